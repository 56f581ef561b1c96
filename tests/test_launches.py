"""Commands as they are launched: two at once, a sweep, torchrun; each run has one folder, no more."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import stages

CHECKOUT = Path(__file__).resolve().parent.parent
SECONDS = 300
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node")
SMALL = (
    "+experiment=ci",
    "trainer.max_steps=2",
    "trainer.save_every=1",
    "adapter.rank=2",
    "paths.store=store",
    "paths.outputs=outputs",
)


def start(place, *words, **environment):
    """A command of ours, started in a folder that is not the checkout."""
    added = {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=place,
        env={**os.environ, **added},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process):
    """Exit code and stderr of a command."""
    _, errors = process.communicate(timeout=SECONDS)
    return process.returncode, errors


def folders(place):
    """The folders of runs, and each one's own learning rate and rank."""
    found = {}
    for folder in sorted((place / "outputs").iterdir()):
        config = yaml.safe_load((folder / "config.yaml").read_text())
        found[folder.name] = config["optimizer"]["lr"]
    return found


def left(place):
    """Everything that lies in a place, but what is inside the store."""
    names = {path.relative_to(place).as_posix() for path in place.rglob("*")}
    return {name for name in names if not name.startswith("store/")}


def assert_nothing_stray(place):
    """No folder of Hydra, no empty folder, no record of a run whose folder is not there."""
    assert {path.name for path in place.iterdir()} <= {"store", "outputs"}
    assert not [name for name in left(place) if ".hydra" in name or name.endswith(".log")]
    empty = [
        path for path in (place / "outputs").rglob("*") if path.is_dir() and not any(path.iterdir())
    ]
    assert empty == []
    records = [json.loads(path.read_text()) for path in (place / "store/runs").glob("*.json")]
    claimed = [Path(record["folder"]) for record in records]
    runs = [path for path in (place / "outputs").iterdir() if path.name != ".sweeps"]
    assert sorted(claimed) == sorted(path.resolve() for path in runs)
    assert {record["state"] for record in records} == {"complete"}


@pytest.fixture
def prepared(tmp_path):
    """A place in which everything up to training is made, so that launches meet at the run."""
    for stage in ("encode_captions", "build_latent_cache"):
        assert ended(start(tmp_path, f"stages.{stage}", *SMALL))[0] == 0
    return tmp_path


@pytest.mark.nightly
def test_one_run_launched_twice_at_once_has_one_folder(prepared):
    both = [start(prepared, "stages.train", *SMALL, "name=mine") for _ in range(2)]
    codes, errors = zip(*map(ended, both), strict=True)
    # The second is refused while the first runs, or finds it complete.
    assert sorted(codes) in ([0, 0], [0, 4]), errors
    assert all(
        "is running: process" in text for code, text in zip(codes, errors, strict=True) if code
    )
    assert list(folders(prepared)) == ["mine"]
    assert_nothing_stray(prepared)
    assert ended(start(prepared, "stages.train", *SMALL, "name=mine"))[0] == 0
    assert list(folders(prepared)) == ["mine"]


@pytest.mark.nightly
def test_two_runs_of_one_name_at_once_have_a_folder_each(prepared):
    rates = (0.01, 0.001)
    both = [
        start(prepared, "stages.train", *SMALL, "name=mine", f"optimizer.lr={r}") for r in rates
    ]
    assert [code for code, _ in map(ended, both)] == [0, 0]
    assert list(folders(prepared)) == ["mine", "mine-2"]
    assert sorted(folders(prepared).values()) == sorted(rates)
    assert_nothing_stray(prepared)


@pytest.mark.nightly
def test_a_sweep_with_hydra_s_own_folders_asked_for_leaves_runs_alone(tmp_path):
    words = ("-m", "seed=1,2", "hydra.job.chdir=true")
    code, errors = ended(start(tmp_path, "stages.train", *SMALL, *words))
    assert code == 0, errors
    (sweep,) = (tmp_path / "outputs" / ".sweeps").iterdir()
    assert {path.name for path in sweep.iterdir()} == {"losses.png", "multirun.yaml"}
    assert len(list((tmp_path / "outputs").iterdir())) == 3
    assert_nothing_stray(tmp_path)


@pytest.mark.nightly
def test_torchrun_with_one_process_is_the_plain_command(tmp_path):
    code, errors = ended(start(tmp_path, *TORCHRUN, "1", "-m", "stages.train", *SMALL, "name=mine"))
    assert code == 0, errors
    assert list(folders(tmp_path)) == ["mine"]
    assert_nothing_stray(tmp_path)
    names = [name for name in left(tmp_path) if not re.fullmatch(r"[\w./-]+", name, re.ASCII)]
    assert names == [], "a name that a command line has to quote"


@pytest.mark.nightly
def test_torchrun_with_two_processes_is_one_run_with_one_voice(tmp_path):
    words = ("name=mine", "trainer.batch_size=2")
    code, errors = ended(start(tmp_path, *TORCHRUN, "2", "-m", "stages.train", *SMALL, *words))
    assert code == 0, errors
    assert list(folders(tmp_path)) == ["mine"]
    assert errors.count("train: start") == 1
    assert_nothing_stray(tmp_path)


@pytest.mark.nightly
def test_what_several_processes_cannot_do_is_one_refusal_of_both_and_leaves_nothing(tmp_path):
    code, errors = ended(start(tmp_path, *TORCHRUN, "2", "-m", "stages.sample", *SMALL))
    assert code != 0
    assert re.findall(r"^refused: .*\n.*", errors, re.M) == [
        "refused: 1 problem\n  WORLD_SIZE=2: stages.sample is work for one process; allowed: "
        "stages.train, stages.encode_captions, stages.build_latent_cache, stages.prepare_dataset, "
        "no flags; start it with `python -m`"
    ]
    codes = set(re.findall(r"exitcode *: (-?\d+)", errors))
    assert "2" in codes
    assert codes <= {"2", "-15"}  # torchrun stops a process whose sibling has ended
    assert left(tmp_path) == set()


@pytest.mark.parametrize("flags", [[], ["-m", "seed=1,2"], ["--cfg", "job"]], ids=str)
@pytest.mark.parametrize("rank", ["0", "1", None])
def test_a_run_on_several_processes_is_refused_once_before_anything_is_made(
    rank, flags, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(stages, "HEARING_SECONDS", 0.0)
    monkeypatch.delenv("RANK", raising=False)
    if rank:
        monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as exit:
        stages.main(lambda *_: pytest.fail("the job ran"), arguments=[*flags, *SMALL])
    printed = capsys.readouterr()
    assert exit.value.code == 2
    assert printed.out == ""
    assert printed.err.count("WORLD_SIZE=2") == (0 if rank == "1" else 1)
    assert left(tmp_path) == set()


@pytest.mark.parametrize("size", ["1", ""])
def test_one_process_is_no_group(size, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", size)
    ran = []
    with contextlib.suppress(SystemExit):
        stages.main(lambda *_: ran.append(1) or 0, arguments=[*SMALL], opens_base=False)
    assert ran == [1]
