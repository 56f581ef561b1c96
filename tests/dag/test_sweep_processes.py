"""Sweeps whose jobs run in other processes: on this machine, and under a stand-in of SLURM."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import stages
from lib.config import read
from lib.errors import InputRefused
from stages import composing, launching, sweeping

CHECKOUT = Path(__file__).resolve().parents[2]
SECONDS = 240
# Commands of SLURM for one job on this machine; a job that asks to be queued again runs again.
SLURM = {
    "sbatch": """
        for file; do :; done
        cp "$file" "$FAKE/job.sh"
        sh "$FAKE/node" >"$FAKE/log" 2>&1 </dev/null &
        echo "Submitted batch job 7"
    """,
    "node": """
        export SLURM_JOB_ID=7 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=1
        while :; do
            rm -f "$FAKE/again"
            sh "$FAKE/job.sh"
            [ -e "$FAKE/again" ] || break
        done
    """,
    "srun": 'shift 5; exec "$@"',  # --unbuffered, --output and --error with their files
    "scontrol": 'touch "$FAKE/again"; echo "$@" >> "$FAKE/asked"',
    "sacct": "exit 0",
}


@pytest.fixture
def sweep(settings, capsys, monkeypatch):
    """Run a sweep of the small run in processes of this machine: its code and what it printed."""

    def made(*overrides):
        monkeypatch.setattr(sys, "argv", ["train"])
        with pytest.raises(SystemExit) as ended:
            stages.main(
                functools.partial(stages.run_stage, "train"),
                arguments=["-m", "hydra/launcher=local_processes", *settings(*overrides)],
            )
        return ended.value.code, capsys.readouterr().out

    return made


@pytest.mark.nightly
def test_rows_come_back_from_other_processes_and_runs_hang_under_one_parent(
    sweep, mlflow_store, tmp_path
):
    from lib.tracking import replay_pending
    from lib.tracking.server import Server

    tracked = ("tracker=mlflow", f"tracker.uri={mlflow_store}")
    code, printed = sweep("adapter.rank=2,0", "trainer.max_steps=2", *tracked)
    lines = printed.splitlines()
    rows = {line.split()[0]: line.split()[1:3] for line in lines if line.startswith("adapter")}
    assert code == 2
    assert [rows[f"adapter.rank={rank}"][0] for rank in (2, 0)] == ["done", "failed"]
    assert float(rows["adapter.rank=2"][1]) > 0
    (folder,) = (tmp_path / "outputs" / ".sweeps").iterdir()
    assert {path.name for path in folder.iterdir()} == {"losses.png", "multirun.yaml", ".submitit"}
    logs = [path.read_text() for path in folder.glob(".submitit/*/*.err")]
    assert len([text for text in logs if "adapter.rank=0: " in text]) == 1
    assert list(folder.rglob("*.pkl")) == []  # they would hold the tracker's address
    server = Server(mlflow_store, "darkroom")
    replay_pending(tmp_path / "outputs", server)  # three processes at once may have had no time
    found = {run.info.run_name: run for run in server._client.search_runs([server._experiment])}
    parent = found.pop("sweep")
    assert parent.info.status == "FAILED"
    parents = [run.data.tags["mlflow.parentRunId"] for run in found.values()]
    assert parents == [parent.info.run_id]


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A folder with SLURM's commands, which are found first."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    for name, script in SLURM.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("FAKE", str(folder))
    monkeypatch.setenv("PATH", os.pathsep.join([str(folder), os.environ["PATH"]]))
    return folder


def until(condition, process):
    deadline = time.monotonic() + SECONDS
    while not (found := condition()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


@pytest.mark.nightly
def test_a_job_that_nears_its_time_limit_goes_back_to_the_queue_and_resumes(
    settings, cluster, tmp_path
):
    words = ["-m", "hydra/launcher=slurm", "hydra.launcher.partition=gpu"]
    words += settings("trainer.max_steps=200", "trainer.save_every=10")
    command = [sys.executable, "-m", "stages.train", *words]
    running = subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True)
    until(lambda: list(tmp_path.glob("outputs/*/checkpoints/step-*")), running)
    (record,) = (p for p in tmp_path.glob("store/runs/*.json") if len(p.stem) == 64)
    os.kill(json.loads(record.read_text())["process"]["pid"], signal.SIGUSR2)
    printed, _ = running.communicate(timeout=SECONDS)
    log = (cluster / "log").read_text()
    assert running.returncode == 0, log
    assert (cluster / "asked").read_text().splitlines() == ["requeue 7"]
    assert "done" in printed
    (events,) = tmp_path.glob("outputs/*/events.jsonl")
    decided = [json.loads(line) for line in events.read_text().splitlines()]
    resumed = [e["value"] for e in decided if e["kind"] == "decision" and e["name"] == "resume"]
    assert len(resumed) == 1
    assert resumed[0] > 0
    asked = (cluster / "job.sh").read_text()
    for flag in ("partition=gpu", "gpus-per-node=1", "time=720", "signal=USR2@120", "requeue"):
        assert f"#SBATCH --{flag}\n" in asked


@pytest.mark.nightly
def test_a_job_that_is_terminated_stops_as_anywhere_and_can_be_resumed(settings, cluster, tmp_path):
    words = settings("trainer.max_steps=200", "trainer.save_every=10")
    command = [sys.executable, "-m", "stages.train", "-m", "hydra/launcher=slurm", *words]
    running = subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True)
    until(lambda: list(tmp_path.glob("outputs/*/checkpoints/step-*")), running)
    (record,) = (p for p in tmp_path.glob("store/runs/*.json") if len(p.stem) == 64)
    os.kill(json.loads(record.read_text())["process"]["pid"], signal.SIGTERM)
    printed, _ = running.communicate(timeout=SECONDS)
    assert running.returncode == 75
    assert "stopped" in printed
    assert json.loads(record.read_text())["state"] == "stopped"


def test_when_a_job_dies_the_rows_of_the_others_are_shown(monkeypatch, tmp_path, capsys):
    reading = read({})

    def dying(run, arguments, *, begin):
        begin(reading, tmp_path)
        monkeypatch.setenv(sweeping.ELSEWHERE, "local")
        run(launching.Combination(3, ("seed=3",), reading, tmp_path))
        swept = run.__self__
        assert swept.rows == []  # that was another process
        raise SystemExit(1)

    monkeypatch.setattr(launching, "with_hydra", dying)
    before = signal.getsignal(signal.SIGTERM)
    try:
        code = sweeping.sweep(lambda config, summary: 0, ["-m", "hydra/launcher=local_processes"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert code == 2
    assert "seed=3     failed (2)" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("launcher", ["slurm", "local_processes", "submitit_slurm"])
def test_without_the_plugin_the_launcher_is_refused_with_the_command_that_installs_it(
    monkeypatch, launcher
):
    monkeypatch.setattr(launching.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputRefused, match=r"pip install -e '\.\[sweep\]'"):
        launching.check_launcher(["-m", f"hydra/launcher={launcher}"])
    launching.check_launcher(["-m", "hydra/launcher=basic", "adapter.rank=2"])


def test_slurm_is_refused_where_there_is_none(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputRefused, match="no srun"):
        launching.check_launcher(["-m", "hydra/launcher=slurm"])
    launching.check_launcher(["-m", "hydra/launcher=local_processes"])


def test_a_launcher_for_one_run_is_refused():
    with pytest.raises(InputRefused, match="add -m"):
        composing.compose(["hydra/launcher=local_processes"])
