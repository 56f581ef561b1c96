"""All that the data and cache stages write goes through lib/files.py, where tests can see it."""

import errno
import json
import os
import sys

import pytest

from tests.reliability import crashes, rigs, trials
from tests.reliability.crashes import Seam

EVENTS = {"os.mkdir", "os.rename", "os.remove", "os.link", "os.rmdir", "os.utime", "os.truncate"}


def written(event, args):
    """The paths that an audit event of the interpreter changes."""
    if event == "open":
        path, _mode, flags = args
        is_write = flags & crashes.WRITES and not crashes.is_probe(flags)
        return [path] if is_write and isinstance(path, str | os.PathLike | bytes) else []
    return [args[0]] if event in EVENTS else []


@pytest.mark.slow
def test_the_interpreter_sees_no_write_that_the_seam_does_not(rig, tmp_path):
    """By audit events, which no way of writing files in Python escapes."""
    root, found = rigs.fresh(tmp_path / "trial"), tmp_path / "found.json"

    def make():
        seen, told, here = set(), set(), os.path.realpath(root)

        def hook(event, args):
            if event == "open" or event in EVENTS:
                seen.update(os.path.realpath(os.fsdecode(p)) for p in written(event, args))

        sys.addaudithook(hook)
        with Seam(root, after=lambda operation: told.add(operation.path)):
            for stage in rigs.STAGES:
                rig.make(stage, root)
        ours = {path for path in seen if path.startswith(here)}
        found.write_text(json.dumps([sorted(ours - told), len(ours)]))

    assert crashes.run(make, log=tmp_path / "log") == 0, (tmp_path / "log").read_text()
    unseen, count = json.loads(found.read_text())
    assert unseen == []
    assert count > 3 * len(rigs.PICTURES)


def test_operations_are_numbered_and_the_same_each_time(tmp_path):
    traces = []
    for name in ("one", "two"):
        root = rigs.fresh(tmp_path / name)
        traces.append([op.name for op in trials.operations(trials.publication, root)])
    assert traces[0] == traces[1]
    root = rigs.fresh(tmp_path / "three")
    trace = trials.operations(trials.publication, root)
    numbers = [op.number for op in trace]
    assert numbers == sorted(set(numbers))  # what the system itself refuses has one too
    assert all(op.path.startswith(os.path.realpath(root)) for op in trace)


def test_every_file_is_synced_before_it_is_named_and_its_folder_after(tmp_path):
    trace = trials.operations(trials.publication, rigs.fresh(tmp_path / "trial"))
    placed = [op for op in trace if op.name in ("link", "replace")]
    assert len(placed) == 3  # the lease, the entry, the manifest
    for op in placed:
        before = [o.number for o in trace if o.name == "fsync" and o.path == op.path]
        written = [o.number for o in trace if o.name == "write" and o.path == op.path]
        folder = os.path.dirname(op.target)
        after = [o.number for o in trace if o.name == "fsync_folder" and o.path == folder]
        assert max(written) < min(before) < op.number < max(after)


def test_a_closed_seam_leaves_os_as_it_was(tmp_path):
    before = {name: getattr(os, name) for name in (*Seam.NAMES, *Seam.MOVES)}
    with (
        pytest.raises(OSError, match="No space"),
        Seam(tmp_path, before=crashes.failing_at(0, errno.ENOSPC, forever=True)),
    ):
        (tmp_path / "x").mkdir()
    assert {name: getattr(os, name) for name in before} == before
    (tmp_path / "x").mkdir()
