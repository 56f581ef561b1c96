"""Several processes on one run, here two on the CPU: as one, whatever happens to either."""

import json
import os
import signal
import socket
import time
from collections import Counter

import pytest

from tests.reliability import crashes

SPLIT = ("trainer.batch_size=6", "trainer.micro_batch=3", "encode.batch_size=2")
PATIENCE_SECONDS = 60


@pytest.fixture
def team(tmp_path, configure):
    """Runs a stage in so many processes at once; exit codes by rank, and what they said.

    `meddle(rank)` is called in each before it begins.
    """

    def run(*overrides, stage="train", size=2, meddle=lambda rank: None, **options):
        from lib import stopping

        config, port, log = configure(*overrides, **options), free_port(), tmp_path / "log"
        log.unlink(missing_ok=True)

        def job(rank):
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in names.items()})
            os.environ["MASTER_ADDR"] = "127.0.0.1"
            meddle(rank)
            with stopping.heeding():
                ensure_here(stage, config, leads=rank == 0)

        children = [crashes.started(lambda rank=rank: job(rank), log=log) for rank in range(size)]
        codes = [crashes.ended(child) for child in children]
        return codes, log.read_text()

    return run


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def ensure_here(stage, config, *, leads):
    from lib.events import Events
    from lib.pipeline import graph

    graph.ensure(stage, config, Events(kept=leads))


def losses(root):
    """The loss after each step, of the one run under a root; a step run twice as it ran last."""
    (path,) = root.glob("outputs/*/events.jsonl")
    events = map(json.loads, path.read_text().splitlines())
    found = {e["step"]: e["loss"] for e in events if e["kind"] == "metric" and "loss" in e}
    return [found[step] for step in sorted(found)]


def adapter_of(root):
    from safetensors.torch import load_file

    (path,) = root.glob("outputs/*/adapter/adapter.safetensors")
    return load_file(path)


def assert_same_run(one, other):
    import torch

    assert losses(one) == pytest.approx(losses(other), rel=1e-5)
    first, second = adapter_of(one), adapter_of(other)
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=1e-3, atol=1e-5)


def ends_at(step, *, number=signal.SIGKILL, ranks=(0, 1)):
    """A meddling: these processes get a signal as they begin a step."""

    def meddle(rank):
        from lib.training.step import Trainer

        whole = Trainer.launch

        def dying(self, group, *, rate):
            if group.step == step and rank in ranks:
                os.kill(os.getpid(), number)
            return whole(self, group, rate=rate)

        Trainer.launch = dying

    return meddle


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [pytest.param((), marks=pytest.mark.nightly), SPLIT],
    ids=["whole", "unequal shares"],
)
def test_two_processes_train_as_one(team, ensure, tmp_path, overrides):
    """With unequal shares a group of three micro-batches leaves one process with two of them."""
    codes, said = team(*overrides, root=tmp_path / "two")
    assert codes == [0, 0], said
    ensure("train", *overrides, root=tmp_path / "one")
    assert_same_run(tmp_path / "two", tmp_path / "one")
    assert len(list((tmp_path / "two" / "outputs").iterdir())) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", [pytest.param(2, marks=pytest.mark.nightly), 1], ids=["two then one", "one then two"]
)
def test_what_some_saved_others_resume(team, ensure, tmp_path, first):
    ensure("train", root=tmp_path / "whole")
    codes, said = team(size=first, meddle=ends_at(3), root=tmp_path / "parts")
    assert set(codes) == {-signal.SIGKILL}, said
    codes, said = team(size=3 - first, root=tmp_path / "parts")
    assert codes == [0] * (3 - first), said
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.slow
def test_two_processes_encode_each_entry_once(team, tmp_path):
    """Cold caches: rows are counted at the encoders' own classes, in both processes."""

    def count(rank):
        from diffusers import AutoencoderKL
        from transformers import T5EncoderModel

        for kind, method in ((AutoencoderKL, "encode"), (T5EncoderModel, "forward")):
            setattr(kind, method, counting(getattr(kind, method), tmp_path / f"rows {method}"))

    codes, said = team(stage="train", meddle=count, root=tmp_path / "two")
    assert codes == [0, 0], said
    rows = {path.name: len(path.read_bytes()) for path in tmp_path.glob("rows *")}
    kinds = Counter(p.parent.parent.name for p in (tmp_path / "two/store").glob("*/??/*"))
    assert rows == {"rows encode": kinds["latents"], "rows forward": kinds["captions"]}


def counting(method, path):
    def counted(self, rows=None, *args, **named):
        given = rows if rows is not None else named["input_ids"]
        with path.open("ab") as file:
            file.write(b"." * len(given))
        time.sleep(0.02)  # long enough for both processes to have their part
        return method(self, *(() if rows is None else (rows,)), *args, **named)

    return counted


@pytest.mark.slow
@pytest.mark.parametrize("dying", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_when_one_is_killed_in_a_step_the_other_ends_with_a_word_and_the_run_resumes(
    team, ensure, tmp_path, dying
):
    ensure("train", root=tmp_path / "whole")
    began = time.monotonic()
    codes, said = team(meddle=ends_at(3, ranks=(dying,)), root=tmp_path / "parts")
    assert time.monotonic() - began < PATIENCE_SECONDS
    assert codes[dying] == -signal.SIGKILL
    assert codes[1 - dying] == 75, said
    assert "another process of this run" in said
    codes, said = team(root=tmp_path / "parts")
    assert codes == [0, 0], said
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("asked", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_one_that_is_asked_to_stop_stops_both_after_the_same_step(team, ensure, tmp_path, asked):
    ensure("train", root=tmp_path / "whole")
    meddle = ends_at(2, number=signal.SIGTERM, ranks=(asked,))
    codes, said = team("trainer.save_every=100", meddle=meddle, root=tmp_path / "parts")
    assert codes == [75, 75], said
    assert said.count("after step 3, saved") == 2
    (saved,) = tmp_path.glob("parts/outputs/*/checkpoints/*")
    assert saved.name == "step-00000003"
    (record,) = tmp_path.glob("parts/outputs/*/run.json")
    by = "SIGTERM" if asked == 0 else "another process"
    assert json.loads(record.read_text())["ended"] == {"state": "stopped", "why": by, "step": 3}
    codes, said = team(root=tmp_path / "parts")
    assert codes == [0, 0], said
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.slow
def test_a_number_that_is_not_finite_on_one_stops_both_with_the_good_weights(team, tmp_path):
    def poison(rank):
        from lib.training.step import Trainer

        whole = Trainer.launch

        def poisoned(self, group, *, rate):
            if group.step == 4 and rank == 1:
                group.batches[0].target.fill_(float("nan"))
            return whole(self, group, rate=rate)

        Trainer.launch = poisoned

    codes, said = team(meddle=poison, root=tmp_path)
    assert codes == [1, 1], said
    assert "step 5" in said
    assert sorted(p.name for p in tmp_path.glob("outputs/*/checkpoints/*"))[-1] == "step-00000004"


@pytest.mark.slow
def test_a_run_of_another_is_refused_to_both_with_one_word(team, ensure, configure, tmp_path):
    from lib import runs
    from lib.pipeline import graph

    ensure("build_latent_cache")
    ensure("encode_captions")
    (planned,) = [plan for plan in graph.plan("train", configure()) if plan.stage == "train"]
    held = {"outputs": tmp_path / "outputs", "name": "mine", "manifests": [], "rerun": False}
    runs.claim(tmp_path / "store", planned.known().key, **held)
    codes, said = team()
    assert codes == [4, 4], said
    assert said.count("is running") == 1


def test_held_out_pictures_are_measured_in_batches_of_one_process_s_share(encoded):
    from lib.family import process_of
    from lib.team import Team
    from lib.training.watching import make_held_out

    config, opened, upstream = encoded("trainer.batch_size=6", "validation.fraction=0.3")
    process = process_of(opened.family, opened.base)
    given = (config, opened.family, process, upstream, opened.store)
    sizes = [make_held_out(*given, Team(0, size)).batch_size for size in (1, 2, 3)]
    assert sizes == [6, 3, 2]


def test_the_parts_of_a_team_are_the_whole_of_one(encoded):
    from lib.team import Team
    from lib.training.session import make_assembler

    config, opened, upstream = encoded(*SPLIT, "trainer.caption_dropout=0.3")
    given = (config, opened.family, opened.base)
    whole = make_assembler(*given, upstream=upstream, store=opened.store)
    parts = [
        make_assembler(*given, upstream=upstream, store=opened.store, team=Team(rank, 3))
        for rank in range(3)
    ]
    for group in whole.plan.groups(0, 2 * whole.plan.steps_per_epoch):
        expected, found = whole.step(group), [part.step(group) for part in parts]
        assert {part.num_samples for part in found} == {len(group.slots)}
        numbered = {n: b for part in found for n, b in zip(part.numbers, part.batches, strict=True)}
        assert sorted(numbered) == list(expected.numbers)
        for number, batch in zip(expected.numbers, expected.batches, strict=True):
            other = numbered[number]
            assert other.names == batch.names
            for name in ("noisy", "target", "level", "weights"):
                assert getattr(other, name).equal(getattr(batch, name))


def test_a_batch_that_does_not_divide_among_the_processes_is_refused(configure, monkeypatch):
    from lib.pipeline import graph

    config = configure("trainer.batch_size=3")
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = [str(problem) for problem in graph.problems(config, online=False)]
    assert any("trainer.batch_size=3" in line and "WORLD_SIZE=2" in line for line in found)
