"""Noise levels for training: our own function, never a scheduler's table (design 6)."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from lib.errors import Problem
from lib.random import normal, uniform
from lib.schema import TimestepsConfig

GRID = np.float32(1000)
TOKENS = "tokens"  # of `timesteps.shift_by`
POINTS = {  # of a scheduler's line through two token counts, by diffusers' names and defaults
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
    "base_shift": 0.5,
    "max_shift": 1.15,
}


def draw_sigma(settings: TimestepsConfig, *, seed: int, counter: int, sample_id: str) -> float:
    """One sigma in (0, 1]: a density over sigma, put on a grid of a thousandth, then shifted."""
    u = draw_unit(settings, seed=seed, counter=counter, sample_id=sample_id)
    on_grid = max(np.ceil(GRID * u), np.float32(1)) / GRID
    return float(shift_sigma(np.float32(on_grid), shift=settings.shift))


def shifted_by_size(
    settings: TimestepsConfig, *, tokens: int, scheduler: Mapping[str, Any]
) -> TimestepsConfig:
    """The settings with the shift of pictures of so many image tokens."""
    if settings.shift_by != TOKENS:
        return settings
    return replace(settings, shift=math.exp(mu_of_tokens(tokens, scheduler=scheduler)))


def mu_of_tokens(tokens: int, *, scheduler: Mapping[str, Any], most: int = 4096) -> float:
    """Linear in the number of image tokens, through the two points that a base's scheduler names.

    `most` is the pipeline's own default for the second point.
    """
    points = {**POINTS, "max_image_seq_len": most, **scheduler}
    fewest, most = points["base_image_seq_len"], points["max_image_seq_len"]
    low, high = points["base_shift"], points["max_shift"]
    slope = (high - low) / (most - fewest)
    return tokens * slope + (low - slope * fewest)


def size_problems(settings: TimestepsConfig, *, scheduler: Mapping[str, Any]) -> Iterator[Problem]:
    """Why a base's sampler does not shift by exp(mu) of the size, so that training must not."""
    if settings.shift_by != TOKENS:
        return
    subject, remedy = f"timesteps.shift_by={TOKENS}", "use timesteps.shift_by=constant"
    if not scheduler.get("use_dynamic_shifting", False):
        why = "the base's scheduler shifts no size otherwise than another"
        yield Problem(subject, why, "a base with use_dynamic_shifting", remedy)
    elif (kind := scheduler.get("time_shift_type", "exponential")) != "exponential":
        why = f"the base's scheduler has time_shift_type={kind}"
        yield Problem(subject, why, "time_shift_type exponential", remedy)


def shift_sigma(sigma: np.float32, *, shift: float) -> np.float32:
    """k sigma / (1 + (k - 1) sigma): SD3, arXiv:2403.03206, equation 23."""
    one, factor = np.float32(1), np.float32(shift)
    # Of the last sigma, 1, the quotient may be one bit more.
    return np.minimum(factor * sigma / (one + (factor - one) * sigma), one)


def draw_unit(settings: TimestepsConfig, *, seed: int, counter: int, sample_id: str) -> np.float32:
    """A draw from the density over (0, 1); a larger mean of the logit-normal is noisier."""
    if settings.density == "uniform":
        return np.float32(
            uniform(seed=seed, stream="timestep", counter=counter, sample_id=sample_id)
        )
    z = normal((), seed=seed, stream="timestep", counter=counter, sample_id=sample_id)
    logit = np.float32(settings.mean) + np.float32(settings.std) * np.float32(z)
    return np.float32(1) / (np.float32(1) + np.exp(-logit))
