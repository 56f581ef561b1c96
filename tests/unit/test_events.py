import json
from types import SimpleNamespace

import pytest

from lib.events import Event, Events


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("lib.events.time", SimpleNamespace(time=lambda: clock.now))
    return clock


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "events.jsonl"


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_line_has_kind_stage_and_time(path, clock):
    events = Events()
    events.attach(path)
    events.phase("train", "start", total=3)
    clock.now = 1001.5
    events.decision("device", "cpu", source="machine", reason="no GPU")
    events.metric(1, loss=0.5, lr=1e-4)
    events.warning("two\nlines")
    events.progress(3, 3, unit="steps")
    found = lines_of(path)
    assert [line["kind"] for line in found] == [
        "phase",
        "decision",
        "metric",
        "warning",
        "progress",
    ]
    assert {line["stage"] for line in found} == {"train"}
    assert [line["time"] for line in found] == [1000.0] + [1001.5] * 4
    assert found[0] == {
        "kind": "phase",
        "stage": "train",
        "time": 1000,
        "status": "start",
        "total": 3,
    }
    assert found[1]["name"] == "device"
    assert found[1]["value"] == "cpu"
    assert found[2]["loss"] == 0.5
    assert found[2]["step"] == 1
    assert found[3]["text"] == "two\nlines"


def test_what_was_held_is_written_first(path, clock):
    events = Events()
    events.phase("prepare_dataset", "start")
    events.warning("early")
    assert not path.exists()
    events.attach(path)
    events.warning("late")
    texts = [line.get("text", line.get("status")) for line in lines_of(path)]
    assert texts == ["start", "early", "late"]
    events.attach(path.with_name("other.jsonl"))
    events.warning("elsewhere")
    assert len(lines_of(path)) == 3
    assert [line["text"] for line in lines_of(path.with_name("other.jsonl"))] == ["elsewhere"]


def test_a_file_is_continued_and_not_begun_again(path, clock):
    for text in ("one", "two"):
        events = Events()
        events.attach(path)
        events.warning(text)
    assert [line["text"] for line in lines_of(path)] == ["one", "two"]


@pytest.mark.parametrize("attached", [True, False])
def test_progress_is_written_once_a_second_at_most_and_at_the_end(path, clock, attached):
    events = Events()
    if attached:
        events.attach(path)
    events.phase("train", "start")
    for done in range(1, 36):
        clock.now = 1000 + done / 10
        events.progress(done, 35, unit="steps")
    if not attached:
        events.attach(path)
    found = [line["done"] for line in lines_of(path)[1:]]
    assert found == [1, 11, 21, 31, 35]


def test_each_stage_has_a_second_of_its_own_and_other_events_are_never_left_out(path, clock):
    events = Events()
    events.attach(path)
    for stage in ("encode_captions", "build_latent_cache"):
        events.phase(stage, "start")
        events.progress(1, 9, unit="texts")
        events.progress(2, 9, unit="texts")
        events.metric(1, loss=0.1)
        events.metric(2, loss=0.1)
    kinds = [line["kind"] for line in lines_of(path)]
    assert kinds == ["phase", "progress", "metric", "metric"] * 2


def test_every_sink_sees_every_event_in_order(clock):
    seen, also = [], []
    events = Events(sinks=(seen.append, also.append))
    events.phase("train", "start")
    for done in range(5):
        events.progress(done, 9, unit="steps")
    assert seen == also
    assert [event.data.get("done") for event in seen] == [None, 0, 1, 2, 3, 4]
    assert seen[1] == Event("progress", "train", {"done": 0, "total": 9, "unit": "steps"}, 1000.0)


def test_a_number_that_is_not_finite_is_no_event(path, clock):
    events = Events()
    events.attach(path)
    with pytest.raises(ValueError, match="nan"):
        events.metric(1, loss=float("nan"))
    assert not path.exists()
