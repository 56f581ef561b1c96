"""One trial of each kind: what it found wrong, in words; nothing when all is well."""

import errno
import os
import pickle
import random
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lib.files import StorageFailed
from lib.keys import digest
from lib.leases import lease
from lib.store import EntryRef, Manifest, Store
from lib.tensors import Tensor
from lib.upkeep import verify
from tests.reliability import crashes, disks, rigs
from tests.reliability.crashes import CRASHED, Operation, Seam
from tests.reliability.rigs import Counter, Rig

REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
# What needs no space cannot fail for want of it.
PAGE_BYTES = 4096
LEAST_FILE_BYTES = 1024
_AMPLE = shutil._ntuple_diskusage(1 << 40, 0, 1 << 40)
FREE = ("unlink", "rmdir", "close", "utime")


@dataclass(frozen=True)
class Whole:
    """An unkilled run to compare with: `before` holds what is upstream of the stage alone."""

    rig: Rig
    stage: str
    before: Path
    after: dict[str, str]
    trace: tuple[Operation, ...]
    root: Path
    rows: int
    scratch: Path

    @property
    def log(self) -> Path:
        return self.scratch / "log"


def whole_runs(rig: Rig, scratch: Path) -> dict[str, Whole]:
    """Each stage made once, undisturbed, with the operations it took."""
    found: dict[str, Whole] = {}
    scratch.mkdir(parents=True, exist_ok=True)
    upstream = rigs.fresh(scratch / "nothing")
    for stage in rigs.STAGES:
        before = rigs.fresh(scratch / f"before-{stage}", like=upstream)
        root = rigs.fresh(scratch / f"whole-{stage}", like=before)
        rows = Counter()
        with rigs.counting(rows):
            trace = _traced(rig, stage, root, scratch=scratch)
        after = rigs.artifacts(root)
        found[stage] = Whole(rig, stage, before, after, trace, root, rows.value, scratch)
        if stage == "prepare_dataset":
            upstream = root
    return found


def _traced(rig: Rig, stage: str, root: Path, *, scratch: Path) -> tuple[Operation, ...]:
    """The operations of a stage, in a child: whoever comes later must find its process dead."""
    file, log = scratch / "trace", scratch / "log"

    def make() -> None:
        trace: list[Operation] = []
        with Seam(root, after=trace.append):
            rig.make(stage, root)
        file.write_bytes(pickle.dumps(trace))

    if crashes.run(make, log=log):
        raise AssertionError(log.read_text())
    return tuple(pickle.loads(file.read_bytes()))


def _finished(whole: Whole, root: Path, *, said: str) -> list[str]:
    """What is wrong after a trial and one undisturbed run."""
    wrong = rigs.lies(root, whole=whole.after) if (root / "store").exists() else []
    code = crashes.run(lambda: whole.rig.make(whole.stage, root), log=whole.log)
    if code:
        return [*wrong, f"{said}: the rerun ended with {code}"]
    after = rigs.artifacts(root)
    if after != whole.after:
        names = {n for n in after.keys() | whole.after.keys() if after.get(n) != whole.after.get(n)}
        wrong.append(f"{said}: different: {sorted(names)}")
    if left := rigs.leftovers(root):
        wrong.append(f"{said}: left: {left}")
    return wrong


def kill(whole: Whole, *, after_seconds: Sequence[float]) -> list[str]:
    """SIGKILL a stage at some times, one run after the other, then run it to the end."""
    root = rigs.fresh(whole.scratch / "trial", like=whole.before)
    rows, said = Counter(), f"{whole.stage} killed after {[f'{s:.3f}' for s in after_seconds]}"
    with rigs.counting(rows):
        for seconds in after_seconds:
            make = lambda: whole.rig.make(whole.stage, root)  # noqa: E731
            crashes.killed(make, after_seconds=seconds, log=whole.log)
        wrong = _finished(whole, root, said=said)
    if rows.value > whole.rows + len(after_seconds):
        wrong.append(f"{said}: {rows.value} rows encoded for {whole.rows}")
    return wrong


def crash(whole: Whole, number: int, *, torn: bool = False) -> list[str]:
    """Crash a stage before its operation of a number, then run it to the end."""
    root = rigs.fresh(whole.scratch / "trial", like=whole.before)
    said = f"{whole.stage} crashed at {number}: {_shown(whole, number)}"

    def make() -> None:
        with Seam(root, before=crashes.dying_at(number, torn=torn)):
            whole.rig.make(whole.stage, root)

    code = crashes.run(make, log=whole.log)
    wrong = [] if code == CRASHED else [f"{said}: it ended with {code}"]
    return wrong + _finished(whole, root, said=said)


def cut_power(whole: Whole, *, count: int, rng: random.Random, reruns: int) -> Iterator[list[str]]:
    """States after power cuts: none may lie, and from some of them a run comes to the end."""
    again = set(rng.sample(range(count), reruns))
    disk = disks.Disk(os.path.realpath(whole.root))
    for operation in _upstream(whole):
        disk.apply(operation)
    cuts = disks.power_cuts(whole.trace, disk=disk, count=count, rng=rng)
    for number, (cut, mode, state) in enumerate(cuts):
        root = whole.scratch / "trial"
        shutil.rmtree(root, ignore_errors=True)
        disks.lay_out(state, root=whole.root, folder=root)
        said = f"{whole.stage} without power after {cut}, {mode} kept"
        if number in again:
            yield _finished(whole, root, said=said)
        else:
            yield [f"{said}: {lie}" for lie in rigs.lies(root, whole=whole.after)]


def _upstream(whole: Whole) -> list[Operation]:
    """Operations that make what was there before the stage, all of it synced."""
    made: list[Operation] = []
    root = os.path.realpath(whole.root)
    for folder, folders, names in os.walk(whole.before):
        here = os.path.normpath(os.path.join(root, os.path.relpath(folder, whole.before)))
        made += [Operation(0, "mkdir", f"{here}/{name}") for name in folders]
        for path, name in ((f"{here}/{name}", name) for name in names):
            made.append(Operation(0, "open", path))
            made.append(Operation(0, "write", path, data=Path(folder, name).read_bytes()))
            made.append(Operation(0, "fsync", path))
        made.append(Operation(0, "fsync_folder", here))
    return made


def refuse(whole: Whole, number: int, code: int, *, forever: bool) -> list[str]:
    """A disk that refuses an operation of a stage; then one with space again."""
    root = rigs.fresh(whole.scratch / "trial", like=whole.before)
    before = rigs.artifacts(root) if (root / "store").exists() else {}
    how = f"{errno.errorcode[code]} {'from' if forever else 'at'} {number}"
    said = f"{whole.stage}, {how}: {_shown(whole, number)}"
    whole.log.unlink(missing_ok=True)

    def make() -> None:
        with Seam(root, before=crashes.failing_at(number, code, forever=forever)):
            whole.rig.make(whole.stage, root)

    ended = crashes.run(make, log=whole.log)
    wrong = _refused(whole, root, ended, said=said, before=before)
    return wrong + _finished(whole, root, said=said)


def _refused(
    whole: Whole, root: Path, ended: int, *, said: str, before: dict[str, str]
) -> list[str]:
    """What is wrong with how a run ended on a bad disk, and with what it left."""
    words, now, wrong = whole.log.read_text(), rigs.artifacts(root), []
    if "Traceback" in words or str(root) not in words or "bytes needed" not in words:
        wrong.append(f"{said}: it said {words[-300:]!r}")
    if ended != StorageFailed.exit_code:
        wrong.append(f"{said}: it ended with {ended}")
    if any(now.get(name) != sha for name, sha in before.items()):
        wrong.append(f"{said}: what was there before has changed")
    return wrong


def _shown(whole: Whole, number: int) -> str:
    root = os.path.realpath(whole.root)
    found = [op for op in whole.trace if op.number == number]
    shown = [f"{op.name} {os.path.relpath(op.path, root)}" for op in found]
    return shown[0] if shown else "an operation that is refused anyway"


def may_fail(operation: Operation, code: int) -> bool:
    """Whether a disk may refuse it so: what needs no space does not fail for want of any."""
    return code == errno.EIO or operation.name not in FREE


def disk_bytes(root: Path) -> int:
    """About what a folder's files take on a disk, in whole pages."""
    paths = [path for path in root.rglob("*") if path.is_file()]
    return sum(-(-path.stat().st_size // PAGE_BYTES) * PAGE_BYTES for path in paths)


def mount(folder: Path, size_bytes: int) -> bool:
    """Mount a disk in memory; False where this machine does not allow it."""
    options = ["-o", f"size={size_bytes}", "-t", "tmpfs", "tmpfs", str(folder)]
    try:
        done = subprocess.run(["mount", *options], capture_output=True, check=False)
    except FileNotFoundError:
        return False
    return done.returncode == 0


def fill(whole: Whole, disk: Path, *, limit_bytes: int | None) -> list[str]:
    """Run a stage on a disk too small, then give it space; the disk's folder is empty at first.

    `limit_bytes` stands in for a disk that cannot be mounted: no file may grow over a part of it.
    """
    root = disk / "trial"
    shutil.copytree(whole.before, root)
    before = rigs.artifacts(root) if (root / "store").exists() else {}
    whole.log.unlink(missing_ok=True)

    def make() -> None:
        shutil.disk_usage = lambda path: _AMPLE  # the check before the first encode is not asked
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (LEAST_FILE_BYTES,) * 2)
        whole.rig.make(whole.stage, root)

    ended = crashes.run(make, log=whole.log)
    said = f"{whole.stage} on a small disk"
    wrong = _refused(whole, root, ended, said=said, before=before)
    if limit_bytes is None:
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
    return wrong + _finished(whole, root, said=said)


# One entry's and one manifest's publication, without a stage.

KEY, OLD_KEY = digest("one"), digest("old")


def tensors(seed: int, *, size: int = 64) -> dict[str, Tensor]:
    """The record of a seed."""
    mean, std = np.random.default_rng(seed).standard_normal((2, size)).astype("<f4")
    parts = {"mean": mean, "std": abs(std)}
    return {name: Tensor("F32", (size,), part.tobytes()) for name, part in parts.items()}


def put(store: Store, key: str, seed: int, *, size: int = 64) -> EntryRef:
    """An entry of a seed."""
    record = tensors(seed, size=size)
    return store.put("latents", key, record, metadata={"of": str(seed)}, inputs={"seed": seed})


def publication(root: Path) -> None:
    """One entry under a lease, and the manifest that names it."""
    store = Store(root / "store")
    with lease(store, [KEY]):
        ref = put(store, KEY, 1)
        store.publish(Manifest("cache", KEY, {"seed": 1}, {"train": (ref,)}, {"note": [1, 2.5]}))


def sound(root: Path) -> list[str]:
    """What verify finds wrong."""
    report = verify(Store(root / "store"), threads=1, progress=lambda done, total: None)
    found = [*report.damaged, *report.missing, *report.stray]
    return [f"verify: {one}" for one in found]


def operations(action: Callable[[Path], None], root: Path) -> list[Operation]:
    """What an action does to the disk under a folder."""
    trace: list[Operation] = []
    with Seam(root, after=trace.append):
        action(root)
    return trace
