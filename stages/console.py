"""Events on a screen: bars on a terminal, one line a minute elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lib.events import Event, Sink

QUIET_SECONDS = 60.0
_LABELS = {"hit": "found", "done": "made", "start": "start"}


@contextmanager
def console() -> Iterator[Sink]:
    """A sink for the block; it draws bars when stderr is a terminal."""
    if sys.stderr.isatty():
        with _bars() as sink:
            yield sink
    else:
        yield _Lines()


def phase_line(event: Event) -> str:
    """One line for a stage: what happened, its folder or file, its counts."""
    data = {k: v for k, v in event.data.items() if k not in ("status", "key")}
    key = f" {event.data['key'][:12]}" if "key" in event.data else ""
    rest = ", ".join(f"{name} {value}" for name, value in data.items())
    return f"{event.stage}: {_LABELS[event.data['status']]}{key}{': ' if rest else ''}{rest}"


def other_line(event: Event) -> str | None:
    """A warning, decision, picture or held-out loss as a line; what else there is, otherwise."""
    if event.kind == "warning":
        return f"warning: {event.data['text']}"
    if event.kind == "decision":
        return f"{event.data['name']} = {event.data['value']} ({event.data['reason']})"
    if event.kind == "picture":
        return f"step {event.data['step']}: drawn in {event.data['file']}"
    if event.kind == "metric" and "held_out_loss" in event.data:
        losses = ("held_out_loss", "held_out_loss_ema")
        shown = ", ".join(f"{event.data[n]:.4f} {n}" for n in losses if n in event.data)
        return f"step {event.data['step']}: {shown}"
    return None


class _Lines:
    """Plain lines; progress at most once a minute."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, event: Event) -> None:
        if event.kind == "phase":
            self._print(phase_line(event))
        elif event.kind == "progress":
            if time.monotonic() - self._last >= QUIET_SECONDS:
                done, total = event.data["done"], event.data["total"]
                self._print(f"{event.stage}: {done} of {total} {event.data['unit']}")
        elif line := other_line(event):
            self._print(line)

    def _print(self, line: str) -> None:
        self._last = time.monotonic()
        # A terminal's encoding must never stop a run.
        print(line.encode("ascii", "backslashreplace").decode(), file=sys.stderr, flush=True)


@contextmanager
def _bars() -> Iterator[Sink]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield _Bars(progress)


class _Bars:
    """One bar for each stage and unit; the training bar carries the loss."""

    def __init__(self, progress: Any):
        self._progress = progress
        self._tasks: dict[tuple[str, str], Any] = {}
        self._note = ""

    def __call__(self, event: Event) -> None:
        if event.kind == "metric" and "loss" in event.data:
            self._note = f"loss {event.data['loss']:.4f}"
        elif event.kind == "progress":
            self._advance(event)
        else:
            line = phase_line(event) if event.kind == "phase" else other_line(event)
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _advance(self, event: Event) -> None:
        key = (event.stage, event.data["unit"])
        if key not in self._tasks:
            self._tasks[key] = self._progress.add_task(
                event.stage, total=event.data["total"], unit=event.data["unit"], note=""
            )
        note = self._note if event.data["unit"] == "steps" else ""
        self._progress.update(self._tasks[key], completed=event.data["done"], note=note)
