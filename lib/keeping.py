"""Records from the encoders into the store: written, opened once more, by threads beside a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

import torch

from lib import stopping
from lib.claims import claims
from lib.encoding import Failed
from lib.errors import Problem, SamplesFailed
from lib.events import Events
from lib.family import Record
from lib.keys import Key
from lib.records import to_stored
from lib.store import Damaged, EntryRef, Store

# What a GPU encodes together where nothing is asked: enough to fill it, and 16 GB hold it.
PIXELS_TOGETHER = 1 << 21
TOKENS_TOGETHER = 1 << 13
MOST_TOGETHER = 64
WRITERS = 8
WAITING = 2  # records for each writer that are written or wait for it: memory holds no more

Item = TypeVar("Item")
Kept = EntryRef | Problem | None


@dataclass(frozen=True)
class Pace:
    """How many items are encoded together, and how far the encoder is ahead of the disk."""

    batch_size: int
    late: int  # records that may still be on their way from the device
    writers: int  # threads; without any each record is stored before the next is encoded

    @classmethod
    def of(cls, device: torch.device, *, asked: int | None, fitting: int) -> Pace:
        """`fitting` is what fills a GPU; on a CPU a killed process has one encode to repeat."""
        if device.type != "cuda":
            return cls(asked or 1, late=0, writers=0)
        size = asked or max(1, min(MOST_TOGETHER, fitting))
        return cls(size, late=size, writers=WRITERS)


def put_all(
    items: Iterable[Item],
    encode: Callable[[Iterable[Item]], Iterator[tuple[Item, Record | Failed]]],
    *,
    keys: Mapping[Item, Key],
    kind: str,
    store: Store,
    subject_of: Callable[[Item], str],
    events: Events,
    writers: int = 0,
) -> frozenset[EntryRef]:
    """Encode items into the store, shared with any process that is at the same ones.

    The entries made here, each opened once more. Items that fail are told apart, after all others
    are kept: SamplesFailed.
    """
    problems: list[Problem] = []
    opened: set[EntryRef] = set()
    done = 0
    with claims(store, kind, keys) as claimed:

        def keep(item: Item, record: Record | Failed) -> Kept:
            return _kept(store, kind, keys[item], record, subject=subject_of(item))

        def put(records: Iterator[tuple[Item, Record | Failed]]) -> None:
            nonlocal done
            # Closed also by a stop: what is encoded is written before the claims go.
            with closing(in_threads(keep, records, threads=writers)) as ended:
                for item, kept in ended:
                    claimed.free(item)
                    problems.extend([kept] if isinstance(kept, Problem) else [])
                    opened.update([kept] if isinstance(kept, EntryRef) else [])
                    done += 1
                    stopping.check()
                    events.progress(done + claimed.found, len(keys), unit=kind)

        put(encode(claimed.mine(items)))
        for item in claimed.left():
            put(encode([item]))
    if problems:
        raise SamplesFailed(problems)
    return frozenset(opened)


def in_threads(
    keep: Callable[[Item, Record | Failed], Kept],
    records: Iterator[tuple[Item, Record | Failed]],
    *,
    threads: int,
) -> Generator[tuple[Item, Kept]]:
    """What becomes of each record, in their order; what one raises comes at its place.

    Without threads each is kept before the next is asked for.
    """
    if threads == 0:
        yield from ((item, keep(item, record)) for item, record in records)
        return
    pending: deque[tuple[Item, Future[Kept]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="writer") as pool:
        for item, record in records:
            pending.append((item, pool.submit(keep, item, record)))
            del record  # the writer's alone: let go when it is written
            while pending and (pending[0][1].done() or len(pending) >= WAITING * threads):
                yield _first(pending)
        while pending:
            yield _first(pending)


def _first(pending: deque[tuple[Item, Future[Kept]]]) -> tuple[Item, Kept]:
    item, future = pending.popleft()
    return item, future.result()


def _kept(store: Store, kind: str, key: Key, record: Record | Failed, *, subject: str) -> Kept:
    """The entry, read once more; of a record that failed or is not finite its subject's problem.

    None for one that does not read as what was stored: publishing reads it again, and tells.
    """
    if isinstance(record, Failed):
        return Problem(subject, record.why, remedy=record.remedy)
    try:
        ref = store.put(kind, key.digest, to_stored(record), metadata={}, inputs=key.inputs)
    except ValueError as error:
        return Problem(subject, f"its encoding cannot be stored: {error}")
    try:
        store.check(ref)
    except Damaged:
        return None
    return ref
