"""A run folder in a real SQLite store: what is there, what is not, and that nothing is twice."""

import json
from pathlib import Path

import yaml

from lib.tracking.shown import parameters

CANARY = "hf_canary0123456789"


def everything(uri):
    """All bytes of the store and of its artifacts."""
    folder = Path(uri.removeprefix("sqlite:///")).parent
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_the_metrics_are_the_events_with_their_steps_and_times(make_run, send, history, metrics):
    steps = range(1, 1301)
    run = send(make_run(*metrics(*steps)))
    assert history(run) == [(s, 1 / s, round((1000 + s) * 1000)) for s in steps]
    assert [point[1] for point in history(run, "num_samples_seen")] == [2 * s for s in steps]
    assert run.data.metrics.keys() == {"loss", "num_samples_seen"}


def test_phases_decisions_digests_and_counts_become_tags(make_run, send, event):
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


def test_parameters_are_the_configuration_and_long_ones_are_cut(make_run, send, config_of_run):
    run = send(make_run())
    assert run.data.params == parameters(config_of_run)
    assert run.data.params["optimizer.lr"] == "0.0001"
    assert run.data.params["trainer.micro_batch"] == "null"
    assert {len(run.data.params[name]) for name in ("adapter.targets", "name")} == {250}


def test_artifacts_hold_the_files_and_the_whole_configuration(
    make_run, send, mlflow_store, config_of_run, record_of_run
):
    run = send(make_run())
    folder = Path(run.info.artifact_uri.removeprefix("file://"))
    assert folder.is_relative_to(Path(mlflow_store.removeprefix("sqlite:///")).parent)
    assert (folder / "adapter/adapter.safetensors").read_bytes() == b"weights"
    assert (folder / "samples/grid.png").read_bytes() == b"picture"
    assert json.loads((folder / "run.json").read_text()) == record_of_run
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["adapter"] == config_of_run["adapter"]
    assert config["dataset"]["root"] == "my cat"


def test_nothing_shows_a_caption_a_token_or_a_path(
    make_run, send, monkeypatch, mlflow_store, event
):
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


def test_one_bad_item_does_not_spoil_the_rest(make_run, send, history, event):
    odd = event("metric", 1001.0, step=1, **{"a b:c*": 0.5, "loss": 0.25, "note": "x", "on": True})
    bare = '{"kind": "metric", "stage": "train", "time": 1002, "step": 2, "loss": %s, "lr": 1}\n'
    folder = make_run(odd)
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(bare % word for word in ("NaN", "Infinity", "-Infinity"))
    run = send(folder)
    assert history(run) == [(1, 0.25, 1001000)]
    assert history(run, "lr")[0][:2] == (2, 1.0)
    assert run.data.metrics.keys() == {"loss", "lr", "a_b_c_"}


def test_a_setting_changed_on_resuming_is_a_tag_and_its_parameter_stays(
    make_run, send, config_of_run
):
    folder = make_run()
    send(folder, status="KILLED")
    now = {**parameters(config_of_run), "optimizer.lr": "0.5", "new.setting": "1"}
    run = send(folder, settings=now)
    assert run.data.params == {**parameters(config_of_run), "new.setting": "1"}
    changed = {n: v for n, v in run.data.tags.items() if n.startswith("changed.")}
    assert changed == {"changed.optimizer.lr": "0.5"}


def test_the_tag_of_a_changed_setting_goes_when_its_first_value_is_back(
    make_run, send, config_of_run
):
    folder = make_run()
    first = parameters(config_of_run)
    send(folder, status="KILLED", settings={**first, "optimizer.lr": "0.5", "seed": "1"})
    send(folder, status="KILLED", settings={**first, "optimizer.lr": "0.25", "seed": "2"})
    run = send(folder, settings={**first, "seed": "2"})
    changed = {n: v for n, v in run.data.tags.items() if n.startswith("changed.")}
    assert changed == {"changed.seed": "2"}
    assert run.data.params["optimizer.lr"] == "0.0001"


def test_start_and_end_are_the_times_of_the_events(make_run, send, metrics):
    run = send(make_run(*metrics(1, 7)), status="FAILED")
    assert (run.info.start_time, run.info.end_time) == (1000000, 1007000)
    assert (run.info.status, run.info.run_name) == ("FAILED", "run")
