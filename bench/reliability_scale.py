"""How the store does with many entries: rates and memory at three sizes."""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lib.events import Events
from lib.keys import digest
from lib.leases import lease
from lib.store import Manifest, Store
from lib.tensors import Tensor
from lib.upkeep import gc, verify
from lib.verify import verify_entries
from tests.reliability import crashes

ENTRIES = 100_000
SIZES = (0.1, 0.5, 1.0)  # of all entries
READS = 5000
THREADS = 2
STAGE = "cache"
Phase = Callable[[Store, int, int], int]


def build(store: Store, start: int, stop: int) -> int:
    """Put entries, each synced, under one lease."""
    data = np.ones((4, 8, 8), "<f4").tobytes()
    tensors = {name: Tensor("F32", (4, 8, 8), data) for name in ("mean", "std")}
    with lease(store, (digest(number) for number in range(start, stop))):
        for number in range(start, stop):
            store.put("latents", digest(number), tensors, metadata={}, inputs={"number": number})
    return stop - start


def publish(store: Store, _start: int, stop: int) -> int:
    """Read every entry once more and publish a manifest of all."""
    store.publish(_manifest(store, stop))
    return stop


def open_all(store: Store, _start: int, stop: int) -> int:
    """What a warm run asks: the manifest, and whether all its entries are there."""
    found = store.manifest(STAGE, digest(["of", stop]))
    assert found is not None
    assert store.complete(found) == ()
    return stop


def read(store: Store, _start: int, stop: int) -> int:
    """Read entries at random."""
    rng = random.Random(stop)
    for _ in range(READS):
        store.get("latents", digest(rng.randrange(stop)))
    return READS


def verify_all(store: Store, _start: int, stop: int) -> int:
    """`python -m stages.store verify`."""
    report = verify(store, threads=THREADS, progress=lambda done, total: None)
    assert not report.damaged
    assert not report.missing
    return stop


def before_training(store: Store, _start: int, stop: int) -> int:
    """What train verifies before its first step; the second time it remembers."""
    found = store.manifest(STAGE, digest(["of", stop]))
    assert found is not None
    verify_entries(store, [found], Events())
    return stop


def collect(store: Store, _start: int, stop: int) -> int:
    """`gc` with nothing to take."""
    report = gc(store, keep_days=1, now=time.time(), grace_seconds=0, dry_run=False)
    assert report.removed == ()
    return stop


PHASES: dict[str, Phase] = {
    "build": build,
    "publish": publish,
    "open": open_all,
    "random read": read,
    "verify": verify_all,
    "verify before training": before_training,
    "the same, remembered": before_training,
    "gc": collect,
}


def table(scratch: Path, *, count: int) -> str:
    """Entries a second of each phase, and the most memory it took beyond its start."""
    sizes = [int(count * share) for share in SIZES]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in PHASES}
    store = Store(scratch / "scale")
    for start, stop in zip([0, *sizes], sizes, strict=False):
        for name, phase in PHASES.items():
            found[name].append(_measured(phase, store, start, stop, scratch=scratch))
            rate, peak = found[name][-1]
            print(f"{stop} entries, {name}: {rate:.0f} a second, {peak:.0f} MB", flush=True)
    heads = " | ".join(f"{size} entries" for size in sizes)
    lines = [f"\n| entries a second (MB beyond the start) | {heads} |", "|---|--:|--:|--:|"]
    for name, cells in found.items():
        shown = " | ".join(f"{rate:.0f} ({peak:.0f})" for rate, peak in cells)
        lines.append(f"| {name} | {shown} |")
    return "\n".join(lines)


def _measured(
    phase: Phase, store: Store, start: int, stop: int, *, scratch: Path
) -> tuple[float, float]:
    """A phase in a child: its rate, and its peak of resident memory beyond the parent's."""
    file, log = scratch / "measured", scratch / "scale-log"

    def measured() -> None:
        before, began = _resident("VmRSS"), time.perf_counter()
        done = phase(store, start, stop)
        seconds = time.perf_counter() - began
        file.write_text(json.dumps([done / seconds, _resident("VmHWM") - before]))

    if crashes.run(measured, log=log):
        raise AssertionError(log.read_text())
    rate, peak = json.loads(file.read_text())
    return rate, peak


def _resident(name: str) -> float:
    """A figure of this process's memory in MB, by /proc."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise AssertionError(name)


def _manifest(store: Store, count: int) -> Manifest:
    from lib.store import EntryRef

    sizes = ((digest(n), store.size_bytes("latents", digest(n)) or 0) for n in range(count))
    refs = tuple(EntryRef("latents", key, size) for key, size in sizes)
    return Manifest(STAGE, digest(["of", count]), {}, {"train": refs}, {})
