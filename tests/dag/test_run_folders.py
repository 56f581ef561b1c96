"""A run's folder is its own: nothing of an earlier run is changed, and each says what it is."""

import json

import yaml
from safetensors import safe_open


def test_two_runs_of_one_name_keep_their_own_configuration_and_weights(ensure, tmp_path):
    made = {
        "mine": ensure("train", "name=mine", "optimizer.lr=1e-2"),
        "mine-2": ensure("train", "name=mine", "optimizer.lr=1e-3"),
    }
    outputs = tmp_path / "outputs"
    assert {path.name for path in outputs.iterdir()} == made.keys()
    for (name, manifest), rate in zip(made.items(), (1e-2, 1e-3), strict=True):
        config = yaml.safe_load((outputs / name / "config.yaml").read_text())
        record = json.loads((outputs / name / "run.json").read_text())
        with safe_open(outputs / name / "adapter/adapter.safetensors", "numpy") as weights:
            of_weights = weights.metadata()["train_key"]
        assert (config["optimizer"]["lr"], record["keys"]["train"]) == (rate, manifest.key)
        assert of_weights == manifest.key


def test_the_first_run_of_a_name_is_untouched_by_the_second(ensure, tmp_path):
    ensure("train", "name=mine")
    files = [path for path in (tmp_path / "outputs/mine").rglob("*") if path.is_file()]
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}
    ensure("train", "name=mine", "seed=7")
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files} == before
    assert len(before) > 5
