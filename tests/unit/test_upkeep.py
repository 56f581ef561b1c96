"""Gc removes what nothing reaches, and nothing else."""

import json
import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib import upkeep
from lib.errors import StateRefused
from lib.files import TEMP_PREFIX, temporary_prefix
from lib.keys import digest
from lib.leases import lease
from lib.store import EntryRef, Store
from lib.upkeep import gc, stats

NOW = 2_000_000_000.0
DAY = 86_400
OLD = NOW - 100 * DAY


@pytest.fixture(autouse=True)
def unsynced(monkeypatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def record_run(store: Store, folder: Path, *names: object) -> None:
    path = store.root / "runs" / f"{digest(str(folder))}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    manifests = [["cache", digest(name)] for name in names]
    path.write_text(json.dumps({"folder": str(folder), "manifests": manifests}))


def collect(store: Store, *, keep_days=14, grace_seconds=0.0, dry_run=False) -> upkeep.GcReport:
    return gc(store, keep_days=keep_days, now=NOW, grace_seconds=grace_seconds, dry_run=dry_run)


def there(store: Store, *refs: EntryRef) -> list[bool]:
    return [store.size_bytes(ref.kind, ref.key) is not None for ref in refs]


def test_other_folders_of_the_store_are_neither_checked_nor_collected(store, put, check):
    put(store, 0, when=NOW)
    other = store.root / "bases" / digest("tiny") / "model.safetensors"
    other.parent.mkdir(parents=True)
    other.write_text("a base")
    os.utime(other, (1, 1))
    assert check(store).checked == 1
    assert check(store).stray == ()
    collect(store, keep_days=0)
    assert other.exists()


def test_what_was_compiled_is_counted_never_verified_and_goes_when_unused_for_long(store, check):
    for name, when in (("torch-1", OLD), ("torch-2", NOW - 13 * DAY)):
        kernel = store.root / "compiled" / name / "ab" / "kernel.so"
        kernel.parent.mkdir(parents=True)
        kernel.write_bytes(b"12345")
        os.utime(kernel.parents[1], (when, when))
    assert stats(store).kinds["compiled"] == upkeep.KindStats(2, 10)
    assert (check(store).checked, check(store).stray) == (0, ())
    told = collect(store, dry_run=True)
    assert told.removed == (store.root / "compiled" / "torch-1",)
    assert (store.root / "compiled" / "torch-1").exists()
    assert collect(store) == told
    assert told.freed_bytes == 5
    assert [path.name for path in (store.root / "compiled").iterdir()] == ["torch-2"]


def test_gc_keeps_what_runs_recent_manifests_and_leases_reach_and_removes_the_rest(
    store, tmp_path, put, publish, check
):
    names = ("run", "recent", "leased", "expired", "gone run", "leased manifest")
    refs = {name: put(store, name) for name in names}
    shared, orphan = put(store, "shared"), put(store, "orphan")
    for name in names:
        if name != "leased":
            publish(store, f"m {name}", refs[name], shared)
    os.utime(store.manifest_path("cache", digest("m recent")), (NOW - 13 * DAY,) * 2)
    record_run(store, tmp_path, "m run", "never published")
    record_run(store, tmp_path / "deleted", "m gone run")
    with lease(store, [refs["leased"].key, digest("m leased manifest")]):
        planned = collect(store, dry_run=True)
        assert all(there(store, *refs.values(), shared, orphan))
        report = collect(store)
    kept = ("run", "recent", "leased", "leased manifest")
    assert [name for name in names if there(store, refs[name]) == [True]] == [
        name for name in names if name in kept
    ]
    assert there(store, shared, orphan) == [True, False]
    removed = [
        *(store.manifest_path("cache", digest(f"m {name}")) for name in ("expired", "gone run"))
    ]
    removed += [store.entry_path("latents", refs[name].key) for name in ("expired", "gone run")]
    assert set(report.removed) == {*removed, store.entry_path("latents", orphan.key)}
    assert set(planned.removed) == set(report.removed)
    assert (planned.freed_bytes, planned.kept) == (report.freed_bytes, report.kept)
    assert report.kept == 5
    assert report.freed_bytes > 3 * orphan.size_bytes
    assert check(store).missing == ()


@settings(max_examples=25, deadline=None)
@given(
    manifests=st.lists(
        st.tuples(st.sets(st.integers(0, 7)), st.integers(0, 30), st.booleans()), max_size=5
    ),
    leased=st.sets(st.integers(0, 7), max_size=2),
)
def test_gc_removes_exactly_what_nothing_reaches(
    manifests, leased, tmp_path_factory, put, publish, check
):
    root = tmp_path_factory.mktemp("gc")
    store, reached = Store(root / "store"), set(leased)
    refs = [put(store, number) for number in range(8)]
    for number, (entries, age_days, has_run) in enumerate(manifests):
        publish(store, f"m{number}", *(refs[e] for e in entries), when=NOW - age_days * DAY)
        if has_run:
            record_run(store, root, *(f"m{n}" for n in range(number + 1) if manifests[n][2]))
        reached |= entries if has_run or age_days <= 14 else set()
    with lease(store, [refs[number].key for number in leased]):
        collect(store)
        assert {n for n in range(8) if there(store, refs[n]) == [True]} == reached
        assert collect(store).removed == ()
    assert check(store).missing == ()


def test_gc_spares_entries_younger_than_its_grace(store, monkeypatch, put):
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    young, old = put(store, "young", when=NOW - 59), put(store, "old", when=NOW - 61)
    collect(store, grace_seconds=60)
    assert there(store, young, old) == [True, False]
    assert waited == [60]


@pytest.mark.parametrize("how", ["lease", "touch", "run", "publish"])
def test_gc_sees_what_is_claimed_during_its_grace(store, tmp_path, monkeypatch, how, put, publish):
    ref = put(store, "wanted")
    if how != "publish":
        publish(store, "m", ref)
    claims = []

    def claim(seconds):
        if how == "lease":
            claims.append(lease(store, [ref.key]))
            claims[0].__enter__()
        elif how == "touch":
            store.touch("cache", digest("m"))
        elif how == "run":
            record_run(store, tmp_path, "m")
        else:
            publish(store, "m", ref, when=NOW)

    monkeypatch.setattr(time, "sleep", claim)
    os.utime(store.root, (1, 1))
    gc(store, keep_days=14, now=time.time() + DAY, grace_seconds=60, dry_run=False)
    assert there(store, ref) == [True]
    for one in claims:
        one.__exit__(None, None, None)


def test_gc_asks_again_before_each_batch(store, monkeypatch, put):
    refs = [put(store, number) for number in range(6)]
    monkeypatch.setattr(upkeep, "BATCH", 2)
    real, claims, batches = upkeep.changing, [], []

    def changing(store):
        batches.append(1)
        if len(batches) == 2:
            claims.append(lease(store, [ref.key for ref in refs]))
            claims[0].__enter__()
        return real(store)

    monkeypatch.setattr(upkeep, "changing", changing)
    report = collect(store)
    assert len(report.removed) == 2
    assert sum(there(store, *refs)) == 4
    claims[0].__exit__(None, None, None)


def test_no_lease_comes_between_reading_them_and_removing(store, monkeypatch, put):
    ref, real, found = put(store, "wanted"), upkeep.files.remove, []

    def build():
        with lease(store, [ref.key]):
            found.append(there(store, ref))

    builder = threading.Thread(target=build)

    def remove(path):
        if path == store.entry_path("latents", ref.key):
            builder.start()
            builder.join(0.2)
        real(path)

    monkeypatch.setattr(upkeep.files, "remove", remove)
    collect(store)
    builder.join()
    assert found == [[False]]


@pytest.mark.parametrize("what", ["manifest", "run", "run without manifests", "lease"])
def test_gc_removes_nothing_while_a_record_in_use_is_damaged(store, tmp_path, what, put, publish):
    ref, orphan = put(store, "wanted"), put(store, "orphan")
    publish(store, "m", ref)
    record_run(store, tmp_path, "m")
    path = {
        "manifest": store.manifest_path("cache", digest("m")),
        "lease": store.root / "leases" / "x.json",
    }.get(what, next((store.root / "runs").iterdir()))
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"folder": str(tmp_path)}) if "without" in what else "{")
    with pytest.raises(StateRefused, match=path.name):
        collect(store)
    assert there(store, ref, orphan) == [True, True]


def test_an_expired_manifest_may_be_damaged_and_goes(store, publish):
    publish(store, "m")
    path = store.manifest_path("cache", digest("m"))
    path.write_text("{")
    os.utime(path, (OLD, OLD))
    assert collect(store).removed == (path,)


def test_gc_clears_litter_and_leaves_live_writers_and_quarantine_alone(store):
    folder = store.root / "latents" / "ab"
    folder.mkdir(parents=True)
    (store.root / "quarantine").mkdir()
    stale, fresh = folder / f"{TEMP_PREFIX}1-a", folder / f"{TEMP_PREFIX}1-b"
    staged = folder / f"{TEMP_PREFIX}1-folder"
    staged.mkdir()
    (staged / "inside").write_text("staged")
    kept = [fresh, store.root / "quarantine" / f"{TEMP_PREFIX}1-c"]
    kept += [store.root / "quarantine" / "latents-x-1.safetensors"]
    for path in (stale, *kept):
        path.write_text("x")
        os.utime(path, (OLD, OLD))
    os.utime(staged, (OLD, OLD))
    os.utime(fresh, (NOW - DAY + 60,) * 2)
    with lease(store, []):
        (path,) = (store.root / "leases").glob("*.json")
        dead = path.with_name("dead.json")
        dead.write_text(json.dumps({**json.loads(path.read_bytes()), "started": "before"}))
        assert collect(store, dry_run=True).removed != ()
        assert all(path.exists() for path in (stale, staged, dead))
        report = collect(store)
        assert path.exists()
    assert set(report.removed) == {stale, staged, dead}
    assert not any(path.exists() for path in (stale, staged, dead))
    assert all(path.exists() for path in kept)


def test_gc_takes_the_lease_of_the_dead_only_with_the_files_it_left(store):
    """Or nobody would look for them any more."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    folder = store.root / "latents" / "ab"
    folder.mkdir(parents=True)
    dead, live = (folder / f"{temporary_prefix(pid)}x" for pid in (child, os.getpid()))
    for path in (dead, live):
        path.write_text("x")
        os.utime(path, (NOW, NOW))
    with lease(store, []):
        assert set(collect(store).removed) == {dead}
    assert live.exists()


def test_gc_follows_no_link_out_of_the_store(store, tmp_path, put):
    outside = Store(tmp_path / "outside")
    ref = put(outside, "mine")
    store.root.mkdir()
    (store.root / "latents").symlink_to(outside.root / "latents")
    (store.root / "captions").mkdir()
    (store.root / "captions" / ref.key[:2]).symlink_to(outside.root / "latents" / ref.key[:2])
    assert collect(store, keep_days=0).removed == ()
    assert outside.get("latents", ref.key)


def test_an_empty_or_absent_store_is_sound(store, check):
    assert check(store) == upkeep.VerifyReport(0, (), (), ())
    assert collect(store) == upkeep.GcReport((), 0, 0)
    assert stats(store).kinds == {}
