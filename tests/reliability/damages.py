"""Damage to stored files, drawn at random: every kind must be seen, and no wrong tensor returned."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from lib.keys import digest
from lib.store import Damaged, Manifest, Store
from tests.reliability.trials import put, tensors

ENTRIES = 8
PAGE = 4096
SIZE = PAGE  # numbers in a tensor: four pages
KEYS = [digest(f"entry {number}") for number in range(ENTRIES)]
STAGE, MANIFEST = "cache", digest("manifest")

Damage = Callable[[Store, random.Random], str]


def sound_store(root: Path) -> Store:
    """Entries of one size over several pages, and a manifest that names them."""
    store = Store(root)
    refs = tuple(put(store, key, seed, size=SIZE) for seed, key in enumerate(KEYS))
    store.publish(Manifest(STAGE, MANIFEST, {}, {"train": refs}, {}))
    return store


def _some(store: Store, rng: random.Random) -> tuple[str, Path]:
    key = rng.choice(KEYS)
    return key, store.entry_path("latents", key)


def flip(store: Store, rng: random.Random) -> str:
    """One bit, of header or data."""
    key, path = _some(store, rng)
    data = bytearray(path.read_bytes())
    bit = rng.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    return key


def flip_header(store: Store, rng: random.Random) -> str:
    """One bit of the header, where most is structure."""
    key, path = _some(store, rng)
    data = bytearray(path.read_bytes())
    bit = rng.randrange(8 * (8 + int.from_bytes(data[:8], "little")))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    return key


def truncate(store: Store, rng: random.Random) -> str:
    """Cut off anywhere."""
    key, path = _some(store, rng)
    os.truncate(path, rng.randrange(path.stat().st_size))
    return key


def zero_page(store: Store, rng: random.Random) -> str:
    """A page of zeros where there was another."""
    key, path = _some(store, rng)
    data = path.read_bytes()
    start = rng.randrange(0, len(data), PAGE)
    end = min(start + PAGE, len(data))
    path.write_bytes(data[:start] + bytes(end - start) + data[end:])
    return key


def append(store: Store, rng: random.Random) -> str:
    """Bytes after the end: zeros, spaces or anything."""
    key, path = _some(store, rng)
    more = rng.choice([b"\0", b" ", rng.randbytes(1)]) * rng.choice([1, 7, 8, PAGE])
    with path.open("ab") as file:
        file.write(more)
    return key


def swap(store: Store, rng: random.Random) -> str:
    """Two entries under each other's names."""
    one, two = rng.sample(KEYS, 2)
    first, second = store.entry_path("latents", one), store.entry_path("latents", two)
    spare = first.with_name("spare")
    first.rename(spare)
    second.rename(first)
    spare.rename(second)
    return rng.choice([one, two])


def duplicate(store: Store, rng: random.Random) -> str:
    """One entry under another's name too."""
    one, two = rng.sample(KEYS, 2)
    shutil.copy(store.entry_path("latents", one), store.entry_path("latents", two))
    return two


def rename(store: Store, rng: random.Random) -> str:
    """An entry under the name of one that was not there."""
    key, path = _some(store, rng)
    new = digest(rng.random())
    target = store.entry_path("latents", new)
    target.parent.mkdir(parents=True, exist_ok=True)
    path.rename(target)
    return rng.choice([key, new])


def retype(store: Store, rng: random.Random) -> str:
    """The same bytes told to be of another type, or of another shape."""
    key, path = _some(store, rng)
    old, new = rng.choice([(b'"F32"', b'"I32"'), (b'"F32"', b'"U32"'), (b'"mean"', b'"near"')])
    path.write_bytes(path.read_bytes().replace(old, new))
    return key


def empty(store: Store, rng: random.Random) -> str:
    """An empty file."""
    key, path = _some(store, rng)
    os.truncate(path, 0)
    return key


def folder(store: Store, rng: random.Random) -> str:
    """A folder in its place."""
    key, path = _some(store, rng)
    path.unlink()
    path.mkdir()
    return key


def absent(store: Store, rng: random.Random) -> str:
    """Nothing in its place."""
    key, path = _some(store, rng)
    path.unlink()
    return key


KINDS: dict[str, Damage] = {
    "bit flipped": flip,
    "bit of the header flipped": flip_header,
    "truncated": truncate,
    "page zeroed": zero_page,
    "bytes appended": append,
    "swapped": swap,
    "duplicated": duplicate,
    "renamed": rename,
    "another type or name": retype,
    "empty": empty,
    "folder in its place": folder,
    "absent": absent,
}


def trials(kind: str, *, count: int, scratch: Path, rng: random.Random) -> Iterator[list[str]]:
    """Damage a sound store so many times; what was returned in spite of it."""
    whole = sound_store(scratch / "whole")
    originals = {key: whole.entry_path("latents", key).read_bytes() for key in KEYS}
    references = {key: tensors(seed, size=SIZE) for seed, key in enumerate(KEYS)}
    store = sound_store(scratch / "damaged")
    known = {key: store.entry_path("latents", key).stat() for key in KEYS}
    for number in range(count):
        key = KINDS[kind](store, rng)
        try:
            entry = store.get("latents", key)
        except Damaged:
            yield []
        else:
            same = entry.tensors == references.get(key)
            yield [f"{kind}, trial {number}: {'sound' if same else 'WRONG'} tensors returned"]
        _mend(store, originals, known)


def manifest_trials(*, count: int, scratch: Path, rng: random.Random) -> Iterator[list[str]]:
    """Flip bits of a manifest; what it was read as in spite of it."""
    store = sound_store(scratch / "manifests")
    path = store.manifest_path(STAGE, MANIFEST)
    data = path.read_bytes()
    for number in range(count):
        changed = bytearray(data)
        bit = rng.randrange(8 * (len(data) - 1))  # the last byte ends the line
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            store.manifest(STAGE, MANIFEST)
        except Damaged:
            yield []
        else:
            yield [f"manifest, trial {number}: bit {bit} not seen"]


def _mend(store: Store, originals: dict[str, bytes], known: dict[str, os.stat_result]) -> None:
    """Put back what is not as it was."""
    for path in store.root.glob("latents/*/*"):
        if path.is_dir():
            path.rmdir()
        elif path.parent.name + path.stem not in originals:
            path.unlink()
    for key, data in originals.items():
        path = store.entry_path("latents", key)
        if not path.exists() or _told(path.stat()) != _told(known[key]):
            path.write_bytes(data)
            known[key] = path.stat()


def _told(found: os.stat_result) -> tuple[int, ...]:
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
