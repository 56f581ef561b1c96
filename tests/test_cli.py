"""The doors as a user meets them: one report for all mistakes, exit codes, nothing left behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import stages
import stages.store
from lib.errors import DarkroomError, InputRefused, Problem, SamplesFailed, StateRefused
from lib.pipeline.graph import STAGES
from stages.plan import show_plan

CHECKOUT = Path(__file__).resolve().parent.parent
TINY = "family.base=tiny"


def _export(config, summary):
    return stages.run_stage("export", config, summary)


@pytest.fixture
def cli(tmp_path, monkeypatch, capsys):
    """Runs a door in this process: exit code, both outputs, and what it left on the disk."""
    workplace = tmp_path / "workplace"
    workplace.mkdir()
    monkeypatch.chdir(workplace)
    paths = [f"paths.store={workplace}/store", f"paths.outputs={workplace}/outputs"]

    class Done:
        def __init__(self, code):
            self.code = code
            self.out, self.err = capsys.readouterr()
            self.lines = self.err.splitlines()
            self.left = sorted(p.relative_to(workplace).as_posix() for p in workplace.rglob("*"))

    def run(*arguments, job=_export, **options):
        with pytest.raises(SystemExit) as exit:
            stages.main(job, arguments=[*arguments, *paths], **options)
        return Done(exit.value.code)

    return run


def _spoil(file, old, new):
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")


REFUSED = {
    "an unknown family": ([TINY, "family=fluxx"], ["family=fluxx", "flux"]),
    "an unknown family by its name": ([TINY, "family.name=fluxx"], ["family=fluxx", "flux"]),
    "a base that is no folder": (["family.base=./nowhere"], ["no such folder", "tiny"]),
    "a base that is another folder": (["family.base={tmp}"], ["model_index.json"]),
    "an unknown precision": ([TINY, "precision=fp12"], ["precision=fp12", "bf16, fp32"]),
    "a wrong precision mode": ([TINY, "precision.mode=fp12"], ["fp32, bf16"]),
    "an empty folder": ([TINY, "dataset.root={tmp}/empty"], ["holds no pictures", ".png"]),
    "no folder": ([TINY, "dataset.root={tmp}/none"], ["dataset.root=", "no such folder"]),
    "a file as data set": ([TINY, "dataset.root={tmp}/file"], ["not a folder"]),
    "a wrong type": (
        [TINY, "trainer.batch_size=many"],
        ["trainer.batch_size=many", "a whole number"],
    ),
    "a wrong range": ([TINY, "adapter.rank=0"], ["adapter.rank=0", "1 to 320"]),
    "a wrong type that others repeat": ([TINY, "adapter.rank=many"], ["adapter.rank=many"]),
    "a misspelt setting": ([TINY, "adapter.rnak=4"], ["adapter.rnak=4", "mean adapter.rank?"]),
    "a number for a group": ([TINY, "adapter=3"], ["adapter=3"]),
    "null for a group": ([TINY, "adapter=null"], ["adapter=null"]),
    "no name": ([TINY, "=3"], ["=3"]),
    "a misspelt group": ([TINY, "optimiser=adamw"], ["optimiser=adamw", "unknown setting"]),
    "an added setting": ([TINY, "+adapter.foo=4"], ["adapter.foo=4", "alpha, dropout"]),
    "no override at all": ([TINY, "fast"], ["fast"]),
    "an open bracket": ([TINY, "adapter.targets=[to_q"], ["adapter.targets=[to_q"]),
    "a sweep without its flag": ([TINY, "adapter.rank=8,16"], ["adapter.rank=8,16", "add -m"]),
    "an indivisible batch": (
        [TINY, "trainer.batch_size=4", "trainer.micro_batch=3"],
        ["trainer.micro_batch=3", "1, 2, 4"],
    ),
    "an option without effect": ([TINY, "latents.crop_seed=3"], ["latents.crop_seed=3", "effect"]),
    "a step that the family cannot use": ([TINY, "buckets.step=8"], ["buckets.step=8", "16"]),
    "too many tokens": ([TINY, "captions.max_length=4000"], ["1 to 512"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_mistake_is_one_report_and_leaves_nothing(cli, tmp_path, case):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("", encoding="utf-8")
    given, expected = REFUSED[case]
    done = cli(*(word.replace("{tmp}", str(tmp_path)) for word in given))
    assert done.code == 2
    assert done.lines[0] == "refused: 1 problem"
    assert len(done.lines) == 2
    for text in expected:
        assert text in done.lines[1]
    assert (done.out, done.left) == ("", [])


def test_six_mistakes_one_of_them_in_a_file_are_one_report(cli, conf, tmp_path):
    (tmp_path / "empty").mkdir()
    _spoil(conf / "trainer" / "default.yaml", "batch_size: 1", "batch_size: many")
    done = cli(
        "family=fluxx",
        "precision=bf17",
        "adapter.rank=0",
        "optimizer.lr=abc",
        f"dataset.root={tmp_path}/empty",
    )
    subjects = [line.strip().split("=")[0] for line in done.lines[1:]]
    assert done.code == 2
    assert done.lines[0] == "refused: 6 problems"
    expected = {"family", "precision", "adapter.rank", "optimizer.lr", "dataset.root"}
    assert sorted(subjects) == sorted(expected | {"trainer.batch_size"})
    assert (done.out, done.left) == ("", [])


def test_a_wrong_base_does_not_hide_other_mistakes(cli):
    done = cli("family.base=./nowhere", "adapter.rank=0")
    assert done.lines[0] == "refused: 2 problems"
    assert done.left == []


def test_a_misspelt_name_in_a_file_is_refused_with_the_names_there_are(cli, conf):
    _spoil(conf / "trainer" / "default.yaml", "batch_size: 1", "bath_size: 1")
    done = cli(TINY)
    assert (done.code, done.lines[0]) == (2, "refused: 1 problem")
    told, _, allowed = done.lines[1].partition("; allowed: ")
    assert told.endswith("trainer.bath_size=1: unknown setting")
    assert "batch_size" in allowed.split(", ")


def test_a_file_that_is_no_yaml_is_named_with_its_line_alone(cli, conf):
    _spoil(conf / "trainer" / "default.yaml", "batch_size: 1", "batch_size: [1")
    done = cli(TINY, "adapter.rank=8", "seed=3")
    assert (done.code, done.lines[0]) == (2, "refused: 1 problem")
    assert f"{conf / 'trainer' / 'default.yaml'} line 4: is not YAML" in done.lines[1]


def test_a_file_that_names_no_option_is_not_blamed_on_the_overrides(cli, conf):
    _spoil(conf / "config.yaml", "- family: flux", "- family: fluxy")
    done = cli(TINY, "adapter.rank=8", "seed=3")
    assert (done.code, done.lines[0]) == (2, "refused: 1 problem")
    assert "family/fluxy" in done.lines[1]


def test_a_plan_refuses_what_a_run_refuses(cli):
    done = cli(TINY, "adapter.rank=0", job=show_plan)
    assert (done.code, done.out, done.left) == (2, "", [])


def test_a_plan_makes_nothing_but_the_memory_of_digests(cli):
    done = cli(TINY, job=show_plan)
    assert (done.code, done.err) == (0, "")
    assert [line.split()[0] for line in done.out.splitlines() if line[0] != " "] == [
        *STAGES,
        "to",
    ]
    assert {Path(name).parts[:2] for name in done.left} <= {("store",), ("store", "memory")}


@pytest.mark.parametrize("stage", [stage for stage, (_, needs) in STAGES.items() if needs])
def test_requiring_upstream_in_a_cold_store_names_the_stage_and_its_command(cli, stage):
    done = cli(
        TINY,
        "upstream=require",
        job=lambda config, summary: stages.run_stage(stage, config, summary),
    )
    assert done.code == 4
    assert done.lines[0] == "stopped: 1 problem"
    assert "prepare_dataset is not complete" in done.lines[1]
    assert "`python -m stages.prepare_dataset`" in done.lines[1]
    assert not [name for name in done.left if name.startswith("outputs")]


@pytest.mark.parametrize(
    ("error", "code"),
    [(InputRefused, 2), (SamplesFailed, 3), (StateRefused, 4)],
)
def test_each_kind_of_error_has_its_exit_code(cli, error, code):
    def job(_config, _summary):
        raise error([Problem("b", "second"), Problem("a", "first")])

    done = cli(TINY, job=job)
    assert done.code == code
    assert done.lines[0].endswith(": 2 problems")
    assert done.lines[1:] == ["  a: first", "  b: second"]


def test_a_fault_of_ours_keeps_its_traceback():
    def job(_config, _summary):
        raise ZeroDivisionError

    assert not issubclass(ZeroDivisionError, DarkroomError)
    with pytest.raises(ZeroDivisionError):
        stages.main(job, arguments=[TINY], opens_base=False)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_with_its_own_code_and_a_way_on(cli, interruptible, name):
    def job(_config, _summary):
        os.kill(os.getpid(), signal.Signals[name])
        return 0

    done = cli(TINY, job=job)
    assert done.code == 75
    assert f"stopped: {name}; the same command resumes" in done.lines


def _command(*words):
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=300)


def test_help_names_the_groups_and_their_options():
    done = _command("stages.train", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "lr_schedule: constant, constant_with_warmup, cosine" in done.stdout


def test_cfg_prints_the_configuration_and_runs_nothing(tmp_path):
    done = _command("stages.train", "--cfg", "job", TINY, f"paths.store={tmp_path}/store")
    assert (done.returncode, done.stderr) == (0, "")
    assert "base: tiny" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_flags_do_not_turn_mistakes_into_tracebacks():
    done = _command("stages.train", "--cfg", "job", TINY, "adapter.rank=0", "precision=bf17")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0] == "refused: 2 problems"


@pytest.mark.parametrize("action", [["polish"], []])
def test_an_unknown_action_of_the_store_names_the_known_ones(action):
    done = _command("stages.store", *action)
    assert (done.returncode, done.stdout) == (2, "")
    assert "verify, gc, stats" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.fixture
def prepared(cli):
    """A door on a store in which the data set was prepared."""
    assert (
        cli(
            TINY, job=lambda config, summary: stages.run_stage("prepare_dataset", config, summary)
        ).code
        == 0
    )

    def run(job):
        return cli(job=job, opens_base=False)

    return run


def test_verify_is_content_with_a_whole_store(prepared):
    done = prepared(stages.store.verify)
    assert (done.code, done.out.splitlines()[-1].split(" checked, ")[1]) == (
        0,
        "0 damaged, 0 missing, 0 stray",
    )


def test_verify_of_a_damaged_store_exits_3_and_names_the_file(prepared):
    left = prepared(stages.store.verify).left
    manifest = next(Path(n) for n in left if "manifests" in n and n.endswith(".json"))
    content = bytearray(manifest.read_bytes())
    content[len(content) // 2] ^= 1
    manifest.write_bytes(content)
    done = prepared(stages.store.verify)
    assert done.code == 3
    assert "1 damaged" in done.out
    assert str(manifest) in done.out


def test_stats_and_gc_of_a_store_that_is_not_there_find_nothing(cli):
    for job in (stages.store.verify, stages.store.stats, stages.store.gc):
        assert cli(job=job, opens_base=False).code == 0
