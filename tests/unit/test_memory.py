"""What is remembered of files holds only while they are unchanged."""

import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib import memory as memory_module
from lib.keys import file_digest
from lib.memory import RACY_NS, Item, Memory, Stat, stat_of

OLD_NS = 1_700_000_000_000_000_000


@pytest.fixture
def memory(tmp_path) -> Memory:
    return Memory(tmp_path / "store")


@pytest.fixture
def weights(tmp_path) -> Path:
    return old_file(tmp_path / "weights.safetensors", b"weights")


def old_file(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    os.utime(path, ns=(OLD_NS, OLD_NS))
    return path


def forbid_reading(monkeypatch) -> None:
    def refuse(path):
        raise AssertionError(f"{path} was hashed again")

    monkeypatch.setattr(memory_module, "file_digest", refuse)


def test_an_unchanged_file_is_hashed_once_also_by_the_next_process(memory, weights, monkeypatch):
    expected = file_digest(weights)
    assert memory.digest_of(weights, name="file:w") == expected
    forbid_reading(monkeypatch)
    assert memory.digest_of(weights, name="file:w") == expected
    assert Memory(memory.folder.parent).digest_of(weights, name="file:w") == expected


def test_another_name_of_the_same_file_is_another_memory(memory, weights):
    memory.digest_of(weights, name="file:w")
    assert memory.recall("hub:w", weights) is None
    assert memory.last("hub:w") is None


@pytest.mark.parametrize("field", ["size", "mtime_ns", "ctime_ns", "inode", "host"])
def test_any_other_stat_is_not_recalled(memory, weights, monkeypatch, field):
    memory.remember("file:w", weights, {"sha256": "x"})
    assert memory.recall("file:w", weights) == {"sha256": "x"}
    real = stat_of(weights)
    value = "another host" if field == "host" else getattr(real, field) + 1
    changed = Stat(**{**vars(real), field: value})
    monkeypatch.setattr(
        memory_module, "stat_of", lambda path: changed if path == weights else stat_of(path)
    )
    assert memory.recall("file:w", weights) is None
    assert memory.last("file:w") == {"sha256": "x"}


def test_a_changed_file_is_hashed_again_though_size_and_mtime_stay(memory, weights):
    first = memory.digest_of(weights, name="file:w")
    old_file(weights, b"WEIGHTS")
    assert memory.digest_of(weights, name="file:w") == file_digest(weights) != first


def test_a_file_that_changes_while_it_is_hashed_is_hashed_again(memory, weights, monkeypatch):
    def hash_while_it_changes(path):
        digest = file_digest(path)
        old_file(path, b"changed meanwhile")
        return digest

    monkeypatch.setattr(memory_module, "file_digest", hash_while_it_changes)
    memory.digest_of(weights, name="file:w")
    monkeypatch.undo()
    assert memory.digest_of(weights, name="file:w") == file_digest(weights)


@pytest.mark.parametrize(
    ("age_ns", "trusted"),
    [(-(10**12), False), (0, False), (RACY_NS - 1, False), (RACY_NS, True), (10**12, True)],
)
def test_a_file_just_written_is_not_trusted(memory, weights, monkeypatch, age_ns, trusted):
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now)
    os.utime(weights, ns=(now - age_ns, now - age_ns))
    memory.remember("file:w", weights, {"sha256": "x"})
    assert (memory.recall("file:w", weights) is not None) == trusted
    assert memory.last("file:w") == {"sha256": "x"}


def test_a_file_is_trusted_once_it_was_hashed_when_older_than_two_seconds(
    memory, weights, monkeypatch
):
    now = time.time_ns()
    os.utime(weights, ns=(now, now))
    memory.digest_of(weights, name="file:w")
    assert memory.recall("file:w", weights) is None
    monkeypatch.setattr(time, "time_ns", lambda: now + RACY_NS + 1)
    assert memory.recall("file:w", weights) is None
    expected = memory.digest_of(weights, name="file:w")
    forbid_reading(monkeypatch)
    assert memory.digest_of(weights, name="file:w") == expected


def test_an_absent_file_has_its_last_digest_and_else_none(memory, weights):
    expected = memory.digest_of(weights, name="file:w")
    weights.unlink()
    assert memory.digest_of(weights, name="file:w") == expected
    with pytest.raises(FileNotFoundError):
        memory.digest_of(weights, name="file:never seen")
    with pytest.raises(FileNotFoundError):
        memory.recall("file:w", weights)


def test_records_are_plain_json_that_can_be_rewritten(memory, weights):
    memory.remember("file:w", weights, {"sha256": "x"})
    (shard,) = memory.folder.glob("*.json")
    records = json.loads(shard.read_bytes())
    assert records["file:w"] == {**vars(stat_of(weights)), "racy": False, "value": {"sha256": "x"}}
    records["file:w"]["inode"] += 1
    shard.write_text(json.dumps(records))
    assert memory.recall("file:w", weights) is None


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b'{"a": 1}', b'{"a": {"size": "1"}}', b"\xff", b"[" * 100_000]
)
def test_a_damaged_shard_is_counted_forgotten_and_written_anew(memory, weights, text):
    memory.remember("file:w", weights, {"sha256": "x"})
    (shard,) = memory.folder.glob("*.json")
    shard.write_bytes(text)
    assert memory.recall("file:w", weights) is None
    assert memory.damaged == 1
    memory.remember("file:w", weights, {"sha256": "y"})
    assert Memory(memory.folder.parent).recall("file:w", weights) == {"sha256": "y"}


@settings(max_examples=15, deadline=None)
@given(names=st.sets(st.text(st.characters(exclude_categories=["Cs"])), max_size=6))
def test_what_was_remembered_together_is_recalled_one_by_one(names, tmp_path_factory):
    root = tmp_path_factory.mktemp("memory")
    weights = old_file(root / "weights", b"w")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        stat = stat_of(weights)
        Memory(root).remember_all(Item(name, stat, {"name": name}) for name in names)
    fresh = Memory(root)
    assert all(fresh.recall(name, weights) == {"name": name} for name in names)


def test_many_names_share_at_most_256_shards_each_read_once(memory, weights, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    stat = stat_of(weights)
    memory.remember_all(Item(f"entry {number}", stat, {"n": number}) for number in range(600))
    assert 200 < len(list(memory.folder.glob("*.json"))) <= 256
    fresh, reads = Memory(memory.folder.parent), []
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: reads.append(path) or real(path))
    assert all(fresh.recall(f"entry {n}", weights) == {"n": n} for n in range(600))
    assert len(reads) == len(set(reads))


def _remember(root: Path, weights: Path, barrier, worker: int) -> None:
    memory = Memory(root)
    barrier.wait()
    for number in range(30):
        memory.remember(f"{worker} {number % 3}", weights, {"n": number})


def test_processes_that_remember_at_once_lose_nothing(memory, weights, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(Memory, "_shard_path", lambda self, name: self.folder / "00.json")
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    args = [(memory.folder.parent, weights, barrier, worker) for worker in range(3)]
    workers = [context.Process(target=_remember, args=arg) for arg in args]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    found = {(w, n): memory.recall(f"{w} {n}", weights) for w in range(3) for n in range(3)}
    assert found == {(w, n): {"n": 27 + n} for w in range(3) for n in range(3)}
