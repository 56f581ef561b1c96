"""What the MLflow mirror costs a training step, on SQLite, in pairs.

    python -m bench.tracking [--steps 900] [--pairs 3] [--warm 5] [setting=value ...]

Each pair trains twice on the shipped pictures, without and with the tracker, one right after the
other. MLflow is imported and its tables are made before, and reported apart: a process pays that
once. Processor seconds of the mirror's own thread are what a step can lose to it at most; other
programs on the machine move them less than they move the clock.
"""

import argparse
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from lib.events import Event, Events
from lib.pipeline import graph
from lib.tracking.server import Server, prepare_environment
from stages.composing import compose

FEWEST_STEPS = 50


@dataclass(frozen=True)
class Moment:
    """When a step's metrics were emitted; processor seconds of the process and of the mirror."""

    clock: float
    processor: float
    mirror: float


@dataclass(frozen=True)
class Timing:
    """Seconds of a step once everything is warm, and before; from the last step to the end."""

    steady: float
    processor: float
    mirror: float
    start: float
    end: float


def mirror_seconds() -> float:
    """Processor seconds of the mirror's thread so far; 0 without one."""
    for thread in threading.enumerate():
        if thread.name == "tracking" and thread.ident:
            return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return 0.0


def timed(overrides: list[str], *, name: str, tracker: list[str], warm_seconds: float) -> Timing:
    """Train once and time the steps by the moments at which their metrics are emitted."""
    moments: list[Moment] = []

    def sink(event: Event) -> None:
        if event.kind == "metric":
            moments.append(Moment(time.perf_counter(), time.process_time(), mirror_seconds()))

    config = compose([*overrides, *tracker, f"name={name}", "rerun=true"])
    graph.ensure("train", config, Events(sinks=(sink,)))
    ended = time.perf_counter()
    early = [m for m in moments if m.clock < moments[0].clock + warm_seconds]
    late = moments[len(early) :]
    if len(late) < FEWEST_STEPS:
        raise SystemExit(f"{len(late)} steps after {warm_seconds:g} seconds: give more --steps")
    steps = len(late) - 1
    return Timing(
        steady=(late[-1].clock - late[0].clock) / steps,
        processor=(late[-1].processor - late[0].processor) / steps,
        mirror=(late[-1].mirror - late[0].mirror) / steps,
        start=(late[0].clock - early[0].clock) / len(early),
        end=ended - moments[-1].clock,
    )


def show(name: str, timing: Timing) -> None:
    print(
        f"{name:<8} {timing.steady * 1e3:8.2f} ms a step, {timing.processor * 1e3:8.2f} ms of "
        f"processor, {timing.mirror * 1e3:6.2f} ms of them the mirror's; "
        f"{timing.start * 1e3:8.2f} ms a step at first, "
        f"{timing.end:5.1f} s from the last step to the end",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--warm", type=float, default=5.0, help="seconds that are reported apart")
    parser.add_argument("overrides", nargs="*", help="for instance a step that takes longer")
    arguments = parser.parse_args()
    clock, mirror = [], []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        overrides = [
            "+experiment=flux_emoji_smoke",
            f"paths.store={folder}/store",
            f"paths.outputs={folder}/outputs",
            f"trainer.max_steps={arguments.steps}",
            f"trainer.save_every={arguments.steps}",
            *arguments.overrides,
        ]
        kinds = {
            "without": ["tracker=none"],
            "with": ["tracker=mlflow", f"tracker.uri=sqlite:///{folder}/mlflow.db"],
        }
        prepare_environment()
        began = time.perf_counter(), time.process_time()
        Server(f"sqlite:///{folder}/mlflow.db", "darkroom")
        spent = time.perf_counter() - began[0], time.process_time() - began[1]
        print(f"MLflow and its tables, once: {spent[0]:.1f} s, {spent[1]:.1f} s of processor")
        for pair in range(arguments.pairs):
            names = list(kinds) if pair % 2 == 0 else list(kinds)[::-1]  # no order is favoured
            found = {}
            for name in names:
                found[name] = timed(
                    overrides,
                    name=f"{name}-{pair}",
                    tracker=kinds[name],
                    warm_seconds=arguments.warm,
                )
                show(name, found[name])
            clock.append(found["with"].steady / found["without"].steady - 1)
            mirror.append(found["with"].mirror / found["without"].processor)
    for what, shares in (("the clock", clock), ("the mirror's processor", mirror)):
        listed = ", ".join(f"{share:+.1%}" for share in shares)
        print(f"share of a step by {what}: median {statistics.median(shares):+.1%} of {listed}")


if __name__ == "__main__":
    main()
