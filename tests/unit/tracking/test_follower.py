"""The thread beside a run: what ends it how, and that no failure of the tracker reaches the run."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from lib.config import parse
from lib.errors import Problem, Stopped
from lib.events import Events
from lib.files import StorageFailed
from lib.tracking import follower, following
from lib.tracking.journal import Journal

CHECKOUT = Path(__file__).resolve().parents[3]


def raising(error):
    def body(_events):
        raise error

    return body


def steps(server):
    return [point.step for point in server.points if point.name == "loss"]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ZeroDivisionError(), "FAILED"),
        (SystemExit(3), "FAILED"),
        (SystemExit("text"), "FAILED"),
        (SystemExit(0), "FINISHED"),
        (SystemExit(), "FINISHED"),
        (KeyboardInterrupt(), "KILLED"),
        (Stopped("SIGTERM", by="SIGTERM"), "KILLED"),
    ],
    ids=repr,
)
def test_how_a_run_ends_is_its_status_and_the_error_goes_on(fake, followed, error, status):
    with pytest.raises(type(error)) as raised:
        followed(raising(error))
    assert raised.value is error
    assert fake.ended == status
    assert Journal(followed.folder).progress.status == status
    assert steps(fake) == [1, 2, 3]


def test_a_run_that_ends_well_is_finished_and_sent(fake, followed):
    assert followed().warnings == []
    assert (fake.ended, steps(fake)) == ("FINISHED", [1, 2, 3])
    assert Journal(followed.folder).progress.sent


def test_events_are_sent_while_the_run_goes_on_and_never_from_its_thread(fake, followed, until):
    def body(events):
        until(lambda: steps(fake) == [1, 2, 3])
        events.metric(4, loss=0.1)
        until(lambda: steps(fake) == [1, 2, 3, 4])
        assert fake.ended is None

    followed(body)
    assert {thread.name for _, thread in fake.calls} == {"tracking"}
    assert threading.main_thread() not in {thread for _, thread in fake.calls}
    assert all(thread.daemon for _, thread in fake.calls)


def test_a_tracker_that_fails_at_times_is_one_warning_and_misses_nothing(fake, followed, until):
    fake.fails = 4
    followed(lambda _events: until(lambda: steps(fake) == [1, 2, 3]))
    assert len(followed.warnings) == 1
    assert "http://fake: refused" in followed.warnings[0]
    assert (fake.ended, steps(fake)) == ("FINISHED", [1, 2, 3])


def test_a_tracker_that_always_fails_is_one_warning_and_the_end_is_noted(fake, followed, until):
    fake.fails = 10**9
    followed(lambda _events: until(lambda: len(fake.calls) > 3))
    assert len(followed.warnings) == 1
    progress = Journal(followed.folder).progress
    assert (progress.status, progress.sent, progress.offset) == ("FINISHED", False, 0)


def test_a_tracker_that_hangs_delays_the_end_and_nothing_else(fake, followed, monkeypatch, until):
    monkeypatch.setattr(follower, "END_SECONDS", 0.2)
    fake.hangs = threading.Event()
    started = time.monotonic()
    followed(lambda _events: until(lambda: fake.calls))
    assert time.monotonic() - started < 30  # the fake hangs for 60
    assert len(followed.warnings) == 1
    assert "0.2 seconds" in followed.warnings[0]
    assert Journal(followed.folder).progress.status == "FINISHED"
    fake.hangs.set()
    until(lambda: not [t for t in threading.enumerate() if t.name == "tracking"])
    assert Journal(followed.folder).progress.status == "FINISHED"


def test_a_journal_that_cannot_be_written_is_a_warning(fake, followed, monkeypatch):
    def full(*_args):
        raise StorageFailed(Problem("tracking.json", "No space left on device"))

    monkeypatch.setattr("lib.tracking.journal.files.write_json", full)
    followed()
    assert len(followed.warnings) == 1
    assert "No space left" in followed.warnings[0]


def test_a_resumed_run_is_running_again_until_it_ends(fake, followed, until):
    with pytest.raises(KeyboardInterrupt):
        followed(raising(KeyboardInterrupt()))
    seen = []

    def body(_events):
        until(lambda: Journal(followed.folder).progress.status == "RUNNING")
        seen.append(Journal(followed.folder).progress.sent)

    followed(body)
    assert seen == [False]
    assert [name for name, _ in fake.calls].count("create_run") == 1
    assert fake.ended == "FINISHED"


def test_the_start_of_a_run_sends_what_an_earlier_one_left(fake, followed, until):
    other = followed.folder.with_name("earlier")
    Events(stage="train", _path=other / "events.jsonl").metric(7, loss=0.25)
    Journal(other).update(status="FAILED")
    followed(lambda _events: until(lambda: Journal(other).progress.sent))
    assert sorted(steps(fake)) == [1, 2, 3, 7]


def test_without_a_tracker_there_is_no_thread_and_no_file(tmp_path, valid, fake):
    before = threading.active_count()
    with following(tmp_path, parse(valid()), events=Events()):
        assert threading.active_count() == before
    assert list(tmp_path.iterdir()) == []
    assert fake.calls == []


def test_a_hanging_tracker_keeps_no_process_alive(tmp_path):
    script = f"""
        import socket, sys
        sys.path.insert(0, {str(CHECKOUT)!r})
        from pathlib import Path
        from lib.events import Events
        from lib.schema import Config, TrackerConfig
        from lib.tracking import follower, following
        follower.END_SECONDS = 0.2
        silent = socket.create_server(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{{silent.getsockname()[1]}}"
        config = Config(tracker=TrackerConfig("mlflow", address, "darkroom"))
        events = Events(stage="train")
        folder = Path({str(tmp_path)!r}) / "run"
        events.attach(folder / "events.jsonl")
        with following(folder, config, events=events):
            events.metric(1, loss=0.5)
    """
    environment = {**os.environ, "MLFLOW_HTTP_REQUEST_TIMEOUT": "100"}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
