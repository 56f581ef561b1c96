"""How far a run's folder was mirrored: `tracking.json`, and the events that are still to send."""

import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from threading import Lock
from typing import Any, Literal

from lib import files
from lib.errors import DarkroomError, Problem

FILE, EVENTS = "tracking.json", "events.jsonl"
CHUNK_BYTES = 1 << 18
MAX_EVENTS = 80

Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]


class TrackerFailed(DarkroomError):
    """The tracker did not take what it was sent; the run goes on and it is sent again later."""


def new_token() -> str:
    return uuid.uuid4().hex


@dataclass
class Progress:
    """What the tracker has accepted; `offset` counts bytes of events.jsonl.

    `token` is a tag of the MLflow run, by which a run is found whose creation was not answered.
    `artifacts` are files by name with the state in which each was sent.
    """

    token: str = field(default_factory=new_token)
    store: str = ""
    run_id: str | None = None
    parent: str | None = None
    offset: int = 0
    warnings: int = 0
    unreadable: int = 0
    status: Status = "RUNNING"
    sent: bool = False
    settings: dict[str, str] = field(default_factory=dict)
    artifacts: dict[str, str] = field(default_factory=dict)


class Journal:
    """A folder's progress, on disk after every change; two threads may change it."""

    def __init__(self, folder: Path):
        self.path = folder / FILE
        self._lock = Lock()
        self.progress = _read(self.path)

    def update(self, **changes: Any) -> None:
        with self._lock:
            for name, value in changes.items():
                setattr(self.progress, name, value)
            files.write_json(self.path, asdict(self.progress))


@dataclass(frozen=True)
class Chunk:
    """Events from one offset to the next; a line that is no event is counted.

    `more` says whether more lay there already: what came meanwhile waits for the next round.
    """

    events: list[Mapping[str, Any]]
    end: int
    unreadable: int
    more: bool = False


def read_chunk(folder: Path, offset: int) -> Chunk:
    """The next whole lines; from the beginning if the file is shorter than the offset."""
    path = folder / EVENTS
    if not path.exists():
        return Chunk([], 0, 0)
    size = path.stat().st_size
    if size < offset:
        offset = 0
    with path.open("rb") as file:
        file.seek(offset)
        lines = file.readlines(CHUNK_BYTES)[:MAX_EVENTS]
    whole = [line for line in lines if line.endswith(b"\n")]
    events = [event for line in whole if (event := _event(line))]
    end = offset + sum(map(len, whole))
    return Chunk(events, end, len(whole) - len(events), more=bool(whole) and end < size)


def _event(line: bytes) -> Mapping[str, Any] | None:
    """A line cut by a full disk is no event."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and {"kind", "stage", "time"} <= event.keys() else None


def _read(path: Path) -> Progress:
    if not path.exists():
        return Progress()
    try:
        values = {"artifacts": {}, **json.loads(path.read_text(encoding="utf-8"))}  # as before
        return Progress(**{item.name: values[item.name] for item in fields(Progress)})
    except (ValueError, KeyError, TypeError) as error:
        remedy = "remove the file: the run is then sent again, as a new one"
        raise TrackerFailed(
            Problem(f"{path.parent.name}/{FILE}", "is no tracking record", remedy=remedy)
        ) from error
