"""The average of the adapter: its ramp, its limit, its identity with the closed form."""

import pytest
import torch

from lib import ema


def test_the_ramp_starts_at_one_eleventh_and_reaches_the_decay():
    assert ema.decay_at(1, decay=0.99) == pytest.approx(1 / 11)
    assert ema.decay_at(989, decay=0.99) < 0.99
    assert ema.decay_at(990, decay=0.99) == pytest.approx(0.99)
    assert ema.decay_at(10_000, decay=0.99) == 0.99


def test_the_start_is_a_copy_and_not_the_parameters_themselves():
    parameters = {"a": torch.nn.Parameter(torch.ones(3))}
    average = ema.start(parameters)
    parameters["a"].data.zero_()
    assert torch.equal(average["a"], torch.ones(3))
    assert not average["a"].requires_grad


def moved(average, parameters, *, number, decay):
    weight = torch.tensor(1 - ema.decay_at(number, decay=decay))
    ema.move(list(average.values()), [p.detach() for p in parameters.values()], weight=weight)


def test_updates_equal_the_recursion_written_out():
    torch.manual_seed(0)
    path = [torch.randn(5) for _ in range(8)]
    parameters = {"a": torch.nn.Parameter(path[0].clone())}
    average = ema.start(parameters)
    expected = path[0].double()
    for number, point in enumerate(path[1:], start=1):
        parameters["a"].data.copy_(point)
        moved(average, parameters, number=number, decay=0.9)
        decay = min(0.9, number / (10 + number))
        expected = decay * expected + (1 - decay) * point.double()
    torch.testing.assert_close(average["a"].double(), expected, rtol=1e-6, atol=1e-6)


def test_constant_parameters_leave_the_average_where_it_is():
    parameters = {"a": torch.nn.Parameter(torch.full((4,), 3.0))}
    average = ema.start(parameters)
    for number in range(1, 30):
        moved(average, parameters, number=number, decay=0.99)
    torch.testing.assert_close(average["a"], torch.full((4,), 3.0))


def test_a_weight_of_zero_leaves_the_very_bits():
    average = [torch.tensor([0.1, 1e-30, 3e8])]
    before = average[0].clone()
    ema.move(average, [torch.tensor([1.0, 2.0, -3e8])], weight=torch.tensor(0.0))
    assert torch.equal(average[0], before)
