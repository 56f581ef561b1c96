import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lib.schema import TimestepsConfig
from lib.timesteps import draw_sigma, mu_of_tokens, shift_sigma, shifted_by_size

settings_of = st.builds(
    TimestepsConfig,
    density=st.sampled_from(["logit_normal", "uniform"]),
    mean=st.floats(-10, 10),
    std=st.floats(0.01, 10),
    shift=st.floats(0.05, 20),
)
counters = st.integers(0, 10**6)


def sigmas(count, **settings):
    config = TimestepsConfig(**settings)
    return np.array(
        [draw_sigma(config, seed=1, counter=n, sample_id="a.png") for n in range(count)]
    )


def distance(drawn, cdf):
    """Kolmogorov's: the largest gap between the drawn and the expected distribution, on the grid."""
    grid = np.arange(1, 1000) / 1000
    share = np.searchsorted(np.sort(drawn), grid + 5e-4) / len(drawn)
    return np.abs(share - [cdf(at) for at in grid]).max()


def logit_normal_cdf(mean, std):
    return lambda s: 0.5 * (1 + math.erf((math.log(s / (1 - s)) - mean) / (std * math.sqrt(2))))


@given(settings_of, counters)
@example(TimestepsConfig(density="logit_normal", std=4.0, shift=0.17208708187873042), 1)
def test_a_sigma_is_above_zero_and_at_most_one(settings, counter):
    sigma = draw_sigma(settings, seed=0, counter=counter, sample_id="a")
    assert 0 < sigma <= 1
    assert sigma == float(np.float32(sigma))


@given(settings_of, counters)
def test_undone_the_shift_leaves_a_thousandth(settings, counter):
    sigma = draw_sigma(settings, seed=0, counter=counter, sample_id="a")
    k = settings.shift
    on_grid = 1000 * sigma / (k - (k - 1) * sigma)
    assert on_grid == pytest.approx(round(on_grid), abs=0.02)
    assert round(on_grid) >= 1


@given(st.floats(1e-3, 1), st.floats(0.05, 20))
def test_a_shift_is_its_formula_and_the_inverse_shift_undoes_it(sigma, k):
    shifted = shift_sigma(np.float32(sigma), shift=k)
    assert shifted == pytest.approx(k * sigma / (1 + (k - 1) * sigma), rel=1e-5)
    assert shift_sigma(shifted, shift=1 / k) == pytest.approx(sigma, rel=1e-4)
    if k >= 1:
        assert shifted >= sigma * (1 - 1e-5)
    else:
        assert shifted <= sigma * (1 + 1e-5)


def test_known_shifts():
    assert shift_sigma(np.float32(0.5), shift=3.0) == np.float32(0.75)
    assert shift_sigma(np.float32(1.0), shift=3.0) == np.float32(1.0)
    assert shift_sigma(np.float32(0.25), shift=1.0) == np.float32(0.25)


def test_known_draws_never_change():
    drawn = sigmas(4).tolist()
    assert drawn == pytest.approx([0.574, 0.8, 0.814, 0.331], abs=1e-6)
    drawn = sigmas(4, density="uniform", shift=3.0).tolist()
    assert drawn == pytest.approx([0.556604, 0.947717, 0.941549, 0.746231], abs=1e-6)


def test_uniform_covers_the_interval():
    drawn = sigmas(2000, density="uniform")
    assert distance(drawn, lambda s: s) < 0.035
    assert drawn.min() < 0.01
    assert drawn.max() > 0.99


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (1.0, 0.5), (-0.7, 1.6)])
def test_logit_normal_draws_have_the_logit_normal_distribution(mean, std):
    assert distance(sigmas(2000, mean=mean, std=std), logit_normal_cdf(mean, std)) < 0.035


@given(counters, st.floats(-3, 3), st.floats(0.1, 2), st.floats(0.1, 2))
def test_a_larger_mean_is_noisier(counter, mean, more, std):
    low, high = (
        draw_sigma(TimestepsConfig(mean=m, std=std), seed=0, counter=counter, sample_id="a")
        for m in (mean, mean + more)
    )
    assert low <= high
    assert low < high or not 0.01 < low < 0.99


@given(counters, st.floats(0.1, 10), st.floats(1.1, 3))
def test_a_larger_shift_is_noisier(counter, shift, times):
    low, high = (
        draw_sigma(TimestepsConfig(shift=k), seed=0, counter=counter, sample_id="a")
        for k in (shift, shift * times)
    )
    assert low < high or low == 1


def test_seed_counter_and_sample_each_change_the_draw():
    place = {"seed": 1, "counter": 2, "sample_id": "a"}
    changes = [{}, {"seed": 2}, {"counter": 3}, {"sample_id": "b"}]
    assert len({draw_sigma(TimestepsConfig(), **{**place, **c}) for c in changes}) == 4


points = st.fixed_dictionaries(
    {},
    optional={
        "base_image_seq_len": st.integers(1, 1000),
        "max_image_seq_len": st.integers(1001, 10_000),
        "base_shift": st.floats(0, 1),
        "max_shift": st.floats(0.5, 2),
    },
)


@given(st.integers(1, 20_000), points)
def test_mu_is_that_of_diffusers_pipelines(tokens, scheduler):
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    config = FlowMatchEulerDiscreteScheduler(**scheduler, use_dynamic_shifting=True).config
    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    expected = calculate_shift(tokens, *(config[name] for name in names))
    assert mu_of_tokens(tokens, scheduler=scheduler) == pytest.approx(expected, abs=1e-9)


@given(st.integers(1, 10_000), points, counters)
def test_a_sigma_shifted_by_tokens_is_that_of_diffusers_scheduler(tokens, scheduler, counter):
    from diffusers import FlowMatchEulerDiscreteScheduler

    made = FlowMatchEulerDiscreteScheduler(**scheduler, use_dynamic_shifting=True)
    where = {"seed": 0, "counter": counter, "sample_id": "a"}
    settings = TimestepsConfig(shift_by="tokens")
    shifted = shifted_by_size(settings, tokens=tokens, scheduler=scheduler)
    plain = draw_sigma(TimestepsConfig(), **where)
    mu = mu_of_tokens(tokens, scheduler=scheduler)
    expected = float(made.time_shift(mu, 1.0, np.array([plain]))[0])
    assert draw_sigma(shifted, **where) == pytest.approx(expected, rel=1e-5)


def test_a_constant_shift_knows_no_size():
    settings = TimestepsConfig(shift=3.0)
    assert shifted_by_size(settings, tokens=4096, scheduler={"base_shift": 0.9}) == settings
