"""Looking after a store: verify, gc and stats (design 4)."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from lib import compiled, files
from lib.errors import Problem, StateRefused
from lib.leases import (
    DAY_SECONDS,
    changing,
    is_left,
    leases,
    read_records,
    readable,
    temporaries,
)
from lib.listing import Item, entries_of, item_at, manifests_of, strays_of
from lib.store import Damaged, EntryRef, Manifest, Store

BATCH = 64
_DECIDING = ("leases", "runs")
AHEAD = 16  # entries that a thread of verify takes at a time


@dataclass(frozen=True)
class Damage:
    """A file that is not what it should be."""

    path: Path
    why: str


@dataclass(frozen=True)
class Missing:
    """An entry that a manifest names, and that is absent or of another size."""

    manifest: Path
    ref: EntryRef


@dataclass(frozen=True)
class VerifyReport:
    """`checked` counts entries and manifests; strays are files that belong to no key."""

    checked: int
    damaged: tuple[Damage, ...]
    missing: tuple[Missing, ...]
    stray: tuple[Path, ...]


@dataclass(frozen=True)
class GcReport:
    """What was removed (in a dry run: would be); `kept` counts entries."""

    removed: tuple[Path, ...]
    freed_bytes: int
    kept: int


@dataclass(frozen=True)
class KindStats:
    """How many entries, and their size together."""

    count: int
    size_bytes: int


@dataclass(frozen=True)
class StoreStats:
    """Entries by kind, and the number of manifests by stage."""

    kinds: Mapping[str, KindStats]
    manifests: Mapping[str, int]


@dataclass(frozen=True)
class _Held:
    """Names (kind, key) that something reaches, and the keys that leases hold."""

    names: frozenset[tuple[str, str]]
    leased: frozenset[str]

    def holds(self, item: Item) -> bool:
        """Whether an item must stay."""
        return (item.kind, item.key) in self.names or item.key in self.leased


class _Reach:
    """Works out anew at each call what must stay; remembers the manifests that it has read."""

    def __init__(self, store: Store, *, now: float, since: float):
        self._store, self._now, self._since = store, now, since
        self._refs: dict[Item, frozenset[tuple[str, str]]] = {}
        self._last: tuple[frozenset[Item], _Held] | None = None

    def held(self) -> _Held:
        """What runs, recent use and live leases hold now."""
        state = self._state()
        if self._last is None or self._last[0] != state:
            self._last = state, self._work_out()
        return self._last[1]

    def _state(self) -> frozenset[Item]:
        """What decides, by directory records: a large store is not worked out for each batch."""
        root = self._store.root
        records = (item_at("", path) for kind in _DECIDING for path in root.glob(f"{kind}/*.json"))
        return frozenset([*(record for record in records if record), *manifests_of(self._store)])

    def _work_out(self) -> _Held:
        live = [one.keys for one in leases(self._store) if one.is_live(self._now)]
        leased = frozenset[str]().union(*live)
        of_runs = _manifests_of_runs(self._store)
        kept = [
            item
            for item in manifests_of(self._store)
            if (item.kind, item.key) in of_runs or item.time >= self._since or item.key in leased
        ]
        names = frozenset((item.kind, item.key) for item in kept)
        return _Held(names.union(*map(self._entries_of, kept)), leased)

    def _entries_of(self, item: Item) -> frozenset[tuple[str, str]]:
        if item not in self._refs:
            try:
                found = _read_manifest(self._store, item)
            except Damaged as damage:
                why = "a manifest in use is damaged, so what it reaches is not known"
                remedy = "run its stage again, then gc"
                raise StateRefused(Problem(str(item.path), why, remedy=remedy)) from damage
            refs = found.refs() if found else ()
            self._refs[item] = frozenset((ref.kind, ref.key) for ref in refs)
        return self._refs[item]


def check_entries(
    store: Store,
    refs: Sequence[EntryRef],
    *,
    threads: int,
    progress: Callable[[int, int], None],
) -> tuple[Damaged, ...]:
    """Verify entries in threads; `progress` gets (done, all) in the calling one."""
    return _check(store, refs, total=len(refs), threads=threads, progress=progress)


def _check(
    store: Store,
    refs: Iterable[EntryRef],
    *,
    total: int,
    threads: int,
    progress: Callable[[int, int], None],
) -> tuple[Damaged, ...]:
    def check(ref: EntryRef) -> Damaged | None:
        try:
            store.check(ref)
        except Damaged as damage:
            return damage
        return None

    found: list[Damaged] = []
    ended = 0
    with ThreadPoolExecutor(threads) as pool:
        # A few at a time: a store may hold more entries than futures fit in memory.
        rest = iter(refs)
        while batch := tuple(islice(rest, threads * AHEAD)):
            for damage in pool.map(check, batch):
                ended += 1
                found += [damage] if damage else []
                progress(ended, max(total, ended))
    return tuple(found)


def verify(store: Store, *, threads: int, progress: Callable[[int, int], None]) -> VerifyReport:
    """Check the digest of every entry and manifest, and that what manifests name is there."""
    total, manifests = sum(1 for _ in entries_of(store)), list(manifests_of(store))
    refs = (EntryRef(item.kind, item.key, item.size_bytes) for item in entries_of(store))
    found = _check(store, refs, total=total, threads=threads, progress=progress)
    # What has gone since it was listed was removed by gc: no damage.
    damaged = [one for one in found if not isinstance(one.__cause__, FileNotFoundError)]
    missing: list[Missing] = []
    for item in manifests:
        try:
            manifest = _read_manifest(store, item)
        except Damaged as damage:
            damaged.append(damage)
        else:
            lost = store.complete(manifest) if manifest else ()
            # gc takes a manifest before its entries, so ask for it once more.
            if lost and item.path.exists():
                missing += [Missing(item.path, ref) for ref in lost]
    return VerifyReport(
        checked=total + len(manifests),
        damaged=tuple(Damage(one.path, one.why) for one in damaged),
        missing=tuple(missing),
        stray=tuple(strays_of(store)),
    )


def gc(
    store: Store, *, keep_days: int | float, now: float, grace_seconds: int | float, dry_run: bool
) -> GcReport:
    """Remove what nothing reaches: no run's, no recent and no leased manifest, and no lease.

    Entries younger than the grace stay; a damaged record is a StateRefused, nothing removed. What
    was compiled goes when no run has used it for so long.
    """
    reach = _Reach(store, now=now, since=now - keep_days * DAY_SECONDS)
    held, entries, litter = reach.held(), list(entries_of(store)), _litter(store, now=now)
    old = [item for item in entries if item.path.is_file() and item.time <= now - grace_seconds]
    unheld = [item for item in (*manifests_of(store), *old) if not held.holds(item)]
    if unheld and not dry_run:
        time.sleep(grace_seconds)
        unheld = _remove_unheld(store, unheld, reach=reach)
    since = now - keep_days * DAY_SECONDS
    builds = [build for build in compiled.builds_of(store.root) if build.time < since]
    for path in () if dry_run else (*litter, *(build.path for build in builds)):
        files.remove(path)
    return GcReport(
        removed=(*(item.path for item in unheld), *litter, *(build.path for build in builds)),
        freed_bytes=sum(one.size_bytes for one in (*unheld, *builds)),
        kept=len({item.path for item in entries} - {item.path for item in unheld}),
    )


def stats(store: Store) -> StoreStats:
    """Count and size what is stored; of what was compiled, the files."""
    counts, sizes = Counter[str](), Counter[str]()
    for build in compiled.builds_of(store.root):
        counts[compiled.FOLDER] += build.count
        sizes[compiled.FOLDER] += build.size_bytes
    for item in entries_of(store):
        counts[item.kind] += 1
        sizes[item.kind] += item.size_bytes
    return StoreStats(
        kinds={kind: KindStats(counts[kind], sizes[kind]) for kind in sorted(counts)},
        manifests=Counter(item.path.parent.name for item in manifests_of(store)),
    )


def _remove_unheld(store: Store, items: Sequence[Item], *, reach: _Reach) -> list[Item]:
    """Remove items in batches, asking before each what is held by now; returns those removed."""
    removed: list[Item] = []
    for start in range(0, len(items), BATCH):
        with changing(store):
            held = reach.held()
            batch = [
                item
                for item in items[start : start + BATCH]
                # What was touched or made again since it was listed is another thing.
                if not held.holds(item) and item == item_at(item.kind, item.path)
            ]
            for item in batch:
                files.remove(item.path)
        removed += batch
    return removed


def _read_manifest(store: Store, item: Item) -> Manifest | None:
    return store.manifest(item.path.parent.name, item.key)


def _manifests_of_runs(store: Store) -> frozenset[tuple[str, str]]:
    """The manifests that runs name whose folders exist."""
    names: set[tuple[str, str]] = set()
    for record in read_records(store.root / "runs"):
        with readable(record.path):
            of_run = [(f"manifests/{stage}", key) for stage, key in record.fields["manifests"]]
            if Path(record.fields["folder"]).is_dir():
                names.update(of_run)
    return frozenset(names)


def _litter(store: Store, *, now: float) -> list[Path]:
    """Temporary files of the dead, and those nobody has written to for a day; leases of the dead.

    The leases last: they make the next builder look for the files.
    """
    found = [item for path in temporaries(store) if (item := item_at("", path))]
    left = [i.path for i in found if is_left(i.path) or i.time < now - DAY_SECONDS]
    return left + [one.path for one in leases(store) if not one.is_live(now)]
