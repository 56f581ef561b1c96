"""A run folder in a real SQLite store: what is there, what is not, and that nothing is twice."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lib.tracking.journal import Journal, TrackerFailed, read_chunk
from lib.tracking.mirror import Mirror, alone, replay_pending
from lib.tracking.server import Server, prepare_environment
from lib.tracking.shown import parameters, scrubbed, without_credentials

CHECKOUT = Path(__file__).resolve().parents[2]
CANARY = "hf_canary0123456789"
CONFIG = {
    "family": {"name": "flux", "base": "/models/FLUX.1-dev"},
    "dataset": {"root": "/pictures of me/my cat", "instance_prompt": "a photo of Tom"},
    "optimizer": {"lr": 1e-4},
    "adapter": {"targets": [f"module.{number}" for number in range(500)]},
    "trainer": {"micro_batch": None},
    "paths": {"store": "/big/store", "outputs": "/big/outputs"},
    "tracker": {"name": "mlflow", "uri": f"http://me:{CANARY}@host", "experiment": "x"},
    "name": "long" * 2000,
}
RECORD = {
    "keys": {"train": "ab" * 32, "prepare_dataset": "cd" * 32},
    "versions": {"torch": "2.13.0"},
    "git_commit": "0123abc-dirty",
}


def event(kind, time, **data):
    return {"kind": kind, "stage": "train", "time": time, **data}


def metrics(*steps, at=1000.0):
    return [event("metric", at + s, step=s, loss=1 / s, num_samples_seen=2 * s) for s in steps]


def append(folder, *events):
    with (folder / "events.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(one) + "\n" for one in events)


@pytest.fixture
def outputs(tmp_path):
    return tmp_path / "outputs"


@pytest.fixture
def make_run(outputs):
    """A run folder with events."""

    def make(*events, name="run"):
        folder = outputs / name
        (folder / "adapter").mkdir(parents=True)
        (folder / "samples").mkdir()
        (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
        (folder / "run.json").write_text(json.dumps(RECORD), encoding="utf-8")
        (folder / "adapter/adapter.safetensors").write_bytes(b"weights")
        (folder / "samples/grid.png").write_bytes(b"picture")
        append(folder, event("phase", 1000.0, status="start", folder=str(folder)), *events)
        return folder

    return make


@pytest.fixture
def server(mlflow_store):
    prepare_environment()
    return Server(mlflow_store, "darkroom")


@pytest.fixture
def send(server):
    """Mirrors a folder to its end, as a new process would; returns the MLflow run."""

    def send(folder, *, status="FINISHED", settings=None):
        journal = Journal(folder)
        changes = {"settings": settings} if settings else {}
        journal.update(status=status, sent=False, **changes)
        mirror = Mirror(folder, server, journal)
        while mirror.advance():
            pass
        mirror.finish()
        return server._client.get_run(mirror.run_id)

    return send


@pytest.fixture
def history(server):
    def points(run, name="loss"):
        found = server._client.get_metric_history(run.info.run_id, name)
        return [(point.step, point.value, point.timestamp) for point in found]

    return points


@pytest.fixture
def runs_of(server):
    return lambda: server._client.search_runs([server._experiment])


def everything(uri):
    """All bytes of the store and of its artifacts."""
    folder = Path(uri.removeprefix("sqlite:///")).parent
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_the_metrics_are_the_events_with_their_steps_and_times(make_run, send, history):
    steps = range(1, 1301)
    run = send(make_run(*metrics(*steps)))
    assert history(run) == [(s, 1 / s, round((1000 + s) * 1000)) for s in steps]
    assert [point[1] for point in history(run, "num_samples_seen")] == [2 * s for s in steps]
    assert run.data.metrics.keys() == {"loss", "num_samples_seen"}


def test_phases_decisions_digests_and_counts_become_tags(make_run, send):
    decided = event("decision", 1001.0, name="device", value="cpu", reason="no GPU")
    warned = [event("warning", 1002.0, text=f"number {n}") for n in range(3)]
    done = event("phase", 1003.0, status="done", key="ab")
    tags = send(make_run(decided, *warned, done)).data.tags
    assert tags["phase.train"] == "done"
    assert tags["decision.device"] == "cpu (no GPU)"
    assert tags["warnings"] == "3"
    assert tags["key.train"] == "ab" * 32
    assert tags["version.torch"] == "2.13.0"
    assert tags["git_commit"] == tags["mlflow.source.git.commit"] == "0123abc-dirty"


def test_parameters_are_the_configuration_and_long_ones_are_cut(make_run, send):
    run = send(make_run())
    assert run.data.params == parameters(CONFIG)
    assert run.data.params["optimizer.lr"] == "0.0001"
    assert run.data.params["trainer.micro_batch"] == "null"
    assert {len(run.data.params[name]) for name in ("adapter.targets", "name")} == {250}


def test_artifacts_hold_the_files_and_the_whole_configuration(make_run, send, mlflow_store):
    run = send(make_run())
    folder = Path(run.info.artifact_uri.removeprefix("file://"))
    assert folder.is_relative_to(Path(mlflow_store.removeprefix("sqlite:///")).parent)
    assert (folder / "adapter/adapter.safetensors").read_bytes() == b"weights"
    assert (folder / "samples/grid.png").read_bytes() == b"picture"
    assert json.loads((folder / "run.json").read_text()) == RECORD
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["adapter"] == CONFIG["adapter"]
    assert config["dataset"]["root"] == "my cat"


def test_nothing_shows_a_caption_a_token_or_a_path(make_run, send, monkeypatch, mlflow_store):
    monkeypatch.setenv("HF_TOKEN", CANARY)
    value = f"read {CANARY} from /home/somebody/secret place"
    decided = event("decision", 1001.0, name="odd", value=value, reason="/home/somebody/x.bin")
    folder = make_run(decided, event("warning", 1001.0, text="/home/somebody says a caption"))
    shown = send(folder).data
    texts = " ".join([*shown.params.values(), *shown.tags.values(), *shown.params, *shown.tags])
    for word in (CANARY, "/models", "pictures of me", "/big", "Tom", "/home", "caption"):
        assert word not in texts
    assert shown.tags["decision.odd"].startswith("read [hidden] from secret")
    assert shown.params["family.base"] == "FLUX.1-dev"
    assert CANARY.encode() in (folder / "config.yaml").read_bytes()
    assert CANARY.encode() not in everything(mlflow_store)


def test_one_bad_item_does_not_spoil_the_rest(make_run, send, history):
    odd = event("metric", 1001.0, step=1, **{"a b:c*": 0.5, "loss": 0.25, "note": "x", "on": True})
    bare = '{"kind": "metric", "stage": "train", "time": 1002, "step": 2, "loss": %s, "lr": 1}\n'
    folder = make_run(odd)
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(bare % word for word in ("NaN", "Infinity", "-Infinity"))
    run = send(folder)
    assert history(run) == [(1, 0.25, 1001000)]
    assert history(run, "lr")[0][:2] == (2, 1.0)
    assert run.data.metrics.keys() == {"loss", "lr", "a_b_c_"}


def test_a_torn_line_is_counted_and_one_being_written_is_waited_for(make_run, send, history):
    folder = make_run()
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"kind": "met')
    assert history(send(folder)) == []
    append(folder, *metrics(1, 2))
    run = send(folder)
    assert [point[0] for point in history(run)] == [2]
    assert run.data.tags["unreadable_lines"] == "1"


@pytest.mark.parametrize("lost", ["offset", "run", "record"])
def test_what_was_accepted_but_not_noted_does_not_appear_twice(
    make_run, send, history, runs_of, lost
):
    folder = make_run(*metrics(*range(1, 200)), event("warning", 1300.0, text="w"))
    first = history(send(folder))
    journal = Journal(folder)
    if lost == "offset":
        journal.update(offset=0, warnings=0, sent=False)
    elif lost == "run":  # the answer to the creating call was lost
        journal.update(run_id=None)
    else:  # half of what was sent was noted
        journal.update(offset=read_chunk(folder, 0).end, warnings=0, sent=False)
    append(folder, *metrics(200))
    run = send(folder)
    assert len(runs_of()) == 1
    assert history(run) == [*first, (200, 1 / 200, 1200000)]
    assert run.data.tags["warnings"] == "1"


def test_a_resumed_run_is_the_same_run_with_each_step_once(make_run, send, history, runs_of):
    folder = make_run(*metrics(1, 2, 3, 4, 5))
    assert send(folder, status="KILLED").info.status == "KILLED"
    resumed = event("decision", 1010.0, name="resume", value=4, reason="an earlier attempt")
    append(folder, resumed, *metrics(5, 6, at=1010.0))
    run = send(folder)
    assert [run.info.run_id] == [one.info.run_id for one in runs_of()]
    assert run.info.status == "FINISHED"
    assert [point[0] for point in history(run)] == [1, 2, 3, 4, 5, 6]
    assert run.data.tags["decision.resume"].startswith("4 ")


def test_a_step_that_is_repeated_before_it_was_sent_is_there_once(make_run, send, history):
    again = [{**one, "loss": 9.0} for one in metrics(3, 4, at=1010.0)]
    run = send(make_run(*metrics(1, 2, 3), *again))
    assert [point[:2] for point in history(run)] == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 9.0)]


def test_a_setting_changed_on_resuming_is_a_tag_and_its_parameter_stays(make_run, send):
    folder = make_run()
    send(folder, status="KILLED")
    now = {**parameters(CONFIG), "optimizer.lr": "0.5", "new.setting": "1"}
    run = send(folder, settings=now)
    assert run.data.params == {**parameters(CONFIG), "new.setting": "1"}
    changed = {n: v for n, v in run.data.tags.items() if n.startswith("changed.")}
    assert changed == {"changed.optimizer.lr": "0.5"}


@pytest.mark.parametrize("harm", ["removed there", "another store"])
def test_a_run_that_is_gone_is_sent_whole_as_a_new_one(
    make_run, send, history, server, runs_of, harm
):
    folder = make_run(*metrics(1, 2), event("warning", 1300.0, text="w"))
    first = send(folder)
    if harm == "removed there":
        server._client.delete_run(first.info.run_id)
    else:
        Journal(folder).update(store="another", run_id="unknown")
    second = send(folder)
    assert second.info.run_id != first.info.run_id
    assert [point[0] for point in history(second)] == [1, 2]
    assert second.data.tags["warnings"] == "1"


def test_start_and_end_are_the_times_of_the_events(make_run, send):
    run = send(make_run(*metrics(1, 7)), status="FAILED")
    assert (run.info.start_time, run.info.end_time) == (1000000, 1007000)
    assert (run.info.status, run.info.run_name) == ("FAILED", "run")


def test_a_replay_sends_what_is_missing_and_nothing_else(make_run, send, server, outputs, runs_of):
    complete, dead = make_run(*metrics(1), name="complete"), make_run(*metrics(1, 2), name="dead")
    make_run(name="untracked")
    grown = make_run(*metrics(1), name="grown")
    send(complete)
    send(grown)
    Journal(dead).update(status="RUNNING")
    append(grown, event("phase", 1400.0, status="done"))
    assert replay_pending(outputs, server) == 2
    assert replay_pending(outputs, server) == 0
    found = {run.info.run_name: run for run in runs_of()}
    assert {name: run.info.status for name, run in found.items()} == {
        "complete": "FINISHED",
        "dead": "KILLED",
        "grown": "FINISHED",
    }
    assert found["grown"].data.tags["phase.train"] == "done"
    assert found["dead"].data.metrics["loss"] == 0.5


def test_a_replay_leaves_what_is_followed_or_belongs_elsewhere(make_run, server, outputs, runs_of):
    followed, elsewhere = make_run(name="followed"), make_run(name="elsewhere")
    Journal(followed).update(status="RUNNING")
    Journal(elsewhere).update(status="FINISHED", run_id="theirs", store="another")
    with alone(followed) as free:
        assert free
        assert replay_pending(outputs, server) == 0
    assert runs_of() == []
    assert replay_pending(outputs, server) == 1


def test_a_damaged_record_is_named_and_does_not_stop_the_others(make_run, server, outputs, runs_of):
    damaged, sound = make_run(name="a"), make_run(name="b")
    (damaged / "tracking.json").write_text("{", encoding="utf-8")
    Journal(sound).update(status="FINISHED")
    with pytest.raises(TrackerFailed, match=r"a/tracking\.json"):
        replay_pending(outputs, server)
    assert [run.info.run_name for run in runs_of()] == ["b"]


def test_a_stopped_replay_goes_on_later(make_run, server, outputs, history, runs_of):
    folder = make_run(*metrics(*range(1, 300)))
    Journal(folder).update(status="FINISHED")
    answers = iter([False, True])
    assert replay_pending(outputs, server, stopped=lambda: next(answers)) == 0
    (run,) = runs_of()
    assert 0 < len(history(run)) < 299
    assert run.info.status == "RUNNING"
    assert replay_pending(outputs, server) == 1
    assert len(history(run)) == 299


def test_events_that_begin_anew_are_read_from_their_beginning(make_run, send, history):
    folder = make_run(*metrics(*range(1, 50)))
    send(folder)
    (folder / "events.jsonl").unlink()
    append(folder, *metrics(50))
    assert [point[0] for point in history(send(folder))] == list(range(1, 51))
    (folder / "events.jsonl").unlink()
    assert len(history(send(folder))) == 50


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/me/base", "base"),
        ("at ~/x/y.png, 3", "at y.png, 3"),
        ("['/a/b', '/c']", "['b', 'c']"),
        ("black-forest-labs/FLUX.1-dev", "black-forest-labs/FLUX.1-dev"),
        ("http://host:1/api/x", "http://host:1/api/x"),
        ("1/3 and/or 2", "1/3 and/or 2"),
    ],
)
def test_paths_are_their_last_names(text, shown):
    assert scrubbed(text) == shown


def test_an_address_is_shown_without_its_credentials():
    assert without_credentials("http://a:b@host:5/x") == "http://host:5/x"
    assert without_credentials("sqlite:////a/b.db") == "sqlite:////a/b.db"


@pytest.mark.parametrize("store", ["sqlite:////proc/none/mlflow.db", "http://me:pass@127.0.0.1:1"])
def test_a_store_that_fails_is_named_without_credentials(store):
    prepare_environment()
    with pytest.raises(TrackerFailed) as failed:
        Server(store, "darkroom")
    assert "me:pass" not in str(failed.value)
    assert without_credentials(store) in str(failed.value)


def test_the_tracker_is_imported_without_mlflow():
    code = """
import sys, lib.tracking, lib.pipeline.train
print([name for name in ("mlflow", "sqlalchemy", "torch") if name in sys.modules])"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_a_copied_folder_does_not_need_the_process_that_made_it(make_run, send, outputs, history):
    """Everything that is sent lies in the folder."""
    folder = make_run(*metrics(1, 2))
    shutil.move(folder, outputs / "moved")
    assert [point[0] for point in history(send(outputs / "moved"))] == [1, 2]
