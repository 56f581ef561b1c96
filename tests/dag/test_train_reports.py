"""Public reports of training that went wrong without a word, re-created (tests/field_reports.yaml)."""

import itertools
from types import SimpleNamespace

import pytest
import torch

MODES = {
    "bf16": ("precision=bf16",),
    "gradient checkpointing": ("trainer.gradient_checkpointing=always",),
    "micro-batch of one": ("trainer.micro_batch=1",),
}


@pytest.fixture
def learnt(ensure, adapter_of):
    """What a run taught: every B by its name, from zero."""
    from lib.records import from_stored
    from lib.tensors import decode

    def found(*overrides, root):
        data = adapter_of(ensure("train", *overrides, root=root), root)
        state = from_stored(decode(data).tensors)
        return {name: tensor for name, tensor in state.items() if "lora_B" in name}

    return found


# Gradient checkpointing: the next test too, to the last digits.
@pytest.mark.parametrize(
    "mode",
    [
        "bf16",
        pytest.param("gradient checkpointing", marks=pytest.mark.nightly),
        "micro-batch of one",
    ],
)
def test_every_way_to_save_memory_teaches_the_same(mode, learnt, tmp_path):
    plain = learnt("trainer.max_steps=2", root=tmp_path / "plain")
    other = learnt("trainer.max_steps=2", *MODES[mode], root=tmp_path / "other")
    assert all(tensor.any() for tensor in other.values())
    one, two = (torch.cat([state[n].flatten() for n in sorted(plain)]) for state in (plain, other))
    assert float(torch.cosine_similarity(one, two, dim=0)) > 0.9


def test_gradient_checkpointing_teaches_what_is_taught_without(learnt, tmp_path):
    plain = learnt(root=tmp_path / "plain")
    other = learnt("trainer.gradient_checkpointing=always", root=tmp_path / "other")
    assert all(tensor.any() for tensor in other.values())
    for name, tensor in plain.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=1e-6)


def test_a_run_in_which_nothing_moved_is_refused(ensure, monkeypatch):
    from lib.errors import StateRefused

    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: None)
    with pytest.raises(StateRefused, match="every B is zero"):
        ensure("train")


def test_a_group_is_one_update_in_the_last_group_of_an_epoch_too(ensure, seen, monkeypatch):
    """Eight pictures in groups of three, micro-batches of one: two of three and one of two, three times."""
    updates, step = [], torch.optim.AdamW.step

    def counting(self, *given):
        updates.append(1)
        return step(self, *given)

    monkeypatch.setattr(torch.optim.AdamW, "step", counting)
    length = ("trainer.max_steps=null", "trainer.num_epochs=3")
    ensure("train", *length, "trainer.batch_size=3", "trainer.micro_batch=1")
    counts = [e.data["num_samples_seen"] for e in seen if e.kind == "metric" and "loss" in e.data]
    assert len(updates) == 9
    taken = [b - a for a, b in itertools.pairwise((0, *counts))]
    assert [sorted(taken[at : at + 3]) for at in (0, 3, 6)] == [[2, 3, 3]] * 3


def test_only_the_adapter_is_in_the_optimizer_and_the_base_stays_as_it_was(ensure, monkeypatch):
    from lib.training.step import Trainer

    launch, seen = Trainer.launch, []

    def frozen(trainer):
        tensors = trainer.denoiser.state_dict()
        return {name: tensor.clone() for name, tensor in tensors.items() if "lora_" not in name}

    def launching(self, group, *, rate):
        seen.append((self, frozen(self)))
        return launch(self, group, rate=rate)

    monkeypatch.setattr(Trainer, "launch", launching)
    ensure("train", "optimizer.weight_decay=0.5", "trainer.max_steps=5")
    trainer, before = seen[0]
    now, groups = frozen(trainer), trainer.optimizer.param_groups
    assert before
    assert all(torch.equal(now[name], before[name]) for name in before)
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    assert trained == {id(parameter) for parameter in trainer.parameters.values()}


def test_an_adapter_in_float32_leaves_the_activations_of_a_bf16_base_as_they_are(ensure):
    from lib.training.step import Trainer

    kinds, predict = set(), Trainer.predict

    def looking(module, _given, answer):
        if "Linear" in type(module).__name__ and isinstance(answer, torch.Tensor):
            kinds.add((type(module).__name__, answer.dtype))

    def predicting(self, batch):
        with torch.nn.modules.module.register_module_forward_hook(looking):
            return predict(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "predict", predicting)
        ensure("train", "precision=bf16", "trainer.max_steps=1")
    assert len(kinds) > 1  # plain layers, and adapted ones
    assert {dtype for _, dtype in kinds} == {torch.bfloat16}


def test_saving_more_often_moves_no_bit(ensure, results_of, tmp_path):
    often, seldom = (
        results_of(
            ensure("train", f"trainer.save_every={n}", root=tmp_path / str(n)), tmp_path / str(n)
        )
        for n in (1, 6)
    )
    assert len(often) == 2
    assert often == seldom


@pytest.fixture
def rates(configure, tmp_path, monkeypatch):
    """The rate of every step of a loop of ten, with a trainer that only writes it down."""
    from lib.events import Events
    from lib.training import loop
    from lib.training.step import StepResult

    monkeypatch.setattr(loop, "_save", lambda *_, **__: None)
    config = configure("lr_schedule=linear", "lr_schedule.warmup_steps=3", "trainer.max_steps=10")

    def found(*, processes=1, micro_batches=1):
        told, done = [], SimpleNamespace(result=lambda: StepResult(1.0, 1.0, finite=True))
        trainer = SimpleNamespace(
            team=SimpleNamespace(leads=True, size=processes),
            launch=lambda _, rate: told.append(rate) or done,
            asked=lambda: "",
        )
        numbers = tuple(range(micro_batches))
        groups = [
            SimpleNamespace(step=n, num_samples=4, numbers=numbers, batches=numbers)
            for n in range(10)
        ]
        where = {"folder": tmp_path, "train_key": "", "events": Events()}
        loop.train(trainer, groups, config=config, total_steps=10, num_samples_seen=0, **where)
        return told

    return found


def test_the_rate_of_a_step_is_the_same_for_any_number_of_processes(rates):
    assert rates(processes=2) == rates(processes=4) == rates()
    assert rates()[2] == pytest.approx(1e-2)


def test_the_rate_is_counted_in_steps_and_not_in_micro_batches(rates):
    assert rates(micro_batches=4) == rates()
    assert rates()[-1] == pytest.approx(1e-2 / 7)
