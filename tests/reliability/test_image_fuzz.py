"""Damaged pictures: each is decoded or refused by name, within 2 GB and ten seconds."""

from tests.reliability import images

MUTANTS = 2000


def test_every_damaged_picture_is_decoded_or_refused_with_a_reason():
    outcome = images.fuzz(0, MUTANTS)
    assert outcome.failures == []
    assert sum(outcome.counts.values()) == MUTANTS
    assert outcome.counts[images.ACCEPTED] > MUTANTS / 20, "too broken to get anywhere"
    assert len(outcome.counts) >= 6, outcome.counts
    assert "a refusal without a reason" not in outcome.counts


def test_the_corpus_holds_what_is_taken_and_every_kind_of_refusal():
    kinds = [images.ends(data) for data in images.corpus()]
    assert len(set(images.corpus())) >= 60
    assert {images.ACCEPTED, "too small", "too narrow", "too many pixels", "damaged"} <= set(kinds)
    assert {"not a format that is read", "unusable colour profile"} <= set(kinds)


def test_a_process_that_dies_is_seen_and_costs_one_mutant(monkeypatch):
    """A memory limit that no process can keep stands for any death."""
    monkeypatch.setattr(images.sys, "executable", "/bin/false")
    outcome = images.fuzz(0, 3)
    assert (len(outcome.failures), outcome.counts) == (3, {"death": 3})
