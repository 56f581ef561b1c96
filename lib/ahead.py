"""Work done a little before it is asked for."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

AHEAD = 2

Item = TypeVar("Item")
Made = TypeVar("Made")


def ahead(
    make: Callable[[Item], Made], items: Iterable[Item], *, depth: int = AHEAD
) -> Iterator[Made]:
    """`make` of each item in order, computed by a thread up to `depth` items ahead."""
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as thread:
        pending: list[Future[Made]] = []
        try:
            for item in items:
                pending.append(thread.submit(make, item))
                if len(pending) > depth:
                    yield pending.pop(0).result()
            while pending:
                yield pending.pop(0).result()
        finally:
            for future in pending:
                future.cancel()
