"""Verifying before a run: all of it, once, and never all of the memory at once."""

import os

import pytest

from lib import verify as verify_module
from lib.events import Events
from lib.verify import EntriesDamaged, verify_entries

LONG_AGO = 1e9  # what was just written is not remembered


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(verify_module, "BATCH", 4)


@pytest.fixture
def checked(monkeypatch):
    """The entries whose digests were verified, as they come."""
    seen, real = [], verify_module.check_entries

    def check(store, refs, **named):
        seen.extend(refs)
        return real(store, refs, **named)

    monkeypatch.setattr(verify_module, "check_entries", check)
    return seen


def test_every_entry_is_verified_once_and_then_remembered(store, put, publish, checked):
    refs = [put(store, number, when=LONG_AGO) for number in range(11)]
    manifests = [publish(store, "m", *refs[:7]), publish(store, "n", *refs[4:])]
    verify_entries(store, manifests, Events())
    assert sorted(checked) == sorted(refs)
    checked.clear()
    verify_entries(store, manifests, Events())
    assert checked == []


def test_all_damage_is_named_though_it_lies_apart_and_the_sound_ones_are_remembered(
    store, put, publish, checked
):
    refs = [put(store, number, when=LONG_AGO) for number in range(11)]
    manifest = publish(store, "m", *refs)
    for ref in refs[::3]:
        path = store.entry_path(ref.kind, ref.key)
        path.write_bytes(b"")
        os.utime(path, (LONG_AGO, LONG_AGO))
    with pytest.raises(EntriesDamaged) as found:
        verify_entries(store, [manifest], Events())
    assert {damage.key for damage in found.value.damaged} == {ref.key for ref in refs[::3]}
    assert len(found.value.problems) == 4
    assert found.value.exit_code == 3
    checked.clear()
    with pytest.raises(EntriesDamaged):
        verify_entries(store, [manifest], Events())
    assert sorted(checked) == sorted(refs[::3])


def test_only_a_few_parts_of_the_memory_are_held_at_once(store, put, publish, monkeypatch):
    held, real = [], verify_module.Memory.forget

    def forget(memory):
        held.append(len(memory._shards))
        real(memory)

    monkeypatch.setattr(verify_module.Memory, "forget", forget)
    manifest = publish(store, "m", *(put(store, number) for number in range(40)))
    verify_entries(store, [manifest], Events())
    assert len(held) == 10
    assert max(held) <= 4
