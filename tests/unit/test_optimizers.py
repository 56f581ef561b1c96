import pytest
import torch
from diffusers.optimization import get_scheduler
from hypothesis import given
from hypothesis import strategies as st

from lib.optimizers import learning_rate, make_optimizer
from lib.rules import SCHEDULES
from lib.schema import LrScheduleConfig, OptimizerConfig

BASE = 1e-3


def ours(name, step, *, warmup=0, total=100, **more):
    config = LrScheduleConfig(name=name, warmup_steps=warmup, **more)
    return learning_rate(config, base=BASE, step=step, total_steps=total) / BASE


def theirs(name, step, *, warmup=0, total=100, **more):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE)
    scheduler = get_scheduler(
        name, optimizer, num_warmup_steps=warmup, num_training_steps=total, **more
    )
    return scheduler.lr_lambdas[0](step)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("constant", {}),
        ("constant_with_warmup", {}),
        ("linear", {}),
        ("cosine", {}),
        ("cosine_with_restarts", {"num_cycles": 3}),
        ("polynomial", {"power": 2.0}),
        ("polynomial", {"power": 0.5}),
    ],
)
def test_after_the_warm_up_a_schedule_is_that_of_diffusers(name, more):
    warmup = 0 if name == "constant" else 20
    known = {} if name == "cosine" else more
    for step in range(warmup, 100):
        expected = theirs(name, step, warmup=warmup, **known)
        assert ours(name, step, warmup=warmup, **more) == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "constant"])
def test_the_warm_up_is_one_step_ahead_of_that_of_diffusers(name):
    for step in range(20):
        expected = theirs(name, step + 1, warmup=20)
        assert ours(name, step, warmup=20) == pytest.approx(expected, abs=1e-9)


@given(st.sampled_from(SCHEDULES), st.integers(1, 50), st.integers(1, 100), st.integers(1, 4))
def test_no_step_has_rate_zero_and_none_exceeds_the_base(name, warmup, more, cycles):
    total = warmup + more
    rates = [
        ours(name, step, warmup=warmup, total=total, num_cycles=cycles) for step in range(total)
    ]
    assert rates[0] == pytest.approx(1 / warmup)
    assert min(rates) > 0
    assert max(rates) <= 1
    assert rates[:warmup] == sorted(rates[:warmup])


def test_restarts_return_to_the_top_and_other_schedules_only_fall():
    restarting = [ours("cosine_with_restarts", step, num_cycles=4) for step in range(100)]
    assert [step for step, rate in enumerate(restarting) if rate == 1.0] == [0, 25, 50, 75]
    for name in ("linear", "cosine", "polynomial"):
        rates = [ours(name, step) for step in range(100)]
        assert rates == sorted(rates, reverse=True)
        assert rates[-1] < 0.02


def test_a_run_that_is_all_warm_up_ends_at_the_base_rate():
    assert ours("linear", 9, warmup=10, total=10) == 1.0


def test_an_unknown_schedule_is_an_error():
    with pytest.raises(ValueError, match="unknown schedule"):
        ours("step", 3)


CONFIG = OptimizerConfig(lr=0.01, weight_decay=0.1, beta1=0.8, beta2=0.95, eps=0.05)


def parameters():
    source = torch.Generator().manual_seed(0)
    shapes = ((4, 3), (3,))
    return [torch.nn.Parameter(torch.randn(shape, generator=source)) for shape in shapes]


def step(optimizer, tensors, number):
    source = torch.Generator().manual_seed(number)
    for tensor in tensors:
        tensor.grad = torch.randn(tensor.shape, generator=source)
    optimizer.step()


def test_ten_fused_steps_are_ten_plain_steps():
    fused, plain = parameters(), parameters()
    ours = make_optimizer(iter(fused), CONFIG)
    theirs = torch.optim.AdamW(
        plain, lr=0.01, betas=(0.8, 0.95), eps=0.05, weight_decay=0.1, foreach=False
    )
    for number in range(10):
        rate = 0.01 * (number + 1) / 10
        ours.param_groups[0]["lr"].fill_(rate)
        theirs.param_groups[0]["lr"] = rate
        step(ours, fused, number)
        step(theirs, plain, number)
    for one, other in zip(fused, plain, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
        assert not torch.allclose(one, parameters()[0 if one.ndim == 2 else 1], atol=1e-2)


def test_the_rate_is_a_tensor_and_the_state_float32():
    tensors = parameters()
    optimizer = make_optimizer(tensors, CONFIG)
    step(optimizer, tensors, 0)
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
    assert {t.dtype for t in optimizer.state[tensors[0]].values()} == {torch.float32}


def test_found_inf_leaves_weights_and_moments_as_they_were():
    tensors = parameters()
    optimizer = make_optimizer(tensors, CONFIG)
    step(optimizer, tensors, 0)
    weights = [tensor.detach().clone() for tensor in tensors]
    moments = [{n: t.clone() for n, t in optimizer.state[p].items()} for p in tensors]
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(1.0), None
    step(optimizer, tensors, 1)
    for tensor, weight, before in zip(tensors, weights, moments, strict=True):
        assert torch.equal(tensor, weight)
        assert all(torch.equal(optimizer.state[tensor][name], before[name]) for name in before)
    optimizer.found_inf = torch.tensor(0.0)
    step(optimizer, tensors, 2)
    assert not torch.equal(tensors[0], weights[0])
