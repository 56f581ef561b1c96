"""What the MLflow mirror costs a training step, on SQLite, in pairs.

    python -m bench.tracking [--steps 400] [--pairs 3] [--base tiny]

Each pair trains twice on the shipped pictures, without and with the tracker. The first steps of
each run, during which MLflow is imported and its tables are made, are reported apart.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from lib.events import Event, Events
from lib.pipeline import graph
from stages.composing import compose

START_SECONDS = 15.0


@dataclass(frozen=True)
class Timing:
    """Seconds of a step once everything is warm, and over the first seconds of the run."""

    steady: float
    start: float
    end: float


def timed(overrides: list[str], *, name: str, tracker: list[str]) -> Timing:
    """Train once and time the steps by the moments at which their metrics are emitted."""
    moments: list[float] = []

    def sink(event: Event) -> None:
        if event.kind == "metric":
            moments.append(time.perf_counter())

    config = compose([*overrides, *tracker, f"name={name}", "rerun=true"])
    graph.ensure("train", config, Events(sinks=(sink,)))
    ended = time.perf_counter()
    seconds = [after - before for before, after in pairwise(moments)]
    early = [s for s, at in zip(seconds, moments, strict=False) if at < moments[0] + START_SECONDS]
    late = seconds[len(early) :]
    if len(late) < 20:
        raise SystemExit(f"only {len(late)} steps after {START_SECONDS:g} seconds: give more steps")
    return Timing(statistics.fmean(late), statistics.fmean(early), ended - moments[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--base", default="tiny")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        overrides = [
            "+experiment=flux_emoji_smoke",
            f"family.base={arguments.base}",
            f"paths.store={folder}/store",
            f"paths.outputs={folder}/outputs",
            f"trainer.max_steps={arguments.steps}",
            f"trainer.save_every={arguments.steps}",
        ]
        shares = []
        for pair in range(arguments.pairs):
            uri = f"sqlite:///{folder}/mlflow.db"
            kinds = {"without": ["tracker=none"], "with": [f"tracker.uri={uri}"]}
            names = list(kinds) if pair % 2 == 0 else list(kinds)[::-1]  # no order is favoured
            found = {n: timed(overrides, name=f"{n}-{pair}", tracker=kinds[n]) for n in names}
            shares.append(found["with"].steady / found["without"].steady - 1)
            for name, timing in found.items():
                print(
                    f"{name:<8} {timing.steady * 1e3:8.2f} ms a step, "
                    f"{timing.start * 1e3:8.2f} in the first {START_SECONDS:g} s, "
                    f"{timing.end:5.1f} s from the last step to the end"
                )
    print(f"share of a step: median {statistics.median(shares):+.1%} of {len(shares)} pairs")


if __name__ == "__main__":
    main()
