import os
import signal
import subprocess
import sys

import pytest

from lib.process import is_alive, this_process


@pytest.fixture
def sleeper():
    """A process of ours, and the record it would leave."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.stdin.close()
    process.wait()


def record_of(pid):
    import psutil

    return {**this_process(), "pid": pid, "started": psutil.Process(pid).create_time()}


def test_this_process_is_alive():
    assert this_process()["pid"] == os.getpid()
    assert is_alive(this_process())


def test_another_process_is_alive_until_it_ends(sleeper):
    record = record_of(sleeper.pid)
    assert is_alive(record)
    sleeper.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(record)  # ended, and not yet waited for
    sleeper.wait()
    assert not is_alive(record)


def test_a_number_used_again_is_another_process(sleeper):
    record = record_of(sleeper.pid)
    assert not is_alive({**record, "started": record["started"] - 100})


def test_a_process_of_another_host_may_live():
    assert is_alive({**this_process(), "host": "elsewhere", "started": 0})
