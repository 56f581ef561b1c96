"""A step that is launched before the last one's numbers are read, compiled, and undone."""

import dataclasses

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import InductorError

from lib.training.step import Trainer


def weights_of(trainer):
    return {name: p.detach().clone() for name, p in trainer.parameters.items()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def broken(make_step, number):
    """A step whose loss is not finite."""
    group = make_step(number)
    group.batches[0].target[0, 0, 0, 0] = float("nan")
    return group


def test_a_step_launched_before_a_broken_one_was_read_moves_nothing(make_trainer, make_step):
    trainer = make_trainer()
    trainer.step(make_step(0), rate=0.01)
    before = weights_of(trainer)
    first = trainer.launch(broken(make_step, 1), rate=0.01)
    second = trainer.launch(make_step(2), rate=0.01)
    assert not first.result().finite
    assert not second.result().finite  # whose own numbers are sound
    assert same(weights_of(trainer), before)
    assert trainer.step(make_step(3), rate=0.01).finite
    assert not same(weights_of(trainer), before)


def test_neither_moments_nor_averages_move_until_a_broken_step_is_read(make_trainer, make_step):
    trainer = make_trainer()
    average = {n: torch.zeros_like(p) for n, p in weights_of(trainer).items()}
    trainer = dataclasses.replace(trainer, ema_decay=0.5, ema=average)
    trainer.launch(broken(make_step, 0), rate=0.01)
    trainer.launch(make_step(1), rate=0.01)
    assert not any(tensor.any() for tensor in trainer.ema.values())
    moments = [state["exp_avg"] for state in trainer.optimizer.state.values()]
    assert not any(moment.any() for moment in moments)
    trainer.forgive()
    trainer.step(make_step(1), rate=0.01)
    assert all(tensor.any() for tensor in trainer.ema.values())


def test_steps_launched_ahead_are_those_of_steps_waited_for(make_trainer, make_step):
    ahead, waited = make_trainer(), make_trainer()
    launched = [ahead.launch(make_step(n), rate=0.01) for n in range(3)]
    found = [one.result() for one in launched]
    assert found == [waited.step(make_step(n), rate=0.01) for n in range(3)]
    assert same(weights_of(ahead), weights_of(waited))


@pytest.fixture
def failing(make_trainer, monkeypatch):
    """A trainer whose prediction fails to compile, at its `at`-th call, and what it was told."""

    def make(error, *, at=1, compiled=True):
        told, calls, right = [], [], Trainer.predict

        def predict(self, batch):
            calls.append(batch)
            if self is trainer and len(calls) == at:
                raise error
            return right(self, batch)

        trainer = make_trainer()
        trainer.uncompile = told.append if compiled else None
        monkeypatch.setattr(Trainer, "predict", predict)
        return trainer, told

    return make


FAULTS = [
    TorchDynamoException("graph break\nand a trace"),
    InductorError(RuntimeError("no compiler"), None),
]


@pytest.mark.parametrize("error", FAULTS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("at", [1, 2])
def test_a_compilation_that_fails_is_undone_and_the_step_is_a_plain_one(
    failing, make_trainer, make_step, error, at
):
    trainer, told = failing(error, at=at)
    group = make_step(0, micro_batch=3)  # the second fails with a gradient of the first held
    found = trainer.step(group, rate=0.01)
    assert len(told) == 1
    assert told[0].startswith(f"{type(error).__name__}: ")
    assert "\n" not in told[0]
    assert trainer.uncompile is None
    plain = make_trainer()
    assert found == plain.step(make_step(0, micro_batch=3), rate=0.01)
    assert same(weights_of(trainer), weights_of(plain))


def test_a_failure_of_what_is_not_compiled_is_raised(failing, make_step):
    trainer, told = failing(FAULTS[0], compiled=False)
    with pytest.raises(TorchDynamoException):
        trainer.step(make_step(0), rate=0.01)
    assert told == []


def test_a_fault_that_is_no_compilation_s_is_raised(failing, make_step):
    trainer, told = failing(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        trainer.step(make_step(0), rate=0.01)
    assert told == []
