"""Several processes on one store: nothing corrupt, nothing lost, no lock outlives its holder."""

import os
import signal
import time

import pytest

from lib import files
from lib.store import Store
from tests.reliability import crashes, crowds

ROUNDS, KEYS = 2, 60
POINTS, FEWER = 4, 16  # one call in so many; the benchmark takes all


@pytest.mark.slow
def test_two_writers_with_readers_verify_and_gc_harm_nothing(tmp_path):
    found = crowds.rounds(count=ROUNDS, keys=KEYS, writers=2, scratch=tmp_path)
    assert [wrong for wrong in found if wrong] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("half", "stage", "points"),
    [
        (False, "encode_captions", FEWER),
        (True, "build_latent_cache", FEWER),
        pytest.param(False, "encode_captions", POINTS, marks=pytest.mark.nightly),
        pytest.param(False, "build_latent_cache", POINTS, marks=pytest.mark.nightly),
        pytest.param(True, "encode_captions", POINTS, marks=pytest.mark.nightly),
        pytest.param(True, "build_latent_cache", POINTS, marks=pytest.mark.nightly),
    ],
)
def test_gc_at_any_call_of_a_builder_takes_nothing_that_it_has_found(
    whole, tmp_path, stage, half, points
):
    calls = crowds.planted(whole[stage], None, scratch=tmp_path, half=half).calls
    assert calls > 20
    for number in range(0, calls, points):
        found = crowds.planted(whole[stage], number, scratch=tmp_path, half=half)
        assert found.at
        assert found.wrong == []


def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path, monkeypatch):
    store, held = Store(tmp_path / "store"), tmp_path / "held"
    lock = store.root / "leases" / ".lock"

    def hold():
        with files.locked(lock):
            held.touch()
            time.sleep(600)

    child = crashes.started(hold, log=tmp_path / "log")
    while not held.exists():
        time.sleep(0.01)
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.2)
    with pytest.raises(files.StorageFailed, match="lock"), files.locked(lock):
        pass
    os.kill(child, signal.SIGKILL)
    monkeypatch.setattr(files, "LOCK_SECONDS", 5)
    with files.locked(lock):
        pass
    assert crashes.ended(child) == -signal.SIGKILL
