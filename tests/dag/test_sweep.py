"""Sweeps: one encode, a run a combination, a table and one picture; a failure stops no other."""

import os
import signal

import pytest


@pytest.fixture
def sweep(settings, capsys, monkeypatch):
    """Run a sweep of the small run; its exit code and what it printed."""
    import sys

    import stages

    def made(*overrides: str, steps: int = 2) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["train"])
        with pytest.raises(SystemExit) as ended:
            stages.main(
                lambda config, summary: stages.run_stage("train", config, summary),
                arguments=["-m", *settings(f"trainer.max_steps={steps}", *overrides)],
            )
        return int(ended.value.code or 0), capsys.readouterr().out

    return made


def table_of(printed: str) -> dict[str, str]:
    """Result by overrides, of the table at the end."""
    lines = printed[printed.rindex("\noverrides") :].strip().splitlines()[1:]
    rows = [
        line.split("  ") for line in lines if line.startswith(("adapter", "optimizer", "seed", "("))
    ]
    return {row[0].strip(): next(cell.strip() for cell in row[1:] if cell.strip()) for row in rows}


def test_four_runs_share_one_encode_and_end_in_a_table_and_a_picture(sweep, counted, tmp_path):
    code, printed = sweep("adapter.rank=2,4", "optimizer.lr=1e-2,1e-3")
    assert code == 0
    assert counted == {"captions": 9, "latents": 8}
    assert table_of(printed) == {
        f"adapter.rank={rank} optimizer.lr={lr}": "done" for rank in (2, 4) for lr in (0.01, 0.001)
    }
    folders = [path for path in (tmp_path / "outputs").iterdir() if path.name != ".sweeps"]
    assert len(folders) == 4
    (picture,) = (tmp_path / "outputs" / ".sweeps").glob("*/losses.png")
    assert str(picture) in printed


def test_a_failing_combination_does_not_stop_the_others(sweep, tmp_path):
    code, printed = sweep("adapter.rank=2,0,4")
    assert code == 2
    assert table_of(printed) == {
        "adapter.rank=2": "done",
        "adapter.rank=0": "failed (2)",
        "adapter.rank=4": "done",
    }


@pytest.mark.usefixtures("interruptible")
def test_a_stop_ends_the_sweep_and_the_same_sweep_goes_on(sweep, monkeypatch, tmp_path):
    from lib.training.step import Trainer

    whole = Trainer.launch

    def interrupted(self, group, *, rate):
        if self.seed == 1 and group.step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return whole(self, group, rate=rate)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "launch", interrupted)
        code, printed = sweep("seed=0,1,2", steps=4)
    assert code == 75
    assert table_of(printed) == {"seed=0": "done", "seed=1": "stopped", "seed=2": "not started"}
    code, printed = sweep("seed=0,1,2", steps=4)
    assert code == 0
    assert table_of(printed) == {"seed=0": "hit", "seed=1": "done", "seed=2": "done"}


def test_each_run_of_a_sweep_is_the_run_alone(sweep, ensure, results_of, tmp_path):
    """Nothing of one job reaches the next: dropout first, then none."""
    sweep("adapter.dropout=0.5,0")
    last, alone = ("adapter.dropout=0", "trainer.max_steps=2"), tmp_path / "alone"
    swept = results_of(ensure("train", *last))
    assert results_of(ensure("train", *last, root=alone), alone) == swept


@pytest.mark.nightly
def test_a_sweep_run_again_is_all_hits_with_the_same_losses(sweep):
    _, first = sweep("adapter.rank=2,4")
    _, second = sweep("adapter.rank=2,4")
    assert set(table_of(second).values()) == {"hit"}
    assert [line.split()[2] for line in first.splitlines()[-4:-2]] == [
        line.split()[2] for line in second.splitlines()[-4:-2]
    ]


def test_a_sweep_leaves_nothing_but_its_runs_and_its_own_folder(sweep, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    sweep("adapter.rank=2,4")
    assert {path.name for path in tmp_path.iterdir()} - before <= {"store", "outputs"}
    (folder,) = (tmp_path / "outputs" / ".sweeps").iterdir()
    assert {path.name for path in folder.iterdir()} == {"losses.png", "multirun.yaml"}
