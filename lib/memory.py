"""What is known of files on this machine, valid while they are unchanged (design 3)."""

import hashlib
import json
import platform
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lib import files
from lib.keys import file_digest

RACY_NS = 2_000_000_000
_STAT_TYPES = {"size": int, "mtime_ns": int, "ctime_ns": int, "inode": int, "host": str}
_TYPES = {**_STAT_TYPES, "racy": bool, "value": dict}

Records = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Stat:
    """What changes when a file does."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    host: str


@dataclass(frozen=True)
class Item:
    """One thing to remember; `stat` is the file's when its content was read."""

    name: str
    stat: Stat
    value: Mapping[str, Any]


@dataclass(frozen=True)
class _Shard:
    """A shard as last read, and the file's stat then."""

    stat: Stat | None
    records: Records


class Memory:
    """Small JSON values by name in `<root>/memory/`; `damaged` counts shards found unreadable."""

    def __init__(self, root: Path):
        self.folder = root / "memory"
        self.damaged = 0
        self._shards: dict[Path, _Shard] = {}

    def recall(self, name: str, path: Path) -> Mapping[str, Any] | None:
        """The value remembered, if the file is as it was then and had not just been written."""
        record = self._records(self._shard_path(name)).get(name)
        if record is None or record["racy"]:
            return None
        now = asdict(stat_of(path))
        return record["value"] if all(record[field] == now[field] for field in now) else None

    def last(self, name: str) -> Mapping[str, Any] | None:
        """The value last remembered, whatever became of the file."""
        record = self._records(self._shard_path(name)).get(name)
        return record["value"] if record else None

    def remember(self, name: str, path: Path, value: Mapping[str, Any]) -> None:
        """Remember a value of the file as it is now."""
        self.remember_all([Item(name, stat_of(path), value)])

    def remember_all(self, items: Iterable[Item]) -> None:
        """Remember many values, each shard written once."""
        shards: dict[Path, Records] = defaultdict(dict)
        for item in items:
            shards[self._shard_path(item.name)][item.name] = _record(item)
        for shard_path, records in shards.items():
            self._merge(shard_path, records)

    def shard_of(self, name: str) -> str:
        """Which part of the memory a name is in."""
        return self._shard_path(name).name

    def forget(self) -> None:
        """Let go of the parts read so far; they are read again when asked for."""
        self._shards.clear()

    def digest_of(self, path: Path, *, name: str) -> str:
        """SHA-256 of a file, hashed once; of an absent file the last one known, if any."""
        try:
            if known := self.recall(name, path):
                return known["sha256"]
            # Taken before the reading: a change meanwhile then shows as another stat.
            before = stat_of(path)
            value = {"sha256": file_digest(path)}
        except FileNotFoundError:
            if known := self.last(name):
                return known["sha256"]
            raise
        self.remember_all([Item(name, before, value)])
        return value["sha256"]

    def _shard_path(self, name: str) -> Path:
        return self.folder / f"{hashlib.sha256(name.encode()).hexdigest()[:2]}.json"

    def _merge(self, shard_path: Path, records: Records) -> None:
        with files.locked(shard_path.with_suffix(".lock")):
            files.write_json(shard_path, {**self._records(shard_path), **records})

    def _records(self, shard_path: Path) -> Records:
        """A shard's records, read again only when its file is another."""
        now = stat_of(shard_path) if shard_path.exists() else None
        shard = self._shards.get(shard_path)
        if shard is None or shard.stat != now:
            shard = _Shard(now, self._read(shard_path))
            self._shards[shard_path] = shard
        return shard.records

    def _read(self, shard_path: Path) -> Records:
        """A shard's records; a damaged one is counted and empty, since it is only a memory."""
        try:
            return _parse(shard_path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError):
            self.damaged += 1
            return {}


def stat_of(path: Path) -> Stat:
    """A file's stat on this host, links followed."""
    found = path.stat()
    host = platform.node()
    return Stat(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, host)


def _record(item: Item) -> dict[str, Any]:
    """A plain record; racy when the file was written in the last two seconds (or the future).

    It can change again within a tick of its clock and keep its stat (git: racily clean).
    """
    racy = item.stat.mtime_ns > time.time_ns() - RACY_NS
    return {**asdict(item.stat), "racy": racy, "value": dict(item.value)}


def _parse(text: bytes) -> Records:
    records = json.loads(text)
    if not isinstance(records, dict) or not all(map(_is_record, records.values())):
        raise ValueError("not the records of a memory")
    return records


def _is_record(record: Any) -> bool:
    return isinstance(record, dict) and all(
        isinstance(record.get(field), kind) for field, kind in _TYPES.items()
    )
