"""What lies in a store, by directory records alone: entries, manifests, and what is neither."""

import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lib import files
from lib.store import RESERVED, Store

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_SHARD = re.compile(r"[0-9a-f]{2}")
_ENTRY = re.compile(r"[0-9a-f]{62}\.safetensors")
_MANIFEST = re.compile(r"[0-9a-f]{64}\.json")


@dataclass(frozen=True, slots=True)
class Item:
    """An entry, or a manifest whose kind is `manifests/<stage>`; `time` is when it was touched."""

    kind: str
    key: str
    path: Path
    size_bytes: int
    time: float


def entries_of(store: Store) -> Iterator[Item]:
    """All entries, whatever lies in their place."""
    for shard in _shards(store):
        for path in shard.iterdir():
            if _ENTRY.fullmatch(path.name) and (item := item_at(shard.parent.name, path)):
                yield item


def manifests_of(store: Store) -> Iterator[Item]:
    for stage in _folders(store.root / "manifests", _NAME):
        for path in stage.iterdir():
            if _MANIFEST.fullmatch(path.name) and (
                item := item_at(f"manifests/{stage.name}", path)
            ):
                yield item


def strays_of(store: Store) -> Iterator[Path]:
    """What lies among entries and manifests and is neither, nor a writer's temporary file."""
    shards = list(_shards(store))
    stages = _folders(store.root / "manifests", _NAME)
    inside = [(path, _ENTRY) for shard in shards for path in shard.iterdir()]
    inside += [(path, _MANIFEST) for stage in stages for path in stage.iterdir()]
    inside += [(path, _SHARD) for kind in {s.parent for s in shards} for path in kind.iterdir()]
    for path, pattern in sorted(inside):
        if not pattern.fullmatch(path.name) and not path.name.startswith(files.TEMP_PREFIX):
            yield path


def _shards(store: Store) -> Iterator[Path]:
    """The folders of entries, `<kind>/ab`."""
    for kind in _folders(store.root, _NAME):
        if kind.name not in RESERVED:
            yield from _folders(kind, _SHARD)


def _folders(parent: Path, pattern: re.Pattern[str]) -> list[Path]:
    """The real folders in a folder whose names match; links are not followed."""
    inside = sorted(parent.iterdir()) if parent.is_dir() else []
    named = [path for path in inside if pattern.fullmatch(path.name)]
    return [path for path in named if path.is_dir() and not path.is_symlink()]


def item_at(kind: str, path: Path) -> Item | None:
    """A file by its directory record; None when it has just been removed."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    size = found.st_size if stat.S_ISREG(found.st_mode) else 0
    key = path.stem if kind.startswith("manifests/") else path.parent.name + path.stem
    return Item(kind, key, path, size, found.st_mtime)
