"""Sweeps: one run for each combination of values, then a table and a picture of all losses."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lib import stopping
from lib.errors import InputRefused, Problem, Stopped, without_credentials
from lib.schema import Config
from stages import guarded
from stages.summary import Summary

if TYPE_CHECKING:
    from lib.config import Reading
    from stages.launching import Combination

Job = Callable[[Config, Summary], int]
MULTIRUN = ("-m", "--multirun")
LOGS = ".submitit"  # what jobs in other processes print, in the sweep's folder
ELSEWHERE = "SUBMITIT_EXECUTOR"  # set in the process of a job that a launcher has started


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
        from lib.runs import recorded_metric

        return recorded_metric(Path(self.folder), "loss") if self.folder else []


def sweep(job: Job, arguments: Sequence[str]) -> int:
    """Run every combination; one that fails does not stop the others. The largest exit code."""
    from stages.composing import check_sweep
    from stages.launching import check_launcher, with_hydra

    check_launcher(arguments)
    words = [word for word in arguments if word not in MULTIRUN]
    if not any(word.startswith("-") for word in words):
        check_sweep([word for word in words if not word.startswith("hydra")])
    swept = _Sweep(job)
    ended = 0
    try:
        begin = swept.begin if words != list(arguments) else None
        with_hydra(swept.run, _flags_first(arguments), begin=begin)
    except SystemExit as error:  # a job died, and Hydra has said so
        ended = error.code if isinstance(error.code, int) else 1
    rows = swept.rows or swept.taken_rows()
    if not rows:  # --info and its kind run nothing
        return ended
    print("\n".join(table(rows)))
    if picture := _picture(rows, swept.folder):
        print(f"losses    {picture}")
    code = max(ended, *(row.code for row in rows))
    swept.close(code)
    return code


def _flags_first(arguments: Sequence[str]) -> list[str]:
    """Hydra's parser loses overrides that stand before a flag, and repeats them as it says so."""
    flags = [word for word in arguments if word in MULTIRUN]
    return [*flags, *(word for word in arguments if word not in MULTIRUN)]


@dataclass
class _Sweep:
    """What is the same for all combinations; a launcher pickles it for other processes."""

    job: Job
    rows: list[Row] = field(default_factory=list)
    folder: Path = Path()
    config: Config | None = None
    parent: str | None = None

    def begin(self, shared: Reading, folder: Path) -> None:
        """In the process of the command, before the first combination."""
        from lib.tracking import parent_run

        self.folder, self.config = folder, shared.config
        self.parent = parent_run(shared.config, "sweep")

    def run(self, combination: Combination) -> None:
        """In whichever process the launcher has chosen, so the row is left in a file."""
        self.folder = combination.folder
        with ExitStack() as held:
            if ELSEWHERE in os.environ:
                # The launcher ignores SIGTERM; a run that it stops can be resumed on any node.
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                held.enter_context(stopping.heeding())
            self._run(combination)

    def _run(self, combination: Combination) -> None:
        from lib import files

        config, problems = combination.reading.config, combination.reading.problems
        _hide_credentials(combination.folder)
        summary = Summary()
        asked = tuple(map(without_credentials, combination.overrides))
        if stopping.asked():  # one that was at work has said so
            self.rows.append(Row(asked, Stopped.exit_code, summary))
            return
        print(f"\njob {combination.number}: {' '.join(asked)}", file=sys.stderr)
        code = guarded(lambda: _run(self.job, _child(config, self.parent), summary, problems))
        row = Row(asked, code, dataclasses.replace(summary, losses=[]))
        if ELSEWHERE in os.environ:
            files.write_json(_row_path(self.folder, combination.number), dataclasses.asdict(row))
        else:
            self.rows.append(row)

    def taken_rows(self) -> list[Row]:
        """The rows that other processes left; their files, and copies of the job, go."""
        from lib import files

        _hide_credentials(self.folder)
        for pickled in self.folder.glob(f"{LOGS}/*/*.pkl"):
            files.remove(pickled)
        paths = sorted(_row_path(self.folder, 0).parent.glob("*.json"))
        found = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        if paths:
            files.remove(paths[0].parent)
        return [
            Row(tuple(row["overrides"]), row["code"], Summary(**row["summary"])) for row in found
        ]

    def close(self, code: int) -> None:
        """End the sweep's own run of the tracker."""
        from lib.tracking import close_parent

        if self.parent and self.config:
            stopped = code == Stopped.exit_code
            status = "KILLED" if stopped else "FAILED" if code else "FINISHED"
            close_parent(self.config, self.parent, status=status)


def table(rows: Sequence[Row]) -> Iterator[str]:
    """A line a combination: what is its own, how it ended, its last mean loss, its folder."""
    from lib.pictures import running_mean

    asked = names_of(rows)
    width = max(len(text) for text in ("overrides", *asked))
    yield f"\n{'overrides':<{width}}  result      loss    folder"
    for text, row in zip(asked, rows, strict=True):
        result = _result(row)
        means = running_mean([loss for _, loss in row.losses])
        last = f"{means[-1]:.4f}" if means else "-"
        yield f"{text:<{width}}  {result:<10}  {last:<6}  {row.folder}"


def _result(row: Row) -> str:
    if row.code == Stopped.exit_code:
        return "stopped" if row.summary.status else "not started"
    return f"failed ({row.code})" if row.code else row.summary.status.get("train", "done")


def names_of(rows: Sequence[Row]) -> list[str]:
    """The overrides in which combinations differ."""
    shared = set(rows[0].overrides).intersection(*(row.overrides for row in rows))
    shared = shared if len(rows) > 1 else set()
    return [" ".join(o for o in row.overrides if o not in shared) or "(all)" for row in rows]


def _row_path(folder: Path, number: int) -> Path:
    return folder / "jobs" / f"{number:06}.json"


def _hide_credentials(folder: Path) -> None:
    """Hydra copies every override into its record of the sweep."""
    from lib.files import write_bytes

    path = folder / "multirun.yaml"
    if path.is_file():
        write_bytes(path, without_credentials(path.read_text(encoding="utf-8")).encode())


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
