"""Who is at work on a store: leases of live builders, and what dead ones left (design 4)."""

import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib import files
from lib.errors import Problem, StateRefused
from lib.store import Store

DAY_SECONDS = 86_400


@dataclass(frozen=True)
class Owner:
    """A process, so told that its number's next bearer is not taken for it."""

    pid: int
    host: str
    started: str

    @property
    def is_here(self) -> bool:
        """Whether it is of this host, where it can be asked after."""
        return self.host == files.this_host()


@dataclass(frozen=True)
class Lease:
    """The keys that a process is about to build or use; `time` in seconds since 1970."""

    path: Path
    owner: Owner
    time: float
    keys: frozenset[str]

    def is_live(self, now: float) -> bool:
        """Whether its process lives; of another host that is believed for a day."""
        if self.owner.is_here:
            return is_alive(self.owner)
        return now - self.time < DAY_SECONDS


@dataclass(frozen=True)
class Record:
    """One JSON object of a folder of them."""

    path: Path
    fields: dict[str, Any]


def this_process() -> Owner:
    """The owner of what this process leases."""
    return Owner(os.getpid(), files.this_host(), _started(os.getpid()) or "")


def is_alive(owner: Owner) -> bool:
    """Whether this very process of this host still runs."""
    return _started(owner.pid) == owner.started


@contextmanager
def lease(store: Store, keys: Iterable[object]) -> Iterator[None]:
    """Keep gc from these keys during the block; first clears up after processes that died."""
    clear_dead(store, now=time.time())
    owner = this_process()
    path = store.root / "leases" / f"{uuid.uuid4()}.json"
    who = {"pid": owner.pid, "host": owner.host, "started": owner.started}
    held = sorted(set(map(str, keys)))
    with changing(store):
        files.write_json(path, {**who, "time": time.time(), "keys": held})
    refused = False
    try:
        yield
    except files.StorageFailed:
        # The disk may have kept a temporary file too; its lease is why the next one will look.
        refused = True
        raise
    finally:
        if not refused:
            files.remove(path)


def changing(store: Store) -> AbstractContextManager[None]:
    """The lock under which a lease is published, and gc reads leases and removes a batch.

    Without it a lease could come between the two, and its holder lose what it has just found.
    """
    return files.locked(store.root / "leases" / ".lock")


def leases(store: Store) -> tuple[Lease, ...]:
    """All leases, live or not; an unreadable one is a StateRefused."""
    found = []
    for record in read_records(store.root / "leases"):
        with readable(record.path):
            fields = record.fields
            owner = Owner(fields["pid"], fields["host"], fields["started"])
            found.append(Lease(record.path, owner, fields["time"], frozenset(fields["keys"])))
    return tuple(found)


def clear_dead(store: Store, *, now: float) -> tuple[Path, ...]:
    """Remove the leases of processes that died, and the temporary files they left."""
    dead = [one for one in leases(store) if not one.is_live(now)]
    left = [path for path in _searched(store, everywhere=bool(dead)) if is_left(path)]
    # The leases last: whoever is killed here leaves the next one its reason to look.
    removed = (*left, *(one.path for one in dead))
    for path in removed:
        files.remove(path)
    return removed


def _searched(store: Store, *, everywhere: bool) -> Iterator[Path]:
    """All temporaries, or those in flat folders alone: a lease's own file is under no lease."""
    if everywhere:
        return temporaries(store)
    folders = ("leases", "memory", "runs", "manifests/*")
    pattern = f"{files.TEMP_PREFIX}*"
    return (path for folder in folders for path in store.root.glob(f"{folder}/{pattern}"))


def is_left(temporary: Path) -> bool:
    """Whether its writer, of this host, has died; a number in use again waits a day for gc."""
    pid = files.writer_of(temporary.name)
    return pid is not None and _started(pid) is None


def temporaries(store: Store) -> Iterator[Path]:
    """The temporary files and folders of writers, alive or dead; quarantine is left alone."""
    for folder, folders, names in os.walk(store.root):
        of_writers = [name for name in (*folders, *names) if name.startswith(files.TEMP_PREFIX)]
        yield from (Path(folder, name) for name in of_writers)
        folders[:] = [name for name in folders if name not in (*of_writers, "quarantine")]


def read_records(folder: Path) -> Iterator[Record]:
    """The JSON objects of a folder, but for those removed meanwhile; StateRefused if unreadable."""
    for path in sorted(folder.glob("*.json")):
        with readable(path):
            try:
                fields = json.loads(path.read_bytes())
            except FileNotFoundError:
                continue
            if not isinstance(fields, dict):
                raise TypeError("not a JSON object")
        yield Record(path, fields)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn what a damaged record raises in the block into StateRefused."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = f"damaged, so what it holds is not known: {error}"
        raise StateRefused(Problem(str(path), why, remedy="move it away")) from error


def _started(pid: int) -> str | None:
    """The boot, and the tick of its clock, at which a process began; None when it has ended.

    Without /proc (macOS) only whether the number is in use.
    """
    try:
        if not os.path.exists("/proc/self/stat"):
            os.kill(pid, 0)
            return "unknown"
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except PermissionError:
        return "unknown"
    except (FileNotFoundError, ProcessLookupError):
        return None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None if fields[0] in "ZX" else f"{boot}/{fields[19]}"
