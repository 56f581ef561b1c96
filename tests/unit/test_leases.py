"""Who is alive, and what is cleared up after those who are not."""

import json
import multiprocessing
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lib import files
from lib import leases as leases_module
from lib.errors import StateRefused
from lib.files import TEMP_PREFIX, temporary_prefix, this_host
from lib.keys import digest, make_key
from lib.leases import DAY_SECONDS, clear_dead, is_alive, lease, leases, this_process
from lib.store import Store

KEY = digest("key")


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(tmp_path / "store")


def rewrite(store: Store, **fields) -> None:
    (found,) = leases(store)
    record = json.loads(found.path.read_bytes())
    found.path.write_text(json.dumps({**record, **fields}))


def test_a_lease_is_there_during_the_block_only_also_when_it_fails(store):
    key = make_key("image", a=1)
    with lease(store, [KEY, KEY, key]):
        (found,) = leases(store)
        assert found.keys == {KEY, str(key)}
        assert found.owner == this_process()
        assert found.is_live(time.time())
    assert leases(store) == ()
    with pytest.raises(KeyboardInterrupt), lease(store, [KEY]):
        raise KeyboardInterrupt
    assert leases(store) == ()


def test_a_reused_process_number_is_another_process(store):
    owner = this_process()
    assert is_alive(owner)
    assert not is_alive(replace(owner, started=owner.started + "1"))


def test_a_killed_process_is_dead_though_its_parent_has_not_noticed(store):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, leases_module._started(os.getpid()).encode())
        signal.pause()
    owner = replace(this_process(), pid=pid, started=os.read(reader, 100).decode())
    try:
        assert is_alive(owner)
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        assert is_alive(owner)
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert not is_alive(owner)
    finally:
        os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)
    assert not is_alive(owner)


def test_a_lease_of_another_host_is_believed_for_a_day(store):
    with lease(store, [KEY]):
        rewrite(store, host="another", pid=1, started="x", time=1000.0)
        (found,) = leases(store)
        assert found.is_live(1000.0 + DAY_SECONDS - 1)
        assert not found.is_live(1000.0 + DAY_SECONDS)


def _die_holding_a_lease(root: Path) -> None:
    store = Store(root)
    with lease(store, [KEY]):
        folder = root / "latents" / "ab"
        folder.mkdir(parents=True)
        (folder / f"{temporary_prefix(os.getpid())}file").write_text("torn")
        (folder / f"{temporary_prefix(os.getpid())}folder").mkdir()
        (folder / f"{TEMP_PREFIX}elsewhere-{os.getpid()}-file").write_text("of another host")
        (root / "quarantine").mkdir()
        (root / "quarantine" / f"{temporary_prefix(os.getpid())}file").write_text("never touched")
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_next_lease_clears_up_after_a_killed_process(store):
    worker = multiprocessing.get_context("fork").Process(
        target=_die_holding_a_lease, args=(store.root,)
    )
    worker.start()
    worker.join()
    assert len(leases(store)) == 1
    with lease(store, [KEY]):
        assert [found.owner.pid for found in leases(store)] == [os.getpid()]
        left = {path.relative_to(store.root) for path in store.root.rglob(f"{TEMP_PREFIX}*")}
    assert left == {
        Path("latents", "ab", f"{TEMP_PREFIX}elsewhere-{worker.pid}-file"),
        Path("quarantine", f"{temporary_prefix(worker.pid)}file"),
    }


def test_a_lease_that_was_never_published_leaves_no_file_either(store):
    """Its own temporary file is under no lease; that of a live process stays."""
    worker = multiprocessing.get_context("fork").Process(target=int)
    worker.start()
    worker.join()
    folder = store.root / "leases"
    folder.mkdir(parents=True)
    dead, live = (folder / f"{temporary_prefix(pid)}x" for pid in (worker.pid, os.getpid()))
    dead.write_text("{")
    live.write_text("{")
    with lease(store, [KEY]):
        assert not dead.exists()
        assert live.exists()


def test_a_container_with_the_host_s_name_is_another_host(store, monkeypatch):
    mine = this_host()
    monkeypatch.setattr(files, "this_host", lambda: f"{mine} of a container")
    with lease(store, [KEY]):
        monkeypatch.setattr(files, "this_host", lambda: mine)
        assert files.writer_of(f"{temporary_prefix(7)}x") == 7
        (found,) = leases(store)
        assert found.owner.host != mine
        assert found.is_live(time.time())


@pytest.mark.parametrize("name", ["x", ".tmp-", ".tmp-1-a", ".tmp-a-b-c", f"{temporary_prefix(1)}"])
def test_only_a_temporary_file_of_this_host_has_a_writer(name):
    assert files.writer_of(name) == (1 if name == temporary_prefix(1) else None)


def test_the_files_of_a_live_process_stay_when_its_number_was_once_anothers(store):
    with lease(store, [KEY]):
        rewrite(store, started="an earlier boot")
        mine = store.root / "latents" / f"{temporary_prefix(os.getpid())}file"
        mine.parent.mkdir()
        mine.write_text("being written")
        assert len(clear_dead(store, now=time.time())) == 1
        assert leases(store) == ()
        assert mine.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": 1}'])
def test_a_damaged_lease_is_refused_by_name(store, text):
    path = store.root / "leases" / "x.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(StateRefused, match=r"x\.json"):
        leases(store)


def test_without_proc_a_number_in_use_counts_as_alive(monkeypatch):
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    assert is_alive(this_process())
    assert not is_alive(replace(this_process(), pid=2**22 + 1))
    assert this_process().host == this_host()
