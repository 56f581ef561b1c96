"""Work that is run, then recorded, then replayed; with a fake in place of CUDA's graphs."""

from contextlib import contextmanager

import pytest
import torch

from lib import replays
from lib.replays import Replays


class FakeGraph:
    """A recorded graph: replaying it does the recorded work on the inputs it was recorded with."""

    def __init__(self):
        self.work = lambda: None

    def replay(self):
        self.work()

    def pool(self):
        return "pool"


@pytest.fixture
def cuda(monkeypatch):
    """Keeps what was asked of CUDA; `refuses` makes a recording fail after its work was seen."""

    class Fake:
        def __init__(self):
            self.refuses: Exception | None = None
            self.recording: FakeGraph | None = None
            self.pools: list[object] = []
            self.modes: list[str] = []

        @contextmanager
        def graph(self, graph, *, pool, stream, capture_error_mode):
            self.pools.append(pool)
            self.modes.append(capture_error_mode)
            self.recording = graph
            try:
                yield
            finally:
                self.recording = None
            if self.refuses is not None:
                raise self.refuses

    fake = Fake()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device=None: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", fake.graph)
    return fake


@pytest.fixture
def doubling(cuda):
    """Work that appends twice its input, when it runs and when a replay does it."""

    class Doubling:
        def __init__(self):
            self.calls = 0  # of Python
            self.done: list[float] = []  # by the device

        def __call__(self, inputs):
            self.calls += 1

            def launched():
                self.done.append(float(sum(2 * tensor for tensor in inputs)))

            if cuda.recording is None:
                launched()
            else:
                cuda.recording.work = launched

    return Doubling()


def on(*, enabled=True, told=None):
    refused = (told if told is not None else []).append
    return Replays(torch.device("cpu"), enabled=enabled, refused=refused)


def number(value):
    return [torch.tensor(float(value))]


def test_the_first_time_runs_the_second_records_and_all_after_replay(doubling):
    replaying = on()
    for value in range(1, 6):
        replaying.run("key", doubling, number(value))
    assert doubling.done == [2, 4, 6, 8, 10]
    assert doubling.calls == 2


def test_work_that_is_not_to_be_replayed_runs_each_time(doubling):
    replaying = on(enabled=False)
    for value in range(4):
        replaying.run("key", doubling, number(value))
    assert doubling.calls == len(doubling.done) == 4


def test_inputs_of_the_caller_are_copied_and_never_held(doubling):
    replaying, given = on(), number(1)
    for _ in range(2):
        replaying.run("key", doubling, given)
    replaying.run("key", doubling, number(7))
    assert given[0] == 1
    assert doubling.done[-1] == 14


def test_work_without_inputs_is_replayed_too(doubling):
    replaying = on()
    for _ in range(3):
        replaying.run("key", doubling)
    assert (doubling.calls, doubling.done) == (2, [0, 0, 0])


def test_each_key_is_recorded_by_itself_into_one_pool(doubling, cuda):
    replaying = on()
    for _ in range(3):
        for key in ("one", "other"):
            replaying.run(key, doubling, number(1))
    assert doubling.calls == 4
    assert cuda.pools == [None, "pool"]
    assert cuda.modes == ["thread_local"] * 2  # other threads use the device meanwhile


def test_work_of_more_kinds_than_are_kept_runs_as_it_is(doubling, monkeypatch):
    monkeypatch.setattr(replays, "MOST", 2)
    replaying = on()
    for _ in range(3):
        for key in range(3):
            replaying.run(key, doubling, number(key))
    assert doubling.calls == 2 + 2 + 3
    assert doubling.done == [0, 2, 4] * 3


def test_a_recording_that_is_refused_is_told_once_and_the_work_is_done(doubling, cuda):
    told = []
    replaying, cuda.refuses = on(told=told), RuntimeError("capture is unsupported\na trace")
    for value in range(1, 5):
        replaying.run("key", doubling, number(value))
    assert told == ["RuntimeError: capture is unsupported"]
    assert doubling.done == [2, 4, 6, 8]
    assert not replaying.enabled
    assert len(cuda.pools) == 1


def test_what_was_recorded_before_a_refusal_is_run_from_then_on(doubling, cuda):
    told = []
    replaying = on(told=told)
    for value in (1, 2):
        replaying.run("one", doubling, number(value))
    cuda.refuses = RuntimeError("no")
    for value in (3, 4):
        replaying.run("other", doubling, number(value))
    calls = doubling.calls
    replaying.run("one", doubling, number(5))
    assert doubling.calls == calls + 1
    assert doubling.done == [2, 4, 6, 8, 10]


def test_a_fault_that_is_no_refusal_is_raised(doubling, cuda):
    replaying, cuda.refuses = on(), KeyError("a fault of ours")
    replaying.run("key", doubling, number(1))
    with pytest.raises(KeyError):
        replaying.run("key", doubling, number(2))


def test_on_a_cpu_there_is_no_stream_to_run_on():
    replaying = on()
    with replaying.stream():
        assert replaying._own is None
