"""The one event schema and its writer; consoles, plots and trackers only render it (design 9)."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lib.files import append_line
from lib.keys import canonical_json

Kind = Literal["phase", "progress", "metric", "picture", "warning", "decision"]
PROGRESS_SECONDS = 1.0


@dataclass(frozen=True)
class Event:
    """`stage` is the stage at work; `data` holds no caption and no token."""

    kind: Kind
    stage: str
    data: Mapping[str, Any]
    time: float

    def line(self) -> str:
        record = {"kind": self.kind, "stage": self.stage, "time": self.time, **self.data}
        return canonical_json(record).decode("utf-8")


Sink = Callable[[Event], None]


@dataclass
class Events:
    """Hands each event to the sinks, and to the run's `events.jsonl` once that run has a folder."""

    sinks: tuple[Sink, ...] = ()
    stage: str = ""
    kept: bool = True  # False: handed to the sinks alone, never to a run's file
    _path: Path | None = None
    _held: list[str] = field(default_factory=list)
    _last_progress: dict[str, float] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def attach(self, path: Path) -> None:
        """Write to `path` from now on, what was held until now first."""
        if not self.kept:
            return
        self._path = path
        for line in self._held:
            append_line(path, line)
        self._held.clear()

    def emit(self, kind: Kind, **data: Any) -> None:
        """Any thread may; one event is out before the next begins."""
        with self._lock:
            self._emit(Event(kind, self.stage, data, round(time.time(), 3)))

    def _emit(self, event: Event) -> None:
        for sink in self.sinks:
            sink(event)
        if not self.kept or (event.kind == "progress" and not self._due(event)):
            return
        if self._path is None:
            self._held.append(event.line())
        else:
            append_line(self._path, event.line())

    def _due(self, event: Event) -> bool:
        """Progress goes to the file once a second at most, the last one always."""
        ended = event.data["done"] >= event.data["total"]
        if not ended and event.time - self._last_progress.get(event.stage, 0.0) < PROGRESS_SECONDS:
            return False
        self._last_progress[event.stage] = event.time
        return True

    def phase(self, stage: str, status: str, **data: Any) -> None:
        """A stage begins ("start"), was found ("hit") or was made ("done")."""
        self.stage = stage
        self.emit("phase", status=status, **data)

    def progress(self, done: int, total: int, *, unit: str) -> None:
        self.emit("progress", done=done, total=total, unit=unit)

    def metric(self, step: int, **values: float | int) -> None:
        self.emit("metric", step=step, **values)

    def picture(self, step: int, file: str) -> None:
        """A picture of the run as it was after `step`."""
        self.emit("picture", step=step, file=file)

    def warning(self, text: str) -> None:
        self.emit("warning", text=text)

    def decision(self, name: str, value: Any, *, source: str, reason: str) -> None:
        """What was chosen for the user and why: the setting, its value, where it came from."""
        self.emit("decision", name=name, value=value, source=source, reason=reason)
