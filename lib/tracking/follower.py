"""The thread that mirrors a run while it trains, and what a run does at its beginning and end."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.errors import Problem
from lib.events import Events
from lib.files import StorageFailed
from lib.schema import Config, TrackerConfig, to_plain
from lib.tracking.journal import Journal, Status, TrackerFailed, new_token
from lib.tracking.mirror import Mirror, alone, pending, replay_pending
from lib.tracking.server import RunStart, Server, identity, prepare_environment
from lib.tracking.shown import parameters

POLL_SECONDS = 3.0
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 60.0
END_SECONDS = 10.0
PARENT_SECONDS = 30.0  # a sweep's first call may have to make the tables of a new file
FAILURES = (TrackerFailed, StorageFailed)
LATER = "training is not affected; what is missing is sent again, at the latest by the next run"


@contextmanager
def following(
    folder: Path, config: Config, *, events: Events, parent: str | None = None
) -> Iterator[None]:
    """Mirror the folder's events during the block.

    `parent` is the MLflow run of a sweep. Leaving the block takes END_SECONDS at most.
    """
    if config.tracker.name == "none":
        yield
        return
    prepare_environment()
    follower = Follower(folder, config, events=events, parent=parent)
    status: Status = "FAILED"
    try:
        yield
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    except SystemExit as ending:
        status = "FAILED" if ending.code else "FINISHED"
        raise
    finally:
        follower.end(status)


class Follower:
    """A daemon thread, so that a tracker that hangs keeps no process alive."""

    def __init__(self, folder: Path, config: Config, *, events: Events, parent: str | None):
        self._folder = folder
        self._tracker = config.tracker
        self._settings = parameters(to_plain(config))
        self._parent = parent
        self._events = events
        self._status: Status = "RUNNING"
        self._ending = threading.Event()
        self._warning = threading.Lock()
        self._warned = False
        self._journal: Journal | None = None
        self._mirror: Mirror | None = None
        self._replayed = False
        self._thread = threading.Thread(target=self._run, name="tracking", daemon=True)
        self._thread.start()

    def end(self, status: Status) -> None:
        """Let the thread send the rest; what it does not manage is for the next start."""
        self._status = status
        self._ending.set()
        self._thread.join(END_SECONDS)
        if self._journal is None or not self._journal.progress.sent:
            self._save_status()
            self._warn(f"the tracker did not take everything within {END_SECONDS:g} seconds")
        with self._warning:
            self._warned = True  # the events are no longer ours

    def _save_status(self) -> None:
        try:
            if self._journal is not None:
                self._journal.update(status=self._status)
        except StorageFailed as error:
            self._warn(str(error))

    def _run(self) -> None:
        wait, ending = 0.0, False
        with ExitStack() as held:
            while not ending:
                self._ending.wait(wait)
                # Read before the work: what was written before the end is then sent too.
                ending = self._ending.is_set()
                try:
                    self._work(held, ending=ending)
                    wait = POLL_SECONDS
                except FAILURES as error:
                    self._mirror = None  # opened anew: a part may have been accepted
                    self._warn(str(error))
                    wait = min(max(2 * wait, FIRST_WAIT_SECONDS), LONGEST_WAIT_SECONDS)

    def _work(self, held: ExitStack, *, ending: bool) -> None:
        """One round: open what is not open yet, send what there is."""
        if self._journal is None:
            self._journal = self._open_journal(held)
        if ending:
            self._journal.update(status=self._status)
        if self._mirror is None:
            server = Server(self._tracker.uri or "", self._tracker.experiment or "")
            self._mirror = Mirror(self._folder, server, self._journal)
        while self._mirror.advance():
            pass
        if ending:
            self._mirror.finish()
        elif not self._replayed:
            self._replayed = True  # once: what fails again is for the next start
            replay_pending(self._folder.parent, self._mirror.server, stopped=self._ending.is_set)

    def _open_journal(self, held: ExitStack) -> Journal:
        attempt = ExitStack()
        if not attempt.enter_context(alone(self._folder)):
            raise TrackerFailed(Problem("the tracker", "another process mirrors this run"))
        held.enter_context(attempt)
        journal = Journal(self._folder)
        journal.update(
            status="RUNNING",
            sent=False,
            settings=self._settings,
            parent=self._parent or journal.progress.parent,
        )
        return journal

    def _warn(self, text: str) -> None:
        with self._warning:
            if not self._warned:
                self._warned = True
                self._events.warning(f"{text}; {LATER}")


def send_pending(folder: Path, config: Config, *, events: Events) -> None:
    """Send what the tracker lacks of a complete run and those beside it: END_SECONDS at most.

    What is not sent by then stays pending; nothing is asked when nothing is pending.
    """
    tracker = config.tracker
    if tracker.name == "none" or not pending(folder.parent, identity(tracker.uri or "")):
        return
    ending = threading.Event()
    answer = _in_time(
        tracker,
        lambda server: replay_pending(folder.parent, server, stopped=ending.is_set),
        seconds=END_SECONDS,
    )
    ending.set()
    if answer.why:
        events.warning(f"{answer.why}; {LATER}")


def parent_run(config: Config, name: str) -> str | None:
    """The MLflow run that a sweep's runs hang under; None without a tracker that answers."""
    if config.tracker.name == "none":
        return None
    start = RunStart(name, time.time(), {"darkroom.kind": "sweep"})
    return _in_time(
        config.tracker,
        lambda server: server.create_run(start, token=new_token()),
        seconds=PARENT_SECONDS,
    ).result


def close_parent(config: Config, run_id: str, *, status: Status) -> bool:
    """End a sweep's run; whether the tracker took it in time."""

    def close(server: Server) -> bool:
        server.end_run(run_id, status=status, time=time.time())
        return True

    return bool(_in_time(config.tracker, close, seconds=END_SECONDS).result)


@dataclass(frozen=True)
class _Answer:
    """What an action returned, or why it did not."""

    result: Any = None
    why: str = ""


def _in_time(tracker: TrackerConfig, action: Callable[[Server], Any], *, seconds: float) -> _Answer:
    """The action's answer, within some seconds whatever the tracker does."""
    prepare_environment()
    answers: list[_Answer] = []

    def act() -> None:
        try:
            result = action(Server(tracker.uri or "", tracker.experiment or ""))
        except FAILURES as error:
            answers.append(_Answer(why=str(error)))
        else:
            answers.append(_Answer(result))

    thread = threading.Thread(target=act, name="tracking", daemon=True)
    thread.start()
    thread.join(seconds)
    late = _Answer(why=f"the tracker did not take everything within {seconds:g} seconds")
    return answers[0] if answers else late
