"""A disk that is full or broken: a refusal by name, nothing lost, and the same once it is mended."""

import errno
import os
import random
import shutil
import subprocess

import pytest

from lib.errors import InputRefused
from lib.files import StorageFailed
from lib.keys import digest
from lib.store import Store
from tests.reliability import crashes, rigs, trials
from tests.reliability.crashes import Seam

SAMPLED = 3  # operations of a stage that fail here; `python -m bench.reliability` fails all
OLD = digest("old")
HERE = ((errno.ENOSPC, True), (errno.EIO, False))  # the others: nightly
KINDS = {"encode_captions": "captions", "build_latent_cache": "latents"}


@pytest.mark.parametrize(
    ("code", "forever"),
    [
        pytest.param(
            code,
            forever,
            marks=() if (code, forever) in HERE else pytest.mark.nightly,
            id=f"{errno.errorcode[code]}-{forever}",
        )
        for forever in (False, True)
        for code in trials.REFUSALS
    ],
)
def test_a_publication_refused_at_any_operation_names_path_and_bytes_and_is_made_later(
    tmp_path, code, forever
):
    def before(root):
        trials.put(Store(root / "store"), OLD, 2)

    whole = rigs.fresh(tmp_path / "whole")
    before(whole)
    trace = trials.operations(trials.publication, whole)
    chosen = [op for op in trace if trials.may_fail(op, code)]
    assert len(chosen) > 15
    for operation in chosen:
        root = rigs.fresh(tmp_path / "trial")
        before(root)
        old = rigs.artifacts(root)

        def fail(root=root, number=operation.number):
            with Seam(root, before=crashes.failing_at(number, code, forever=forever)):
                trials.publication(root)

        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        assert crashes.run(fail, log=log) == StorageFailed.exit_code, operation
        said = log.read_text()
        assert "Traceback" not in said, operation
        for part in (str(root), "bytes needed", os.strerror(code)):
            assert part in said, operation
        assert old.items() <= rigs.artifacts(root).items()
        assert rigs.lies(root, whole=rigs.artifacts(whole)) == []
        placed = [op.number for op in trace if op.name == "replace" and "/cache/" in op.target]
        if operation.number <= placed[0]:
            assert Store(root / "store").manifest("cache", trials.KEY) is None
        trials.publication(root)
        assert rigs.artifacts(root) == rigs.artifacts(whole), operation
        assert rigs.leftovers(root) == [], operation


@pytest.mark.slow
@pytest.mark.parametrize("stage", rigs.STAGES)
def test_a_stage_that_the_disk_refuses_ends_by_name_and_is_made_later(whole, stage):
    run, rng = whole[stage], random.Random(stage)
    code = rng.choice(trials.REFUSALS)
    numbers = [op.number for op in run.trace if trials.may_fail(op, code)]
    for place, number in enumerate(sorted(rng.sample(numbers, SAMPLED))):
        assert trials.refuse(run, number, code, forever=bool(place % 2)) == []


@pytest.fixture
def small_disk(tmp_path):
    """Makes a disk of so many bytes, and lets it grow; without the right to, a limit on files."""
    mounted = []

    def make(size_bytes):
        folder = tmp_path / "disk"
        folder.mkdir(exist_ok=True)
        if mounted:
            subprocess.run(["umount", folder], check=True)
            mounted.clear()
        if trials.mount(folder, size_bytes):
            mounted.append(folder)
        return folder, bool(mounted)

    yield make
    for folder in mounted:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("stage", rigs.STAGES)
def test_a_disk_too_small_for_a_stage_is_refused_and_a_larger_one_takes_the_rest(
    whole, stage, small_disk
):
    size_bytes = trials.disk_bytes(whole[stage].root) - 2 * trials.PAGE_BYTES
    disk, mounted = small_disk(size_bytes)
    assert trials.fill(whole[stage], disk, limit_bytes=None if mounted else size_bytes) == []


@pytest.mark.parametrize("stage", KINDS)
def test_what_cannot_fit_is_refused_before_the_first_encode(whole, stage, tmp_path, monkeypatch):
    run, rows = whole[stage], rigs.Counter()
    root = rigs.fresh(tmp_path / "trial", like=run.before)
    usage = shutil.disk_usage(root)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10_000))
    with rigs.counting(rows), pytest.raises(InputRefused) as refused:
        run.rig.make(stage, root)
    assert rows.value == 0
    assert refused.value.exit_code == 2
    (problem,) = refused.value.problems
    assert str(root / "store") in problem.subject
    assert "10000 are free" in problem.why
    assert problem.remedy
    needed = int(problem.why.split(" needs ")[1].split()[0])
    written = sum(path.stat().st_size for path in (run.root / "store").glob(f"{KINDS[stage]}/*/*"))
    assert needed >= written > 10_000
    monkeypatch.undo()
    run.rig.make(stage, root)
    assert rigs.artifacts(root) == run.after
