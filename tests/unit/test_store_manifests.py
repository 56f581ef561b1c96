"""Manifests: they come after their entries, and damage of them is seen too."""

import os
import shutil
from dataclasses import replace

import pytest

from lib import files
from lib.keys import digest
from lib.store import WORTH_THREADS, Damaged, EntryRef, Manifest, Store
from lib.tensors import Tensor

KEY, OTHER = digest("one"), digest("two")


def put(store: Store, key: str = KEY) -> EntryRef:
    tensors = {"mean": Tensor("F32", (2,), bytes(range(8)))}
    return store.put("latents", key, tensors, metadata={}, inputs={})


def manifest_of(*refs: EntryRef, stage: str = "cache", key: str = KEY) -> Manifest:
    return Manifest(stage, key, {"rank": 4}, {"train": refs}, {"note": [1, 2.5]})


def test_a_manifest_reads_back_as_it_was_published(store):
    manifest = manifest_of(put(store), put(store, OTHER))
    assert store.publish(manifest) == manifest
    assert store.manifest("cache", KEY) == manifest
    assert store.manifest("cache", OTHER) is None
    assert store.complete(manifest) == ()


def test_publishing_verifies_every_entry_first(store):
    refs = [put(store, digest(number)) for number in range(3)]
    path = store.entry_path("latents", refs[1].key)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(Damaged) as caught:
        store.publish(manifest_of(*refs))
    assert caught.value.path == path
    assert store.manifest("cache", KEY) is None


def test_publishing_many_entries_reads_them_in_threads_and_names_the_first_damaged(
    store, monkeypatch
):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    refs = sorted(put(store, digest(number)) for number in range(2 * WORTH_THREADS + 5))
    assert store.publish(manifest_of(*refs, key=OTHER))
    for place in (70, 20, 130):
        store.entry_path("latents", refs[place].key).write_bytes(bytes(refs[place].size_bytes))
    with pytest.raises(Damaged) as caught:
        store.publish(manifest_of(*refs))
    assert caught.value.key == refs[20].key
    assert store.manifest("cache", KEY) is None


def test_entries_that_were_opened_before_are_not_read_again_but_must_be_there(store, monkeypatch):
    refs = [put(store, digest(number)) for number in range(3)]
    read = []
    monkeypatch.setattr(Store, "check", lambda self, ref: read.append(ref))
    store.publish(manifest_of(*refs), opened=refs[:2])
    assert read == [refs[2]]
    store.entry_path("latents", refs[0].key).unlink()
    store.publish(manifest_of(*refs, key=OTHER), opened=refs)
    assert read[1:] == [refs[0]]


def test_publishing_refuses_an_entry_that_is_absent_or_of_another_size(store):
    ref = put(store)
    for wrong in (replace(ref, key=OTHER), replace(ref, size_bytes=ref.size_bytes + 1)):
        with pytest.raises(Damaged):
            store.publish(manifest_of(ref, wrong))
    assert store.manifest("cache", KEY) is None


def test_publishing_the_same_manifest_again_only_marks_it_used(store, monkeypatch):
    manifest = store.publish(manifest_of(put(store)))
    path = store.manifest_path("cache", KEY)
    os.utime(path, (1, 1))
    monkeypatch.setattr(files, "write_json", None)
    store.publish(manifest)
    assert path.stat().st_mtime > 1


def test_a_manifest_collected_while_it_is_published_again_is_written(store, monkeypatch):
    manifest = store.publish(manifest_of(put(store)))
    real = files.touch

    def touch(path):
        path.unlink()
        return real(path)

    monkeypatch.setattr(files, "touch", touch)
    store.publish(manifest)
    assert store.manifest("cache", KEY) == manifest


def test_complete_names_missing_and_resized_entries(store):
    refs = [put(store, digest(number)) for number in range(3)]
    manifest = manifest_of(*refs)
    store.entry_path("latents", refs[0].key).unlink()
    store.entry_path("latents", refs[1].key).write_bytes(b"short")
    assert set(store.complete(manifest)) == set(refs[:2])


def test_every_flipped_bit_of_a_manifest_is_seen(store):
    store.publish(manifest_of(put(store)))
    path = store.manifest_path("cache", KEY)
    data = path.read_bytes()
    for position in range(len(data) - 1):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        with pytest.raises(Damaged):
            store.manifest("cache", KEY)


def test_a_manifest_under_another_name_is_damage(store):
    store.publish(manifest_of())
    shutil.copy(store.manifest_path("cache", KEY), store.manifest_path("cache", OTHER))
    with pytest.raises(Damaged, match="it holds cache"):
        store.manifest("cache", OTHER)


def test_a_damaged_manifest_is_set_aside_when_its_stage_publishes_again(store):
    manifest = store.publish(manifest_of(put(store)))
    store.manifest_path("cache", KEY).write_text("{")
    store.publish(manifest)
    assert store.manifest("cache", KEY) == manifest
    assert [path.read_text() for path in (store.root / "quarantine").iterdir()] == ["{"]


def test_manifests_come_in_order_of_use_without_the_damaged(store):
    for number in range(4):
        store.publish(manifest_of(key=digest(number)))
        os.utime(store.manifest_path("cache", digest(number)), (number, number))
    store.manifest_path("cache", digest(3)).write_text("{}")
    store.touch("cache", digest(0))
    assert [found.key for found in store.manifests("cache")] == [digest(n) for n in (1, 2, 0)]
    assert list(store.manifests("export")) == []


def test_a_publication_that_crashes_anywhere_names_no_missing_entry(store, monkeypatch):
    class Crash(BaseException):
        pass

    refs = (put(store), put(store, OTHER))
    reals = {step: getattr(os, step) for step in ("open", "write", "fsync", "replace", "unlink")}
    for crash_at in range(40):
        left = [crash_at]

        def step(name, *args, left=left, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                raise Crash
            return reals[name](*args, **kwargs)

        with monkeypatch.context() as patch:
            for name in reals:
                patch.setattr(os, name, lambda *a, name=name, step=step, **k: step(name, *a, **k))
            try:
                store.publish(manifest_of(*refs))
            except Crash:
                pass
            else:
                break
        assert store.manifest("cache", KEY) in (None, manifest_of(*refs))
    else:
        pytest.fail("the publication never ended")
    assert crash_at > 5
