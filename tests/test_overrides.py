"""Values on their way from a shell or a file into a configuration, and from there into files."""

import re
import shlex
import shutil
import sys
import time
from pathlib import Path

import pytest

from lib.errors import InputRefused, without_credentials
from lib.files import user_path
from lib.pipeline import graph
from lib.schema import Config, value_of
from stages import composing, launching
from stages.overrides import quoted

CHECKOUT = Path(__file__).resolve().parent.parent
TINY = "family.base=tiny"
PROMPT = "dataset.instance_prompt"
TOKEN = "hf_canary0123456789"


def refused(*overrides):
    """The problems of a refusal."""
    with pytest.raises(InputRefused) as refusal:
        composing.compose([TINY, *overrides])
    return refusal.value.problems


def typed(problem):
    """The override that a shell makes of the words a report tells to type."""
    (override,) = shlex.split(problem.remedy.partition(" type ")[2])
    return override


@pytest.fixture
def swept(tmp_path, monkeypatch):
    """The combinations that Hydra runs one after the other, each noted by a job."""

    def sweep(job, *overrides):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["train"])
        places = ["paths.store=store", "paths.outputs=outputs", TINY, "tracker=none"]
        launching.with_hydra(job, ["-m", *places, *overrides])

    return sweep


@pytest.mark.parametrize("value", ["epoch=9-step=9.ckpt", "=", "a=b=c"])
def test_a_value_with_an_equals_sign_is_refused_with_the_words_to_type(value, tmp_path):
    folder = tmp_path / value
    shutil.copytree(CHECKOUT / "examples" / "emoji", folder)
    (problem,) = refused(f"dataset.root={folder}")
    assert composing.compose([TINY, typed(problem)]).dataset.root == str(folder)


SIGNS = [
    "#1",
    "~/ds",
    "photo of [x]",
    "(cat:1.2)",
    "\xe9clair",
    "\u65e5\u672c",
    "a {b",
    'say "x',
    "\\'",
]


@pytest.mark.parametrize("value", SIGNS, ids=ascii)
def test_a_text_with_special_signs_is_refused_with_the_words_to_type(value):
    (problem,) = refused(f"{PROMPT}={value}")
    assert problem.subject == f"{PROMPT}={value}"
    assert composing.compose([TINY, typed(problem)]).dataset.instance_prompt == value


@pytest.mark.parametrize("value", [*SIGNS, "a, b", "ends in \\", 'it\'s "so" \\" $HOME `x`', ""])
def test_words_to_type_mean_the_very_value(value):
    (override,) = shlex.split(quoted(f"{PROMPT}={value}"))
    assert composing.compose([TINY, override]).dataset.instance_prompt == value


def test_help_says_how_a_text_is_quoted():
    (example,) = re.findall(rf"'{PROMPT}=.*'", composing.help_text())
    (override,) = shlex.split(example)
    assert composing.compose([override]).dataset.instance_prompt == "a cat, red"


@pytest.mark.parametrize("setting", [PROMPT, "sample.negative_prompt"])
def test_a_comma_in_a_text_makes_no_second_run(setting):
    word = f"{setting}=a cat, red"
    with pytest.raises(InputRefused) as refusal:
        composing.check_sweep([TINY, word, "seed=1,2"])
    (problem,) = refusal.value.problems
    assert (problem.subject, problem.why) == (word, "its commas would make 2 runs")
    (given,) = shlex.split(re.findall(r"type ('.*');", problem.remedy)[0])
    composing.check_sweep([TINY, given])
    assert value_of(composing.compose([TINY, given]), setting) == "a cat, red"


def test_a_comma_in_a_text_without_a_sweep_is_no_list():
    (problem,) = refused(f"{PROMPT}=a cat, red")
    assert problem.why == "several values"
    assert composing.compose([TINY, typed(problem)]).dataset.instance_prompt == "a cat, red"


def test_texts_that_are_each_quoted_make_a_run_each(swept):
    words, found = [f"{PROMPT}='a cat, red','a dog'"], []
    composing.check_sweep([TINY, *words])
    swept(lambda combination: found.append(combination.reading.config), *words)
    assert [config.dataset.instance_prompt for config in found] == ["a cat, red", "a dog"]


def test_ranges_and_patterns_may_be_swept(swept):
    words, found = ["seed=range(1,4)", "lr_schedule=glob(cosine)", "adapter.rank=2,4"], []
    composing.check_sweep([TINY, *words, "sample.seed=range(1,100000)"])
    swept(lambda combination: found.append(combination.reading.config.seed), *words)
    assert sorted(found) == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("wrong", ["adapter.rnak=2,4", "adapter.rank=2,[4", "adapter.rank=2,many"])
def test_a_sweep_that_cannot_be_composed_is_one_report_and_leaves_nothing(
    wrong, tmp_path, monkeypatch, capsys
):
    import stages

    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        stages.main(lambda *_: 0, arguments=["-m", TINY, wrong, "precision=bf17"])
    lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert lines[0].startswith("refused: ")
    assert [name for name in ("adapter", "precision") if f"  {name}" in "\n".join(lines)] == [
        "adapter",
        "precision",
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("chdir", ["false", "true"])
def test_a_relative_path_starts_where_the_user_stands_in_a_sweep_too(chdir, swept, tmp_path):
    shutil.copytree(CHECKOUT / "examples" / "emoji", tmp_path / "ds")
    found = []

    def job(combination):
        config = combination.reading.config
        found.append((user_path(config.dataset.root).resolve(), combination.reading.problems))
        assert combination.folder.is_dir()

    swept(job, "dataset.root=./ds", f"hydra.job.chdir={chdir}", "seed=1,2")
    assert found == [((tmp_path / "ds").resolve(), ())] * 2


def test_a_data_set_is_the_same_from_another_folder_and_whatever_hydra_is_told(
    tmp_path, monkeypatch
):
    shutil.copytree(CHECKOUT / "examples" / "emoji", tmp_path / "ds")
    (tmp_path / "elsewhere").mkdir()

    def key(place, *overrides):
        monkeypatch.chdir(place)
        config = composing.compose([TINY, f"paths.store={tmp_path}/store", *overrides])
        return graph.plan("prepare_dataset", config)[0].known().key

    first = key(tmp_path, "dataset.root=ds", "hydra.job.chdir=false")
    assert key(tmp_path, "dataset.root=./ds", "hydra.job.chdir=true") == first
    assert key(tmp_path / "elsewhere", "dataset.root=../ds") == first


def test_a_folder_named_by_the_time_is_one_folder_for_all_jobs(swept, tmp_path):
    folders = []

    def job(combination):
        folders.append(combination.folder)
        time.sleep(0.01)  # the name counts microseconds

    swept(job, "seed=1,2,3")
    (made,) = (tmp_path / "outputs" / ".sweeps").iterdir()
    assert folders == [made] * 3


FOREIGN = [
    f"{PROMPT}=${{oc.env:HF_TOKEN}}",
    f"{PROMPT}='a ${{oc.env:HF_TOKEN,none}} cat'",
    f"{PROMPT}='${{oc.decode:${{oc.env:HF_TOKEN}}}}'",
    f"{PROMPT}='${{checkout:${{oc.env:HF_TOKEN}}}}'",
    "sample.prompts=['${oc.env:HF_TOKEN}']",
    "adapter.rank=${oc.env:HF_TOKEN}",
    "name=${oc.env:HF_TOKEN}",
    "adapter.rank_pattern={attn.to_q:'${oc.env:HF_TOKEN}'}",
    "+adapter.other=${oc.env:HF_TOKEN}",
    "+loader={kind: ${oc.env:HF_TOKEN}}",
    f"{PROMPT}=${{hydra:runtime.cwd}}",
]


@pytest.mark.parametrize("given", FOREIGN)
def test_no_setting_reads_the_environment(given, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    texts = [str(problem) for problem in refused(given)]
    with pytest.raises(InputRefused) as of_sweep:
        composing.check_sweep([TINY, given, "seed=1,2"])
    texts += map(str, of_sweep.value.problems)
    assert any("no setting" in text or "unknown" in text for text in texts)
    assert TOKEN not in " ".join([*texts, *capsys.readouterr()])


def test_a_recipe_that_reads_the_environment_is_refused_too(conf, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    text = "# @package _global_\nfamily:\n  preset:\n    lr: ${oc.env:HF_TOKEN}\n"
    (conf / "experiment" / "probe.yaml").write_text(text)
    (problem,) = refused("+experiment=probe")
    assert problem.subject == "family.preset.lr=${oc.env:HF_TOKEN}"


def test_another_setting_and_a_path_of_the_checkout_may_be_named():
    config = composing.compose([TINY, "name=run-${seed}", "dataset.root=${checkout:examples}"])
    assert (config.name, config.dataset.root) == ("run-0", str(CHECKOUT / "examples"))


LOGINS = [
    f"tracker.uri=ftp://me:{TOKEN}@host/x",
    f"tracker.uri=http://me:{TOKEN}@host tracker.experiment=''",
    f"tracker=none tracker.uri=http://me:{TOKEN}@host",
    f"tracker=none tracker.uri='postgresql://host/db?user=me&password={TOKEN}'",
    f"tracker.url=http://me:{TOKEN}@host",
    f"+tracker.url=http://me:{TOKEN}@host",
    f"dataset.root=https://me:{TOKEN}@host/pictures",
    f"adapter.rank=http://me:p/{TOKEN}@host",
    f"tracker.uri=[http://me:{TOKEN}@host]",
    f"tracker.uri=http://me:p/{TOKEN}@host",
    f"\"tracker.uri='http://me:{TOKEN}@[host'\"",
]


@pytest.mark.parametrize("given", LOGINS)
def test_no_report_shows_the_login_of_an_address(given):
    problems = refused(*shlex.split(given))
    assert problems
    assert TOKEN not in " ".join([repr(problems), *map(str, problems)])


def test_an_address_without_a_login_is_shown_as_it_is():
    for text in (Config().paths.store, "sqlite:////home/me@work/x.db", "http://h:1/a?b=c", "a@b.c"):
        assert without_credentials(text) == text
