import threading
import time

import pytest

from lib.ahead import ahead


def workers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


def soon(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


@pytest.mark.parametrize("count", [0, 1, 2, 3, 20])
def test_what_is_made_comes_in_order(count):
    assert list(ahead(lambda n: n * n, range(count))) == [n * n for n in range(count)]
    assert not workers()


def test_it_works_ahead_by_its_depth_and_no_further():
    made = []
    stream = ahead(lambda n: made.append(n) or n, range(50), depth=2)
    assert next(stream) == 0
    assert soon(lambda: made == [0, 1, 2])
    time.sleep(0.05)
    assert made == [0, 1, 2]
    assert next(stream) == 1
    assert soon(lambda: made == [0, 1, 2, 3])
    stream.close()


def test_an_exception_comes_at_its_place_and_ends_the_thread():
    def make(n):
        if n == 3:
            raise OSError("the disk is gone")
        return n

    stream = ahead(make, range(9))
    assert [next(stream) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(stream)
    assert soon(lambda: not workers())


def test_the_thread_ends_when_the_consumer_stops_early_and_makes_no_more():
    made = []

    def make(n):
        time.sleep(0.1 if n else 0)
        made.append(n)
        return n

    stream = ahead(make, range(1000), depth=6)
    next(stream)
    stream.close()
    assert not workers()
    assert len(made) <= 3


def test_items_are_taken_one_by_one_and_never_all_at_once():
    taken = []

    def endless():
        n = 0
        while True:
            taken.append(n)
            yield n
            n += 1

    stream = ahead(lambda n: n, endless(), depth=2)
    assert [next(stream) for _ in range(3)] == [0, 1, 2]
    assert len(taken) <= 5 + 1
    stream.close()
