"""Processes that share work: each key once, and what a dead one had is free at once."""

import os
import signal
import time

import numpy as np
import pytest

from lib.claims import claims
from lib.keys import Key, digest
from lib.store import Store
from lib.tensors import Tensor

PATIENCE_SECONDS = 20
KEYS = {number: Key(digest(number), {}) for number in range(12)}


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def put(store, number):
    tensors = {"mean": Tensor("F32", (2,), np.zeros(2, "<f4").tobytes())}
    store.put("latents", KEYS[number].digest, tensors, metadata={}, inputs={})


@pytest.fixture
def child():
    """Runs a function in a forked process; yields its pid, and ends it."""
    started = []

    def start(job):
        pid = os.fork()
        if pid == 0:
            try:
                job()
            finally:
                os._exit(0)
        started.append(pid)
        return pid

    yield start
    for pid in started:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.fixture
def holding(store, child, tmp_path):
    """A process that has claimed the first three items and makes none of them."""

    def hold():
        with claims(store, "latents", KEYS) as claimed:
            first = claimed.mine(KEYS)
            assert [next(first) for _ in range(3)] == [0, 1, 2]
            (tmp_path / "held").touch()
            time.sleep(PATIENCE_SECONDS)

    pid = child(hold)
    end = time.monotonic() + PATIENCE_SECONDS
    while not (tmp_path / "held").exists() and time.monotonic() < end:
        time.sleep(0.01)
    return pid


def test_alone_a_process_gets_what_is_not_made_and_waits_for_nothing(store):
    put(store, 4)
    with claims(store, "latents", KEYS) as claimed:
        assert list(claimed.mine(KEYS)) == [n for n in KEYS if n != 4]
        assert list(claimed.left()) == []
        assert claimed.found == 1


def test_what_another_process_claimed_is_passed_over(store, holding):
    with claims(store, "latents", KEYS) as claimed:
        assert list(claimed.mine(KEYS)) == list(range(3, 12))


def test_another_kind_has_claims_of_its_own(store, holding):
    with claims(store, "captions", KEYS) as claimed:
        assert list(claimed.mine(KEYS)) == list(KEYS)


def test_what_a_dead_process_had_claimed_is_free_at_once(store, holding):
    with claims(store, "latents", KEYS) as claimed:
        for item in claimed.mine(KEYS):
            claimed.free(item)
        os.kill(holding, signal.SIGKILL)
        began = time.monotonic()
        taken = []
        for item in claimed.left():
            taken.append(item)
            claimed.free(item)
        assert taken == [0, 1, 2]
        assert time.monotonic() - began < PATIENCE_SECONDS / 4


def test_what_another_process_made_meanwhile_is_not_made_again(store, child, tmp_path):
    def work():
        with claims(store, "latents", KEYS) as claimed:
            first = claimed.mine(KEYS)
            mine = [next(first) for _ in range(3)]
            (tmp_path / "held").touch()
            for item in mine:
                time.sleep(0.1)
                put(store, item)
                claimed.free(item)
            time.sleep(PATIENCE_SECONDS)

    child(work)
    end = time.monotonic() + PATIENCE_SECONDS
    while not (tmp_path / "held").exists() and time.monotonic() < end:
        time.sleep(0.01)
    with claims(store, "latents", KEYS) as claimed:
        for item in claimed.mine(KEYS):
            put(store, item)
            claimed.free(item)
        assert list(claimed.left()) == []
        assert claimed.found >= 1


def test_a_process_that_hangs_with_a_claim_is_not_waited_for_for_ever(store, holding, monkeypatch):
    from lib import claims as module

    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.2)
    with claims(store, "latents", KEYS) as claimed:
        for item in claimed.mine(KEYS):
            claimed.free(item)
        assert list(claimed.left()) == [0, 1, 2]
