"""Reading every entry a run will use, before its first step (design 4)."""

from collections.abc import Sequence
from pathlib import Path

from lib.events import Events
from lib.memory import Item, Memory, stat_of
from lib.store import Damaged, EntryRef, Manifest, Store
from lib.upkeep import check_entries

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
    present = {ref: path for ref in refs if (path := _path(store, ref)).exists()}
    known = {ref for ref, path in present.items() if memory.recall(_name(ref), path) is not None}
    unsure = [ref for ref in refs if ref not in known]
    before = {ref: stat_of(path) for ref, path in present.items() if ref not in known}
    damaged = check_entries(
        store,
        unsure,
        threads=THREADS,
        progress=lambda done, total: events.progress(done, total, unit="entries verified"),
    )
    bad = {(damage.kind, damage.key) for damage in damaged}
    sound = [ref for ref in unsure if (ref.kind, ref.key) not in bad]
    memory.remember_all(Item(_name(ref), before[ref], {"verified": True}) for ref in sound)
    if damaged:
        raise EntriesDamaged(damaged)


def _name(ref: EntryRef) -> str:
    return f"entry:{ref.kind}/{ref.key}"


def _path(store: Store, ref: EntryRef) -> Path:
    return store.entry_path(ref.kind, ref.key)
