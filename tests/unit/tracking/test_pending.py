"""What is sent when a command found a complete run or left something in one."""

import threading
import time

import pytest

from lib.config import parse
from lib.events import Events
from lib.tracking import follower, send_pending
from lib.tracking.journal import Journal
from lib.tracking.server import identity

URI = "http://127.0.0.1:1"


@pytest.fixture
def seen():
    return []


@pytest.fixture
def events(seen):
    return Events(sinks=(seen.append,), stage="sample")


@pytest.fixture
def complete(fake, followed, configured):
    """The folder of a run of which the tracker has everything."""
    fake.store = identity(URI)
    followed()
    fake.calls.clear()
    return followed.folder


def test_nothing_is_asked_when_nothing_is_pending(complete, fake, configured, events):
    send_pending(complete, configured(URI), events=events)
    assert fake.calls == []


def test_a_new_picture_is_sent_at_once_and_not_by_the_callers_thread(
    complete, fake, configured, events, seen
):
    (complete / "samples").mkdir()
    (complete / "samples/grid.png").write_bytes(b"picture")
    send_pending(complete, configured(URI), events=events)
    assert "upload" in [name for name, _ in fake.calls]
    assert threading.main_thread() not in {thread for _, thread in fake.calls}
    assert Journal(complete).progress.sent
    assert seen == []
    fake.calls.clear()
    send_pending(complete, configured(URI), events=events)
    assert fake.calls == []


def test_runs_beside_it_are_sent_too(complete, fake, configured, events):
    other = complete.with_name("earlier")
    Events(stage="train", _path=other / "events.jsonl").metric(7, loss=0.25)
    Journal(other).update(status="FAILED")
    send_pending(complete, configured(URI), events=events)
    assert Journal(other).progress.sent
    assert 7 in [point.step for point in fake.points]


def test_without_a_tracker_or_of_a_run_without_one_nothing_is_sent(
    complete, fake, valid, configured, events, tmp_path
):
    (complete / "samples").mkdir()
    (complete / "samples/grid.png").write_bytes(b"picture")
    send_pending(complete, parse(valid()), events=events)
    untracked = tmp_path / "others" / "untracked"
    (untracked / "samples").mkdir(parents=True)
    (untracked / "samples/grid.png").write_bytes(b"picture")
    send_pending(untracked, configured(URI), events=events)
    assert fake.calls == []


def test_a_tracker_that_fails_is_one_warning_and_it_stays_pending(
    complete, fake, configured, events, seen
):
    (complete / "loss.png").write_bytes(b"picture")
    fake.fails = 10**9
    send_pending(complete, configured(URI), events=events)
    (warning,) = [event.data["text"] for event in seen]
    assert "http://fake: refused" in warning
    fake.fails = 0
    send_pending(complete, configured(URI), events=events)
    assert "upload" in [name for name, _ in fake.calls]


def test_a_tracker_that_hangs_holds_nobody_longer_than_the_end_of_a_run(
    complete, fake, configured, events, seen, until, monkeypatch
):
    (complete / "loss.png").write_bytes(b"picture")
    monkeypatch.setattr(follower, "END_SECONDS", 0.2)
    fake.hangs = threading.Event()
    started = time.monotonic()
    send_pending(complete, configured(URI), events=events)
    assert time.monotonic() - started < 30  # the fake hangs for 60
    assert ["0.2 seconds" in event.data["text"] for event in seen] == [True]
    fake.hangs.set()
    until(lambda: not [t for t in threading.enumerate() if t.name == "tracking"])


def test_a_damaged_record_of_a_run_is_a_warning(complete, configured, events, seen):
    (complete / "tracking.json").write_text("{", encoding="utf-8")
    send_pending(complete, configured(URI), events=events)
    (warning,) = [event.data["text"] for event in seen]
    assert "tracking.json" in warning
