"""A run that is asked to stop saves within a step, says so, and goes on as if it had not been."""

import json
import os
import signal
import time

import pytest

from tests.reliability import crashes

RARE = ("trainer.save_every=100", "name=mine")


@pytest.fixture
def stopped(configure, tmp_path):
    """Ensures a stage in a process of its own that heeds signals; its exit code and its words."""

    def run(*overrides, stage="train", meddle=lambda: None):
        config, log = configure(*overrides), tmp_path / "log"
        log.unlink(missing_ok=True)

        def job():
            from lib import stopping
            from lib.events import Events
            from lib.pipeline import graph

            signal.signal(signal.SIGINT, signal.default_int_handler)
            meddle()
            with stopping.heeding():
                graph.ensure(stage, config, Events())

        return crashes.run(job, log=log), log.read_text()

    return run


def before_step(number, do):
    """A meddling: something happens as a step begins."""

    def meddle():
        from lib.training.step import Trainer

        whole = Trainer.launch

        def meddled(self, group, *, rate):
            if group.step == number:
                do()
            return whole(self, group, rate=rate)

        Trainer.launch = meddled

    return meddle


def send(name):
    return lambda: os.kill(os.getpid(), signal.Signals[name])


def checkpoints(root):
    return sorted(path.name for path in root.glob("outputs/*/checkpoints/*"))


def run_record(root):
    return json.loads((root / "outputs/mine/run.json").read_text())


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("SIGINT", marks=pytest.mark.nightly),
        "SIGTERM",
        "file",
        pytest.param("file of all runs", marks=pytest.mark.nightly),
    ],
)
def test_a_run_saves_after_the_step_it_was_asked_in_and_resumes_as_unbroken(
    stopped, ensure, results_of, tmp_path, how
):
    from lib import runs

    files = {"file": "outputs/mine/stop", "file of all runs": "outputs/stop"}
    asked = (lambda: (tmp_path / files[how]).touch()) if how in files else send(how)
    code, said = stopped(*RARE, meddle=before_step(2, asked))
    assert code == 75, said
    assert "after step 3, saved" in said
    assert checkpoints(tmp_path) == ["step-00000003"]
    by = "stop file" if how in files else how
    assert run_record(tmp_path)["ended"] == {"state": "stopped", "why": by, "step": 3}
    if how in files:
        from lib.errors import StateRefused

        assert "remove" in said
        with pytest.raises(StateRefused, match="remove the file"):
            ensure("train", *RARE)
        (tmp_path / files[how]).unlink()
    resumed = ensure("train", *RARE)
    ended = run_record(tmp_path)
    assert ended["ended"] == {"state": "complete", "step": 6}
    assert ended["decisions"]["resume"]["value"] == 3
    assert runs.read(tmp_path / "store", resumed.key)["state"] == "complete"
    whole = ensure("train", *RARE, root=tmp_path / "whole")
    assert results_of(resumed) == results_of(whole, tmp_path / "whole")


def test_a_stop_without_saving_writes_no_checkpoint(stopped, tmp_path):
    def ask():
        (tmp_path / "outputs/mine/stop").write_text("discard")

    code, said = stopped(*RARE, meddle=before_step(2, ask))
    assert code == 75
    assert "after step 3, not saved" in said
    assert checkpoints(tmp_path) == []
    assert run_record(tmp_path)["ended"] == {"state": "stopped", "why": "stop file", "step": 0}


def test_a_second_signal_ends_a_run_that_hangs(stopped, tmp_path):
    def hang():
        send("SIGINT")()
        time.sleep(0.2)
        send("SIGINT")()
        time.sleep(60)

    code, _ = stopped(*RARE, meddle=before_step(2, hang))
    assert code == 130
    assert checkpoints(tmp_path) == []


def test_a_stop_while_the_denoiser_loads_is_at_once_and_writes_nothing(stopped, ensure, tmp_path):
    def meddle():
        from lib.families import flux

        flux.load_denoiser = lambda *_, **__: (send("SIGTERM")(), time.sleep(60))

    code, said = stopped(*RARE, meddle=meddle)
    assert code == 75
    assert "SIGTERM; the same command resumes" in said
    assert checkpoints(tmp_path) == []
    assert run_record(tmp_path)["ended"] == {"state": "stopped", "why": "SIGTERM", "step": 0}
    ensure("train", *RARE)


@pytest.mark.parametrize("how", ["SIGINT", pytest.param("file", marks=pytest.mark.nightly)])
def test_a_stop_while_caching_keeps_what_is_encoded(stopped, ensure, counted, tmp_path, how):
    def meddle():
        from lib.store import Store

        put, calls = Store.put, []

        def counting(self, kind, *args, **named):
            made = put(self, kind, *args, **named)
            calls.append(kind)
            if calls.count("latents") == 3:
                (tmp_path / "outputs").mkdir(exist_ok=True)
                (tmp_path / "outputs/stop").touch() if how == "file" else send(how)()
            return made

        Store.put = counting

    code, said = stopped(stage="build_latent_cache", meddle=meddle)
    assert code == 75, said
    assert len(list((tmp_path / "store/latents").glob("??/*"))) == 3
    (tmp_path / "outputs/stop").unlink(missing_ok=True)
    ensure("build_latent_cache")
    assert counted["latents"] == 5


def test_what_a_stop_cut_short_is_measured_where_the_run_goes_on(
    stopped, ensure, results_of, tmp_path
):
    overrides = (*RARE, "validation.fraction=0.3", "validation.every=3", "validation.num_draws=2")

    def meddle():
        from lib.training.validation import Validator

        whole = Validator._losses_of

        def interrupted(self, batch):
            if len(self._losses) == 1:  # the measure of step 3
                send("SIGTERM")()
            return whole(self, batch)

        Validator._losses_of = interrupted

    code, said = stopped(*overrides, meddle=meddle)
    assert code == 75, said
    measured = json.loads((tmp_path / "outputs/mine/validation.json").read_text())
    assert list(measured) == ["0"]
    resumed = ensure("train", *overrides)
    whole = ensure("train", *overrides, root=tmp_path / "whole")
    assert results_of(resumed) == results_of(whole, tmp_path / "whole")
    paths = [root / "outputs/mine/validation.json" for root in (tmp_path, tmp_path / "whole")]
    both = [json.loads(path.read_text()) for path in paths]
    assert checkpoints(tmp_path)[0] == "step-00000003"
    assert both[0] == both[1]
