"""Thousands of steps with a SIGKILL a minute, beside the same steps undisturbed (T11).

    python -m bench.soak [--steps N] [--seconds S] [--scratch FOLDER]

Both are the command as a user types it, on FLUX.1's tiny base; the killed one is typed again after
each kill. Every S seconds, before the kill, memory, open handles and temporary files of both are
looked at. In the end adapter, average and last checkpoint must be the same bytes; the growth of
memory is the slope of a line through what the undisturbed process held after its first look.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lib import files, runs
from tests.reliability import rigs

CHECKOUT = Path(__file__).resolve().parent.parent
HEAD = "| minute | run | starts | step | RSS, MiB | handles | temporary |"
RULE = "|--:|---|--:|--:|--:|--:|--:|"
SETTINGS = (
    *("family=flux", "family.base=tiny", "precision=fp32", "tracker=none"),
    *("buckets.resolution=64", "buckets.step=16", "captions.max_length=8", "captions.dtype=fp32"),
    *("adapter.rank=2", "adapter.targets=[to_q]", "optimizer.lr=1e-3", "trainer.save_every=100"),
)


@dataclass(frozen=True)
class Look:
    """What a process held at a moment."""

    minute: float
    step: int
    rss_mib: float
    handles: int
    temporary: int


@dataclass
class Run:
    """A command, the process that it last became, and what was seen of it."""

    name: str
    root: Path
    command: list[str]
    starts: int = 0
    looks: list[Look] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.starts += 1
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(self.command, cwd=CHECKOUT, env=environment, **quiet)

    @property
    def done(self) -> bool:
        """Whether it ended by itself; a failure ends the soak."""
        code = self.process.poll()
        if code not in (None, 0):
            raise SystemExit(f"{self.name}: ended with {code}: {' '.join(self.command)}")
        return code == 0

    def look(self, minute: float) -> str:
        """Look once; a line of the table."""
        home = Path("/proc", str(self.process.pid))
        pages = int((home / "statm").read_text().split()[1])
        rss = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        handles = len(list((home / "fd").iterdir()))
        temporary = len(list(self.root.rglob(f"{files.TEMP_PREFIX}*")))
        self.looks.append(Look(minute, last_step(self.root), rss, handles, temporary))
        seen = self.looks[-1]
        counts = f"{self.starts} | {seen.step} | {rss:.1f} | {handles} | {temporary}"
        return f"| {minute:.0f} | {self.name} | {counts} |"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def last_step(root: Path) -> int:
    """The last step that a run told."""
    told = 0
    for path in root.glob("out/*/events.jsonl"):
        for line in path.read_text().splitlines(keepends=True):
            if '"kind":"metric"' in line and line.endswith("\n"):
                told = json.loads(line)["step"]
    return told


def growth(looks: list[Look]) -> float:
    """Per cent of memory in a thousand steps, of a line through all looks but the first."""
    steps = np.array([look.step for look in looks[1:]]) / 1000
    held = np.array([look.rss_mib for look in looks[1:]])
    return 100 * float(np.polyfit(steps, held, 1)[0]) / float(held.mean())


def left(root: Path, *, steps: int) -> dict[str, str]:
    """The digests of what a run made."""
    (folder,) = (root / "out").iterdir()
    state = f"checkpoints/step-{steps:08d}/state.safetensors"
    names = (runs.ADAPTER_FILE, runs.EMA_FILE, state)
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def prepared(scratch: Path, *, steps: int) -> Iterator[Run]:
    """Both runs, each with a store of its own that holds all encodings."""
    data = rigs.fresh(scratch / "data")
    for name in rigs.PICTURES:
        shutil.copy(rigs.EMOJI / f"{name}.png", data / f"{name}.png")
        (data / f"{name}.txt").write_text(f"a 3D emoji of {name}", encoding="utf-8")
    settings = [*SETTINGS, f"dataset.root={data}", f"trainer.max_steps={steps}"]
    for name in ("undisturbed", "killed"):
        root = rigs.fresh(scratch / name)
        places = [f"paths.store={root}/store", f"paths.outputs={root}/out"]
        run = Run(name, root, [sys.executable, "-m", "stages.train", *settings, *places])
        for stage in ("encode_captions", "build_latent_cache"):
            command = [sys.executable, "-m", f"stages.{stage}", *settings, *places]
            subprocess.run(command, cwd=CHECKOUT, check=True, stdout=subprocess.DEVNULL)
        yield run


def soaked(whole: Run, killed: Run, *, seconds: float) -> None:
    """Run both to the end, side by side."""
    began = looked = time.monotonic()
    for run in (whole, killed):
        run.start()
    while not (whole.done and killed.done):
        time.sleep(0.2)
        if (now := time.monotonic()) - looked < seconds:
            continue
        looked = now
        for run in (whole, killed):
            if not run.done:
                print(run.look((now - began) / 60), flush=True)
        if not killed.done:
            killed.kill()
            killed.start()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=60, help="from one kill to the next")
    parser.add_argument("--scratch", type=Path, help="a folder on the disk to be used")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.scratch) as folder:
        whole, killed = prepared(Path(folder), steps=asked.steps)
        print(f"{HEAD}\n{RULE}", flush=True)
        soaked(whole, killed, seconds=asked.seconds)
        same = left(whole.root, steps=asked.steps) == left(killed.root, steps=asked.steps)
        rest = [name for run in (whole, killed) for name in rigs.leftovers(run.root)]
    print(f"\n{killed.starts - 1} kills; {'the same bytes' if same else 'DIFFERENT'}")
    print(f"memory: {growth(whole.looks):+.3f} % in a thousand steps")
    handles = {run.name: sorted({look.handles for look in run.looks}) for run in (whole, killed)}
    print(f"handles: {handles}; left at the end: {rest}")
    return int(not same or bool(rest))


if __name__ == "__main__":
    sys.exit(main())
