"""Who makes which entry: processes that fill one store share the work instead of doubling it.

A claim is a lock on one byte of a file that the kernel gives back when its process ends, however
it ends, so what a dead process had claimed is free at once. Entries are right without claims (the
first writer wins); they only save work (design 4).
"""

import fcntl
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from lib.files import make_folder, storing
from lib.keys import Key
from lib.store import Store

Item = TypeVar("Item")

FOLDER = "claims"
POLL_SECONDS = 0.02
PATIENCE_SECONDS = 300.0  # no encode takes so long
PLACE_DIGITS = (
    15  # of a key: 60 bits, since a file's places are 63; two keys at one place only wait
)


class Claims(Generic[Item]):
    """One process's claims on the entries of a kind; `keys` are those that it wants made."""

    def __init__(self, descriptor: int, store: Store, kind: str, keys: Mapping[Item, Key]):
        self._descriptor = descriptor
        self._store = store
        self._kind = kind
        self._keys = keys
        self._others: list[Item] = []
        self.found = 0  # how many another process had made

    def mine(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items that nobody makes or has made yet, each claimed as it comes.

        What another process is making is passed over, for `left`.
        """
        for item in items:
            if not self._take(item):
                self._others.append(item)
            elif not self._found(item):
                yield item

    def left(self) -> Iterator[Item]:
        """What others were making, each once they are done with it and if they did not make it.

        Hold no other claim meanwhile: two processes that wait for each other would wait for ever.
        """
        for item in self._others:
            self._wait_for(item)
            if not self._found(item):
                yield item

    def free(self, item: Item) -> None:
        """Give up a claim, with its entry made or not."""
        with storing(self._store.root):
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, self._place(item))

    def _wait_for(self, item: Item) -> None:
        """Until the item is ours; without a claim, where another process seems to hang with it."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not self._take(item) and time.monotonic() < end:
            time.sleep(POLL_SECONDS)

    def _take(self, item: Item) -> bool:
        with storing(self._store.root):
            try:
                how = fcntl.LOCK_EX | fcntl.LOCK_NB
                fcntl.lockf(self._descriptor, how, 1, self._place(item))
            except BlockingIOError:
                return False
        return True

    def _found(self, item: Item) -> bool:
        """Whether a claimed item is there already, which frees it."""
        there = self._store.size_bytes(self._kind, self._keys[item].digest) is not None
        if there:
            self.free(item)
            self.found += 1
        return there

    def _place(self, item: Item) -> int:
        return int(self._keys[item].digest[:PLACE_DIGITS], 16)


@contextmanager
def claims(store: Store, kind: str, keys: Mapping[Item, Key]) -> Iterator[Claims[Item]]:
    """Claims for the block; leaving it frees all."""
    path: Path = store.root / FOLDER / f"{kind}.lock"
    make_folder(path.parent)
    with storing(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        yield Claims(descriptor, store, kind, keys)
    finally:
        os.close(descriptor)
