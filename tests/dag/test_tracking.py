"""Training beside a tracker: whole in SQLite, and the same adapter whatever the tracker does."""

import http.server
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from lib.tracking import follower, replay_pending
from lib.tracking.journal import Journal
from lib.tracking.server import Server
from tests.reliability import crashes

CANARY = "hf_canary0123456789"


def tracked(uri):
    return ("tracker=mlflow", f"tracker.uri={uri}")


@pytest.fixture
def patient(monkeypatch):
    """A machine with other things to do may need longer than a run's end waits."""
    monkeypatch.setattr(follower, "END_SECONDS", 120.0)


@pytest.fixture
def recorded(mlflow_store):
    """The one MLflow run of the store, and its metrics as (step, value) lists."""

    def find(uri=mlflow_store):
        client = Server(uri, "darkroom")._client
        (run,) = client.search_runs([client.get_experiment_by_name("darkroom").experiment_id])
        points = {n: client.get_metric_history(run.info.run_id, n) for n in run.data.metrics}
        return run, {name: [(p.step, p.value) for p in found] for name, found in points.items()}

    return find


def logged(folder):
    """The finite metrics of a run's own events, each step once, in the tracker's form."""
    lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    found = {}
    for event in map(json.loads, lines):
        if event["kind"] == "metric":
            for name in event.keys() - {"kind", "stage", "time", "step"}:
                found.setdefault(name, {}).setdefault(event["step"], event[name])
    return {name: list(points.items()) for name, points in found.items()}


def warnings_in(folder):
    lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [e["text"] for e in map(json.loads, lines) if e["kind"] == "warning"]


def test_a_run_is_whole_in_the_store_and_shows_nothing_private(
    ensure, tmp_path, mlflow_store, recorded, patient, monkeypatch, data
):
    monkeypatch.setenv("HF_TOKEN", CANARY)
    manifest = ensure("train", "name=mine", *tracked(mlflow_store))
    run, points = recorded()
    folder = tmp_path / "outputs" / "mine"
    assert points == logged(folder)
    assert len(points["loss"]) == 6
    assert (run.info.status, run.info.run_name) == ("FINISHED", "mine")
    assert run.data.params["adapter.rank"] == "4"
    assert run.data.tags["key.train"] == manifest.key
    assert run.data.tags["phase.train"] == "done"
    artifact = Path(run.info.artifact_uri.removeprefix("file://")) / "adapter/adapter.safetensors"
    assert artifact.read_bytes() == (folder / "adapter/adapter.safetensors").read_bytes()
    shown = json.dumps([run.data.params, run.data.tags])
    captions = [path.read_text() for path in data.glob("*.txt")]
    for private in (CANARY, str(tmp_path), *captions):
        assert private not in shown
    assert CANARY.encode() not in Path(mlflow_store.removeprefix("sqlite:///")).read_bytes()


@pytest.mark.slow
def test_a_grid_drawn_after_training_is_in_the_store_at_once(
    ensure, mlflow_store, recorded, patient, tmp_path
):
    ensure("train", "name=mine", *tracked(mlflow_store))
    untracked = ("tracker=none", "sample.seed=1")
    for overrides in (tracked(mlflow_store), untracked):
        ensure("sample", "sample.steps=1", "sample.prompts=[a red fox]", *overrides)
    run, points = recorded()
    artifacts = Path(run.info.artifact_uri.removeprefix("file://"))
    drawn = sorted((tmp_path / "outputs/mine/samples").iterdir(), key=lambda p: p.stat().st_mtime)
    assert len(drawn) == 2
    assert [path.name for path in (artifacts / "samples").iterdir()] == [drawn[0].name]
    assert (artifacts / "samples" / drawn[0].name).read_bytes() == drawn[0].read_bytes()
    assert run.info.status == "FINISHED"
    assert points == logged(tmp_path / "outputs/mine")
    assert warnings_in(tmp_path / "outputs/mine") == []


def test_mlflow_is_never_called_from_the_training_thread(
    ensure, mlflow_store, patient, monkeypatch
):
    from mlflow import MlflowClient

    threads = []
    for name in [name for name in vars(MlflowClient) if not name.startswith("__")]:
        method = getattr(MlflowClient, name)
        if callable(method):

            def noting(*args, _method=method, **named):
                threads.append(threading.current_thread())
                return _method(*args, **named)

            monkeypatch.setattr(MlflowClient, name, noting)
    ensure("train", *tracked(mlflow_store))
    assert threads
    assert threading.main_thread() not in threads


class Silent:
    """Accepts and never answers."""

    def __init__(self):
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.close = self.socket.close


class Broken:
    """Answers 500 to everything."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(500)
            self.end_headers()

        def do_POST(self):
            self.do_GET()

        def log_message(self, *_args):
            pass

    def __init__(self):
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self.Handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def broken_tracker(tmp_path, request, empty_mlflow_store):
    """The address of a tracker that does not work."""
    closing = []

    def make(kind):
        if kind in ("silent", "500"):
            server = Silent() if kind == "silent" else Broken()
            closing.append(server.close)
            return f"http://127.0.0.1:{server.port}"
        if kind == "closed port":
            with socket.create_server(("127.0.0.1", 0)) as free:
                return f"http://127.0.0.1:{free.getsockname()[1]}"
        if kind == "no folder":
            (tmp_path / "file").write_text("", encoding="utf-8")
            return f"sqlite:///{tmp_path}/file/mlflow.db"
        return full_disk()

    def full_disk():
        folder = tmp_path / "full"
        folder.mkdir()
        size = empty_mlflow_store.stat().st_size + 40_000
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("no file system can be mounted here")
        closing.append(lambda: subprocess.run(["umount", "-l", str(folder)], check=True))
        shutil.copy(empty_mlflow_store, folder / "mlflow.db")
        with (folder / "filler").open("wb", buffering=0) as file:
            while file.tell() < size:
                try:
                    file.write(bytes(4096))
                except OSError:
                    break
        return f"sqlite:///{folder}/mlflow.db"

    yield make
    for close in closing:
        close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "closed port",
        pytest.param("silent", marks=pytest.mark.nightly),
        pytest.param("500", marks=pytest.mark.nightly),
        pytest.param("no folder", marks=pytest.mark.nightly),
        "full disk",
    ],
)
def test_a_broken_tracker_changes_no_adapter_and_a_replay_is_complete(
    ensure, results_of, tmp_path, mlflow_store, recorded, broken_tracker, kind
):
    without = results_of(ensure("train", "name=without"))
    started = time.monotonic()
    manifest = ensure("train", "name=mine", "rerun=true", *tracked(broken_tracker(kind)))
    folder = tmp_path / "outputs" / "mine"
    assert results_of(manifest) == without
    assert len(warnings_in(folder)) == 1
    # The training itself takes seconds; the end waits for the tracker, and for nothing longer.
    assert time.monotonic() - started < follower.END_SECONDS + 60
    assert Journal(folder).progress.status == "FINISHED"
    assert not Journal(folder).progress.sent
    until_free(folder)
    assert replay_pending(tmp_path / "outputs", Server(mlflow_store, "darkroom")) == 1
    run, points = recorded()
    assert points == logged(folder)
    assert run.info.status == "FINISHED"
    assert run.data.tags["warnings"] == "1"


def until_free(folder):
    """Wait for a thread that a hanging tracker still holds."""
    deadline = time.monotonic() + 30
    while [t for t in threading.enumerate() if t.name == "tracking"]:
        assert time.monotonic() < deadline, folder
        time.sleep(0.05)


def test_a_complete_run_that_is_found_again_sends_what_is_pending(
    ensure, mlflow_store, recorded, patient, broken_tracker, tmp_path
):
    ensure("train", "name=mine", *tracked(broken_tracker("closed port")))
    ensure("train", "name=mine", *tracked(mlflow_store))
    run, points = recorded()
    assert points == logged(tmp_path / "outputs" / "mine")
    assert run.info.status == "FINISHED"


def _ends(name):
    """A process that gets a signal."""
    return lambda: os.kill(os.getpid(), signal.Signals[name])


def _fails():
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("death", "code", "status"),
    [
        pytest.param(_ends("SIGTERM"), 75, "KILLED", id="TERM"),
        pytest.param(_ends("SIGKILL"), -signal.SIGKILL, None, marks=pytest.mark.nightly, id="KILL"),
        pytest.param(_fails, 1, "FAILED", marks=pytest.mark.nightly, id="error"),
    ],
)
def test_how_a_run_ends_is_told_and_the_next_start_goes_on_in_the_same_run(
    configure, ensure, mlflow_store, recorded, tmp_path, patient, death, code, status
):
    config = configure("name=mine", *tracked(mlflow_store))

    def dies():
        from lib.events import Events
        from lib.pipeline import graph
        from lib.stopping import heeding
        from lib.training import step

        whole = step.Trainer.launch

        def dying(self, group, *, rate):
            if group.step == 3:
                death()
            return whole(self, group, rate=rate)

        step.Trainer.launch = dying
        with heeding():
            graph.ensure("train", config, Events())

    log = tmp_path / "log"
    assert crashes.run(dies, log=log) == code, log.read_text()
    if status:
        first, points = recorded()
        assert first.info.status == status
        assert points == logged(tmp_path / "outputs/mine")
    ensure("train", "name=mine", "trainer.micro_batch=1", *tracked(mlflow_store))
    run, points = recorded()
    assert run.info.status == "FINISHED"
    assert [step for step, _ in points["loss"]] == [1, 2, 3, 4, 5, 6]
    assert points == logged(tmp_path / "outputs/mine")
    assert run.data.params["trainer.micro_batch"] == "null"
    assert run.data.tags["changed.trainer.micro_batch"] == "1"
