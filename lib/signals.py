"""Signals that ask to stop, and that nothing swallows."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def insisting() -> Iterator[Callable[[], None]]:
    """A check to call now and then in the block: it raises again what a signal raised in vain.

    A handler raises in whatever Python is doing; in a finaliser, or in a callback of a library, the
    exception is dropped. Signals without a handler of Python's, and other threads, are left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    asked: list[int] = []
    handlers: dict[int, Callable[[int, Any], Any]] = {
        number: handler for number in STOPS if callable(handler := signal.getsignal(number))
    }

    def note(number: int, frame: Any) -> None:
        asked.append(number)
        handlers[number](number, frame)

    def check() -> None:
        for number in asked:
            handlers[number](number, None)

    for number in handlers:
        signal.signal(number, note)
    try:
        yield check
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
