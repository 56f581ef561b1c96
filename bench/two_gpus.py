"""Two GPUs beside one, by the real commands: losses, speed, caches, resuming, a killed process.

    python -m bench.two_gpus SCRATCH [--only CASE ...] [--tiny] [--stores FOLDER] [--threads N]
        [--set trainer.compile=always ...]

A full-size FLUX.1 with random weights, random pictures of 512 px and a caption each; `--tiny` takes
the tiny base and 64 px, on a CPU too. Each case goes on when another fails; what is in SCRATCH from
an earlier start is kept, and the tables are made from all of it.
"""

import argparse
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bench.two_gpus_commands import Command, run
from bench.two_gpus_tables import last_step, tables

STEPS, TINY_STEPS = 30, 60
SAVE_EVERY = 5
NEVER = 1000  # steps between checkpoints where speed is measured: only the last is saved
LIMIT_SECONDS = 240.0


@dataclass(frozen=True)
class Bench:
    """Where everything lies, and how large it is."""

    scratch: Path
    stores: Path
    tiny: bool
    pictures: int
    settings: tuple[str, ...]  # of every command, after the bench's own

    @property
    def base(self) -> str:
        return "tiny" if self.tiny else str(self.scratch / "flux")

    @property
    def steps(self) -> int:
        return TINY_STEPS if self.tiny else STEPS

    def overrides(self, store: str, name: str, *, batch: int, save_every: int) -> list[str]:
        """The settings of a training command."""
        small = ["buckets.resolution=64", "buckets.step=16", "captions.max_length=32"]
        return [
            f"family.base={self.base}",
            f"dataset.root={self.scratch / 'pictures'}",
            f"paths.store={self.stores / store}",
            f"paths.outputs={self.scratch / 'outputs'}",
            f"name={name}",
            "tracker=none",
            "encode.batch_size=8",
            "lr_schedule=constant",
            f"trainer.max_steps={self.steps}",
            f"trainer.batch_size={batch}",
            f"trainer.save_every={save_every}",
            *(small if self.tiny else ["precision=bf16"]),
            *self.settings,
        ]

    def train(
        self,
        command: str,
        *,
        processes: int,
        batch: int,
        name: str | None = None,
        store: str | None = None,
        save_every: int = NEVER,
        more: tuple[str, ...] = (),
        kill_when: Callable[[], bool] | None = None,
        rank: int | None = None,
    ) -> Command:
        """A training command; its run's folder has the command's name, if no other is given."""
        where = store or ("two" if processes > 1 else "one")
        overrides = self.overrides(where, name or command, batch=batch, save_every=save_every)
        return run(
            command,
            "stages.train",
            [*overrides, *more],
            processes=processes,
            logs=self.scratch / "logs",
            seconds=LIMIT_SECONDS,
            kill_when=kill_when,
            rank=rank,
        )


def make_picture(folder: Path, side: int, number: int) -> None:
    """A smooth random picture, and a caption of its own."""
    rng = np.random.default_rng(number)
    small = Image.fromarray(rng.integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8))
    small.resize((side, side), Image.Resampling.BICUBIC).save(folder / f"{number:05}.png")
    words = "a red circle, number {}, on a blue background, beside {} dogs and {} cats"
    text = words.format(number, *rng.integers(2, 99, 2))
    (folder / f"{number:05}.txt").write_text(text, encoding="utf-8")


def prepare(bench: Bench) -> None:
    """Pictures and base, and what is remembered of both in two stores, where they are missing."""
    folder = bench.scratch / "pictures"
    if not folder.exists():
        folder.mkdir(parents=True)
        with ProcessPoolExecutor() as workers:
            make = partial(make_picture, folder, 64 if bench.tiny else 512)
            list(workers.map(make, range(bench.pictures), chunksize=16))
        print(f"{bench.pictures} pictures", flush=True)
    logs = bench.scratch / "logs"
    if not bench.tiny and not (Path(bench.base) / "model_index.json").exists():
        run("base", "bench.full_size_flux", [bench.base], processes=1, logs=logs, seconds=300)
    if not bench.stores.exists():
        time.sleep(3.0)  # what has just been written is not remembered
        overrides = bench.overrides("one", "plan", batch=4, save_every=NEVER)
        run("plan", "stages.plan", overrides, processes=1, logs=logs, seconds=LIMIT_SECONDS)
        shutil.copytree(bench.stores / "one", bench.stores / "two", dirs_exist_ok=True)


def summing(bench: Bench) -> None:
    """The sum over two processes alone, and how NCCL carries it."""
    settings = {"NCCL_DEBUG": "INFO"}
    logs = bench.scratch / "logs"
    run("sum", "bench.two_gpus_sum", processes=2, logs=logs, seconds=120, environment=settings)


def cached(bench: Bench, stage: str, name: str) -> None:
    """A cache stage from nothing, on one card and on two."""
    for store, processes in (("one", 1), ("two", 2)):
        overrides = bench.overrides(store, name, batch=4, save_every=NEVER)
        run(
            f"{name}-{store}",
            f"stages.{stage}",
            overrides,
            processes=processes,
            logs=bench.scratch / "logs",
            seconds=LIMIT_SECONDS,
        )


def equal(bench: Bench) -> None:
    """The same run on one card and on two."""
    bench.train("one-4", processes=1, batch=4)
    bench.train("two-4", processes=2, batch=4)


def small(bench: Bench) -> None:
    """One picture a card."""
    bench.train("one-1", processes=1, batch=1)
    bench.train("two-2", processes=2, batch=2)


def large(bench: Bench) -> None:
    """Four pictures a card; one card's are those of `equal`."""
    bench.train("two-8", processes=2, batch=8)


def part(bench: Bench, command: str, *, until: int, processes: int, **options: Any) -> Command:
    """A part of the run of `equal`, in another folder, killed when it has done so many steps."""
    folder = bench.scratch / "outputs" / "killed"
    checkpoint = folder / "checkpoints" / f"step-{until // SAVE_EVERY * SAVE_EVERY:08d}"
    return bench.train(
        command,
        processes=processes,
        batch=4,
        name="killed",
        store="two",
        save_every=SAVE_EVERY,
        kill_when=lambda: checkpoint.exists() and last_step(folder) >= until,
        **options,
    )


def lost(bench: Bench) -> None:
    """Two cards, and the second process is killed in the middle of a step."""
    part(bench, "killed-two", until=7, processes=2, more=("rerun=true",), rank=1)


def resumed(bench: Bench) -> None:
    """One card goes on with what two have left, and two with what it leaves."""
    part(bench, "killed-one", until=17, processes=1)
    part(bench, "resumed-two", until=bench.steps + 1, processes=2)


def verify(bench: Bench) -> None:
    """Every entry of both stores is whole."""
    for store in ("one", "two"):
        overrides = ["verify", *bench.overrides(store, "verify", batch=4, save_every=NEVER)]
        logs = bench.scratch / "logs"
        run(f"verify-{store}", "stages.store", overrides, processes=1, logs=logs, seconds=120)


CASES = {
    "sum": summing,
    "captions": partial(cached, stage="encode_captions", name="captions"),
    "latents": partial(cached, stage="build_latent_cache", name="latents"),
    "equal": equal,
    "small": small,
    "large": large,
    "lost": lost,
    "resumed": resumed,
    "verify": verify,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--stores", type=Path, help="where the stores lie; SCRATCH/stores")
    parser.add_argument("--pictures", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=8, help="of the CPU, for each process")
    parser.add_argument("--set", nargs="+", default=[], help="settings of every command")
    asked = parser.parse_args()
    # torchrun would give one to each of several processes, and one alone would have them all.
    os.environ["OMP_NUM_THREADS"] = str(asked.threads)
    scratch = asked.scratch.resolve()
    stores = (asked.stores or scratch / "stores").resolve()
    bench = Bench(scratch, stores, asked.tiny, asked.pictures, tuple(asked.set))
    prepare(bench)
    failed = False
    for name in asked.only:
        try:
            CASES[name](bench)
        except Exception:  # noqa: BLE001  # one case's failure leaves the others measured
            traceback.print_exc()
            failed = True
        sys.stdout.flush()
    print("\n".join(["", *tables(bench.scratch, bench.stores)]))
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
