"""Reading every entry a run will use, before its first step (design 4)."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lib.events import Events
from lib.memory import Item, Memory, stat_of
from lib.store import Damaged, EntryRef, Manifest, Store

THREADS = 4


class EntriesDamaged(Exception):
    """Entries that do not hold what was stored; whoever ensures the stages decides what to do."""

    def __init__(self, damaged: Sequence[Damaged]):
        super().__init__("\n".join(map(str, damaged)))
        self.damaged = tuple(damaged)


def verify_entries(store: Store, manifests: Sequence[Manifest], events: Events) -> None:
    """Verify the digests of all entries not verified since they last changed."""
    memory = Memory(store.root)
    refs = sorted({ref for manifest in manifests for ref in manifest.refs()})
    unsure = [ref for ref in refs if memory.recall(_name(ref), _path(store, ref)) is None]
    damaged, sound = [], []
    with ThreadPoolExecutor(THREADS) as threads:
        for done, (ref, damage) in enumerate(threads.map(lambda r: _try(store, r), unsure), 1):
            if damage:
                damaged.append(damage)
            else:
                sound.append(Item(_name(ref), stat_of(_path(store, ref)), {"verified": True}))
            events.progress(done, len(unsure), unit="entries verified")
    memory.remember_all(sound)
    if damaged:
        raise EntriesDamaged(damaged)


def _try(store: Store, ref: EntryRef) -> tuple[EntryRef, Damaged | None]:
    try:
        store.check(ref)
    except Damaged as damage:
        return ref, damage
    return ref, None


def _name(ref: EntryRef) -> str:
    return f"entry:{ref.kind}/{ref.key}"


def _path(store: Store, ref: EntryRef) -> Path:
    return store.entry_path(ref.kind, ref.key)
