"""A power cut takes what was not synced, or leaves any part of it: nothing reads as sound and is not."""

import os
import random
from dataclasses import replace

import pytest

from lib.store import Manifest, Store
from tests.reliability import disks, rigs, trials
from tests.reliability.crashes import Seam

STATES = 34  # a stage; a hundred over the three
RERUNS = 2


@pytest.mark.slow
@pytest.mark.parametrize("stage", rigs.STAGES)
def test_no_state_after_a_power_cut_lies_and_a_run_comes_to_the_end_from_it(whole, stage):
    rng = random.Random(stage)
    wrong = list(trials.cut_power(whole[stage], count=STATES, rng=rng, reruns=RERUNS))
    assert len(wrong) == STATES
    assert [one for one in wrong if one] == []


def lies_of(trace, root, tmp_path, *, count=60, whole):
    """What lies in the states after power cuts of a trace of a publication."""
    disk = disks.Disk(os.path.realpath(root))
    cuts = disks.power_cuts(trace, disk=disk, count=count, rng=random.Random(0))
    found = []
    for _cut, _mode, state in cuts:
        folder = rigs.fresh(tmp_path / "state")
        folder.rmdir()
        disks.lay_out(state, root=root, folder=folder)
        if (folder / "store").exists():
            found += rigs.lies(folder, whole=whole)
    return found


@pytest.fixture
def published(tmp_path):
    root = rigs.fresh(tmp_path / "whole")
    return root, trials.operations(trials.publication, root)


def test_a_publication_lies_in_no_state(published, tmp_path):
    root, trace = published
    assert lies_of(trace, root, tmp_path, whole=rigs.artifacts(root)) == []


@pytest.mark.parametrize("kind", ["fsync", "fsync_folder"])
def test_the_harness_sees_a_missing_sync(published, tmp_path, kind):
    """Without a file's sync a manifest names what is damaged, without a folder's what is absent."""
    root, trace = published
    entry = next(op.path for op in trace if op.name == "link")
    dropped = {"fsync": {entry}, "fsync_folder": {os.path.dirname(entry)}}[kind]
    rest = [op for op in trace if not (op.name == kind and op.path in dropped)]
    assert len(rest) < len(trace)
    found = lies_of(rest, root, tmp_path, whole=rigs.artifacts(root))
    assert any("names" in lie for lie in found)


def test_a_manifest_names_no_entry_that_another_process_has_not_synced(tmp_path):
    """The other has given its entry a name and was stopped before it synced the folder."""
    root, trace = rigs.fresh(tmp_path / "whole"), []
    store = Store(root / "store")

    class Stopped(BaseException):
        pass

    def stop(operation):
        if operation.name == "fsync_folder" and any(op.name == "link" for op in trace):
            raise Stopped

    with Seam(root, before=stop, after=trace.append), pytest.raises(Stopped):
        trials.put(store, trials.KEY, 1)
    assert store.get("latents", trials.KEY)
    with Seam(root, after=trace.append):
        ref = trials.put(store, trials.KEY, 1)
        store.publish(Manifest("cache", trials.KEY, {}, {"train": (ref,)}, {}))
    numbered = [replace(op, number=number) for number, op in enumerate(trace)]
    assert lies_of(numbered, root, tmp_path, whole=rigs.artifacts(root)) == []


def test_a_disk_keeps_what_is_synced_and_may_lose_the_rest():
    from tests.reliability.crashes import Operation

    disk, rng = disks.Disk("/r"), random.Random(0)
    for name, path, more in (
        ("mkdir", "/r/a", {}),
        ("fsync_folder", "/r", {}),
        ("open", "/r/a/t", {}),
        ("write", "/r/a/t", {"data": b"12"}),
        ("fsync", "/r/a/t", {}),
        ("write", "/r/a/t", {"data": b"3"}),
        ("link", "/r/a/t", {"target": "/r/a/x"}),
    ):
        disk.apply(Operation(0, name, path, **more))
    assert disk.survivors("nothing", rng) == {"/r/a": None}
    assert disk.survivors("names", rng) == {"/r/a": None, "/r/a/t": b"12", "/r/a/x": b"12"}
    seen = {tuple(disk.survivors("anything", rng).items()) for _ in range(200)}
    assert len({len(state) for state in seen}) == 3
    assert {dict(state).get("/r/a/x") for state in seen} >= {None, b"", b"1", b"12", bytes(3)}
    disk.apply(Operation(0, "fsync_folder", "/r/a"))
    disk.apply(Operation(0, "unlink", "/r/a/t"))
    assert set(disk.survivors("nothing", rng)) == {"/r/a", "/r/a/t", "/r/a/x"}
    assert set(disk.survivors("names", rng)) == {"/r/a", "/r/a/x"}
