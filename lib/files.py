"""The one place that writes: atomic publication, exclusive creation, event lines (design 4)."""

import errno
import hashlib
import json
import os
import platform
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock

from lib.errors import DarkroomError, Problem

TEMP_PREFIX = ".tmp-"  # then the host, the process and a unique part
LOCK_SECONDS = 60
_FULL = (errno.ENOSPC, errno.EDQUOT)


class StorageFailed(DarkroomError):
    """The disk refused a write; what was there before is unchanged."""

    exit_code = 1


@contextmanager
def storing(path: Path, *, needed_bytes: int = 0) -> Iterator[None]:
    """Turn an OSError of the block into StorageFailed, naming the path and the bytes it needs."""
    try:
        yield
    except OSError as error:
        why = f"{error.strerror or error}; {needed_bytes} bytes needed"
        remedy = (
            "free some space" if error.errno in _FULL else "check that the folder can be written"
        )
        raise StorageFailed(Problem(str(path), why, remedy=remedy)) from error


def write_bytes(path: Path, data: bytes) -> None:
    """Publish `data` at `path`: readers see the old content or the new, also after a power cut."""
    _publish(path, data, place=os.replace)


def create_bytes(path: Path, data: bytes) -> bool:
    """Publish `data` at `path` unless something is there; False if so. The first writer wins."""
    try:
        _publish(path, data, place=os.link)
    except StorageFailed as error:
        if isinstance(error.__cause__, FileExistsError):
            return False
        raise
    return True


def write_json(path: Path, value: Any) -> None:
    """Publish `value` as one line of JSON, names sorted, finite numbers only."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)
    write_bytes(path, f"{text}\n".encode())


def append_line(path: Path, text: str) -> None:
    """Append one line in one system call; not synced, so a power cut may lose the last ones."""
    if "\n" in text:
        raise ValueError("a line holds no line break")
    data = f"{text}\n".encode()
    with storing(path, needed_bytes=len(data)):
        make_folder(path.parent)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            _write_all(descriptor, data)
        finally:
            os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file, a link (not its target) or a folder with all in it; absent is fine."""
    with storing(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def move(source: Path, target: Path) -> None:
    """Rename a file or a folder within one file system, durably."""
    with storing(target):
        make_folder(target.parent)
        os.rename(source, target)
        sync_folder(target.parent)
        sync_folder(source.parent)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file, alone among processes and threads; a dead holder's is free."""
    make_folder(path.parent)
    # Holders need milliseconds; a lock that does not come in a minute is a broken disk.
    lock = FileLock(path, timeout=LOCK_SECONDS)
    with storing(path):
        lock.acquire()
    try:
        yield
    finally:
        with storing(path):
            lock.release()


def touch(path: Path) -> bool:
    """Mark a file as used now; False when there is none."""
    with storing(path):
        try:
            os.utime(path)
        except FileNotFoundError:
            return False
    return True


def user_path(text: str) -> Path:
    """A path as a user typed it: `~` is theirs, a relative one starts where they stand."""
    return Path(os.path.expanduser(text))


def make_folder(path: Path) -> None:
    """Create a folder and its parents durably; existing is fine."""
    if path.is_dir():
        return
    with storing(path):
        make_folder(path.parent)
        try:
            os.mkdir(path)
        except FileExistsError:
            if not path.is_dir():
                # Not "exists": that is what an exclusive creation that came second is told.
                code = errno.ENOTDIR
                raise NotADirectoryError(code, os.strerror(code), str(path)) from None
        sync_folder(path.parent)


def claim_folder(base: Path) -> Path:
    """Create `base`, else `base-2`, `base-3`, ...: a folder that nobody else has."""
    make_folder(base.parent)
    path, number = base, 1
    with storing(base):
        while not _made(path):
            number += 1
            path = base.with_name(f"{base.name}-{number}")
        sync_folder(base.parent)
    return path


@contextmanager
def staged_folder(path: Path) -> Iterator[Path]:
    """A folder to fill; it appears at `path`, complete, when the block ends without an error.

    If `path` exists by then, somebody else was first and what was staged is dropped.
    """
    make_folder(path.parent)
    staged = _temporary(path.parent)
    with storing(staged):
        os.mkdir(staged)
    try:
        yield staged
        with storing(path):
            for file in sorted(staged.rglob("*")):
                _sync(file)
            sync_folder(staged)
            if not path.exists():
                os.rename(staged, path)
                sync_folder(path.parent)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


@cache
def this_host() -> str:
    """The world in which process numbers mean something: the host, in a container with its own."""
    world = ""
    with suppress(OSError):  # no /proc on macOS
        world = os.readlink("/proc/self/ns/pid")
    return f"{platform.node()} {world}".strip()


def temporary_prefix(pid: int) -> str:
    """How the names of a process's temporary files begin, of this host and no other."""
    host = hashlib.sha256(this_host().encode()).hexdigest()[:8]
    return f"{TEMP_PREFIX}{host}-{pid}-"


def writer_of(name: str) -> int | None:
    """The process of this host that a temporary file belongs to; None for any other name."""
    number = name.removeprefix(TEMP_PREFIX).split("-")[1:2]
    pid = int(number[0]) if number and number[0].isdecimal() else None
    return pid if pid is not None and name.startswith(temporary_prefix(pid)) else None


def _temporary(folder: Path) -> Path:
    return folder / f"{temporary_prefix(os.getpid())}{uuid.uuid4().hex}"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_name(path: Path) -> Path:
    """`path`, or the first of `path-2`, `path-3`, ... that nothing has."""
    taken, number = path, 1
    while os.path.lexists(taken):
        number += 1
        taken = path.with_name(f"{path.name}-{number}")
    return taken


def sync_folder(path: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _made(path: Path) -> bool:
    try:
        os.mkdir(path)
    except FileExistsError:
        return False
    return True


def _publish(path: Path, data: bytes, *, place: Callable[[Path, Path], None]) -> None:
    """Write a temporary file beside `path`, sync it, and `place` it there under its name."""
    with storing(path, needed_bytes=len(data)):
        make_folder(path.parent)
        temporary = _temporary(path.parent)
        try:
            _write_synced(temporary, data)
            place(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)


def _write_synced(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        _write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`: one call may take only a part (over 2 GiB, or a disk nearly full)."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
