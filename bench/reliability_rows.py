"""The rows of bench/reliability.py: which trials and how many; they are in tests/reliability."""

import random
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.reliability import crashes, crowds, damages, rigs, trials

KILLS, CUTS, SIZES = 300, 500, 10
FLIPS, DAMAGES = 10_000, 1_000
CROWDS, CROWD_KEYS = 20, 500


@dataclass(frozen=True)
class Row:
    """So many trials of one thing."""

    what: str
    count: int
    trials: Callable[[], Iterator[list[str]]]


@dataclass
class Made:
    """A scratch folder, and the undisturbed runs of the stages once somebody needs them."""

    scratch: Path
    _whole: dict[str, trials.Whole] = field(default_factory=dict)

    def whole(self) -> dict[str, trials.Whole]:
        if not self._whole:
            print("making the undisturbed runs", flush=True)
            folder = self.scratch / "rig"
            folder.mkdir()
            self._whole = trials.whole_runs(rigs.build(folder), self.scratch / "runs")
        return self._whole


def kills(made: Made, count: int | None) -> Iterator[Row]:
    """T1: SIGKILL at uniformly random times."""
    for stage, whole in made.whole().items():
        number = count or KILLS
        yield Row(f"{stage} killed", number, lambda w=whole, n=number: _kills(w, n))


def _kills(whole: trials.Whole, count: int) -> Iterator[list[str]]:
    rng = random.Random(whole.stage)
    root = rigs.fresh(whole.scratch / "trial", like=whole.before)
    began = time.monotonic()
    crashes.run(lambda: whole.rig.make(whole.stage, root), log=whole.log)
    seconds = time.monotonic() - began
    for _ in range(count):
        yield trials.kill(whole, after_seconds=[rng.uniform(0, seconds)])


def every_crash(made: Made, count: int | None) -> Iterator[Row]:
    """T1c: a crash before every operation, and in the middle of every write."""
    for stage, whole in made.whole().items():
        numbers = range(whole.trace[-1].number + 1)
        writes = [op.number for op in whole.trace if op.name == "write"]
        cases = [*((n, False) for n in numbers), *((n, True) for n in writes)]
        cases = _some(cases, count)
        yield Row(
            f"{stage} crashed at each operation",
            len(cases),
            lambda w=whole, c=cases: (trials.crash(w, n, torn=torn) for n, torn in c),
        )


def power_cuts(made: Made, count: int | None) -> Iterator[Row]:
    """T2: states after power cuts, and a rerun from one in twenty."""
    for stage, whole in made.whole().items():
        number, rng = count or CUTS, random.Random(stage)
        again = max(1, number // 20)
        yield Row(
            f"{stage} without power",
            number,
            lambda w=whole, n=number, r=rng, a=again: trials.cut_power(w, count=n, rng=r, reruns=a),
        )


def bad_disks(made: Made, count: int | None) -> Iterator[Row]:
    """T3: every operation refused, once and from then on; then disks that are too small."""
    for stage, whole in made.whole().items():
        cases = [
            (op.number, code, forever)
            for op in whole.trace
            for code in trials.REFUSALS
            for forever in (False, True)
            if trials.may_fail(op, code)
        ]
        cases = _some(cases, count)
        yield Row(
            f"{stage} refused by the disk",
            len(cases),
            lambda w=whole, c=cases: (trials.refuse(w, n, e, forever=f) for n, e, f in c),
        )
    for stage, whole in made.whole().items():
        number = min(count or SIZES, SIZES)
        yield Row(f"{stage} on a small disk", number, lambda w=whole, n=number: _small_disks(w, n))


def _small_disks(whole: trials.Whole, count: int) -> Iterator[list[str]]:
    least, most = trials.disk_bytes(whole.before), trials.disk_bytes(whole.root)
    pages = (most - least) // trials.PAGE_BYTES - 2
    for number in range(1, count + 1):
        size = least + max(1, pages * number // count) * trials.PAGE_BYTES
        disk = rigs.fresh(whole.scratch / "disk")
        mounted = trials.mount(disk, size)
        try:
            yield trials.fill(whole, disk, limit_bytes=None if mounted else size)
        finally:
            if mounted:
                subprocess.run(["umount", disk], check=True)


def damage(made: Made, count: int | None) -> Iterator[Row]:
    """T4: each kind of damage to entries, and flipped bits of a manifest."""
    for kind in damages.KINDS:
        number = count or (FLIPS if kind == "bit flipped" else DAMAGES)
        yield Row(f"entry: {kind}", number, lambda k=kind, n=number: _damage(made, k, n))
    number = count or DAMAGES
    yield Row("manifest: bit flipped", number, lambda: _damaged_manifests(made, number))


def _damage(made: Made, kind: str, count: int) -> Iterator[list[str]]:
    scratch = rigs.fresh(made.scratch / "damage")
    return damages.trials(kind, count=count, scratch=scratch, rng=random.Random(kind))


def _damaged_manifests(made: Made, count: int) -> Iterator[list[str]]:
    scratch = rigs.fresh(made.scratch / "damage")
    return damages.manifest_trials(count=count, scratch=scratch, rng=random.Random(0))


def writers(made: Made, count: int | None) -> Iterator[Row]:
    """T4b: crowds of 2, 4 and 8 writers, and gc planted at every call of a builder."""
    for number in (2, 4, 8):
        rounds = count or CROWDS
        yield Row(
            f"{number} writers, {CROWD_KEYS} keys, rounds",
            rounds,
            lambda n=number, r=rounds: crowds.rounds(
                count=r, keys=CROWD_KEYS, writers=n, scratch=made.scratch / "crowds"
            ),
        )
    for stage, whole in made.whole().items():
        if stage != "prepare_dataset":
            calls = crowds.planted(whole, None, scratch=made.scratch).calls
            points = _some(list(range(calls)), count)
            yield Row(
                f"gc between a hit of {stage} and its publication",
                len(points),
                lambda w=whole, p=points: (
                    crowds.planted(w, n, scratch=made.scratch).wrong for n in p
                ),
            )


def _some(cases: list[Any], count: int | None) -> list[Any]:
    """All, or some, in an order of chance: a row that is ended early has tried a bit of each."""
    return random.Random(0).sample(cases, min(count or len(cases), len(cases)))


ROWS: dict[str, Callable[[Made, int | None], Iterator[Row]]] = {
    "T1": kills,
    "T1c": every_crash,
    "T2": power_cuts,
    "T3": bad_disks,
    "T4": damage,
    "T4b": writers,
}
