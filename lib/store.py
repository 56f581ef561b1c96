"""Entries and manifests by key: written once, verified at every read (design 4)."""

import json
import os
import re
import stat
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lib import files
from lib.keys import canonical_json, digest
from lib.tensors import Tensor, decode, encode

THREADS, WORTH_THREADS = 8, 64  # of so many entries or folders, and so many shared out at a time
RESERVED = frozenset(
    {"claims", "compiled", "decisions", "leases", "manifests", "memory", "quarantine", "runs"}
)
_OWN_METADATA = frozenset({"kind", "key", "inputs", "digest"})
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_KEY = re.compile(r"[0-9a-f]{64}")

Item = TypeVar("Item")


@dataclass(frozen=True)
class Entry:
    """What `get` read and verified; `metadata` also holds kind, key, inputs and digest."""

    kind: str
    key: str
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


@dataclass(frozen=True, order=True)
class EntryRef:
    """An entry's name and file size, as manifests list it."""

    kind: str
    key: str
    size_bytes: int


@dataclass(frozen=True)
class Manifest:
    """What one stage made, from which inputs: entries by role, and plain JSON beside them."""

    stage: str
    key: str
    inputs: Mapping[str, Any]
    entries: Mapping[str, tuple[EntryRef, ...]]
    payload: Mapping[str, Any]

    def refs(self) -> tuple[EntryRef, ...]:
        """All entries, over all roles."""
        return tuple(ref for refs in self.entries.values() for ref in refs)


class Damaged(Exception):
    """A file does not hold what was stored; of a manifest, the kind is `manifests/<stage>`."""

    def __init__(self, kind: str, key: str, path: Path, why: str):
        super().__init__(kind, key, path, why)
        self.kind, self.key, self.path, self.why = kind, key, path, why

    def __str__(self) -> str:
        return f"{self.path}: {self.why}"


class Store:
    """The folder of entries and manifests; holds no state but its root, any number may share it."""

    def __init__(self, root: Path):
        self.root = root

    def entry_path(self, kind: str, key: str) -> Path:
        """`<root>/<kind>/ab/cdef....safetensors`."""
        if not _NAME.fullmatch(kind) or kind in RESERVED:
            raise ValueError(f"{kind!r} is not a kind of entry")
        _check_key(key)
        return self.root / kind / key[:2] / f"{key[2:]}.safetensors"

    def manifest_path(self, stage: str, key: str) -> Path:
        """`<root>/manifests/<stage>/<key>.json`."""
        if not _NAME.fullmatch(stage):
            raise ValueError(f"{stage!r} is not a stage")
        _check_key(key)
        return self.root / "manifests" / stage / f"{key}.json"

    def put(
        self,
        kind: str,
        key: str,
        tensors: Mapping[str, Tensor],
        *,
        metadata: Mapping[str, str],
        inputs: Mapping[str, Any],
    ) -> EntryRef:
        """Write an entry unless a sound one is there; a non-finite tensor is a ValueError."""
        path = self.entry_path(kind, key)
        if taken := _OWN_METADATA & metadata.keys():
            raise ValueError(f"metadata {sorted(taken)} is the store's own")
        own = {"kind": kind, "key": key, "inputs": canonical_json(inputs).decode()}
        data = encode(tensors, metadata={**metadata, **own})
        if self.size_bytes(kind, key) not in (None, len(data)):
            self.quarantine(kind, key)
        while not files.create_bytes(path, data):
            # Whoever was first may have been set aside or collected since.
            if (size := self.size_bytes(kind, key)) is not None:
                return EntryRef(kind, key, size)
        return EntryRef(kind, key, len(data))

    def size_bytes(self, kind: str, key: str) -> int | None:
        """An entry's size by its directory record alone; None when it is absent."""
        try:
            found = self.entry_path(kind, key).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else 0

    def get(self, kind: str, key: str) -> Entry:
        """Read an entry and verify it; raises Damaged, also when it is absent."""
        path = self.entry_path(kind, key)
        try:
            found = decode(_read_regular(path))
            holds = found.metadata.get("kind"), found.metadata.get("key")
            if holds != (kind, key):
                raise ValueError(f"it holds {holds[0]} {holds[1]}")
        # RecursionError is the JSON reader's, on a header of a million brackets.
        except (OSError, ValueError, RecursionError) as error:
            raise Damaged(kind, key, path, str(error)) from error
        return Entry(kind, key, found.tensors, found.metadata)

    def check(self, ref: EntryRef) -> None:
        """Verify that the entry is whole and of the listed size; raises Damaged."""
        size = self.size_bytes(ref.kind, ref.key)
        if size not in (None, ref.size_bytes):
            path = self.entry_path(ref.kind, ref.key)
            raise Damaged(ref.kind, ref.key, path, f"{size} bytes, listed with {ref.size_bytes}")
        self.get(ref.kind, ref.key)

    def quarantine(self, kind: str, key: str) -> Path | None:
        """Move a damaged entry or manifest (its kind as in Damaged) aside; returns where.

        None when it is gone or sound by now: another process may have made it again meanwhile.
        """
        folder, _, stage = kind.partition("/")
        is_manifest = folder == "manifests"
        path = self.manifest_path(stage, key) if is_manifest else self.entry_path(kind, key)
        with files.locked(self.root / "leases" / ".quarantine.lock"):
            try:
                _ = self.manifest(stage, key) if is_manifest else self.get(kind, key)
            except Damaged:
                return self._set_aside(path, name=f"{kind.replace('/', '-')}-{key}")
        return None

    def _set_aside(self, path: Path, *, name: str) -> Path | None:
        number, target = 1, self.root / "quarantine" / f"{name}-1{path.suffix}"
        while os.path.lexists(target):
            number, target = number + 1, target.with_name(f"{name}-{number + 1}{path.suffix}")
        try:
            files.move(path, target)
        except files.StorageFailed as error:
            # It was absent all along, or gc was first.
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise
        return target

    def publish(self, manifest: Manifest, *, opened: Collection[EntryRef] = ()) -> Manifest:
        """Verify every entry named (raises Damaged), then write; returns it as read back.

        Of those that the caller has `opened` since they were made the sizes alone are asked.
        """
        path = self.manifest_path(manifest.stage, manifest.key)
        body = json.loads(json.dumps(_manifest_body(manifest), allow_nan=False))
        manifest = _manifest_of(body)
        try:
            known = self.manifest(manifest.stage, manifest.key)
        except Damaged as damage:
            self.quarantine(damage.kind, damage.key)
            known = None
        if known == manifest and self.touch(manifest.stage, manifest.key):
            return manifest
        known = frozenset(opened)
        _each(self.check, [r for r in sorted(set(manifest.refs())) if not self._still(r, known)])
        self._sync_names(manifest)
        files.write_json(path, {**body, "digest": digest(body)})
        return manifest

    def _still(self, ref: EntryRef, known: frozenset[EntryRef]) -> bool:
        return ref in known and self.size_bytes(ref.kind, ref.key) == ref.size_bytes

    def _sync_names(self, manifest: Manifest) -> None:
        """Another process may have made an entry, and not synced its folder yet."""
        shards = {self.entry_path(ref.kind, ref.key).parent for ref in manifest.refs()}
        _each(_sync, sorted(shards))
        _each(_sync, sorted({up for shard in shards for up in shard.parents[:2]}))

    def manifest(self, stage: str, key: str) -> Manifest | None:
        """The manifest of a stage's key; None when absent, raises Damaged when it is not whole."""
        path = self.manifest_path(stage, key)
        try:
            body = json.loads(_read_regular(path))
            if not isinstance(body, dict) or body.pop("digest", None) != digest(body):
                raise ValueError("its digest does not match")
            if (body["stage"], body["key"]) != (stage, key):
                raise ValueError(f"it holds {body['stage']} {body['key']}")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise Damaged(f"manifests/{stage}", key, path, str(error)) from error
        return _manifest_of(body)

    def manifests(self, stage: str) -> Iterator[Manifest]:
        """The stage's intact manifests, the last used one last; `verify` names the damaged ones."""
        for path in sorted(self.root.glob(f"manifests/{stage}/*.json"), key=_last_used):
            with suppress(Damaged):
                if _KEY.fullmatch(path.stem) and (found := self.manifest(stage, path.stem)):
                    yield found

    def touch(self, stage: str, key: str) -> bool:
        """Mark a manifest as used now, for gc; False when gc was first."""
        return files.touch(self.manifest_path(stage, key))

    def complete(self, manifest: Manifest) -> tuple[EntryRef, ...]:
        """The entries missing or of another size, by directory records alone; () is a hit."""
        refs = sorted(set(manifest.refs()))
        return tuple(ref for ref in refs if self.size_bytes(ref.kind, ref.key) != ref.size_bytes)


def _each(do: Callable[[Item], None], items: Sequence[Item]) -> None:
    """Do it for each, of many in threads; what the first of them raises is raised."""
    if len(items) < WORTH_THREADS:
        for item in items:
            do(item)
        return
    with ThreadPoolExecutor(THREADS) as threads:
        for start in range(0, len(items), WORTH_THREADS):
            deque(threads.map(do, items[start : start + WORTH_THREADS]), maxlen=0)


def _sync(folder: Path) -> None:
    with files.storing(folder):
        files.sync_folder(folder)


def _check_key(key: str) -> None:
    if not _KEY.fullmatch(key):
        raise ValueError(f"{key!r} is not a key: 64 hex digits")


def _read_regular(path: Path) -> bytes:
    """A file's bytes; links, pipes and folders in its place are refused."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("not a regular file")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def _last_used(path: Path) -> int:
    """When a manifest was last touched; 0 when gc has just removed it."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _manifest_body(manifest: Manifest) -> dict[str, Any]:
    """A manifest as plain JSON, without its digest."""
    return {
        "stage": manifest.stage,
        "key": manifest.key,
        "inputs": manifest.inputs,
        "entries": {
            role: [[ref.kind, ref.key, ref.size_bytes] for ref in refs]
            for role, refs in manifest.entries.items()
        },
        "payload": manifest.payload,
    }


def _manifest_of(body: Mapping[str, Any]) -> Manifest:
    entries = {
        role: tuple(EntryRef(*ref) for ref in refs) for role, refs in body["entries"].items()
    }
    return Manifest(body["stage"], body["key"], body["inputs"], entries, body["payload"])
