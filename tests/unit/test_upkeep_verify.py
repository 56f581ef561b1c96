"""Verify finds what is wrong, all at once; stats count."""

import os

import pytest

from lib import upkeep
from lib.files import TEMP_PREFIX
from lib.keys import digest
from lib.store import EntryRef, Store
from lib.upkeep import KindStats, check_entries, stats, verify


@pytest.fixture(autouse=True)
def unsynced(monkeypatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def test_verify_finds_nothing_in_a_sound_store_and_tells_progress(store, put, publish):
    refs = [put(store, number) for number in range(5)]
    publish(store, "m", *refs)
    seen = []
    report = verify(store, threads=2, progress=lambda done, total: seen.append((done, total)))
    assert report == upkeep.VerifyReport(checked=6, damaged=(), missing=(), stray=())
    assert seen == [(done, 5) for done in range(1, 6)]


def test_verify_finds_all_planted_damage_at_once(store, put, publish, check):
    refs = [put(store, number) for number in range(6)]
    publish(store, "m", *refs), publish(store, "n", refs[0])
    paths = [store.entry_path("latents", ref.key) for ref in refs]
    flipped = bytearray(paths[0].read_bytes())
    flipped[-1] ^= 1
    paths[0].write_bytes(flipped)
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    paths[2].unlink()
    paths[3].unlink()
    paths[3].mkdir()
    store.manifest_path("cache", digest("n")).write_text("{}")
    strays = [paths[4].with_name("notes.txt"), store.root / "latents" / "thumbs"]
    strays += [store.root / "manifests" / "cache" / "readme"]
    for path in strays:
        path.write_text("stray")
    paths[4].with_name(f"{TEMP_PREFIX}1-x").write_text("a writer's")
    report = check(store)
    assert {found.path for found in report.damaged} == {
        *(paths[number] for number in (0, 1, 3)),
        store.manifest_path("cache", digest("n")),
    }
    assert all(found.why for found in report.damaged)
    assert {found.ref for found in report.missing} == {refs[number] for number in (1, 2, 3)}
    assert {found.manifest for found in report.missing} == {
        store.manifest_path("cache", digest("m"))
    }
    assert set(report.stray) == set(strays)


def test_an_entry_that_gc_removes_during_verify_is_no_damage(store, monkeypatch, put, check):
    ref, real = put(store, "collected"), Store.get
    put(store, "kept")

    def get(self, kind, key):
        if key == ref.key:
            store.entry_path(kind, key).unlink()
        return real(self, kind, key)

    monkeypatch.setattr(Store, "get", get)
    assert check(store).damaged == ()


def test_checking_entries_names_absent_and_resized_ones_in_order(store, put):
    refs = [put(store, number) for number in range(4)]
    store.entry_path("latents", refs[1].key).unlink()
    wrong = EntryRef("latents", refs[3].key, refs[3].size_bytes + 1)
    found = check_entries(store, [*refs[:3], wrong], threads=2, progress=lambda done, total: None)
    assert [damage.key for damage in found] == [refs[1].key, refs[3].key]


def test_stats_count_and_size_by_kind_and_stage(store, put, publish):
    refs = [put(store, number) for number in range(3)]
    one = put(store, 0, kind="captions")
    publish(store, "m", *refs), publish(store, "n", one)
    found = stats(store)
    assert found.kinds == {
        "captions": KindStats(1, one.size_bytes),
        "latents": KindStats(3, sum(ref.size_bytes for ref in refs)),
    }
    assert found.manifests == {"cache": 2}
