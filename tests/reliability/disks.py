"""What a power cut may leave of a recorded run: what was synced, and of the rest anything."""

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.reliability.crashes import Operation

FOLDER = -1
MODES = ("nothing", "names", "anything")  # what survives beyond what was synced


@dataclass
class Inode:
    """A file's bytes as written and as synced."""

    data: bytes = b""
    synced: bytes = b""


@dataclass(frozen=True)
class Change:
    """A name given (`number`), moved from `source`, or taken away (neither)."""

    path: str
    number: int | None = None
    source: str = ""

    def apply(self, names: dict[str, int]) -> None:
        """Change the names, unless what it needs did not survive."""
        if self.source:
            inside = [n for n in names if n == self.source or n.startswith(f"{self.source}/")]
            for name in inside:
                names[self.path + name.removeprefix(self.source)] = names.pop(name)
        elif self.number is not None:
            names[self.path] = self.number
        else:
            names.pop(self.path, None)


@dataclass
class Disk:
    """Names and files while a run writes; `synced` are the names that no power cut takes."""

    root: str
    names: dict[str, int] = field(default_factory=dict)
    synced: dict[str, int] = field(default_factory=dict)
    inodes: list[Inode] = field(default_factory=list)
    pending: list[Change] = field(default_factory=list)

    def apply(self, operation: Operation) -> None:
        """Do one recorded operation."""
        path, kind = operation.path, operation.name
        if kind == "open" and path not in self.names:
            self.inodes.append(Inode())
            self._change(Change(path, len(self.inodes) - 1))
        elif kind == "write":
            self._inode(path).data += operation.data
        elif kind == "fsync":
            self._inode(path).synced = self._inode(path).data
        elif kind == "fsync_folder":
            self._sync(path)
        elif kind == "mkdir":
            self._change(Change(path, FOLDER))
        elif kind in ("unlink", "rmdir"):
            self._change(Change(path))
        elif kind == "link":
            self._change(Change(operation.target, self.names[path]))
        elif kind in ("replace", "rename"):
            self._change(Change(operation.target, source=path))

    def _inode(self, path: str) -> Inode:
        return self.inodes[self.names[path]]

    def _change(self, change: Change) -> None:
        change.apply(self.names)
        self.pending.append(change)

    def _sync(self, folder: str) -> None:
        now = [c for c in self.pending if os.path.dirname(c.path) == folder]
        self.pending = [c for c in self.pending if c not in now]
        for change in now:
            change.apply(self.synced)

    def survivors(self, mode: str, rng: random.Random) -> dict[str, bytes | None]:
        """One state after a power cut now: each name with its bytes, a folder with None."""
        names = dict(self.synced)
        for change in self.pending:
            if mode == "names" or (mode == "anything" and rng.random() < 0.5):
                change.apply(names)
        found: dict[str, bytes | None] = {}
        for name in sorted(names):
            parent = os.path.dirname(name)
            if parent == self.root or found.get(parent, b"") is None:
                found[name] = None if names[name] == FOLDER else self._data(names[name], mode, rng)
        return found

    def _data(self, number: int, mode: str, rng: random.Random) -> bytes:
        inode = self.inodes[number]
        if mode != "anything" or inode.data == inode.synced:
            return inode.synced
        size = rng.randrange(len(inode.data) + 1)
        return rng.choice([inode.data[:size], bytes(len(inode.data)), inode.synced])


def power_cuts(
    trace: Sequence[Operation], *, disk: Disk, count: int, rng: random.Random
) -> Iterator[tuple[int, str, dict[str, bytes | None]]]:
    """States after cuts at random prefixes: the prefix, what survived, the names with their bytes."""
    cuts = sorted((rng.randrange(len(trace) + 1), rng.choice(MODES)) for _ in range(count))
    done = 0
    for cut, mode in cuts:
        while done < cut:
            disk.apply(trace[done])
            done += 1
        yield cut, mode, disk.survivors(mode, rng)


def lay_out(state: dict[str, bytes | None], *, root: Path, folder: Path) -> None:
    """Put a state into a real folder."""
    folder.mkdir(parents=True)
    for name, data in state.items():
        path = folder / os.path.relpath(name, os.path.realpath(root))
        if data is None:
            path.mkdir()
        else:
            path.write_bytes(data)
