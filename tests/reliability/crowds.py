"""Many processes on one store at once: writers, readers, verify and gc, one writer killed a round."""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lib.claims import Claims, claims
from lib.keys import Key, digest
from lib.leases import lease, leases
from lib.store import Damaged, EntryRef, Manifest, Store
from lib.upkeep import gc, verify
from tests.reliability import crashes, rigs
from tests.reliability.trials import Whole, put, tensors

GRACE_SECONDS = 0.2
KILL_WITHIN_SECONDS = 0.5
PATIENCE_SECONDS = 120
KILLED = 1  # a round; what it was encoding is encoded again
OLD_SECONDS = 100 * 86_400


@dataclass(frozen=True)
class Round:
    """One store, so many keys in it, a number to draw by, and where what goes wrong is written."""

    store: Store
    keys: tuple[str, ...]
    seed: int
    log: Path

    @property
    def encoded(self) -> Path:
        """Where each encode is written down: a key a line."""
        return self.log.with_name("encoded")

    def done(self) -> bool:
        """Whether the writers have ended."""
        return (self.store.root / "done").exists()


def write(of: Round, number: int) -> None:
    """Build most of the keys, then publish a manifest of them.

    In an order of its own, or in every other round in the one of all writers: then they ask for the
    same keys at the same time.
    """
    rng = random.Random(of.seed * 100 + number)
    mine = rng.sample(of.keys, len(of.keys) * 3 // 4)
    if of.seed % 2 == 0:
        mine.sort()
    name = digest([of.seed, number])
    wanted = {key: Key(key, {}) for key in mine}
    with lease(of.store, [name, *mine]):
        with claims(of.store, "latents", wanted) as claimed:
            for key in claimed.mine(mine):
                _encode(of, key, claimed)
            for key in claimed.left():
                _encode(of, key, claimed)
        sizes = {key: of.store.size_bytes("latents", key) or 0 for key in mine}
        refs = tuple(EntryRef("latents", key, size) for key, size in sizes.items())
        of.store.publish(Manifest("cache", name, {}, {"train": refs}, {}))


def _encode(of: Round, key: str, claimed: Claims[str]) -> None:
    """Make an entry, and write down that it was made."""
    with of.encoded.open("a") as file:
        file.write(f"{key}\n")
    put(of.store, key, of.keys.index(key), size=16)
    claimed.free(key)


def read(of: Round, number: int) -> None:
    """Read entries at random until the writers have ended; each is whole or not there yet."""
    rng = random.Random(number)
    while not of.done():
        key = rng.choice(of.keys)
        try:
            found = of.store.get("latents", key)
        except Damaged as damage:
            if not isinstance(damage.__cause__, FileNotFoundError):
                raise
        else:
            assert found.tensors == tensors(of.keys.index(key), size=16)


def look_after(of: Round, _number: int) -> None:
    """Verify and collect in turns until the writers have ended."""
    while not of.done():
        report = verify(of.store, threads=2, progress=lambda done, total: None)
        assert not report.damaged, report.damaged
        assert not report.missing, report.missing
        gc(of.store, keep_days=1, now=time.time(), grace_seconds=GRACE_SECONDS, dry_run=False)


def crowd(of: Round, *, writers: int) -> list[str]:
    """All at once, one writer killed and started again; what went wrong."""
    of.store.root.mkdir(parents=True)
    rng = random.Random(of.seed)
    others = [_start(of, job, n) for n, job in enumerate((read, read, look_after))]
    working = [_start(of, write, number) for number in range(writers)]
    victim = rng.randrange(writers)
    time.sleep(rng.uniform(0, KILL_WITHIN_SECONDS))
    os.kill(working[victim], signal.SIGKILL)
    crashes.ended(working[victim])
    working[victim] = _start(of, write, victim)
    codes = [crashes.ended(child) for child in working]
    (of.store.root / "done").touch()
    codes += [crashes.ended(child) for child in others]
    wrong = [f"ended with {codes}: {of.log.read_text()[-2000:]}"] if any(codes) else []
    return wrong + _lost(of, writers)


def _start(of: Round, job: Callable[[Round, int], None], number: int) -> int:
    return crashes.started(lambda: job(of, number), log=of.log)


def _lost(of: Round, writers: int) -> list[str]:
    """Manifests and entries that are not there, and what is left lying about."""
    report = verify(of.store, threads=2, progress=lambda done, total: None)
    wrong = [str(one) for one in (*report.damaged, *report.missing)]
    for number in range(writers):
        manifest = of.store.manifest("cache", digest([of.seed, number]))
        if manifest is None or len(manifest.refs()) != len(of.keys) * 3 // 4:
            wrong.append(f"the manifest of writer {number} is not there")
    with lease(of.store, ()):  # clears up after the killed
        wrong += [f"a lease is left: {one.path}" for one in leases(of.store)[1:]]
    wrong += [f"left: {path}" for path in rigs.leftovers(of.store.root)]
    counts = Counter(of.encoded.read_text().split())
    if (again := sum(counts.values()) - len(counts)) > KILLED:
        wrong.append(f"{again} keys were encoded once more than needed")
    if (of.store.root / "quarantine").exists():
        wrong.append("something was set aside")
    return wrong


def rounds(*, count: int, keys: int, writers: int, scratch: Path) -> Iterator[list[str]]:
    """So many rounds, each with a store of its own."""
    for seed in range(count):
        root = rigs.fresh(scratch / "crowd")
        names = tuple(digest(["key", seed, number]) for number in range(keys))
        yield crowd(Round(Store(root / "store"), names, seed, root / "log"), writers=writers)


# A hit is found, gc removes, a publication follows: gc planted at every call of a builder.

PLANTED = ("size_bytes", "manifest", "complete", "touch", "put", "get", "check", "publish")


class Plan:
    """Runs gc before the call of a number that a builder makes of a store; counts the calls."""

    def __init__(self, root: Path, number: int | None):
        self.root, self.number, self.calls, self.at = root, number, 0, ""
        self._busy = False

    def __enter__(self) -> "Plan":
        self._real = {name: getattr(Store, name) for name in PLANTED}
        for name, real in self._real.items():
            setattr(Store, name, self._wrapped(name, real))
        return self

    def __exit__(self, *_: object) -> None:
        for name, real in self._real.items():
            setattr(Store, name, real)

    def _wrapped(self, name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(store: Store, *args: object, **named: object) -> object:
            if not self._busy:
                if self.calls == self.number:
                    self.at = name
                    self._collect()
                self.calls += 1
            return real(store, *args, **named)

        return call

    def _collect(self) -> None:
        self._busy = True
        now = time.time()
        gc(Store(self.root / "store"), keep_days=1, now=now, grace_seconds=0, dry_run=False)
        self._busy = False


@dataclass(frozen=True)
class Planted:
    """What came of one planting: how many calls there were, which was chosen, what was wrong."""

    calls: int
    at: str
    wrong: list[str]


def planted(whole: Whole, number: int | None, *, scratch: Path, half: bool = False) -> Planted:
    """Run a complete stage again (or one that lacks half its entries), gc before one of its calls.

    All files are long unused, so gc takes whatever the builder does not hold. Of upstream it may
    take what nobody holds by then; the stage's own must be whole in the end.
    """
    root = rigs.fresh(scratch / "planted", like=whole.root)
    own = {name for name in whole.after if name.startswith((f"manifests/{whole.stage}/", "c", "l"))}
    entries = sorted(name for name in own if not name.startswith("manifests/"))
    for name in entries[::2] if half else ():
        (root / "store" / name).unlink()
    age(root)
    with Plan(root, number) as plan:
        whole.rig.make(whole.stage, root)
    absent = sorted(own - rigs.artifacts(root).keys())
    wrong = [f"gc before call {number}, {plan.at}: absent: {absent}"] if absent else []
    return Planted(plan.calls, plan.at, wrong + rigs.lies(root, whole=whole.after))


def age(root: Path) -> None:
    """Let every file of a store be long unused, as gc sees it."""
    then = time.time() - OLD_SECONDS
    for path in root.glob("store/**/*"):
        with suppress(FileNotFoundError):
            os.utime(path, (then, then))
