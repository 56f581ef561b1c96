"""Looking after a store: verify, gc and stats (design 4)."""

import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lib import files
from lib.errors import Problem, StateRefused
from lib.leases import DAY_SECONDS, changing, leases, read_records, readable, temporaries
from lib.store import RESERVED, Damaged, EntryRef, Manifest, Store

BATCH = 64
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_SHARD = re.compile(r"[0-9a-f]{2}")
_ENTRY = re.compile(r"[0-9a-f]{62}\.safetensors")
_MANIFEST = re.compile(r"[0-9a-f]{64}\.json")


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
class _Item:
    """An entry, or a manifest whose kind is `manifests/<stage>`; `time` is when it was touched."""

    kind: str
    key: str
    path: Path
    size_bytes: int
    time: float


@dataclass(frozen=True)
class _Held:
    """Names (kind, key) that something reaches, and the keys that leases hold."""

    names: frozenset[tuple[str, str]]
    leased: frozenset[str]

    def holds(self, item: _Item) -> bool:
        """Whether an item must stay."""
        return (item.kind, item.key) in self.names or item.key in self.leased


class _Reach:
    """Works out anew at each call what must stay; remembers the manifests that it has read."""

    def __init__(self, store: Store, *, now: float, since: float):
        self._store, self._now, self._since = store, now, since
        self._refs: dict[_Item, frozenset[tuple[str, str]]] = {}

    def held(self) -> _Held:
        """What runs, recent use and live leases hold now."""
        live = [one.keys for one in leases(self._store) if one.is_live(self._now)]
        leased = frozenset[str]().union(*live)
        of_runs = _manifests_of_runs(self._store)
        kept = [
            item
            for item in _manifests(self._store)
            if (item.kind, item.key) in of_runs or item.time >= self._since or item.key in leased
        ]
        names = frozenset((item.kind, item.key) for item in kept)
        return _Held(names.union(*map(self._entries_of, kept)), leased)

    def _entries_of(self, item: _Item) -> frozenset[tuple[str, str]]:
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

    def check(ref: EntryRef) -> Damaged | None:
        try:
            store.check(ref)
        except Damaged as damage:
            return damage
        return None

    found: list[Damaged] = []
    with ThreadPoolExecutor(threads) as pool:
        for done, damage in enumerate(pool.map(check, refs), start=1):
            found += [damage] if damage else []
            progress(done, len(refs))
    return tuple(found)


def verify(store: Store, *, threads: int, progress: Callable[[int, int], None]) -> VerifyReport:
    """Check the digest of every entry and manifest, and that what manifests name is there."""
    entries, manifests = list(_entries(store)), list(_manifests(store))
    refs = [EntryRef(item.kind, item.key, item.size_bytes) for item in entries]
    found = check_entries(store, refs, threads=threads, progress=progress)
    # What has gone since it was listed was removed by gc: no damage.
    damaged = [one for one in found if not isinstance(one.__cause__, FileNotFoundError)]
    missing: list[Missing] = []
    for item in manifests:
        try:
            manifest = _read_manifest(store, item)
        except Damaged as damage:
            damaged.append(damage)
        else:
            missing += [
                Missing(item.path, r) for r in (store.complete(manifest) if manifest else ())
            ]
    return VerifyReport(
        checked=len(entries) + len(manifests),
        damaged=tuple(Damage(one.path, one.why) for one in damaged),
        missing=tuple(missing),
        stray=tuple(_strays(store)),
    )


def gc(
    store: Store, *, keep_days: int | float, now: float, grace_seconds: int | float, dry_run: bool
) -> GcReport:
    """Remove what nothing reaches: no run's, no recent and no leased manifest, and no lease.

    Entries younger than the grace stay; a damaged record is a StateRefused, nothing removed.
    """
    reach = _Reach(store, now=now, since=now - keep_days * DAY_SECONDS)
    held, entries, litter = reach.held(), list(_entries(store)), _litter(store, now=now)
    old = [item for item in entries if item.path.is_file() and item.time <= now - grace_seconds]
    unheld = [item for item in (*_manifests(store), *old) if not held.holds(item)]
    if unheld and not dry_run:
        time.sleep(grace_seconds)
        unheld = _remove_unheld(store, unheld, reach=reach)
    for path in () if dry_run else litter:
        files.remove(path)
    return GcReport(
        removed=(*(item.path for item in unheld), *litter),
        freed_bytes=sum(item.size_bytes for item in unheld),
        kept=len({item.path for item in entries} - {item.path for item in unheld}),
    )


def stats(store: Store) -> StoreStats:
    """Count and size what is stored."""
    counts, sizes = Counter[str](), Counter[str]()
    for item in _entries(store):
        counts[item.kind] += 1
        sizes[item.kind] += item.size_bytes
    return StoreStats(
        kinds={kind: KindStats(counts[kind], sizes[kind]) for kind in sorted(counts)},
        manifests=Counter(item.path.parent.name for item in _manifests(store)),
    )


def _remove_unheld(store: Store, items: Sequence[_Item], *, reach: _Reach) -> list[_Item]:
    """Remove items in batches, asking before each what is held by now; returns those removed."""
    removed: list[_Item] = []
    for start in range(0, len(items), BATCH):
        with changing(store):
            held = reach.held()
            batch = [item for item in items[start : start + BATCH] if not held.holds(item)]
            for item in batch:
                files.remove(item.path)
        removed += batch
    return removed


def _read_manifest(store: Store, item: _Item) -> Manifest | None:
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
    """Leases of the dead, and temporary files that nobody has written to for a day."""
    dead = [one.path for one in leases(store) if not one.is_live(now)]
    old = (_item("", path) for path in temporaries(store))
    return dead + [item.path for item in old if item and item.time < now - DAY_SECONDS]


def _entries(store: Store) -> Iterator[_Item]:
    """All entries, whatever lies in their place."""
    for shard in _shards(store):
        for path in shard.iterdir():
            if _ENTRY.fullmatch(path.name) and (item := _item(shard.parent.name, path)):
                yield item


def _manifests(store: Store) -> Iterator[_Item]:
    for stage in _folders(store.root / "manifests", _NAME):
        for path in stage.iterdir():
            if _MANIFEST.fullmatch(path.name) and (item := _item(f"manifests/{stage.name}", path)):
                yield item


def _strays(store: Store) -> Iterator[Path]:
    """What lies among entries and manifests and is neither, nor a writer's temporary file."""
    shards = list(_shards(store))
    stages = _folders(store.root / "manifests", _NAME)
    inside = [(path, _ENTRY) for shard in shards for path in shard.iterdir()]
    inside += [(path, _MANIFEST) for stage in stages for path in stage.iterdir()]
    inside += [(path, _SHARD) for kind in {s.parent for s in shards} for path in kind.iterdir()]
    for path, pattern in sorted(inside):
        if not pattern.fullmatch(path.name) and not path.name.startswith(files.TEMP_PREFIX):
            yield path


def _shards(store: Store) -> Iterator[Path]:
    """The folders of entries, `<kind>/ab`."""
    for kind in _folders(store.root, _NAME):
        if kind.name not in RESERVED:
            yield from _folders(kind, _SHARD)


def _folders(parent: Path, pattern: re.Pattern[str]) -> list[Path]:
    """The real folders in a folder whose names match; links are not followed."""
    inside = sorted(parent.iterdir()) if parent.is_dir() else []
    named = [path for path in inside if pattern.fullmatch(path.name)]
    return [path for path in named if path.is_dir() and not path.is_symlink()]


def _item(kind: str, path: Path) -> _Item | None:
    """A file by its directory record; None when it has just been removed."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    size = found.st_size if stat.S_ISREG(found.st_mode) else 0
    key = path.stem if kind.startswith("manifests/") else path.parent.name + path.stem
    return _Item(kind, key, path, size, found.st_mtime)
