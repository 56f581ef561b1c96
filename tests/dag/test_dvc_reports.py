"""What DVC compares and what it does not: settings, bytes that stay, two commands at once."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.nightly  # each starts DVC, and that a stage, several times

CHECKOUT = Path(__file__).resolve().parents[2]
PARTS = (".dvc/config", ".dvcignore", "dvc.yaml", "conf", "lib", "stages")
PICTURES = ("fox", "key", "owl-crown")
SECONDS = 300
UP_TO_DATE = "Data and pipelines are up to date."
SECOND = ("another DVC process", "is busy")  # what DVC says to the second of two


def started(place, *words):
    """`python -m` of some words; `python` is this one for the commands of dvc.yaml too."""
    binaries = place.parent / "bin"
    path = os.pathsep.join([str(binaries), os.environ["PATH"]])
    sites = {"DVC_SITE_CACHE_DIR": str(place.parent / "dvc"), "PATH": path}
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=place,
        env={**os.environ, **sites},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def done(process):
    """Exit code and output."""
    output, _ = process.communicate(timeout=SECONDS)
    return process.returncode, output


def dvc(place, *words):
    code, output = done(started(place, "dvc", *words))
    assert code == 0, output
    return output


def kept(place):
    """The bytes of all that DVC compares."""
    files = [*place.glob("outputs/dvc/**/*.json"), *place.glob("store/runs/dvc-*.json")]
    return {path.relative_to(place).as_posix(): path.read_bytes() for path in files}


@pytest.fixture
def checkout(tmp_path):
    """A checkout of its own with three pictures, in which nothing was made yet."""
    place = tmp_path / "checkout"
    for name in PARTS:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (CHECKOUT / name).is_dir() else shutil.copy
        copy(CHECKOUT / name, place / name)
    data = place / "examples" / "emoji"
    data.mkdir(parents=True)
    for name in PICTURES:
        shutil.copy(CHECKOUT / "examples" / "emoji" / f"{name}.png", data)
        (data / f"{name}.txt").write_text(f"a 3D emoji of {name}", encoding="utf-8")
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return place


@pytest.fixture
def prepared(checkout):
    dvc(checkout, "repro", "prepare_dataset")
    return checkout


def test_dvc_removes_nothing_from_which_a_run_resumes():
    """DVC deletes a stage's outs before its command: no out may hold a checkpoint or an entry."""
    made = yaml.safe_load((CHECKOUT / "dvc.yaml").read_text())["stages"].values()
    kinds = ("outs", "metrics", "plots")
    outs = [Path(name) for s in made for kind in kinds for out in s.get(kind, ()) for name in out]
    assert len(outs) > 10
    records = [out for out in outs if out.parent == Path("store/runs")]
    assert all(re.fullmatch(r"dvc-\w+\.json", out.name) for out in records)
    assert {out.suffix for out in outs} == {".json", ".csv"}
    assert all(Path("outputs/dvc") in out.parents for out in outs if out not in records)


def test_the_graph_sees_a_changed_setting_that_dvc_does_not_compare(ensure, seen, configure):
    """As when a setting was left out of what a stage shows DVC, and only `export` is run."""
    ensure("export")
    ensure("export")
    statuses = {e.stage: e.data["status"] for e in seen if e.kind == "phase"}
    assert statuses["train"] == "hit"
    ensure("export", "optimizer.lr=2e-2")
    statuses = {e.stage: e.data["status"] for e in seen if e.kind == "phase"}
    assert (statuses["train"], statuses["export"]) == ("done", "done")
    assert statuses["encode_captions"] == statuses["build_latent_cache"] == "hit"


def test_an_edit_of_a_group_s_file_alone_is_seen(prepared):
    file = prepared / "conf" / "optimizer" / "adamw.yaml"
    before = kept(prepared)
    file.write_text(file.read_text().replace("${family.preset.lr}", "0.5"))
    assert "compose" in dvc(prepared, "status", "compose")
    dvc(prepared, "repro", "compose")
    changed = {name for name, data in kept(prepared).items() if data != before[name]}
    assert changed == {"outputs/dvc/config/train.json"}
    settings = json.loads((prepared / "outputs/dvc/config/train.json").read_bytes())
    assert settings["optimizer.lr"] == 0.5


def test_values_come_from_conf_alone_and_a_stage_refuses_any_others(prepared):
    file = prepared / "outputs/dvc/config/prepare_dataset.json"
    settings = json.loads(file.read_bytes())
    settings["buckets.resolution"] = 96
    file.write_text(json.dumps(settings))
    code, said = done(started(prepared, "stages.dvc", "prepare_dataset"))
    assert (code, "dvc repro" in said) == (4, True), said
    code, said = done(started(prepared, "dvc", "exp", "run", "-S", "buckets.resolution=96"))
    assert code != 0
    assert not [line for line in said.splitlines() if line.startswith("> ")]
    dvc(prepared, "repro", "prepare_dataset")
    assert json.loads(file.read_bytes())["buckets.resolution"] == 64


def test_a_second_repro_does_nothing_and_a_forced_one_makes_the_same_bytes(prepared):
    before = kept(prepared)
    assert dvc(prepared, "repro", "prepare_dataset").splitlines()[-1] == UP_TO_DATE
    forced = dvc(prepared, "repro", "--force", "--single-item", "prepare_dataset")
    assert "> python -m stages.dvc prepare_dataset" in forced
    assert kept(prepared) == before
    assert dvc(prepared, "status", "prepare_dataset").strip() == UP_TO_DATE


def test_settings_of_every_plain_type_are_not_shown_as_changed(prepared):
    assert dvc(prepared, "status", "prepare_dataset", "compose").strip() == UP_TO_DATE
    before = kept(prepared)
    dvc(prepared, "repro", "--force", "--single-item", "compose")
    assert kept(prepared) == before
    assert dvc(prepared, "status", "prepare_dataset", "compose").strip() == UP_TO_DATE
    settings = [json.loads(data) for name, data in before.items() if "/config/" in name]
    types = {type(value) for one in settings for value in one.values()}
    assert types >= {str, int, float, bool, list, type(None)}


def at_once(place, *stages):
    """Two `dvc repro` side by side: each is done, or is told that the other is at work."""
    both = [started(place, "dvc", "repro", stage) for stage in stages]
    for code, output in map(done, both):
        assert code == 0 or any(text in output for text in SECOND), output


def test_two_commands_at_once_from_nothing_harm_nothing(checkout, tmp_path):
    at_once(checkout, "compose", "prepare_dataset")
    at_once(checkout, "prepare_dataset", "prepare_dataset")
    dvc(checkout, "repro", "prepare_dataset")
    assert dvc(checkout, "repro", "prepare_dataset").splitlines()[-1] == UP_TO_DATE
    before = kept(checkout)
    shutil.rmtree(checkout / "outputs")
    dvc(checkout, "repro", "prepare_dataset")
    assert kept(checkout) == before
    assert done(started(checkout, "stages.store", "verify", "paths.store=store"))[0] == 0


def test_two_stages_that_share_what_they_need_at_once_harm_nothing(prepared):
    shared = ("encode_captions", "build_latent_cache")
    at_once(prepared, *shared)
    dvc(prepared, "repro", *shared)
    before = kept(prepared)
    assert dvc(prepared, "repro", *shared).splitlines()[-1] == UP_TO_DATE
    dvc(prepared, "repro", "--force", "--single-item", *shared)
    assert kept(prepared) == before
    assert done(started(prepared, "stages.store", "verify", "paths.store=store"))[0] == 0
