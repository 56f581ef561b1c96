"""Run folders in a store, and runs that are followed into a store in memory."""

import json
import threading
import time

import pytest
import yaml

from lib.config import parse
from lib.errors import Problem
from lib.events import Events
from lib.tracking import follower, following
from lib.tracking.journal import Journal, TrackerFailed
from lib.tracking.mirror import Mirror
from lib.tracking.server import Server, prepare_environment

CANARY = "hf_canary0123456789"
CONFIG = {
    "family": {"name": "flux", "base": "/models/FLUX.1-dev"},
    "dataset": {"root": "/pictures of me/my cat", "instance_prompt": "a photo of Tom"},
    "optimizer": {"lr": 1e-4},
    "adapter": {"targets": [f"module.{number}" for number in range(500)]},
    "trainer": {"micro_batch": None},
    "paths": {"store": "/big/store", "outputs": "/big/outputs"},
    "tracker": {"name": "mlflow", "uri": f"http://me:{CANARY}@host", "experiment": "x"},
    "name": "long" * 2000,
}
RECORD = {
    "keys": {"train": "ab" * 32, "prepare_dataset": "cd" * 32},
    "versions": {"torch": "2.13.0"},
    "git_commit": "0123abc-dirty",
}


@pytest.fixture(scope="session")
def config_of_run():
    """The configuration that lies in every folder of `make_run`."""
    return CONFIG


@pytest.fixture(scope="session")
def record_of_run():
    return RECORD


@pytest.fixture(scope="session")
def event():
    def made(kind, time, **data):
        return {"kind": kind, "stage": "train", "time": time, **data}

    return made


@pytest.fixture(scope="session")
def metrics(event):
    """Events of some steps, a second each."""

    def made(*steps, at=1000.0):
        return [event("metric", at + s, step=s, loss=1 / s, num_samples_seen=2 * s) for s in steps]

    return made


@pytest.fixture(scope="session")
def append():
    """Writes events to a folder."""

    def write(folder, *events):
        with (folder / "events.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(one) + "\n" for one in events)

    return write


@pytest.fixture
def outputs(tmp_path):
    return tmp_path / "outputs"


@pytest.fixture
def make_run(outputs, event, append):
    """A run folder with events."""

    def make(*events, name="run"):
        folder = outputs / name
        (folder / "adapter").mkdir(parents=True)
        (folder / "samples").mkdir()
        (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
        (folder / "run.json").write_text(json.dumps(RECORD), encoding="utf-8")
        (folder / "adapter/adapter.safetensors").write_bytes(b"weights")
        (folder / "samples/grid.png").write_bytes(b"picture")
        append(folder, event("phase", 1000.0, status="start", folder=str(folder)), *events)
        return folder

    return make


@pytest.fixture
def server(mlflow_store):
    prepare_environment()
    return Server(mlflow_store, "darkroom")


@pytest.fixture
def send(server):
    """Mirrors a folder to its end, as a new process would; returns the MLflow run."""

    def send(folder, *, status="FINISHED", settings=None):
        journal = Journal(folder)
        changes = {"settings": settings} if settings else {}
        journal.update(status=status, sent=False, **changes)
        mirror = Mirror(folder, server, journal)
        while mirror.advance():
            pass
        mirror.finish()
        return server._client.get_run(mirror.run_id)

    return send


@pytest.fixture
def history(server):
    def points(run, name="loss"):
        found = server._client.get_metric_history(run.info.run_id, name)
        return [(point.step, point.value, point.timestamp) for point in found]

    return points


@pytest.fixture
def runs_of(server):
    return lambda: server._client.search_runs([server._experiment])


class FakeServer(Server):
    """A store in memory that notes the thread of every call; `fails` raises, `hangs` waits."""

    def __init__(self):
        self.store = "fake"
        self.calls, self.points, self.ended = [], [], None
        self.fails, self.hangs = 0, None

    def _answer(self, name, /, *args, **named):
        self.calls.append((name, threading.current_thread()))
        if self.hangs is not None:
            self.hangs.wait(60)
        if self.fails > 0:
            self.fails -= 1
            raise TrackerFailed(Problem("http://fake", "refused"))
        if name == "log":
            self.points += args[1]
        if name == "end_run":
            self.ended = named["status"]
        return {"create_run": "id", "open_run": True, "last_steps": {}}.get(name)


def _answering(name):
    return lambda self, *args, **named: self._answer(name, *args, **named)


for _name in [name for name in vars(Server) if not name.startswith("_")]:
    setattr(FakeServer, _name, _answering(_name))


@pytest.fixture
def fake(monkeypatch):
    server = FakeServer()
    monkeypatch.setattr(follower, "Server", lambda *_address: server)
    monkeypatch.setattr(follower, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(follower, "FIRST_WAIT_SECONDS", 0.02)
    monkeypatch.setattr(follower, "LONGEST_WAIT_SECONDS", 0.05)
    return server


@pytest.fixture
def configured(valid):
    def configure(uri="http://127.0.0.1:1", **changes):
        named = {f"tracker.{name}": value for name, value in changes.items()}
        tracker = {"tracker.name": "mlflow", "tracker.uri": uri, "tracker.experiment": "darkroom"}
        return parse(valid({**tracker, **named}))

    return configure


@pytest.fixture
def followed(tmp_path, configured):
    """Runs a body while its folder is followed; returns the warnings and the folder."""
    folder = tmp_path / "outputs" / "run"

    def run(body=lambda events: None, **options):
        events = Events(stage="train")
        events.attach(folder / "events.jsonl")
        try:
            with following(folder, configured(), events=events, **options):
                for step in (1, 2, 3):
                    events.metric(step, loss=0.5 / step)
                body(events)
        finally:
            lines = (folder / "events.jsonl").read_text().splitlines()
            run.warnings = [e["text"] for e in map(json.loads, lines) if e["kind"] == "warning"]
        return run

    run.folder = folder
    return run


@pytest.fixture(scope="session")
def until():
    """Waits for a condition."""

    def wait(condition):
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    return wait
