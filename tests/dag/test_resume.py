"""The same command gives the same adapter, bit for bit: cold or warm, whole or in pieces."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.reliability import crashes

CHECKOUT = Path(__file__).resolve().parents[2]
RUN = """
import sys
sys.path.insert(0, {checkout!r})
from lib.events import Events
from lib.pipeline import graph
from stages.composing import compose
graph.ensure({stage!r}, compose({overrides!r}), Events())
"""


def in_new_process(overrides, *, stage="train"):
    script = RUN.format(checkout=str(CHECKOUT), stage=stage, overrides=overrides)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)


@pytest.fixture
def killed(configure, tmp_path):
    """Trains in a process of its own that kills itself as a step begins; its exit code."""

    def run(at, **options):
        config = configure(**options)

        def job():
            from lib.events import Events
            from lib.pipeline import graph
            from lib.training import step

            whole = step.Trainer.launch

            def dying(self, group, *, rate):
                if group.step == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return whole(self, group, rate=rate)

            step.Trainer.launch = dying
            graph.ensure("train", config, Events())

        return crashes.run(job, log=tmp_path / "log")

    return run


def process_record(pid: int) -> dict:
    from lib import leases

    started = leases._started(pid)
    return {**asdict(leases.this_process()), "pid": pid, "started": started}


def metric_steps(root: Path) -> list[list[int]]:
    """The steps that each run folder's events report, in order."""
    found = []
    for path in sorted(root.glob("outputs/*/events.jsonl")):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        found.append([event["step"] for event in events if event["kind"] == "metric"])
    return found


@pytest.mark.nightly
def test_two_stores_two_processes_cold_and_warm_give_one_adapter(
    settings, ensure, results_of, tmp_path
):
    cold, warm = tmp_path / "cold", tmp_path / "warm"
    overrides = ("latents.variants=2", "trainer.caption_dropout=0.3", "trainer.micro_batch=1")
    assert in_new_process(settings(*overrides, root=cold)).returncode == 0
    for stage in ("encode_captions", "build_latent_cache"):
        assert in_new_process(settings(*overrides, root=warm), stage=stage).returncode == 0
    assert in_new_process(settings(*overrides, root=warm)).returncode == 0
    first, second = (ensure("train", *overrides, root=root) for root in (cold, warm))
    assert first.key == second.key
    assert results_of(first, cold) == results_of(second, warm)


@pytest.mark.slow
@pytest.mark.parametrize(
    "at",
    [pytest.param(1, marks=pytest.mark.nightly), 2, pytest.param(5, marks=pytest.mark.nightly)],
)
def test_a_killed_run_resumes_and_ends_as_the_unbroken_one(
    killed, ensure, results_of, tmp_path, at
):
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    assert killed(at, root=broken) == -signal.SIGKILL
    before = metric_steps(broken)[0]
    saved = at - at % 2  # a checkpoint every second step
    # A step's numbers are read after the next is launched, but for the first and saved ones.
    assert before == list(range(1, max(saved, 1) + 1))
    resumed = ensure("train", root=broken)
    assert metric_steps(broken) == [before + list(range(saved + 1, 7))]
    assert len(results_of(resumed, broken)) == 2
    assert results_of(resumed, broken) == results_of(ensure("train", root=whole), whole)


def test_a_run_that_is_running_is_refused_with_its_folder(settings, ensure, tmp_path):
    from lib.errors import StateRefused
    from lib.runs import read, record_path

    manifest = ensure("train")
    record = dict(read(tmp_path / "store", manifest.key))
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        record |= {"state": "running", "process": process_record(sleeper.pid)}
        record_path(tmp_path / "store", manifest.key).write_text(json.dumps(record))
        with pytest.raises(StateRefused, match=f"process {sleeper.pid}") as refused:
            ensure("train")
        assert record["folder"] in str(refused.value)
        assert refused.value.exit_code == 4
    finally:
        sleeper.kill()
        sleeper.wait()


def test_rerun_makes_a_new_folder_and_leaves_the_old_one(ensure, adapter_of, tmp_path):
    manifest = ensure("train", "name=mine")
    first = (tmp_path / "outputs/mine/adapter/adapter.safetensors").read_bytes()
    ensure("train", "name=mine", "rerun=true")
    folders = sorted(path.name for path in (tmp_path / "outputs").iterdir())
    assert folders == ["mine", "mine-2"]
    assert adapter_of(manifest) == first
    assert (tmp_path / "outputs/mine/adapter/adapter.safetensors").read_bytes() == first


@pytest.mark.parametrize("loss", ["folder", "adapter"])
def test_a_lost_or_changed_result_is_made_again(ensure, adapter_of, tmp_path, loss):
    import shutil

    manifest = ensure("train", "name=mine")
    first = adapter_of(manifest)
    if loss == "folder":
        shutil.rmtree(tmp_path / "outputs/mine")
    else:
        (tmp_path / "outputs/mine/adapter/adapter.safetensors").write_bytes(b"changed")
    ensure("train", "name=mine")
    assert adapter_of(manifest) == first


def test_a_resumed_run_skips_a_damaged_checkpoint_and_says_so(
    killed, ensure, adapter_of, tmp_path, seen
):
    whole = tmp_path / "whole"
    killed(5)
    newest = sorted(tmp_path.glob("outputs/*/checkpoints/step-*"))[-1]
    state = newest / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-8])
    resumed = ensure("train")
    warnings = [event.data["text"] for event in seen if event.kind == "warning"]
    assert len(warnings) == 1
    assert newest.name in warnings[0]
    assert adapter_of(resumed) == adapter_of(ensure("train", root=whole), whole)


@pytest.mark.nightly
def test_control_c_saves_and_says_how_to_go_on(settings, interruptible, tmp_path):
    overrides = settings("trainer.max_steps=4000", "trainer.save_every=20")
    command = [sys.executable, "-m", "stages.train", *overrides]
    running = subprocess.Popen(
        command, cwd=CHECKOUT, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("outputs/*/checkpoints/step-*")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 75
    assert "SIGINT after step" in errors
    assert "saved; the same command resumes" in errors
    assert "Traceback" not in errors
