import dataclasses

import pytest
import torch
from torch.nn.functional import mse_loss


def weights_of(trainer):
    return {name: p.detach().clone() for name, p in trainer.parameters.items()}


def state_of(trainer):
    return [
        {name: torch.as_tensor(held).clone() for name, held in trainer.optimizer.state[p].items()}
        for p in trainer.parameters.values()
    ]


def assert_same(one, other, *, atol=0.0):
    for name in one:
        assert torch.allclose(one[name], other[name], rtol=0, atol=atol), name


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 4])
def test_micro_batches_add_up_to_one_batch(make_trainer, make_step, micro_batch):
    whole, cut = make_trainer(), make_trainer()
    for number in range(3):
        one = whole.step(make_step(number), rate=0.01)
        other = cut.step(make_step(number, micro_batch=micro_batch), rate=0.01)
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
    assert_same(weights_of(whole), weights_of(cut), atol=1e-6)


def test_a_step_is_adamw_on_the_mean_squared_error(make_trainer, make_step):
    ours, theirs, group = make_trainer(), make_trainer(), make_step()
    optimizer = torch.optim.AdamW(theirs.parameters.values(), lr=0.003, weight_decay=1e-4)
    (batch,) = group.batches
    features = batch.noisy.flatten(1) * (1 + batch.level[:, None])
    prediction = theirs.denoiser(features + batch.conditioning["text_embeds"])
    loss = mse_loss(prediction, batch.target.flatten(1))
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in theirs.parameters.values()]).norm()
    optimizer.step()
    result = ours.step(group, rate=0.003)
    assert result.finite
    assert result.loss == pytest.approx(float(loss.detach()), rel=1e-6)
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)
    assert_same(weights_of(ours), weights_of(theirs), atol=1e-7)


def test_gradients_of_the_step_before_are_forgotten(make_trainer, make_step):
    trainer, fresh = make_trainer(lr=0.0), make_trainer(lr=0.0)
    trainer.step(make_step(0), rate=0.0)
    second = trainer.step(make_step(1), rate=0.0)
    assert second.grad_norm == pytest.approx(fresh.step(make_step(1), rate=0.0).grad_norm)


def test_the_rate_given_is_the_rate_used(make_trainer, make_step):
    trainer = make_trainer()
    before = weights_of(trainer)
    trainer.step(make_step(), rate=0.0)
    assert_same(weights_of(trainer), before)
    trainer.step(make_step(), rate=0.5)
    moved = [float((weights_of(trainer)[name] - before[name]).abs().max()) for name in before]
    assert max(moved) == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_a_step_that_is_not_finite_moves_neither_weights_nor_moments(
    make_trainer, make_step, bad, optimizer, bitsandbytes
):
    trainer = make_trainer(max_grad_norm=1.0, optimizer=optimizer)
    trainer.step(make_step(0), rate=0.01)
    weights, state = weights_of(trainer), state_of(trainer)
    group = make_step(1, micro_batch=3)
    group.batches[1].target[0, 0, 0, 0] = bad
    result = trainer.step(group, rate=0.01)
    assert not result.finite
    assert_same(weights_of(trainer), weights)
    for before, after in zip(state, state_of(trainer), strict=True):
        assert_same(before, after)
    assert trainer.step(make_step(2), rate=0.01).finite
    assert not torch.equal(weights_of(trainer)["1.weight"], weights["1.weight"])


def gradients(trainer):
    return torch.cat([p.grad.flatten() for p in trainer.parameters.values()])


def test_gradients_are_clipped_to_the_norm_and_the_norm_before_is_told(make_trainer, make_step):
    free, clipped = make_trainer(max_grad_norm=0.0), make_trainer(max_grad_norm=0.25)
    group = make_step(scale=10.0)
    one, other = free.step(group, rate=0.0), clipped.step(group, rate=0.0)
    assert one.grad_norm == pytest.approx(other.grad_norm)
    assert one.grad_norm > 1
    assert float(gradients(free).norm()) == pytest.approx(one.grad_norm, rel=1e-5)
    assert float(gradients(clipped).norm()) == pytest.approx(0.25, rel=1e-4)


def test_a_norm_below_the_limit_is_left_alone(make_trainer, make_step):
    free, clipped = make_trainer(), make_trainer(max_grad_norm=1e6)
    for trainer in (free, clipped):
        trainer.step(make_step(), rate=0.0)
    assert torch.allclose(gradients(free), gradients(clipped))


def test_a_step_with_dropout_repeats_itself(make_trainer, make_step):
    results = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        trainer = make_trainer(dropout=0.5)
        results.append([trainer.step(make_step(n, micro_batch=3), rate=0.01) for n in range(2)])
    assert results[0] == results[1]


def test_dropout_differs_between_steps_micro_batches_and_seeds(make_trainer, make_step):
    def loss(*, seed=0, step=0):
        trainer, group = make_trainer(dropout=0.5, seed=seed), make_step(0)
        return trainer.step(dataclasses.replace(group, step=step), rate=0.0).loss

    assert len({loss(), loss(seed=1), loss(step=1)}) == 3
    group = make_step(0)
    twice = dataclasses.replace(group, batches=group.batches * 2, numbers=(0, 1), num_samples=12)
    assert make_trainer(dropout=0.5).step(twice, rate=0.0).loss != pytest.approx(loss(), rel=1e-6)


def test_without_dropout_torch_s_generator_is_left_alone(make_trainer, make_step):
    trainer, before = make_trainer(), torch.get_rng_state()
    trainer.step(make_step(), rate=0.01)
    assert torch.equal(torch.get_rng_state(), before)


def test_bfloat16_computes_near_float32_and_keeps_float32_weights(make_trainer, make_step):
    exact, rounded = make_trainer(), make_trainer(autocast_dtype=torch.bfloat16)
    one, other = (trainer.step(make_step(), rate=0.01) for trainer in (exact, rounded))
    assert one.loss != other.loss
    assert other.loss == pytest.approx(one.loss, rel=0.02)
    assert {p.dtype for p in rounded.parameters.values()} == {torch.float32}
