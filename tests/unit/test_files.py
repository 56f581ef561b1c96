"""The writing seam: every crash point, a full disk, exclusive creation."""

import errno
import json
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib import files

STEPS = ("open", "write", "fsync", "close", "replace", "link", "rename", "unlink", "mkdir")


class Crash(BaseException):
    """The process has died; nothing of ours may catch it."""


class Machine:
    """Counts the seam's system calls; from the `crash_at`-th on, none has any effect."""

    def __init__(self, monkeypatch, *, crash_at=None, torn=False):
        self.calls, self.crash_at, self.torn = [], crash_at, torn
        for step in STEPS:
            monkeypatch.setattr(os, step, self._wrap(step, getattr(os, step)))

    def _wrap(self, step, call):
        def wrapped(*args, **kwargs):
            self.calls.append(step)
            if self.crash_at is not None and len(self.calls) > self.crash_at:
                if self.torn and step == "write" and len(self.calls) == self.crash_at + 1:
                    call(args[0], args[1][: len(args[1]) // 2])
                raise Crash
            return call(*args, **kwargs)

        return wrapped


def temporaries(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith(files.TEMP_PREFIX)]


def count_calls(action, tmp_path: Path) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        machine = Machine(patch)
        action(tmp_path)
    return machine.calls


@pytest.mark.parametrize("torn", [False, True])
def test_a_crash_at_any_call_of_a_write_leaves_the_old_content_or_the_new(tmp_path, torn):
    old, new = b"old" * 1000, b"new" * 1000
    (tmp_path / "probe").mkdir()
    calls = count_calls(lambda folder: files.write_bytes(folder / "x", new), tmp_path / "probe")
    assert {"write", "fsync", "replace"} <= set(calls)
    seen = set()
    for crash_at in range(len(calls)):
        folder = tmp_path / str(crash_at)
        folder.mkdir()
        (folder / "x").write_bytes(old)
        with pytest.MonkeyPatch.context() as patch:
            Machine(patch, crash_at=crash_at, torn=torn)
            with pytest.raises(Crash):
                files.write_bytes(folder / "x", new)
        seen.add((folder / "x").read_bytes())
        files.write_bytes(folder / "x", new)
        assert (folder / "x").read_bytes() == new
    assert seen == {old, new}


def test_a_crash_at_any_call_of_a_creation_leaves_nothing_or_the_whole(tmp_path):
    (tmp_path / "probe").mkdir()
    calls = count_calls(lambda folder: files.create_bytes(folder / "x", b"new"), tmp_path / "probe")
    seen = set()
    for crash_at in range(len(calls)):
        folder = tmp_path / str(crash_at)
        folder.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            Machine(patch, crash_at=crash_at, torn=True)
            with pytest.raises(Crash):
                files.create_bytes(folder / "x", b"new")
        seen.add((folder / "x").read_bytes() if (folder / "x").exists() else None)
    assert seen == {None, b"new"}


def test_data_are_synced_before_they_get_their_name_and_the_folder_after(tmp_path):
    calls = count_calls(lambda folder: files.write_bytes(folder / "x", b"data"), tmp_path)
    place = calls.index("replace")
    assert (
        calls.index("write")
        < calls.index("fsync")
        < place
        < len(calls) - calls[::-1].index("fsync")
    )
    assert calls.count("fsync") == 2


def test_a_write_over_many_partial_writes_is_whole(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
    files.write_bytes(tmp_path / "x", bytes(range(256)))
    assert (tmp_path / "x").read_bytes() == bytes(range(256))


@pytest.mark.parametrize("step", ["open", "write", "fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_a_refused_write_names_path_and_bytes_and_leaves_the_old_file_alone(tmp_path, step, code):
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def refuse(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, step, refuse)
        with pytest.raises(files.StorageFailed) as caught:
            files.write_bytes(path, b"n" * 4321)
    for part in (str(path), "4321 bytes", os.strerror(code)):
        assert part in str(caught.value)
    assert caught.value.exit_code == 1
    assert path.read_bytes() == b"old"
    assert temporaries(tmp_path) == []


def test_a_write_leaves_no_temporary_file(tmp_path):
    files.write_bytes(tmp_path / "a" / "b" / "x", b"1")
    files.create_bytes(tmp_path / "a" / "b" / "x", b"2")
    assert os.listdir(tmp_path / "a" / "b") == ["x"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(value=json_values)
def test_json_round_trips_as_one_line(value, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "value.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        files.write_json(path, value)
    text = path.read_bytes()
    assert json.loads(text) == value
    assert text.endswith(b"\n")
    assert text.count(b"\n") == 1


def test_json_refuses_what_is_not_finite(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        files.write_json(tmp_path / "x.json", {"loss": float("nan")})
    assert os.listdir(tmp_path) == []


def test_exclusive_creation_has_one_winner_and_keeps_its_content(tmp_path):
    results, barrier = {}, threading.Barrier(8)

    def create(number):
        barrier.wait()
        results[number] = files.create_bytes(tmp_path / "x", f"winner {number}".encode())

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [number for number, won in results.items() if won]
    assert len(winners) == 1
    assert (tmp_path / "x").read_text() == f"winner {winners[0]}"
    assert os.listdir(tmp_path) == ["x"]


def test_creation_on_a_full_disk_is_an_error_and_not_a_loss(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(files.StorageFailed):
        files.create_bytes(tmp_path / "x", b"data")
    assert os.listdir(tmp_path) == []


def test_claimed_folders_are_numbered_and_never_shared(tmp_path):
    base = tmp_path / "runs" / "fox"
    names = [files.claim_folder(base).name for _ in range(3)]
    assert names == ["fox", "fox-2", "fox-3"]
    base.rmdir()
    base.write_text("a file in the way")
    assert files.claim_folder(base).name == "fox-4"


def test_lines_are_appended_whole_and_hold_no_break(tmp_path):
    path = tmp_path / "run" / "events.jsonl"
    files.append_line(path, "one")
    files.append_line(path, "two")
    assert path.read_text() == "one\ntwo\n"
    with pytest.raises(ValueError, match="break"):
        files.append_line(path, "a\nb")


def test_removing_a_link_leaves_what_it_points_at(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    files.remove(tmp_path / "link")
    files.remove(tmp_path / "absent")
    assert (tmp_path / "data" / "x").read_text() == "kept"
    files.remove(tmp_path / "data")
    assert os.listdir(tmp_path) == []


def test_a_move_takes_a_file_to_another_folder(tmp_path):
    (tmp_path / "x").write_text("moved")
    files.move(tmp_path / "x", tmp_path / "aside" / "y")
    assert (tmp_path / "aside" / "y").read_text() == "moved"
    assert not (tmp_path / "x").exists()


def test_a_file_in_place_of_a_folder_is_named(tmp_path):
    (tmp_path / "x").write_text("a file")
    with pytest.raises(files.StorageFailed, match="x"):
        files.write_bytes(tmp_path / "x" / "y", b"")
