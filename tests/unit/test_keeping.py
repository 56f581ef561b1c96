"""Records into the store: in order, by how many threads whatever, and what a fault costs."""

import threading
import time

import pytest
import torch

from lib import keeping, stopping
from lib.encoding import Failed
from lib.errors import SamplesFailed, Stopped
from lib.events import Events
from lib.files import StorageFailed
from lib.keeping import Pace, in_threads, put_all
from lib.keys import Key, digest
from lib.store import EntryRef, Store

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


@pytest.fixture
def kept(store):
    """Puts records by name into the store, with so many threads; progress is kept in `told`."""
    told = []

    def put(records, *, writers, taken=None):
        keys = {name: Key(digest(name), {"name": name}) for name in records}

        def encode(items):
            for item in items:
                if taken is not None:
                    taken.append(item)
                yield item, records[item]

        return put_all(
            list(records),
            encode,
            keys=keys,
            kind="latents",
            store=store,
            subject_of=lambda name: f"picture {name}",
            events=Events(sinks=(lambda event: told.append(event.data),)),
            writers=writers,
        )

    put.told = told
    return put


def record(number):
    return {"mean": torch.full((4,), float(number))}


def some(count):
    return {f"n{number}": record(number) for number in range(count)}


def stored(store, name):
    return store.get("latents", digest(name)).tensors["mean"].data


@pytest.mark.parametrize("writers", [0, 1, 3])
def test_every_record_is_stored_once_and_told_in_order(kept, store, writers):
    refs = kept(some(40), writers=writers)
    assert {ref.key for ref in refs} == {digest(f"n{number}") for number in range(40)}
    for number in range(40):
        expected = torch.full((4,), float(number)).numpy().tobytes()
        assert stored(store, f"n{number}") == expected
    assert [event["done"] for event in kept.told] == list(range(1, 41))


@pytest.mark.parametrize("writers", [0, 1, 3])
def test_what_fails_or_is_not_finite_is_named_and_the_others_are_kept(kept, store, writers):
    records = some(20)
    records["n4"] = Failed("could not be encoded", remedy="free memory")
    records["n11"] = {"mean": torch.tensor([float("nan")])}
    records["n17"] = Failed("changed")
    with pytest.raises(SamplesFailed) as failed:
        kept(records, writers=writers)
    subjects = [problem.subject for problem in failed.value.problems]
    assert sorted(subjects) == ["picture n11", "picture n17", "picture n4"]
    assert sum(1 for _ in (store.root / "latents").glob("*/*")) == 17
    assert kept.told[-1]["done"] == 20


@pytest.mark.parametrize("writers", [0, 3])
def test_what_was_opened_is_what_reads_as_it_was_stored(kept, store, writers, monkeypatch):
    put = Store.put

    def damaging(self, kind, key, *args, **named):
        ref = put(self, kind, key, *args, **named)
        if key == digest("n3"):
            path = self.entry_path(kind, key)
            path.write_bytes(path.read_bytes()[:-1] + b"\1")
        return ref

    monkeypatch.setattr(Store, "put", damaging)
    refs = kept(some(6), writers=writers)
    assert {ref.key for ref in refs} == {digest(f"n{n}") for n in range(6) if n != 3}
    assert all(isinstance(ref, EntryRef) for ref in refs)


@pytest.mark.parametrize("writers", [0, 3])
def test_a_disk_that_refuses_ends_it_and_leaves_no_thread(kept, store, writers, monkeypatch):
    real, before = keeping.to_stored, threading.active_count()

    def full(tensors):
        if tensors["mean"][0] == 5:
            raise StorageFailed([])
        return real(tensors)

    monkeypatch.setattr(keeping, "to_stored", full)
    with pytest.raises(StorageFailed):
        kept(some(200), writers=writers)
    assert threading.active_count() == before
    found = sum(1 for _ in (store.root / "latents").glob("*/*"))
    assert found < 5 + (writers or 1) * (keeping.WAITING + 1)


def test_a_stop_keeps_what_is_encoded_and_encodes_no_more(kept, store, monkeypatch):
    taken, real = [], keeping.to_stored

    def slowly(tensors):
        time.sleep(0.005)
        return real(tensors)

    def check():
        if len(taken) > 10:
            raise Stopped("stop", by="SIGINT")

    monkeypatch.setattr(keeping, "to_stored", slowly)
    monkeypatch.setattr(stopping, "check", check)
    with pytest.raises(Stopped):
        kept(some(100), writers=3, taken=taken)
    assert len(taken) < 30
    assert sum(1 for _ in (store.root / "latents").glob("*/*")) == len(taken)


@pytest.mark.parametrize("threads", [1, 4])
def test_no_more_records_wait_than_the_writers_are_allowed(threads):
    lock, inside, most = threading.Lock(), set(), [0]

    def keep(item, _record):
        time.sleep(0.003)
        with lock:
            inside.discard(item)
        return None

    def records():
        for number in range(60):
            with lock:
                inside.add(number)
                most[0] = max(most[0], len(inside))
            yield number, record(number)

    assert [item for item, _ in in_threads(keep, records(), threads=threads)] == list(range(60))
    assert threads <= most[0] <= keeping.WAITING * threads + 1


@pytest.mark.parametrize(
    ("device", "asked", "fitting", "expected"),
    [
        (CPU, None, 16, Pace(1, late=0, writers=0)),
        (CPU, 4, 16, Pace(4, late=0, writers=0)),
        (GPU, None, 16, Pace(16, late=16, writers=keeping.WRITERS)),
        (GPU, None, 0, Pace(1, late=1, writers=keeping.WRITERS)),
        (GPU, None, 999, Pace(64, late=64, writers=keeping.WRITERS)),
        (GPU, 3, 16, Pace(3, late=3, writers=keeping.WRITERS)),
    ],
)
def test_a_gpu_encodes_many_together_and_a_cpu_one_unless_asked(device, asked, fitting, expected):
    assert Pace.of(device, asked=asked, fitting=fitting) == expected
