"""Reading every entry a run will use, before its first step (design 4)."""

from collections.abc import Callable, Sequence
from pathlib import Path

from lib import stopping
from lib.errors import Problem, SamplesFailed
from lib.events import Events
from lib.memory import Item, Memory, stat_of
from lib.store import Damaged, EntryRef, Manifest, Store
from lib.upkeep import check_entries

THREADS = 4
BATCH = 2048


class EntriesDamaged(SamplesFailed):
    """Entries that do not hold what was stored; whoever ensures the stages decides what to do."""

    def __init__(self, damaged: Sequence[Damaged]):
        super().__init__(Problem(str(one.path), one.why, remedy="run again") for one in damaged)
        self.damaged = tuple(damaged)


def verify_entries(store: Store, manifests: Sequence[Manifest], events: Events) -> None:
    """Verify the digests of all entries not verified since they last changed."""
    memory = Memory(store.root)
    refs = list({ref for manifest in manifests for ref in manifest.refs()})
    refs.sort(key=lambda ref: (memory.shard_of(_name(ref)), ref))
    damaged: list[Damaged] = []
    # By what lies together in the memory: each part is read and written once, and let go.
    for start in range(0, len(refs), BATCH):

        def progress(done: int, _total: int, start: int = start) -> None:
            stopping.check()
            events.progress(start + done, len(refs), unit="entries verified")

        damaged += _verify(store, refs[start : start + BATCH], memory, progress)
        memory.forget()
    if damaged:
        raise EntriesDamaged(damaged)


def _verify(
    store: Store, refs: Sequence[EntryRef], memory: Memory, progress: Callable[[int, int], None]
) -> tuple[Damaged, ...]:
    """Those of some entries that are damaged; the others are remembered as verified."""
    present = {ref: path for ref in refs if (path := _path(store, ref)).exists()}
    known = {ref for ref, path in present.items() if memory.recall(_name(ref), path) is not None}
    unsure = [ref for ref in refs if ref not in known]
    before = {ref: stat_of(path) for ref, path in present.items() if ref not in known}
    damaged = check_entries(store, unsure, threads=THREADS, progress=progress)
    bad = {(damage.kind, damage.key) for damage in damaged}
    sound = [ref for ref in unsure if (ref.kind, ref.key) not in bad]
    memory.remember_all(Item(_name(ref), before[ref], {"verified": True}) for ref in sound)
    return damaged


def _name(ref: EntryRef) -> str:
    return f"entry:{ref.kind}/{ref.key}"


def _path(store: Store, ref: EntryRef) -> Path:
    return store.entry_path(ref.kind, ref.key)
