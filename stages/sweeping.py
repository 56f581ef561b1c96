"""Sweeps: one run for each combination of values, then a table and a picture of all losses."""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lib.errors import InputRefused, Problem
from lib.schema import Config
from stages import guarded
from stages.summary import Summary

Job = Callable[[Config, Summary], int]


@dataclass(frozen=True)
class Row:
    """One combination: what was asked, how it ended, what it left."""

    overrides: tuple[str, ...]
    code: int
    summary: Summary

    @property
    def folder(self) -> str:
        return self.summary.places.get("train", "")

    @property
    def losses(self) -> list[tuple[int, float]]:
        """Of the run's own record, so that a run found complete has its curve too."""
        from lib.runs import recorded_losses

        return recorded_losses(Path(self.folder)) if self.folder else []


def sweep(job: Job, arguments: Sequence[str]) -> int:
    """Run every combination; one that fails does not stop the others. The largest exit code."""
    from lib.tracking import close_parent, parent_run
    from stages.composing import Combination, with_hydra

    rows: list[Row] = []
    first: list[Combination] = []
    parents: list[str | None] = []

    def run(combination: Combination) -> None:
        config, problems = combination.reading.config, combination.reading.problems
        if not first:
            first.append(combination)
            parents.append(parent_run(config, "sweep"))
        summary = Summary()
        print(f"\njob {len(rows)}: {' '.join(combination.overrides)}", file=sys.stderr)
        code = guarded(lambda: _run(job, _child(config, parents[0]), summary, problems))
        rows.append(Row(combination.overrides, code, summary))

    with_hydra(run, arguments)
    if not rows:  # --info and its kind run nothing
        return 0
    print("\n".join(table(rows)))
    if picture := _picture(rows, first[0].folder):
        print(f"losses    {picture}")
    code = max(row.code for row in rows)
    if parents[0]:
        status = "FAILED" if code else "FINISHED"
        close_parent(first[0].reading.config, parents[0], status=status)
    return code


def table(rows: Sequence[Row]) -> Iterator[str]:
    """A line a combination: what is its own, how it ended, its last mean loss, its folder."""
    from lib.pictures import running_mean

    asked = names_of(rows)
    width = max(len(text) for text in ("overrides", *asked))
    yield f"\n{'overrides':<{width}}  result      loss    folder"
    for text, row in zip(asked, rows, strict=True):
        result = f"failed ({row.code})" if row.code else row.summary.status.get("train", "done")
        means = running_mean([loss for _, loss in row.losses])
        last = f"{means[-1]:.4f}" if means else "-"
        yield f"{text:<{width}}  {result:<10}  {last:<6}  {row.folder}"


def names_of(rows: Sequence[Row]) -> list[str]:
    """The overrides in which combinations differ."""
    shared = set(rows[0].overrides).intersection(*(row.overrides for row in rows))
    shared = shared if len(rows) > 1 else set()
    return [" ".join(o for o in row.overrides if o not in shared) or "(all)" for row in rows]


def _run(job: Job, config: Config, summary: Summary, problems: Sequence[Problem]) -> int:
    if problems:
        raise InputRefused(problems)
    return job(config, summary)


def _child(config: Config, parent: str | None) -> Config:
    """The configuration of one combination, recorded under the sweep's own run."""
    tracker = dataclasses.replace(config.tracker, parent=parent)
    return dataclasses.replace(config, tracker=tracker) if parent else config


def _picture(rows: Sequence[Row], folder: Path) -> Path | None:
    """All loss curves in one picture, in the sweep's own folder."""
    from lib.pictures import loss_plot, save

    named = dict(zip(names_of(rows), rows, strict=True))
    curves = {name: row.losses for name, row in named.items() if row.losses}
    if not curves:
        return None
    path = folder / "losses.png"
    save(loss_plot(curves, title=f"{len(curves)} runs"), path)
    return path
