"""A request to stop that is swallowed where it arrives comes back at the next check."""

import contextlib
import os
import signal
import threading

import pytest

from lib.signals import insisting


@pytest.fixture(autouse=True)
def interruptible():
    """As in a terminal: what a shell starts in the background ignores Control-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interruption_that_was_swallowed_comes_back():
    with insisting() as check:
        check()
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            check()


def test_it_still_raises_where_it_arrives_and_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), insisting():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_handler_of_another_s_is_called_each_time():
    called = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: called.append(number))
    try:
        with insisting() as check:
            os.kill(os.getpid(), signal.SIGTERM)
            check()
        assert called == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_that_nobody_handles_is_left_alone():
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with insisting():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_another_thread_only_passes_through():
    errors = []

    def work():
        with insisting() as check:
            check()
            errors.append(None)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == [None]
