"""Entries: the first writer wins, and any damage is seen."""

import multiprocessing
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from lib import files
from lib.keys import digest
from lib.store import Damaged, EntryRef, Store
from lib.tensors import Tensor

KEY, OTHER = digest("one"), digest("two")


def tensors(seed: int = 0, *, size: int = 16) -> dict[str, Tensor]:
    data = np.random.default_rng(seed).standard_normal(size).astype("<f4").tobytes()
    return {"mean": Tensor("F32", (size,), data), "mask": Tensor("BOOL", (3,), b"\0\1\1")}


def put(store: Store, key: str = KEY, seed: int = 0, kind: str = "latents") -> EntryRef:
    return store.put(kind, key, tensors(seed), metadata={"note": "x"}, inputs={"seed": seed})


@pytest.fixture
def unsynced(monkeypatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def test_an_entry_reads_back_as_it_was_put(store):
    ref = put(store)
    entry = store.get("latents", KEY)
    assert entry.tensors == tensors()
    assert entry.metadata["note"] == "x"
    assert entry.metadata["inputs"] == '{"seed":0}'
    assert store.size_bytes("latents", KEY) == ref.size_bytes
    assert store.entry_path("latents", KEY).relative_to(store.root).parts == (
        "latents",
        KEY[:2],
        f"{KEY[2:]}.safetensors",
    )


def test_an_entry_is_never_rewritten(store):
    first = put(store, seed=0)
    before = store.entry_path("latents", KEY).stat()
    assert put(store, seed=1) == first
    assert store.entry_path("latents", KEY).stat() == before
    assert store.get("latents", KEY).tensors == tensors(0)


def test_an_entry_of_another_size_is_kept_when_sound_and_replaced_when_not(store):
    ref = store.put("latents", KEY, tensors(size=8), metadata={}, inputs={})
    assert put(store) == ref
    path = store.entry_path("latents", KEY)
    path.write_bytes(path.read_bytes()[:-1])
    put(store)
    assert store.get("latents", KEY).tensors == tensors()
    assert len(os.listdir(store.root / "quarantine")) == 1


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        *(("latents", key) for key in (KEY[:-1], KEY.upper(), "../" + KEY[3:], KEY + "\n")),
        *((kind, KEY) for kind in ("..", "manifests", "quarantine", "a/b", "")),
    ],
)
def test_names_that_are_no_names_are_refused(store, kind, key):
    with pytest.raises(ValueError, match="not a"):
        put(store, key=key, kind=kind)


def test_a_tensor_that_is_not_finite_is_refused_by_name_and_nothing_is_written(store):
    bad = {"mean": Tensor("F32", (1,), np.float32(np.nan).tobytes())}
    with pytest.raises(ValueError, match="mean"):
        store.put("latents", KEY, bad, metadata={}, inputs={})
    assert store.size_bytes("latents", KEY) is None
    assert not store.root.exists()


def test_a_thousand_flipped_bits_are_all_seen(store):
    put(store)
    path = store.entry_path("latents", KEY)
    data, rng = path.read_bytes(), random.Random(0)
    for bit in rng.sample(range(8 * len(data)), 1000):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(Damaged):
            store.get("latents", KEY)
    path.write_bytes(data)
    assert store.get("latents", KEY).tensors == tensors()


def test_every_truncation_and_appended_bytes_are_seen(store):
    put(store)
    path = store.entry_path("latents", KEY)
    data = path.read_bytes()
    for damaged in [data[:size] for size in range(len(data))] + [data + b"\0", data + b" " * 9]:
        path.write_bytes(damaged)
        with pytest.raises(Damaged):
            store.get("latents", KEY)


def test_a_zeroed_page_is_seen(store):
    big = {"mean": Tensor("F32", (4096,), np.ones(4096, "<f4").tobytes())}
    store.put("latents", KEY, big, metadata={}, inputs={})
    path = store.entry_path("latents", KEY)
    data = path.read_bytes()
    for start in range(0, len(data) - 4096, 4096):
        path.write_bytes(data[:start] + bytes(4096) + data[start + 4096 :])
        with pytest.raises(Damaged):
            store.get("latents", KEY)


def test_swapped_and_renamed_entries_are_seen(store):
    put(store, KEY), put(store, OTHER, seed=1), put(store, KEY, kind="captions")
    one, two = store.entry_path("latents", KEY), store.entry_path("latents", OTHER)
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    for key in (KEY, OTHER):
        with pytest.raises(Damaged, match="it holds latents"):
            store.get("latents", key)
    shutil.copy(store.entry_path("captions", KEY), one)
    with pytest.raises(Damaged, match="it holds captions"):
        store.get("latents", KEY)


@pytest.mark.parametrize("what", ["absent", "empty", "folder", "link", "pipe"])
def test_something_else_in_an_entrys_place_is_damage(store, what):
    elsewhere = Store(store.root.parent / "elsewhere")
    put(elsewhere)
    path = store.entry_path("latents", KEY)
    path.parent.mkdir(parents=True)
    if what == "empty":
        path.touch()
    elif what == "folder":
        path.mkdir()
    elif what == "link":
        path.symlink_to(elsewhere.entry_path("latents", KEY))
    elif what == "pipe":
        os.mkfifo(path)
    with pytest.raises(Damaged) as caught:
        store.get("latents", KEY)
    assert (caught.value.kind, caught.value.key, caught.value.path) == ("latents", KEY, path)
    if what != "absent":
        store.quarantine("latents", KEY)
        put(store)
        assert store.get("latents", KEY).tensors == tensors()


def test_an_unreadable_entry_is_damage(store, monkeypatch):
    put(store)
    path, real = store.entry_path("latents", KEY), os.open

    def refuse(name, *args):
        if name == path:
            raise PermissionError(13, "Permission denied")
        return real(name, *args)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(Damaged, match="Permission denied"):
        store.get("latents", KEY)


def test_a_file_in_place_of_a_folder_of_entries_is_named(store):
    folder = store.entry_path("latents", KEY).parent
    folder.parent.mkdir(parents=True)
    folder.write_text("in the way")
    with pytest.raises(files.StorageFailed, match=r"Not a directory") as refused:
        put(store)
    assert str(folder) in str(refused.value)
    with pytest.raises(Damaged):
        store.get("latents", KEY)


def test_quarantine_leaves_what_somebody_made_again_meanwhile(store):
    put(store)
    assert store.quarantine("latents", KEY) is None
    assert store.quarantine("latents", OTHER) is None
    assert store.get("latents", KEY).tensors == tensors()


def test_an_entry_that_is_collected_while_it_is_put_is_written_after_all(store, monkeypatch):
    """Somebody was first, and their entry is gone before its size is asked for."""
    put(store)
    real, asked = Store.size_bytes, []

    def size_bytes(self, kind, key):
        asked.append(1)
        if len(asked) == 2:
            store.entry_path(kind, key).unlink()
        return real(self, kind, key)

    monkeypatch.setattr(Store, "size_bytes", size_bytes)
    put(store)
    assert store.get("latents", KEY).tensors == tensors()


def test_quarantine_keeps_every_damaged_file(store):
    contents = [b"first", b"second", b"third"]
    for content in contents:
        path = store.entry_path("latents", KEY)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        assert store.quarantine("latents", KEY).read_bytes() == content
        assert store.size_bytes("latents", KEY) is None
    kept = {path.read_bytes() for path in (store.root / "quarantine").iterdir()}
    assert kept == set(contents)


def _put_many(root: Path, barrier, seed: int) -> None:
    barrier.wait()
    for number in range(40):
        put(Store(root), digest(number), seed=seed)


def test_processes_that_put_the_same_entries_agree(store, unsynced):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)
    args = [(store.root, barrier, seed) for seed in (0, 1)]
    workers = [context.Process(target=_put_many, args=arg) for arg in args]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    for number in range(40):
        assert store.get("latents", digest(number)).tensors in (tensors(0), tensors(1))
    assert not [path for path in store.root.rglob("*") if path.name.startswith(files.TEMP_PREFIX)]
