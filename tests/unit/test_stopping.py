"""Requests to stop: heard once, never lost, and the second one ends the process."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from lib import stopping
from lib.errors import Stopped

CHECKOUT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("interruptible")
BOTH = pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])


def send(name):
    os.kill(os.getpid(), signal.Signals[name])


@BOTH
def test_a_signal_ends_the_block_at_once_and_the_handlers_are_put_back(name):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(Stopped) as stopped, stopping.heeding():
        send(name)
    assert str(stopped.value) == f"{name}; the same command resumes"
    assert (stopped.value.by, stopped.value.exit_code) == (name, 75)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert stopping.asked() == ""


@BOTH
def test_a_block_that_asks_itself_is_not_torn(name):
    with stopping.heeding(), stopping.deferring():
        send(name)
        stopping.check()
        assert stopping.asked() == name


def test_a_request_that_was_swallowed_comes_back():
    with stopping.heeding():
        with contextlib.suppress(Stopped):
            send("SIGINT")
        with pytest.raises(Stopped):
            stopping.check()


def test_nothing_that_rescues_an_attempt_rescues_a_stop():
    assert not issubclass(Stopped, Exception)


def test_a_file_is_a_request_while_it_is_watched(tmp_path):
    path = tmp_path / "stop"
    with stopping.watching(path):
        stopping.check()
        path.touch()
        assert stopping.asked() == str(path)
        with pytest.raises(Stopped, match=r"remove .*stop, then the same command") as stopped:
            stopping.check()
        assert stopped.value.by == "stop file"
        assert not stopping.discards()
        path.write_text("discard\n")
        assert stopping.discards()
    assert stopping.asked() == ""
    assert not stopping.discards()


def test_what_ignores_a_signal_goes_on_ignoring_it():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with stopping.heeding():
        send("SIGINT")
        assert stopping.asked() == ""
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_another_thread_only_passes_through():
    passed = []

    def work():
        with stopping.heeding():
            stopping.check()
            passed.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert passed == [True]


STUCK = """
import os, signal, sys, time
sys.path.insert(0, {checkout!r})
from lib import stopping
signal.signal(signal.SIGINT, signal.default_int_handler)
with stopping.heeding(), stopping.deferring():
    for name in {names}:
        os.kill(os.getpid(), signal.Signals[name])
        time.sleep({pause})
    time.sleep({rest})
"""


def stuck(*names, pause=0.1, rest=60):
    """A process that takes no notice of any request, with the code and words of its end."""
    script = textwrap.dedent(STUCK).format(
        checkout=str(CHECKOUT), names=names, pause=pause, rest=rest
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    return done.returncode, done.stderr


@BOTH
def test_the_second_of_a_kind_ends_the_process_now(name):
    code, said = stuck(name, name)
    assert code == 128 + signal.Signals[name]
    assert said == f"{name}: stopping; a second {name} ends at once\n"


def test_one_of_each_kind_is_one_request():
    """torchrun answers the Control-C that all processes hear with a SIGTERM to each."""
    code, said = stuck("SIGINT", "SIGTERM", rest=0)
    assert code == 0, said
