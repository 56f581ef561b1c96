"""Values of each type, however they are written, and the files in which a run and DVC keep them."""

import dataclasses
import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from lib import runs
from lib.config import read
from lib.errors import InputRefused
from lib.events import Events
from lib.pipeline import pointers
from lib.schema import value_of
from stages import composing
from stages.overrides import quoted

CHECKOUT = Path(__file__).resolve().parent.parent
TINY = "family.base=tiny"
TOKEN = "hf_canary0123456789"


def refused(*overrides):
    """The problems of a refusal."""
    with pytest.raises(InputRefused) as refusal:
        composing.compose([TINY, *overrides])
    return refusal.value.problems


@pytest.fixture
def written(tmp_path):
    """A configuration as the files of its run and of DVC hold it."""

    def write(config):
        claim = runs.Claim(key="0" * 64, folder=tmp_path / "run", resumed=False)
        runs.describe(claim, config, keys={}, identity={}, events=Events())
        paths = dataclasses.replace(config.paths, outputs=str(tmp_path / "outputs"))
        pointers.write_settings(dataclasses.replace(config, paths=paths))
        settings = (tmp_path / "outputs/dvc/config/train.json").read_bytes()
        return yaml.safe_load((tmp_path / "run/config.yaml").read_bytes()), json.loads(settings)

    return write


RATES = ["1e-5", "1.0e-5", "'1e-5'", "1E-5", "0.00001", ".00001"]


@pytest.mark.parametrize("text", RATES)
@pytest.mark.parametrize("way", ["override", "file"])
def test_a_number_is_one_number_however_it_is_written_and_wherever_it_is_kept(
    text, way, conf, written
):
    if way == "file":
        file = conf / "optimizer" / "adamw.yaml"
        lines = file.read_text().replace("lr: ${family.preset.lr}", f"lr: {text}")
        file.write_text(lines)
    config = composing.compose([TINY, *([f"optimizer.lr={text}"] if way == "override" else [])])
    kept, for_dvc = written(config)
    found = [config.optimizer.lr, kept["optimizer"]["lr"], for_dvc["optimizer.lr"]]
    assert [(value, type(value)) for value in found] == [(1e-5, float)] * 3


@pytest.mark.parametrize("text", ["1e4", "1E4", "10000.0", "'10000'"])
def test_a_whole_number_is_one_however_it_is_written(text):
    steps = composing.compose([TINY, f"trainer.max_steps={text}"]).trainer.max_steps
    assert (steps, type(steps)) == (10000, int)


SAID_NO = ["false", "False", '"false"', '"False"']
SAID_NEITHER = ["no", "off", "0", '"no"', '"off"', '"0"', '""', "[]", "maybe", "1", "2", "null"]


@pytest.mark.parametrize("setting", ["rerun", "latents.random_flip"])
@pytest.mark.parametrize("text", SAID_NO)
def test_a_switch_is_off_for_false_in_quotes_too(setting, text):
    config = composing.compose([TINY, "latents.variants=2", f"{setting}={text}"])
    assert value_of(config, setting) is False


@pytest.mark.parametrize("setting", ["rerun", "latents.random_flip"])
@pytest.mark.parametrize("text", SAID_NEITHER)
def test_a_switch_takes_no_other_word_for_an_answer(setting, text):
    (problem,) = refused("latents.variants=2", f"{setting}={text}")
    assert problem.subject.startswith(f"{setting}=")
    assert problem.allowed == "true or false"


def test_a_switch_in_a_file_takes_no_other_word_either(conf):
    text = "# @package _global_\nrerun: 2\n"
    (conf / "experiment" / "probe.yaml").write_text(text)
    assert [problem.subject for problem in refused("+experiment=probe")] == ["rerun=2"]


OPTIMIZER = [
    "optimizer.betas=[0.9,0.99]",
    'optimizer.betas="0.9,0.99"',
    "optimizer.beta1=[0.9]",
    'optimizer.beta1="(0.9, 0.99)"',
    'optimizer.beta2="0.9,0.99"',
    'optimizer.weight_decay="0.01,"',
    'optimizer.eps="1e-8;"',
    "+optimizer.decouple=True",
    'optimizer="adamw weight_decay=0.5"',
]


@pytest.mark.parametrize("given", OPTIMIZER)
def test_an_argument_of_the_optimizer_in_another_form_is_refused_by_its_name(given):
    (problem,) = refused(given)
    assert problem.subject.split("=")[0] == given.split("=")[0].lstrip("+")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("{to_q:8}", {"to_q": 8}),
        ("{attn.to_q:8,blocks.*.to_k:4}", {"attn.to_q": 8, "blocks.*.to_k": 4}),
        ("{to_q:8.0}", {"to_q": 8}),
        ("{}", {}),
    ],
)
def test_names_of_one_s_own_are_taken_with_their_numbers_and_kept(given, expected, written):
    config = composing.compose([TINY, f"adapter.rank_pattern={given}"])
    kept, for_dvc = written(config)
    found = [config.adapter.rank_pattern, kept["adapter"]["rank_pattern"]]
    assert [*found, for_dvc["adapter.rank_pattern"]] == [expected] * 3
    assert {type(rank) for rank in config.adapter.rank_pattern.values()} <= {int}


def test_names_of_one_s_own_may_stand_in_an_experiment_and_be_swept(conf):
    text = "# @package _global_\nadapter:\n  rank_pattern:\n    to_q: 8\n"
    (conf / "experiment" / "probe.yaml").write_text(text)
    pattern = composing.compose([TINY, "+experiment=probe"]).adapter.rank_pattern
    assert pattern == {"to_q": 8}
    composing.check_sweep([TINY, "adapter.rank_pattern={to_q:8},{to_q:4}"])


@pytest.mark.parametrize("given", ["8", "null", "{to_q:many}", "{to_q:8.5}", "{to_q:true}"])
def test_names_without_whole_numbers_are_refused_by_their_setting(given):
    (problem,) = refused(f"adapter.rank_pattern={given}")
    assert problem.subject.startswith("adapter.rank_pattern=")
    assert problem.allowed == "{a: 1, b: 2}"


FOLDERS = ["ds\\new", "C:\\pictures\\table", "a 'b' \"c\"", "x: [y] #z", "\xe9clair"]


@pytest.mark.parametrize("name", FOLDERS, ids=ascii)
def test_a_folder_with_an_odd_name_is_the_same_folder_in_every_file(
    name, tmp_path, monkeypatch, written
):
    (tmp_path / name).mkdir()
    shutil.copy(CHECKOUT / "examples" / "emoji" / "fox.png", tmp_path / name)
    (tmp_path / name / "fox.txt").write_text("a fox")
    monkeypatch.chdir(tmp_path)
    (override,) = shlex.split(quoted(f"dataset.root={name}"))
    config = composing.compose([TINY, override])
    assert config.dataset.root == name
    assert written(config)[0]["dataset"]["root"] == name
    assert yaml.safe_load(composing.shown([TINY, override]))["dataset"]["root"] == name
    os.rename(tmp_path / name, tmp_path / "plain")
    assert written(
        composing.compose([TINY, "dataset.root=plain"])
    )  # and no other file is in the way


def test_every_value_that_the_readme_names_is_taken():
    rows = re.findall(r"^\| `([^|]*)` \| (.*) \|$", (CHECKOUT / "README.md").read_text(), re.M)
    named = [(n.split("`")[-1], word) for n, rest in rows for word in re.findall(r"`(\w+)`", rest)]
    assert {("timesteps", "uniform"), ("lr_schedule", "cosine"), ("export.dtype", "fp16")} <= {
        *named
    }
    for name, word in named:
        composing.compose([TINY, f"{name}={word}"])


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("timesteps=logitnormal", "logit_normal"),
        ("timesteps.density=logitnormal", "logit_normal"),
        ("lr_schedule=cosin", "cosine"),
        ("dataset.instanceprompt=x", "dataset.instance_prompt"),
        ("captions.strategy=instanceprompt", "captions."),
    ],
)
def test_a_near_miss_is_refused_with_what_was_meant(given, meant):
    (problem,) = refused(given)
    assert problem.subject == given
    assert meant in f"{problem.allowed} {problem.remedy}"


def test_neither_a_run_s_files_nor_the_shown_configuration_hold_the_login_of_the_tracker(written):
    given = [TINY, f"tracker.uri=http://me:{TOKEN}@host:5000"]
    config = composing.compose(given)
    assert config.tracker.uri == f"http://me:{TOKEN}@host:5000"
    assert written(config)[0]["tracker"]["uri"] == "http://host:5000"
    assert yaml.safe_load(composing.shown(given))["tracker"]["uri"] == "http://host:5000"
    unknown = read({"tracker": {"uri": [f"http://me:{TOKEN}@host"]}}).problems
    assert TOKEN not in repr(unknown)
