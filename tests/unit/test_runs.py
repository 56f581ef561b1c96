import dataclasses
import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from lib import runs
from lib.config import parse
from lib.errors import StateRefused
from lib.events import Events
from lib.keys import digest, file_digest
from lib.leases import this_process
from lib.schema import Config

ROOT = Path(__file__).parents[2]
KEY = digest("run")
NO_PROCESS = {**asdict(this_process()), "started": "long ago"}


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


def claim(store, key=KEY, *, rerun=False):
    return runs.claim(
        store,
        key,
        outputs=store.parent / "outputs",
        name="flux",
        manifests=[("a", "b")],
        rerun=rerun,
    )


def change(store, **fields):
    path = runs.record_path(store, KEY)
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def complete(store, key=KEY, data=b"weights"):
    taken = claim(store, key)
    with runs.held(store, taken):
        adapter = taken.folder / runs.ADAPTER_FILE
        adapter.parent.mkdir()
        adapter.write_bytes(data)
    return taken


def test_a_claim_takes_a_folder_and_says_whose_it_is(store):
    taken = claim(store)
    assert taken == runs.Claim(KEY, store.parent / "outputs" / "flux", resumed=False)
    assert taken.folder.is_dir()
    record = runs.read(store, KEY)
    assert record["state"] == "running"
    assert record["process"] == asdict(this_process())
    assert Path(record["folder"]) == taken.folder.resolve()
    assert record["manifests"] == [["a", "b"]]


def test_a_running_run_is_refused_with_its_process_and_folder(store):
    taken = claim(store)
    with pytest.raises(StateRefused) as caught:
        claim(store)
    text = str(caught.value)
    assert f"process {this_process().pid} on {this_process().host}" in text
    assert str(taken.folder.resolve()) in text
    assert list((store.parent / "outputs").iterdir()) == [taken.folder]


@pytest.mark.parametrize("rerun", [True, False])
def test_rerun_does_not_take_a_running_run_either(store, rerun):
    claim(store)
    with pytest.raises(StateRefused):
        claim(store, rerun=rerun)


def test_a_dead_owner_s_run_is_resumed_in_its_folder(store):
    taken = claim(store)
    change(store, process=NO_PROCESS)
    again = claim(store)
    assert again == dataclasses.replace(taken, resumed=True)
    assert runs.read(store, KEY)["process"] == asdict(this_process())


def test_a_stopped_run_is_resumed_wherever_the_outputs_are_now(store):
    taken = claim(store)
    change(store, state="stopped")
    again = runs.claim(
        store, KEY, outputs=store.parent / "elsewhere", name="other", manifests=[], rerun=False
    )
    assert again.folder.resolve() == taken.folder.resolve()
    assert again.resumed


def test_rerun_takes_a_new_folder_and_leaves_the_old_one(store):
    taken = claim(store)
    change(store, state="stopped")
    again = claim(store, rerun=True)
    assert (again.folder.name, again.resumed) == ("flux-2", False)
    assert taken.folder.is_dir()


def test_a_deleted_folder_is_a_new_claim(store):
    taken = claim(store)
    shutil.rmtree(taken.folder)
    change(store, state="stopped")
    again = claim(store)
    assert not again.resumed
    assert again.folder.is_dir()


def test_runs_of_one_name_get_folders_of_their_own(store):
    keys = [digest(number) for number in range(3)]
    assert [claim(store, key).folder.name for key in keys] == ["flux", "flux-2", "flux-3"]


def test_a_complete_run_is_found_by_its_key(store):
    assert runs.completed(store, KEY) is None
    taken = complete(store)
    assert runs.completed(store, KEY) == taken.folder.resolve()
    assert runs.completed(store, digest("another")) is None
    assert runs.read(store, KEY)["adapters"][runs.ADAPTER_FILE] == file_digest(
        taken.folder / runs.ADAPTER_FILE
    )


@pytest.mark.parametrize("harm", ["change", "delete", "folder"])
def test_a_complete_run_whose_adapter_is_another_is_none(store, harm):
    taken = complete(store)
    adapter = taken.folder / runs.ADAPTER_FILE
    if harm == "change":
        adapter.write_bytes(b"Weights")
    elif harm == "delete":
        adapter.unlink()
    else:
        shutil.rmtree(taken.folder)
    assert runs.completed(store, KEY) is None
    again = claim(store)
    assert not again.resumed
    assert again.folder.is_dir()


@pytest.mark.parametrize("state", ["running", "stopped"])
def test_a_run_that_is_not_complete_is_no_result(store, state):
    complete(store)
    change(store, state=state)
    assert runs.completed(store, KEY) is None


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_any_way_out_but_the_end_leaves_the_run_stopped(store, error):
    taken = claim(store)
    with pytest.raises(error), runs.held(store, taken):
        raise error
    assert runs.read(store, KEY)["state"] == "stopped"
    assert claim(store).resumed


def test_steps_done_are_those_of_the_newest_checkpoint_of_an_unfinished_run(store):
    assert runs.steps_done(store, KEY, rerun=False) == 0
    taken = claim(store)
    assert runs.steps_done(store, KEY, rerun=False) == 0
    for step in (9, 100, 20):
        (taken.folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    assert runs.steps_done(store, KEY, rerun=False) == 100
    assert runs.steps_done(store, KEY, rerun=True) == 0
    change(store, state="complete")
    assert runs.steps_done(store, KEY, rerun=False) == 0


def test_a_run_describes_itself_once_and_its_events_follow(store, valid):
    taken, events, config = claim(store), Events(), parse(valid({"seed": 3}))
    events.warning("early")
    runs.describe(taken, config, keys={"train": KEY}, identity={"seed": 3}, events=events)
    assert "early" in (taken.folder / "events.jsonl").read_text()
    written = yaml.safe_load((taken.folder / "config.yaml").read_text())
    assert parse(written) == config
    record = json.loads((taken.folder / "run.json").read_text())
    assert record["keys"] == {"train": KEY}
    assert record["versions"].keys() == {"python", *runs.LIBRARIES}
    runs.describe(taken, Config(), keys={"train": "other"}, identity={}, events=Events())
    assert json.loads((taken.folder / "run.json").read_text()) == record
    assert yaml.safe_load((taken.folder / "config.yaml").read_text()) == written


CONTENDER = """
import sys
from pathlib import Path
from lib import runs
from lib.errors import StateRefused

store = Path(sys.argv[1])
print("ready", flush=True)
input()
for key in sys.argv[2:]:
    outputs = store.parent / "outputs"
    try:
        runs.claim(store, key, outputs=outputs, name="flux", manifests=[], rerun=False)
        print("taken", flush=True)
    except StateRefused:
        print("refused", flush=True)
input()  # alive until both have tried
"""


@pytest.mark.parametrize("dead", [False, True])
def test_of_two_processes_one_gets_each_run(store, dead):
    keys = [digest(number) for number in range(20)]
    for key in keys if dead else ():
        claim(store, key)
        path = runs.record_path(store, key)
        path.write_text(json.dumps({**json.loads(path.read_text()), "process": NO_PROCESS}))
    command = [sys.executable, "-c", CONTENDER, str(store), *keys]
    both = [
        subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for process in both:
        assert process.stdout.readline() == "ready\n"
    for process in both:
        process.stdin.write("\n")
        process.stdin.flush()
    answers = [[process.stdout.readline().strip() for _ in keys] for process in both]
    for process in both:
        process.communicate("\n", timeout=60)
    assert {tuple(sorted(pair)) for pair in zip(*answers, strict=True)} == {("refused", "taken")}
    assert len(list((store.parent / "outputs").iterdir())) == len(keys)
