import dataclasses
import json
import math

import pytest
import torch

from lib.config import parse
from lib.errors import DarkroomError, Stopped
from lib.events import Events
from lib.keys import digest
from lib.optimizers import learning_rate
from lib.training import checkpoint, loop
from lib.training.step import Trainer

KEY = digest("run")


@pytest.fixture
def config(valid):
    changes = {
        "trainer.max_steps": 6,
        "trainer.save_every": 2,
        "lr_schedule.name": "linear",
        "lr_schedule.warmup_steps": 2,
        "optimizer.lr": 0.01,
    }
    return parse(valid(changes))


@pytest.fixture
def run(config, tmp_path, monkeypatch):
    """Trains the toy over some steps; the toy's parameters stand for the adapter."""
    monkeypatch.setattr(
        loop.adapter,
        "state_dict",
        lambda denoiser: {n: p.detach().clone() for n, p in denoiser.named_parameters()},
    )

    def train(trainer, groups, *, seen=0, total=6, events=None, **options):
        return loop.train(
            trainer,
            groups,
            config=config,
            total_steps=total,
            num_samples_seen=seen,
            folder=tmp_path / "checkpoints",
            train_key=KEY,
            events=events or Events(),
            **options,
        )

    return train


@pytest.fixture
def names(tmp_path):
    return lambda: sorted(path.name for path in (tmp_path / "checkpoints").glob("*"))


def test_every_step_s_metrics_are_told_with_the_rate_used(make_trainer, make_step, run, config):
    seen = []
    finished = run(
        make_trainer(), map(make_step, range(6)), events=Events(sinks=(seen.append,)), seen=12
    )
    metrics = [event.data for event in seen if event.kind == "metric"]
    assert [m["step"] for m in metrics] == [1, 2, 3, 4, 5, 6]
    assert [m["num_samples_seen"] for m in metrics] == [18, 24, 30, 36, 42, 48]
    assert [m["lr"] for m in metrics] == [
        learning_rate(config.lr_schedule, base=0.01, step=step, total_steps=6) for step in range(6)
    ]
    assert all(math.isfinite(m["loss"]) and m["grad_norm"] > 0 for m in metrics)
    assert finished.steps == 6
    assert finished.last_loss == metrics[-1]["loss"]
    progress = [event.data for event in seen if event.kind == "progress"]
    assert [(p["done"], p["total"]) for p in progress] == [(n, 6) for n in range(1, 7)]


def test_the_rate_given_is_the_rate_that_moves_the_weights(make_trainer, make_step, run):
    one, other = make_trainer(), make_trainer()
    run(one, map(make_step, range(2)))
    for number, rate in enumerate((0.005, 0.01)):
        other.step(make_step(number), rate=rate)
    for name, parameter in one.parameters.items():
        assert torch.equal(parameter, other.parameters[name])


def test_the_first_step_is_outside_the_speed(make_trainer, make_step, run, monkeypatch):
    now, seen = [100.0], []
    monkeypatch.setattr(loop, "perf_counter", lambda: now[0])

    def steps():
        for number in range(3):
            now[0] += 2
            yield make_step(number)

    run(make_trainer(), steps(), events=Events(sinks=(seen.append,)))
    speeds = [event.data.get("samples_per_second") for event in seen if event.kind == "metric"]
    assert speeds == [None, 3.0, 3.0]  # 6 samples in 2 seconds, 12 in 4


@pytest.mark.parametrize("looks", [True, False], ids=["looked at", "not looked at"])
def test_no_step_is_counted_in_the_speed_without_its_time(
    make_trainer, make_step, run, monkeypatch, looks
):
    """A step takes two seconds of this clock, spent before its launch returns, as on a CPU."""
    now, whole = [100.0], Trainer.launch
    monkeypatch.setattr(loop, "perf_counter", lambda: now[0])

    def slow(self, group, *, rate):
        now[0] += 2
        return whole(self, group, rate=rate)

    monkeypatch.setattr(Trainer, "launch", slow)
    finished = run(make_trainer(), map(make_step, range(6)), looks_at=lambda _step: looks)
    assert finished.samples_per_second == pytest.approx(3.0)


@pytest.fixture
def order(monkeypatch):
    """What is launched and what is read, in the order of it; steps counted from 1."""
    found, launch = [], Trainer.launch

    def launching(self, group, *, rate):
        found.append(("launch", group.step + 1))
        return launch(self, group, rate=rate)

    monkeypatch.setattr(Trainer, "launch", launching)
    report = loop._report
    monkeypatch.setattr(
        loop, "_report", lambda e, n, *a, **k: (found.append(("read", n)), report(e, n, *a, **k))
    )
    return found


def test_a_step_is_launched_before_the_last_is_read_unless_something_is_due(
    make_trainer, make_step, run, order
):
    """Due are the first, of which the clock begins, a checkpoint (2, 4, 6) and a look (5)."""
    looked = []
    run(
        make_trainer(),
        map(make_step, range(8)),
        total=8,
        looks_at=lambda step: step == 5,
        after_step=looked.append,
    )
    at_once = [[("launch", n), ("read", n)] for n in (1, 2)]
    later = [("launch", 3), ("launch", 4), ("read", 3), ("read", 4), ("launch", 5), ("read", 5)]
    rest = [("launch", 6), ("read", 6), ("launch", 7), ("launch", 8), ("read", 7), ("read", 8)]
    assert order == [*at_once[0], *at_once[1], *later, *rest]
    assert 5 in looked
    assert not {3, 7} & set(looked)


def test_a_stop_asked_for_as_a_step_begins_ends_the_run_after_it(
    make_trainer, make_step, run, order, names
):
    trainer = make_trainer()
    trainer.asked = lambda: "asked" if order[-1:] == [("launch", 3)] else ""
    with pytest.raises(Stopped, match="after step 3, saved"):
        run(trainer, map(make_step, range(6)), looks_at=lambda _step: False)
    assert order[-2:] == [("launch", 3), ("read", 3)]
    assert names() == ["step-00000002", "step-00000003"]


def test_a_step_launched_before_a_bad_one_was_read_moves_nothing(
    make_trainer, make_step, run, order, names
):
    trainer, kept = make_trainer(), {}

    def groups():
        yield from map(make_step, range(2))
        kept.update({name: p.detach().clone() for name, p in trainer.parameters.items()})
        yield spoilt(make_step(2, micro_batch=3))
        yield make_step(3)
        raise AssertionError("the run went on")

    with pytest.raises(loop.Diverged, match="step 3"):
        run(trainer, groups(), looks_at=lambda _step: False)
    assert order[-1] == ("launch", 4)
    assert names() == ["step-00000002"]
    for name, parameter in trainer.parameters.items():
        assert torch.equal(parameter, kept[name])


def test_one_step_has_no_speed_and_none_is_no_error(make_trainer, make_step, run):
    assert run(make_trainer(), [make_step(0)]).samples_per_second is None
    nothing = run(make_trainer(), [])
    assert nothing.steps == 0
    assert math.isnan(nothing.last_loss)


def test_a_checkpoint_is_saved_every_so_often_and_at_the_end(make_trainer, make_step, run, names):
    run(make_trainer(), map(make_step, range(3)))
    assert names() == ["step-00000002"]
    run(make_trainer(), map(make_step, range(5)), total=5)
    assert names() == ["step-00000004", "step-00000005"]


def test_a_resumed_run_is_the_uninterrupted_one(make_trainer, make_step, run, tmp_path):
    whole, first, second = (make_trainer(dropout=0.3) for _ in range(3))
    run(whole, [make_step(n, micro_batch=3) for n in range(6)])
    run(first, [make_step(n, micro_batch=3) for n in range(4)])
    found = checkpoint.latest(tmp_path / "checkpoints", train_key=KEY).checkpoint
    assert (found.step, found.num_samples_seen) == (6, 36)
    path = tmp_path / "checkpoints" / "step-00000004"
    found = checkpoint.load(path, train_key=KEY)
    with torch.no_grad():
        for name, parameter in second.parameters.items():
            parameter.copy_(found.adapter[name])
    checkpoint.restore_optimizer(second.optimizer, second.parameters, found.optimizer)
    run(second, [make_step(n, micro_batch=3) for n in range(4, 6)], seen=found.num_samples_seen)
    for name, parameter in whole.parameters.items():
        assert torch.equal(parameter, second.parameters[name])
        assert not torch.equal(parameter, first.parameters[name])


def spoilt(group):
    batch = group.batches[0]
    batch.target[2, 0, 0, 0] = float("nan")
    return dataclasses.replace(group, batches=(batch, *group.batches[1:]))


def test_a_loss_that_is_not_finite_stops_the_run_with_step_sigmas_and_samples(
    make_trainer, make_step, run, names, tmp_path
):
    trainer, kept = make_trainer(), {}
    path = tmp_path / "events.jsonl"
    events = Events()
    events.attach(path)

    def groups():
        yield from map(make_step, range(3))
        kept.update({name: p.detach().clone() for name, p in trainer.parameters.items()})
        yield spoilt(make_step(3, micro_batch=3))
        raise AssertionError("the run went on")

    with pytest.raises(loop.Diverged) as caught:
        run(trainer, groups(), events=events)
    text = str(caught.value)
    assert "step 4" in text
    assert "loss nan" in text
    for batch in make_step(3, micro_batch=3).batches:
        assert all(name in text for name in batch.names)
        assert all(str(round(float(level), 4)) in text for level in batch.level)
    assert isinstance(caught.value, DarkroomError)
    assert caught.value.exit_code == 1
    assert names() == ["step-00000002"]
    for name, parameter in trainer.parameters.items():
        assert torch.equal(parameter, kept[name])
    steps = [json.loads(line).get("step") for line in path.read_text().splitlines()]
    assert max(step for step in steps if step) == 3


def test_what_is_done_beside_the_steps_does_not_count_in_the_rate(monkeypatch):
    """A step takes a second of this clock, and looking at the run a hundred."""
    now = [0.0]
    monkeypatch.setattr(loop, "perf_counter", lambda: now[0])

    def look(_step):
        now[0] += 100

    progress = loop.Progress(num_samples_seen=0)
    for step in range(1, 5):
        now[0] += 1
        progress.add(6)
        progress.aside(look, step)
    assert progress.samples_per_second == pytest.approx(6.0)
    assert progress.num_samples_seen == 24
