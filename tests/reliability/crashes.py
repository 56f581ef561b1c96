"""The operations by which lib/files.py writes: counted, failed, cut off, recorded. For tests alone.

The product has no switch for this: a `Seam` stands in for the functions of `os` while it is open.
"""

import gc
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CRASHED = 86


@dataclass(frozen=True)
class Operation:
    """One call that changes the disk; `number` counts from 0, `target` is where a name goes."""

    number: int
    name: str
    path: str
    target: str = ""
    data: bytes = b""


Hook = Callable[[Operation], None]


def nothing(_operation: Operation) -> None:
    """A hook that lets everything pass."""


def is_probe(flags: int) -> bool:
    """Whether a file without a name is opened: a lock's way of asking what the disk can do."""
    probe = getattr(os, "O_TMPFILE", 0)
    return bool(probe) and flags & probe == probe


class Seam:
    """Tells `before` and `after` of every writing operation under a folder, in order.

    `before` may raise an OSError, or end the process.
    """

    NAMES = ("open", "write", "fsync", "close", "mkdir", "rmdir", "unlink", "utime")
    MOVES = ("link", "replace", "rename")

    def __init__(self, root: Path, *, before: Hook = nothing, after: Hook = nothing):
        self.root, self.before, self.after = os.path.realpath(root), before, after
        self.count = 0
        self._files: dict[int, tuple[str, bool]] = {}  # descriptor -> path, whether it is written
        self._lock = threading.RLock()
        self._real = {name: getattr(os, name) for name in (*self.NAMES, *self.MOVES)}

    def __enter__(self) -> "Seam":
        for name in self.NAMES:
            setattr(os, name, getattr(self, f"_{name}"))
        for name in self.MOVES:
            setattr(os, name, lambda a, b, *, _name=name, **k: self._move(_name, a, b, **k))
        return self

    def __exit__(self, *_: object) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)

    def _under(self, path: Any, dir_fd: int | None = None) -> str:
        """The path's full name when it lies under the root, else nothing."""
        if isinstance(path, int):
            return ""
        base = os.readlink(f"/proc/self/fd/{dir_fd}") if dir_fd is not None else os.getcwd()
        full = os.path.normpath(os.path.join(base, os.fsdecode(path)))
        return full if full == self.root or full.startswith(self.root + "/") else ""

    def _call(self, name: str, path: str, call: Callable[[], Any], **more: Any) -> Any:
        if not path:
            return call()
        with self._lock:
            operation = Operation(self.count, name, path, **more)
            self.count += 1
            self.before(operation)
            made = call()
            self.after(operation)
        return made

    def _open(self, path: Any, flags: int, *args: Any, dir_fd: int | None = None) -> int:
        full, written = self._under(path, dir_fd), bool(flags & WRITES)
        if is_probe(flags):
            return self._real["open"](path, flags, *args, dir_fd=dir_fd)
        call = lambda: self._real["open"](path, flags, *args, dir_fd=dir_fd)  # noqa: E731
        descriptor = self._call("open", full if written else "", call)
        if full:
            self._files[descriptor] = (full, written)
        return descriptor

    def _write(self, descriptor: int, data: Any) -> int:
        path, _ = self._files.get(descriptor, ("", False))
        call = lambda: self._real["write"](descriptor, data)  # noqa: E731
        return self._call("write", path, call, data=bytes(data))

    def _fsync(self, descriptor: int) -> None:
        path, written = self._files.get(descriptor, ("", False))
        name = "fsync" if written or not os.path.isdir(path) else "fsync_folder"
        self._call(name, path, lambda: self._real["fsync"](descriptor))

    def _close(self, descriptor: int) -> None:
        path, written = self._files.pop(descriptor, ("", False))
        told = path if written and not path.endswith(".lock") else ""  # a lock holds no data
        self._call("close", told, lambda: self._real["close"](descriptor))

    def _mkdir(self, path: Any, *args: Any, dir_fd: int | None = None) -> None:
        real = self._real["mkdir"]
        self._call("mkdir", self._under(path, dir_fd), lambda: real(path, *args, dir_fd=dir_fd))

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        real = self._real["rmdir"]
        self._call("rmdir", self._under(path, dir_fd), lambda: real(path, dir_fd=dir_fd))

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        real = self._real["unlink"]
        self._call("unlink", self._under(path, dir_fd), lambda: real(path, dir_fd=dir_fd))

    def _utime(self, path: Any, *args: Any, **more: Any) -> None:
        self._call("utime", self._under(path), lambda: self._real["utime"](path, *args, **more))

    def _move(self, name: str, source: Any, target: Any, **more: Any) -> None:
        call = lambda: self._real[name](source, target, **more)  # noqa: E731
        self._call(name, self._under(source), call, target=self._under(target))


def die(*_: object) -> None:
    """End the process as a crash does: no handler, no clean-up."""
    os._exit(CRASHED)


def dying_at(number: int, *, torn: bool = False) -> Hook:
    """Crash before the operation of a number; `torn` when half of what it writes is there."""

    def before(operation: Operation) -> None:
        if operation.number == number:
            if torn and operation.name == "write":
                with open(operation.path, "r+b", buffering=0) as file:
                    file.write(operation.data[: len(operation.data) // 2])
            die()

    return before


def failing_at(number: int, code: int, *, forever: bool) -> Hook:
    """Refuse the operation of a number with an error, and all later ones if `forever`."""

    def before(operation: Operation) -> None:
        if operation.number == number or (forever and operation.number > number):
            raise OSError(code, os.strerror(code), operation.path)

    return before


def started(action: Callable[[], object], *, log: Path) -> int:
    """A child that does the action and exits 0, or with a refusal's code; its words are in `log`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it uses no thread but its own
        child = os.fork()
    if child:
        return child
    code = 1
    gc.freeze()  # what the parent imported need not be looked through by every child
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = _exit_code(action)
    finally:
        if sys.exc_info()[0]:
            os.write(2, traceback.format_exc().encode())
        os._exit(code)


def _exit_code(action: Callable[[], object]) -> int:
    from lib.errors import DarkroomError, Stopped

    try:
        action()
    except (DarkroomError, Stopped) as error:
        os.write(2, f"{error}\n".encode())
        return error.exit_code
    return 0


def ended(child: int) -> int:
    """Its exit code, or minus the signal that ended it."""
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def run(action: Callable[[], object], *, log: Path) -> int:
    """Do an action in a child; its exit code."""
    return ended(started(action, log=log))


def killed(action: Callable[[], object], *, after_seconds: float, log: Path) -> int:
    """Start an action in a child and SIGKILL it after a time; its exit code when it was quicker."""
    child = started(action, log=log)
    time.sleep(after_seconds)
    os.kill(child, signal.SIGKILL)
    return ended(child)
