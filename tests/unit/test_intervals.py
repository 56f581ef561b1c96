"""Paired differences and their 95 % interval."""

import numpy as np
import pytest

from lib.intervals import change, t_quantile

TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 5: 2.571, 9: 2.262, 30: 2.042, 1000: 1.962}


@pytest.mark.parametrize("freedom", TABLE)
def test_the_quantile_is_that_of_the_printed_tables(freedom):
    assert t_quantile(freedom) == pytest.approx(TABLE[freedom], rel=0.01)


def test_the_interval_is_that_of_the_paired_t_test():
    before, after = [1.0, 2.0, 3.0, 4.0], [0.9, 1.7, 2.9, 3.5]
    found = change(before, after)
    differences = np.subtract(after, before)
    half = 3.182 * differences.std(ddof=1) / 2
    assert found.mean == pytest.approx(-0.25)
    assert (found.mean - found.low, found.high - found.mean) == pytest.approx(
        (half, half), rel=0.01
    )
    assert str(found).startswith("-0.2500 (95 % interval -0.5")


def test_the_interval_covers_the_true_change_as_often_as_it_says():
    source = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        before, noise = source.normal(size=8), source.normal(size=8)
        found = change(before.tolist(), (before + 0.3 + noise).tolist())
        covered += found.low <= 0.3 <= found.high
    assert abs(covered / 2000 - 0.95) < 0.02


def test_one_picture_has_no_interval():
    assert change([1.0], [0.5]) is None
