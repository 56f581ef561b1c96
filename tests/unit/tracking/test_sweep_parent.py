"""A sweep's own run in the tracker, and trackers that are refused."""

import threading

import pytest

from lib.config import parse
from lib.errors import InputRefused, Problem
from lib.events import Events
from lib.tracking import close_parent, follower, following, parent_run
from lib.tracking.journal import TrackerFailed
from lib.tracking.server import Server


def test_a_sweep_has_a_parent_and_its_runs_are_its_children(
    configured, mlflow_store, tmp_path, monkeypatch
):
    monkeypatch.setattr(follower, "END_SECONDS", 120.0)
    config = configured(mlflow_store)
    parent = parent_run(config, "sweep-1")
    assert parent
    events = Events(stage="train")
    events.attach(tmp_path / "child" / "events.jsonl")
    with following(tmp_path / "child", config, events=events, parent=parent):
        events.metric(1, loss=0.5)
    assert close_parent(config, parent, status="FINISHED")
    server = Server(mlflow_store, "darkroom")
    found = {run.info.run_id: run for run in server._client.search_runs([server._experiment])}
    (child,) = [run for run in found.values() if run.info.run_id != parent]
    assert child.data.tags["mlflow.parentRunId"] == parent
    assert found[parent].info.status == "FINISHED"
    assert found[parent].info.run_name == "sweep-1"
    assert found[parent].info.start_time > 1_600_000_000_000


def test_a_sweep_without_an_answer_has_no_parent(configured, valid, monkeypatch):
    assert parent_run(parse(valid()), "sweep") is None
    assert parent_run(configured("http://127.0.0.1:1"), "sweep") is None
    assert not close_parent(configured("http://127.0.0.1:1"), "id", status="FAILED")
    hanging = threading.Event()
    monkeypatch.setattr(follower, "END_SECONDS", 0.1)
    monkeypatch.setattr(follower, "PARENT_SECONDS", 0.1)

    def hang(*_address):
        hanging.wait(60)
        raise TrackerFailed(Problem("http://fake", "no answer"))

    monkeypatch.setattr(follower, "Server", hang)
    assert parent_run(configured(), "sweep") is None
    hanging.set()


@pytest.mark.parametrize(
    ("changes", "subject"),
    [
        ({"uri": "file:./mlruns"}, "tracker.uri=file:./mlruns"),
        ({"uri": None}, "tracker.uri=None"),
        ({"experiment": " "}, "tracker.experiment= "),
        ({"name": "wandb"}, "tracker.name=wandb"),
        ({"name": "none", "experiment": None}, "tracker.uri=http://127.0.0.1:1"),
        ({"name": "none", "uri": None}, "tracker.experiment=darkroom"),
    ],
)
def test_a_tracker_that_cannot_be_is_refused(configured, changes, subject):
    with pytest.raises(InputRefused) as refused:
        configured(**{"uri": "http://127.0.0.1:1", **changes})
    assert [problem.subject for problem in refused.value.problems] == [subject]
