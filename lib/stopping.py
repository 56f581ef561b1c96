"""Requests to stop: SIGINT, SIGTERM, and files that a user lays down.

The first request ends the work at its next safe point: while a run trains, after the step, with a
checkpoint; anywhere else at once, since whatever is published is whole. The same signal again
ends the process now, even where Python does not get to run.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib.errors import Problem, StateRefused, Stopped

STOP_FILE = "stop"  # in a run's folder, or in the folder of all runs
DISCARD = "discard"  # in a stop file: without the checkpoint that a stop otherwise writes
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class _Requests:
    """Of this process: signals, like files, are its own."""

    heard: list[int] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    deferred: bool = False


_requests = _Requests()


def asked() -> str:
    """What asks to stop: a signal's name or a file's path; empty where nothing does."""
    if _requests.heard:
        return signal.Signals(_requests.heard[0]).name
    return next((str(path) for path in _requests.files if path.exists()), "")


def check() -> None:
    """A safe point: ends here as Stopped if that is asked, and if the loop around has no own."""
    if not _requests.deferred and asked():
        raise stopped()


def stopped(where: str = "", *, of_all: bool = False) -> Stopped:
    """What to raise; without anything that asks here, another process of the run was asked."""
    who, by, first = asked() or "another process", "another process", ""
    if asked():
        is_signal = who in signal.Signals.__members__
        by, first = (who, "") if is_signal else ("stop file", f"remove {who}, then ")
    what = " ".join(filter(None, (who, where)))
    return Stopped(f"{what}; {first}the same command resumes", by=by, of_all=of_all)


def discards() -> bool:
    """Whether a stop file asks for no checkpoint."""
    for path in filter(Path.is_file, _requests.files):
        with path.open("rb") as file:
            if file.read(64).strip() == DISCARD.encode():
                return True
    return False


def refuse_if_asked(file: Path, *, whom: str, remedy: str) -> None:
    """Refuse to start what a stop file asks to stop; the file is the user's to remove."""
    if file.exists():
        raise StateRefused(Problem(str(file), f"asks {whom} to stop", remedy=remedy))


@contextmanager
def watching(*files: Path) -> Iterator[None]:
    """Stop files that count during the block."""
    before = list(_requests.files)
    _requests.files.extend(files)
    try:
        yield
    finally:
        _requests.files[:] = before


@contextmanager
def deferring() -> Iterator[None]:
    """For a block that asks `asked` itself, between what must not be torn apart."""
    before, _requests.deferred = _requests.deferred, True
    try:
        yield
    finally:
        _requests.deferred = before


@contextmanager
def heeding() -> Iterator[None]:
    """Hear signals during the block, on the main thread; what ignores them goes on doing so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    handled = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    hears, tells = socket.socketpair()
    tells.setblocking(False)
    wakeup = signal.set_wakeup_fd(tells.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_count, args=(hears, handled), name="signals", daemon=True).start()
    for number in handled:
        signal.signal(number, _hear)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, before[number])
        signal.set_wakeup_fd(wakeup)
        tells.close()
        _requests.heard.clear()


def _hear(number: int, _frame: Any) -> None:
    """In the main thread; a raise that is swallowed where it arrives comes back at a safe point."""
    _requests.heard.append(number)
    if len(_requests.heard) == 1:
        check()


def _count(hears: socket.socket, handled: list[int]) -> None:
    """In a thread of its own, which hears a signal even while the main one waits in a library."""
    seen: set[int] = set()
    with hears:
        while signals := hears.recv(64):
            for number in signals:
                if number in seen:
                    os._exit(128 + number)
                if number in handled:
                    # One of each kind is one request: torchrun answers Control-C with SIGTERM.
                    seen.add(number)
                    _say(signal.Signals(number).name)


def _say(name: str) -> None:
    print(f"{name}: stopping; a second {name} ends at once", file=sys.stderr, flush=True)
