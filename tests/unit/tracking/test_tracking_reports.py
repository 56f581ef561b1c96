"""Settings, numbers and names that a tracker refuses: the run ends by its own rules, and so does the next."""

import math

import pytest

from lib.config import parse
from lib.errors import Problem
from lib.events import Events
from lib.tracking import follower, following
from lib.tracking.journal import Journal, TrackerFailed

TARGETS = [f"transformer_blocks.{number}.attn.to_q" for number in range(500)]


@pytest.fixture
def train(tmp_path, valid, mlflow_store, monkeypatch):
    """A run beside a real store, with other settings than the last."""
    monkeypatch.setattr(follower, "END_SECONDS", 120.0)

    def run(name, changes, body=lambda events: None):
        tracker = {"tracker.name": "mlflow", "tracker.uri": mlflow_store}
        config = parse(valid({**tracker, "tracker.experiment": "darkroom", **changes}))
        events = Events(stage="train")
        events.attach(tmp_path / "outputs" / name / "events.jsonl")
        with following(tmp_path / "outputs" / name, config, events=events):
            events.metric(1, loss=0.5)
            body(events)

    return run


def test_endless_settings_stop_neither_their_run_nor_the_next_one(train, runs_of):
    train("first", {"adapter.targets": TARGETS, "dataset.instance_prompt": "a fox " * 1200})
    train("second", {"adapter.targets": TARGETS[::-1]})
    found = {run.info.run_name: run for run in runs_of()}
    assert {name: run.info.status for name, run in found.items()} == {
        "first": "FINISHED",
        "second": "FINISHED",
    }
    for run in found.values():
        assert run.data.metrics == {"loss": 0.5}
        # 250 characters is what the oldest servers in use take; a cut value says so.
        assert len(run.data.params["adapter.targets"]) == 250
        assert run.data.params["adapter.targets"].endswith("...")


def test_a_run_that_failed_leaves_no_active_one_behind(train, runs_of):
    def fail(_events):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train("first", {}, fail)
    train("second", {})
    assert {run.info.run_name: run.info.status for run in runs_of()} == {
        "first": "FAILED",
        "second": "FINISHED",
    }


class Diverged(Exception):
    """Stands for the end of a run by its own rule for numbers that are not finite."""


def refuse_nan(fake, monkeypatch):
    """A server that takes no number that is not finite, like an old one."""
    answer = type(fake)._answer

    def checked(self, name, /, *args, **named):
        if name == "log" and not all(math.isfinite(point.value) for point in args[1]):
            raise TrackerFailed(Problem("http://fake", "NaN is no number"))
        return answer(self, name, *args, **named)

    monkeypatch.setattr(type(fake), "_answer", checked)


def write_nan(folder):
    line = '{"kind": "metric", "stage": "train", "time": 9, "step": 4, "loss": NaN, "lr": 0.5}\n'
    with (folder / "events.jsonl").open("a") as file:
        file.write(line)


def test_a_number_that_is_not_finite_is_the_run_s_matter_and_not_the_tracker_s(
    fake, followed, monkeypatch
):
    refuse_nan(fake, monkeypatch)
    followed(lambda _events: write_nan(followed.folder))
    assert (fake.ended, followed.warnings) == ("FINISHED", [])
    assert [point.value for point in fake.points if point.name == "lr"] == [0.5]
    assert Journal(followed.folder).progress.sent


def test_a_run_that_ends_for_such_a_number_is_failed_with_its_own_error(
    fake, followed, monkeypatch
):
    refuse_nan(fake, monkeypatch)

    def diverge(_events):
        write_nan(followed.folder)
        raise Diverged

    with pytest.raises(Diverged):
        followed(diverge)
    assert (fake.ended, followed.warnings) == ("FAILED", [])
