"""A bound denoiser computes what PEFT's own code does, from flat buffers of weights."""

import math
from dataclasses import replace

import pytest
import torch

from lib import adapter, ema, families
from lib.batches import StepBatches
from lib.copies import Weights
from lib.lowrank import Group, SharingLinear
from lib.training.validation import averaged
from tests.unit.bound import fill, flat, relative, storages, tiny, trainer_of

HELD_BACK = ("to_add_out.lora_A.default.weight", "to_add_out.lora_B.default.weight")


def assert_as_peft(made):
    """Loss and gradients of the unbound denoiser, which PEFT computes, and of the bound one."""
    loss, gradients = made.gradients()
    made.bind()
    bound_loss, bound = made.gradients()
    assert bound_loss == pytest.approx(loss, rel=1e-5)
    assert {n for n, g in bound.items() if g is None} == {
        n for n, g in gradients.items() if g is None
    }
    assert flat(gradients).norm() > 0
    assert relative(flat(bound), flat(gradients)) < 1e-5
    for name, gradient in gradients.items():
        if gradient is not None:
            nearly = 1e-5 * float(gradient.abs().max())
            torch.testing.assert_close(bound[name], gradient, rtol=1e-5, atol=nearly)


@pytest.mark.parametrize("name", families.names())
def test_a_bound_denoiser_has_the_loss_and_gradients_of_peft(name):
    assert_as_peft(tiny(name, alpha=4.0))


SETTINGS = {
    "scale": {"alpha": 12.0},
    "rslora": {"alpha": 3.0, "rslora": True},
    "ranks": {"rank_pattern": {"to_k": 2, "to_v": 7}},
}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(name, SETTINGS[kind], id=f"{name}-{kind}", marks=marks)
        for name in families.names()
        for kind in SETTINGS
        for marks in [() if name == "flux" or kind == "ranks" else pytest.mark.nightly]
    ],
)
def test_scales_and_ranks_that_differ_in_a_group_are_those_of_peft(name, settings):
    made = tiny(name, **settings)
    assert adapter.scale_of(made.config) != 1
    assert_as_peft(made)
    if "rank_pattern" in settings:
        ranks = [{up.ranks[1] - up.ranks[0] for up in group.ups} for group in made.groups()]
        assert any(len(found) > 1 for found in ranks)


def test_only_so_many_ranks_are_in_one_matrix():
    made = tiny("flux", rank=100)
    assert_as_peft(made)
    ranks = [[up.ranks for up in group.ups] for group in made.groups() if len(group.members) > 2]
    assert ranks[0] == [(0, 200), (200, 300)]  # q and k together, v alone


def test_a_scale_of_rank_stabilised_lora_is_alpha_over_the_root_of_the_rank():
    made = tiny("flux", alpha=6.0, rslora=True, rank_pattern={"to_k": 2})
    made.bind()
    up = made.denoiser.get_submodule("transformer_blocks.0.attn.to_q").lora_B["default"].weight
    group = made.denoiser.get_submodule("transformer_blocks.0.attn.to_q").group
    torch.testing.assert_close(group.ups[0].weight.detach(), up.detach() * 6 / math.sqrt(4))


class Parent(torch.nn.Module):
    """Two layers of one group, the second fed something of its own."""

    def __init__(self, *, faithful):
        super().__init__()
        self.faithful = faithful
        self.first, self.second = (SharingLinear(torch.nn.Linear(4, 4)) for _ in range(2))
        group = Group((self.first, self.second), torch.nn.Linear(4, 8), (4, 4))
        for place, member in enumerate(group.members):
            member.group, member.place = group, place

    def forward(self, x):
        return self.first(x) + self.second(x if self.faithful else x.clone())


def test_a_member_that_is_fed_another_tensor_is_told():
    x = torch.ones(1, 4)
    assert Parent(faithful=True)(x).shape == (1, 4)
    with pytest.raises(RuntimeError, match="declared to share their input"):
        Parent(faithful=False)(x)


def test_a_member_that_is_called_before_the_first_is_told():
    parent = Parent(faithful=True)
    with pytest.raises(RuntimeError, match="declared to share their input"):
        parent.second(torch.ones(1, 4))


def test_a_group_holds_nothing_once_its_last_member_has_its_part():
    parent = Parent(faithful=True)
    parent(torch.ones(1, 4))
    assert parent.first.group._answers is None
    assert parent.first.group._fed is None


@pytest.mark.parametrize("name", families.names())
def test_masters_gradients_and_averages_are_parts_of_one_buffer_each(name):
    made = tiny(name)
    shapes = {n: tuple(t.shape) for n, t in adapter.state_dict(made.denoiser).items()}
    values = {n: p.detach().clone() for n, p in made.named()}
    weights = made.bind()
    average = ema.start(made.parameters)
    (flat_average,) = weights.adopt(average)
    made.gradients()
    weights.complete()
    (masters,), (gradient,) = weights.values(), weights.gradients()
    size = sum(p.numel() for _, p in made.named())
    assert masters.numel() == gradient.numel() == flat_average.numel() == size
    parts = {
        "masters": (masters, made.parameters),
        "gradients": (gradient, {n: p.grad for n, p in made.named()}),
        "average": (flat_average, average),
    }
    for whole, tensors in parts.values():
        assert storages(tensors.values()) == storages([whole])
        assert len({t.data_ptr() for t in tensors.values()}) == len(tensors)
    places = {n: p.storage_offset() for n, p in made.named()}
    assert {n: t.storage_offset() for n, t in average.items()} == places
    assert all(torch.equal(p, values[n]) for n, p in made.named())
    assert {n: tuple(t.shape) for n, t in adapter.state_dict(made.denoiser).items()} == shapes


def test_a_step_moves_the_average_that_is_held_by_name():
    made = tiny("flux")
    made.bind()
    trainer = trainer_of(made, lr=0.01, decay=0.9)
    before = {n: t.clone() for n, t in trainer.ema.items()}
    group = StepBatches(step=0, batches=(made.batch,), numbers=(0,), num_samples=1)
    trainer.step(group, rate=0.01)
    for name, parameter in made.named():
        expected = before[name].lerp(parameter.detach(), 10 / 11)  # the first decay is 1/11
        torch.testing.assert_close(trainer.ema[name], expected)
        assert not torch.equal(trainer.ema[name], before[name])


def test_a_saved_adapter_is_loaded_into_a_bound_one():
    made, other = tiny("flux"), tiny("flux")
    fill(made.parameters, seed=8)
    state = {n: t.clone() for n, t in adapter.state_dict(made.denoiser).items()}
    weights = other.bind()
    adapter.load_state_dict(other.parameters, state)
    weights.refresh()
    with torch.no_grad():
        torch.testing.assert_close(other.predict(), made.predict())


def test_a_parameter_that_no_loss_reaches_has_no_gradient_and_does_not_decay():
    made = tiny("qwen_image")
    made.bind()
    last = made.denoiser.config.num_layers - 1
    held = {n: p for n, p in made.named() if n.endswith(HELD_BACK) and f"blocks.{last}." in n}
    assert len(held) == 2
    before = {n: p.detach().clone() for n, p in made.named()}
    trainer = trainer_of(made, weight_decay=0.5)
    group = StepBatches(step=0, batches=(made.batch,), numbers=(0,), num_samples=1)
    for _ in range(2):
        trainer.step(group, rate=0.1)
    for name, parameter in made.named():
        assert (parameter.grad is None) == (name in held), name
        assert torch.equal(parameter, before[name]) == (name in held), name


def test_keep_takes_the_gradients_of_those_that_do_not_learn():
    made = tiny("qwen_image")
    weights = made.bind()
    made.gradients()
    learning = weights.learning
    assert not all(learning)
    weights.complete()
    assert all(weights.learning)
    weights.keep(learning)
    assert weights.learning == learning


def test_micro_batches_add_up_in_float32_whatever_the_copies_precision():
    made = tiny("flux")
    made.denoiser.to(torch.bfloat16)
    for name, parameter in made.named():  # PEFT's layers in float32, as an adapter is
        parameter.data = parameter.data.float()
        assert parameter.dtype == torch.float32, name
    weights = made.bind(dtype=torch.bfloat16)
    other = replace(made.batch, noisy=made.batch.noisy.flip(-1), target=made.batch.target.flip(-2))
    with torch.autocast("cpu", torch.bfloat16):
        alone = [flat(made.gradients(batch)[1]) for batch in (made.batch, other)]
        weights.clear()
        for batch in (made.batch, other):
            made.loss(batch).backward()
            weights.gather()
    both = flat({n: p.grad for n, p in made.named()})
    assert both.dtype == torch.float32
    assert torch.equal(both, alone[0] + alone[1])
    assert not torch.equal(both, both.bfloat16().float())


def test_a_scale_multiplies_in_float32_and_rounds_once():
    made = tiny("flux", alpha=6.0)
    made.bind(dtype=torch.bfloat16)
    layer = made.denoiser.get_submodule("transformer_blocks.0.attn.to_q")
    up = layer.lora_B["default"].weight.detach()
    found = layer.group.ups[0].weight.detach()[: up.shape[0], : up.shape[1]]
    assert torch.equal(found, (up * 1.5).bfloat16())


def test_moved_masters_are_seen_after_a_refresh_and_not_before():
    made = tiny("flux")
    weights = made.bind()
    with torch.no_grad():
        before = made.predict()
        fill(made.parameters, seed=9)
        assert torch.equal(made.predict(), before)
        weights.refresh()
        moved = made.predict()
    assert relative(moved, before) > 1e-3


def test_the_average_is_shown_for_a_block_and_the_very_bits_come_back():
    made, other = tiny("flux"), tiny("flux")
    made.bind()
    trainer = trainer_of(made, decay=0.9)
    fill(trainer.ema, seed=9)
    adapter.copy_into(other.parameters, trainer.ema)
    kept = {n: p.detach().clone() for n, p in made.named()}
    with torch.no_grad():
        before = made.predict()
        with averaged(trainer):
            torch.testing.assert_close(made.predict(), other.predict())
            assert relative(made.predict(), before) > 1e-3
        assert torch.equal(made.predict(), before)
    assert all(torch.equal(p, kept[n]) for n, p in made.named())


def test_the_very_bits_come_back_from_a_block_that_fails():
    made = tiny("flux")
    made.bind()
    trainer = trainer_of(made, decay=0.9)
    fill(trainer.ema, seed=9)
    with torch.no_grad():
        before = made.predict()
        with pytest.raises(ZeroDivisionError), averaged(trainer):
            raise ZeroDivisionError
        assert torch.equal(made.predict(), before)


def test_gradients_of_a_step_before_are_cleared_from_the_buffer():
    made = tiny("flux")
    made.bind()
    first, second = made.gradients()[1], made.gradients()[1]
    assert torch.equal(flat(first), flat(second))


def test_weights_that_are_not_bound_are_the_parameters_themselves():
    parameters = {
        "one": torch.nn.Parameter(torch.ones(2)),
        "two": torch.nn.Parameter(torch.ones(3)),
    }
    weights = Weights(parameters)
    parameters["one"].sum().backward()
    assert weights.learning == (True, False)
    assert [g.tolist() for g in weights.gradients()] == [[1, 1]]
    weights.complete()
    assert [g.tolist() for g in weights.gradients()] == [[1, 1], [0, 0, 0]]
    weights.keep((True, False))
    assert parameters["two"].grad is None
    weights.clear()
    assert weights.learning == (False, False)
    assert weights.adopt({}) == []
    assert [v.data_ptr() for v in weights.values()] == [p.data_ptr() for p in parameters.values()]
