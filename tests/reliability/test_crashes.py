"""A crash at any moment: what was made is whole, and the same command makes the rest."""

import random
import time

import pytest

from lib.store import Damaged, Store
from tests.reliability import crashes, rigs, trials
from tests.reliability.crashes import CRASHED, Seam

KILLS = 3


@pytest.mark.slow
@pytest.mark.parametrize("stage", rigs.STAGES)
def test_a_stage_killed_at_any_time_makes_the_same_when_run_again(whole, stage):
    rng, run = random.Random(stage), whole[stage]
    root = rigs.fresh(run.scratch / "trial", like=run.before)
    began = time.monotonic()
    assert crashes.run(lambda: run.rig.make(stage, root), log=run.log) == 0, run.log.read_text()
    seconds = time.monotonic() - began
    assert rigs.artifacts(root) == run.after
    times = [rng.uniform(0, seconds) for _ in range(KILLS)]
    assert trials.kill(run, after_seconds=times) == []


def test_what_is_made_is_counted(whole):
    assert whole["prepare_dataset"].rows == 0
    assert whole["encode_captions"].rows == len(rigs.PICTURES) + 1
    assert whole["build_latent_cache"].rows == len(rigs.PICTURES)
    assert len(whole["build_latent_cache"].after) == len(rigs.PICTURES) + 2


@pytest.fixture
def reference(tmp_path):
    root = tmp_path / "whole"
    root.mkdir()
    trace = trials.operations(trials.publication, root)
    return root, trace


@pytest.mark.parametrize("torn", [False, True])
def test_a_crash_at_any_operation_of_a_publication_leaves_it_to_the_next_run(
    reference, tmp_path, torn
):
    whole, trace = reference
    names = {operation.name for operation in trace}
    assert {"open", "write", "fsync", "fsync_folder", "link", "replace", "unlink", "mkdir"} <= names
    chosen = [op.number for op in trace if not torn or op.name == "write"]
    assert len(chosen) > 2
    for number in chosen:
        root = rigs.fresh(tmp_path / "trial")

        def crash(root=root, number=number):
            with Seam(root, before=crashes.dying_at(number, torn=torn)):
                trials.publication(root)

        assert crashes.run(crash, log=tmp_path / "log") == CRASHED
        assert rigs.lies(root, whole=rigs.artifacts(whole)) == [], trace[number]
        trials.publication(root)
        assert rigs.artifacts(root) == rigs.artifacts(whole), trace[number]
        assert rigs.leftovers(root) == [], trace[number]
        assert trials.sound(root) == [], trace[number]


def test_the_harness_sees_a_torn_file_under_its_own_name(tmp_path, monkeypatch):
    """With a writer that writes in place, the same crashes are found out."""
    from lib import files

    def in_place(path, data, *, place):
        files.make_folder(path.parent)
        files._write_synced(path, data)

    monkeypatch.setattr(files, "_publish", in_place)
    whole = rigs.fresh(tmp_path / "whole")
    trace = trials.operations(trials.publication, whole)
    seen = set()
    for number in [op.number for op in trace if op.name == "write"]:
        root = rigs.fresh(tmp_path / "trial")

        def crash(root=root, number=number):
            with Seam(root, before=crashes.dying_at(number, torn=True)):
                trials.publication(root)

        assert crashes.run(crash, log=tmp_path / "log") == CRASHED
        store = Store(root / "store")
        for read, name in ((store.get, "latents"), (store.manifest, "cache")):
            try:
                read(name, trials.KEY)
            except Damaged as damage:
                seen.add(name if damage.path.exists() else "absent")
    assert {"latents", "cache"} <= seen
