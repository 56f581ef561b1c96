"""One run folder mirrored into one MLflow run; what is sent twice appears once."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from lib.files import make_folder
from lib.runs import ADAPTER_FILE, EMA_FILE
from lib.tracking.journal import FILE, Journal, Progress, TrackerFailed, new_token, read_chunk
from lib.tracking.server import PARENT_TAG, Point, RunStart, Server
from lib.tracking.shown import cut, parameters, plain_name, scrubbed, shown_config

LOCK = ".tracking.lock"
ARTIFACTS = ("run.json", ADAPTER_FILE, EMA_FILE, "loss.png")
_NO_METRIC = {"kind", "stage", "time", "step"}


class Mirror:
    """A run folder and its MLflow run, which is made, or found again, at the beginning."""

    def __init__(self, folder: Path, server: Server, journal: Journal):
        self.folder = folder
        self.server = server
        self.journal = journal
        self.run_id = self._open()
        self._describe()
        self._last_steps = server.last_steps(self.run_id)
        self._newest = 0.0

    def advance(self) -> bool:
        """Send the next events; whether more lay there already."""
        progress = self.journal.progress
        chunk = read_chunk(self.folder, progress.offset)
        if chunk.end == progress.offset:
            return False
        warnings = progress.warnings + sum(event["kind"] == "warning" for event in chunk.events)
        unreadable = progress.unreadable + chunk.unreadable
        counts = {}
        if progress.offset == 0 or warnings != progress.warnings:
            counts["warnings"] = str(warnings)
        if unreadable != progress.unreadable:
            counts["unreadable_lines"] = str(unreadable)
        points = self._new_points(chunk.events)
        self.server.log(self.run_id, points, {**_tags(chunk.events), **counts})
        self._last_steps |= {point.name: point.step for point in points}
        self.journal.update(offset=chunk.end, warnings=warnings, unreadable=unreadable)
        self._newest = max([self._newest, *(event["time"] for event in chunk.events)])
        return chunk.more

    def finish(self) -> None:
        """The end that the journal says, and the artifacts."""
        status = self.journal.progress.status
        time = self._newest or _last_time(self.folder)
        self.server.end_run(self.run_id, status=status, time=time)
        self._upload()
        self.journal.update(sent=True)

    def _open(self) -> str:
        progress = self.journal.progress
        run_id = progress.run_id if progress.store == self.server.store else None
        if run_id and self.server.open_run(run_id):
            return run_id
        # Another store, or a run that somebody removed there: everything is sent again.
        fresh = new_token() if progress.run_id else progress.token
        self.journal.update(
            token=fresh,
            store=self.server.store,
            run_id=None,
            offset=0,
            warnings=0,
            unreadable=0,
            artifacts={},
        )
        tags = {PARENT_TAG: progress.parent} if progress.parent else {}
        start = RunStart(self.folder.name, _first_time(self.folder), tags)
        run_id = self.server.create_run(start, token=fresh)
        self.journal.update(run_id=run_id)
        return run_id

    def _describe(self) -> None:
        """Parameters from the run's first configuration; what differs now becomes tags."""
        first = {plain_name(n): v for n, v in parameters(_config(self.folder)).items()}
        now = {plain_name(n): v for n, v in self.journal.progress.settings.items()}
        self.server.log_parameters(self.run_id, first, now=now)
        self.server.log(self.run_id, (), _record_tags(self.folder))

    def _upload(self) -> None:
        """The configuration, and files that are new or differ from what was sent."""
        config = yaml.safe_dump(shown_config(_config(self.folder)), sort_keys=False)
        self.server.upload_text(self.run_id, config, name="config.yaml")
        for name, state in _artifacts(self.folder).items():
            sent = self.journal.progress.artifacts
            if sent.get(name) != state:
                self.server.upload(self.run_id, self.folder / name, name=name)
                self.journal.update(artifacts={**sent, name: state})

    def _new_points(self, events: Sequence[Mapping[str, Any]]) -> list[Point]:
        """A resumed run repeats steps since its checkpoint: the first value of a step stands."""
        last, points = dict(self._last_steps), []
        for point in _points(events):
            if point.step > last.get(point.name, -1):
                last[point.name] = point.step
                points.append(point)
        return points


@contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """Whether nobody else mirrors this folder; nobody else will during the block."""
    make_folder(folder)
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def pending(outputs: Path, store: str) -> list[Path]:
    """Folders of earlier runs from which this store lacks something; asks no tracker."""
    folders = [path.parent for path in sorted(outputs.glob(f"*/{FILE}"))]
    return [folder for folder in folders if _lacks(folder, store)]


def _lacks(folder: Path, store: str) -> bool:
    try:
        progress = Journal(folder).progress
    except TrackerFailed:
        return True  # the replay says what is wrong with it
    return _has_pending(folder, progress, store)


def replay_pending(
    outputs: Path, server: Server, *, stopped: Callable[[], bool] = lambda: False
) -> int:
    """Send what earlier runs left unsent; returns how many folders are now complete.

    Every folder is tried; then TrackerFailed names those that failed.
    """
    done, problems = 0, []
    for folder in pending(outputs, server.store):
        if stopped():
            break
        try:
            with alone(folder) as free:
                if free:
                    done += _replay(folder, server, stopped=stopped)
        except TrackerFailed as error:
            problems += error.problems
    if problems:
        raise TrackerFailed(problems)
    return done


def _replay(folder: Path, server: Server, *, stopped: Callable[[], bool]) -> bool:
    journal = Journal(folder)
    if not _has_pending(folder, journal.progress, server.store):  # another process was first
        return False
    if journal.progress.status == "RUNNING":  # its process died without a word
        journal.update(status="KILLED")
    mirror = Mirror(folder, server, journal)
    while mirror.advance():
        if stopped():
            return False
    mirror.finish()
    return True


def _has_pending(folder: Path, progress: Progress, store: str) -> bool:
    """A complete run gains events and files when a later stage works on it."""
    if progress.run_id is not None and progress.store != store:
        return False
    return (
        not progress.sent
        or read_chunk(folder, progress.offset).end != progress.offset
        or _artifacts(folder) != progress.artifacts
    )


def _artifacts(folder: Path) -> dict[str, str]:
    """The files that are sent, by name, each with what changes when it does."""
    pictures = [f"samples/{path.name}" for path in sorted(folder.glob("samples/*.png"))]
    states = {}
    for name in (*ARTIFACTS, *pictures):
        if (folder / name).is_file():
            found = (folder / name).stat()
            states[name] = f"{found.st_size} {found.st_mtime_ns}"
    return states


def _config(folder: Path) -> Mapping[str, Any]:
    path = folder / "config.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}


def _record_tags(folder: Path) -> dict[str, str]:
    """Digests, versions and the commit of run.json."""
    path = folder / "run.json"
    if not path.exists():
        return {}
    record = json.loads(path.read_text(encoding="utf-8"))
    commit = record.get("git_commit")
    return {
        **{plain_name(f"key.{stage}"): key for stage, key in record.get("keys", {}).items()},
        **{plain_name(f"version.{n}"): cut(v) for n, v in record.get("versions", {}).items()},
        **({"mlflow.source.git.commit": commit, "git_commit": commit} if commit else {}),
    }


def _points(events: Sequence[Mapping[str, Any]]) -> Iterator[Point]:
    """Finite numbers of metric events, with the events' own times."""
    for event in events:
        if event["kind"] != "metric":
            continue
        for name, value in event.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if name not in _NO_METRIC and number and math.isfinite(value):
                yield Point(plain_name(name), float(value), event["time"], event["step"])


def _tags(events: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Phases and decisions; the last one of a name stands."""
    tags = {}
    for event in events:
        if event["kind"] == "phase":
            tags[plain_name(f"phase.{event['stage']}")] = cut(str(event["status"]))
        elif event["kind"] == "decision":
            text = f"{event['value']} ({event['reason']})"
            tags[plain_name(f"decision.{event['name']}")] = cut(scrubbed(text))
    return tags


def _first_time(folder: Path) -> float:
    events = read_chunk(folder, 0).events
    return events[0]["time"] if events else 0.0


def _last_time(folder: Path) -> float:
    offset, last = 0, 0.0
    while (chunk := read_chunk(folder, offset)).end != offset:
        offset, last = chunk.end, max([last, *(event["time"] for event in chunk.events)])
    return last
