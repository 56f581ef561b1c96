"""All calls of MLflow. They are slow and may fail, so they belong on the follower's thread.

MLflow is imported inside functions: nobody else has to pay for it, or needs it installed.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.errors import Problem, without_credentials
from lib.keys import digest
from lib.tracking.journal import Status, TrackerFailed
from lib.tracking.shown import cut, scrubbed

METRICS_PER_CALL, TAGS_PER_CALL = 500, 100
TOKEN_TAG, PARENT_TAG = "darkroom.token", "mlflow.parentRunId"
CHANGED = "changed."
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_CONFIGURE_LOGGING": "false",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "3",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "GIT_PYTHON_REFRESH": "quiet",
}


@dataclass(frozen=True)
class Point:
    """One metric's value at a step; `time` in seconds."""

    name: str
    value: float
    time: float
    step: int


@dataclass(frozen=True)
class RunStart:
    """What a new MLflow run begins with; `time` in seconds."""

    name: str
    time: float
    tags: Mapping[str, str]


def prepare_environment() -> None:
    """MLflow's own settings, unless the user has set them: quiet, no telemetry, short waits."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def identity(uri: str) -> str:
    """Which store this is, without its address."""
    return digest(without_credentials(uri))


class Server:
    """One experiment of one MLflow store."""

    def __init__(self, uri: str, experiment: str):
        self.uri = uri
        self.store = identity(uri)
        with self._asking():
            from mlflow import MlflowClient

            self._client: Any = MlflowClient(tracking_uri=uri)
            self._experiment = self._open_experiment(experiment)

    def open_run(self, run_id: str) -> bool:
        """Whether the run is still there; if so it is running again."""
        with self._asking():
            from mlflow.exceptions import MlflowException

            try:
                if self._client.get_run(run_id).info.lifecycle_stage != "active":
                    return False
            except MlflowException as error:
                if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                    return False
                raise
            self._client.update_run(run_id, status="RUNNING")
            return True

    def create_run(self, start: RunStart, *, token: str) -> str:
        """A new run's id, or that of the run that an unanswered call made for this token."""
        with self._asking():
            wanted = f"tags.`{TOKEN_TAG}` = '{token}'"
            found = self._client.search_runs([self._experiment], filter_string=wanted)
            if found:
                return found[0].info.run_id
            made = self._client.create_run(
                self._experiment,
                start_time=round(start.time * 1000),
                tags={**start.tags, TOKEN_TAG: token},
                run_name=start.name,
            )
            return made.info.run_id

    def log_parameters(
        self, run_id: str, first: Mapping[str, str], *, now: Mapping[str, str]
    ) -> None:
        """Log each parameter once; the store would refuse another value, which becomes a tag.

        A tag of a value that is the first one again goes.
        """
        with self._asking():
            from mlflow.entities import Param

            data = self._client.get_run(run_id).data
            there = data.params
            known = {**now, **first, **there}
            new = [Param(name, value) for name, value in known.items() if name not in there]
            for part in _parts(new, TAGS_PER_CALL):
                self._client.log_batch(run_id, params=part)
        differing = {f"{CHANGED}{n}": value for n, value in now.items() if known[n] != value}
        self.log(run_id, (), differing)
        with self._asking():
            for tag in data.tags:
                if tag.startswith(CHANGED) and tag not in differing:
                    self._client.delete_tag(run_id, tag)

    def log(self, run_id: str, points: Sequence[Point], tags: Mapping[str, str]) -> None:
        with self._asking():
            from mlflow.entities import Metric, RunTag

            metrics = [Metric(p.name, p.value, round(p.time * 1000), p.step) for p in points]
            for part in _parts(metrics, METRICS_PER_CALL):
                self._client.log_batch(run_id, metrics=part)
            named = [RunTag(name, value) for name, value in tags.items()]
            for part in _parts(named, TAGS_PER_CALL):
                self._client.log_batch(run_id, tags=part)

    def last_steps(self, run_id: str) -> dict[str, int]:
        """The last step that each metric of a run has."""
        with self._asking():
            names = self._client.get_run(run_id).data.metrics
            histories = {name: self._client.get_metric_history(run_id, name) for name in names}
        return {name: max(point.step for point in points) for name, points in histories.items()}

    def end_run(self, run_id: str, *, status: Status, time: float) -> None:
        with self._asking():
            self._client.set_terminated(run_id, status=status, end_time=round(time * 1000))

    def upload(self, run_id: str, path: Path, *, name: str) -> None:
        """Put a file under its name among the run's artifacts."""
        folder = name.rpartition("/")[0] or None
        with self._asking():
            self._client.log_artifact(run_id, str(path), artifact_path=folder)

    def upload_text(self, run_id: str, text: str, *, name: str) -> None:
        with self._asking():
            self._client.log_text(run_id, text, name)

    def _open_experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is None:
            self._client.create_experiment(name, artifact_location=_artifacts_beside(self.uri))
            found = self._client.get_experiment_by_name(name)
        return found.experiment_id

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Turn whatever MLflow or its store raises into TrackerFailed."""
        try:
            from alembic.util.exc import CommandError
            from mlflow.exceptions import MlflowException
            from sqlalchemy.exc import SQLAlchemyError
        except ImportError as error:
            remedy = "install the requirements again, or use tracker=none"
            raise TrackerFailed(Problem("MLflow", str(error), remedy=remedy)) from error
        try:
            yield
        except (MlflowException, SQLAlchemyError, CommandError, OSError, ValueError) as error:
            raise TrackerFailed(Problem(without_credentials(self.uri), self._why(error))) from error

    def _why(self, error: Exception) -> str:
        """The first line, without credentials and paths; the innermost words of an HTTP failure."""
        lines = str(error).replace(self.uri, without_credentials(self.uri)).splitlines()
        text = lines[0] if lines else ""
        inner = re.search(r"Caused by (.*)", text)
        return cut(scrubbed(f"{type(error).__name__}: {inner.group(1) if inner else text}"))


def _artifacts_beside(uri: str) -> str | None:
    """Files of a SQLite store lie beside it; a server knows its own place."""
    prefix = "sqlite:///"
    if not uri.startswith(prefix):
        return None
    return (Path(uri.removeprefix(prefix)).resolve().parent / "mlruns").as_uri()


def _parts(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
