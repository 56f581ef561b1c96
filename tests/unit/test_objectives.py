import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import mse_loss

from lib.objectives import group_loss, per_sample_loss


def random_pair(rows, seed=0):
    source = torch.Generator().manual_seed(seed)
    shape = (rows, 4, 2, 6)
    prediction = torch.randn(shape, generator=source).requires_grad_()
    return prediction, torch.randn(shape, generator=source)


def loss_of(prediction, target, weights):
    losses = per_sample_loss(prediction, target)
    return group_loss(losses, weights, total_weight=float(weights.sum()))


@given(st.integers(1, 5), st.integers(0, 1000))
def test_with_equal_weights_it_is_the_mean_squared_error(rows, seed):
    prediction, target = random_pair(rows, seed)
    assert torch.allclose(
        loss_of(prediction, target, torch.ones(rows)), mse_loss(prediction, target)
    )
    assert torch.allclose(
        loss_of(prediction, target, torch.full((rows,), 2.5)), mse_loss(prediction, target)
    )


def test_a_sample_s_loss_is_its_own_mean():
    prediction, target = random_pair(3)
    losses = per_sample_loss(prediction, target)
    for row in range(3):
        assert torch.allclose(losses[row], mse_loss(prediction[row], target[row]))


def test_weights_weigh():
    prediction, target = random_pair(2)
    one, two = per_sample_loss(prediction, target)
    found = loss_of(prediction, target, torch.tensor([3.0, 1.0]))
    assert torch.allclose(found, (3 * one + two) / 4)


def test_a_row_of_weight_zero_changes_neither_value_nor_gradient():
    prediction, target = random_pair(3)
    loss = loss_of(prediction, target, torch.tensor([1.0, 1.0, 0.0]))
    (with_filler,) = torch.autograd.grad(loss, prediction)
    (without,) = torch.autograd.grad(
        alone := loss_of(prediction[:2], target[:2], torch.ones(2)), prediction
    )
    assert torch.equal(loss, alone)
    assert torch.equal(with_filler, without)
    assert not with_filler[2].any()


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=4, max_size=4), st.integers(1, 3))
def test_the_shares_of_micro_batches_add_up_to_the_whole(weights, cut):
    weights = torch.tensor([*weights, 1.0])
    prediction, target = random_pair(5)
    whole = loss_of(prediction, target, weights)
    shares = [
        group_loss(
            per_sample_loss(prediction[part], target[part]),
            weights[part],
            total_weight=float(weights.sum()),
        )
        for part in (slice(0, cut), slice(cut, 5))
    ]
    assert torch.allclose(shares[0] + shares[1], whole)
    (of_whole,) = torch.autograd.grad(whole, prediction, retain_graph=True)
    (of_shares,) = torch.autograd.grad(shares[0] + shares[1], prediction)
    assert torch.allclose(of_whole, of_shares)


def test_a_bfloat16_prediction_is_compared_in_float32():
    prediction, target = random_pair(2)
    rounded = prediction.detach().bfloat16()
    losses = per_sample_loss(rounded, target)
    assert losses.dtype == torch.float32
    assert torch.equal(losses, per_sample_loss(rounded.float(), target))


def test_shapes_that_would_broadcast_are_refused():
    prediction, target = random_pair(2)
    with pytest.raises(Exception, match=r"objectives\.py|per_sample_loss"):
        per_sample_loss(prediction[:1], target)
