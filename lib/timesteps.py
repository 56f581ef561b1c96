"""Noise levels for training: our own function, never a scheduler's table (design 6)."""

import numpy as np

from lib.random import normal, uniform
from lib.schema import TimestepsConfig

GRID = np.float32(1000)


def draw_sigma(settings: TimestepsConfig, *, seed: int, counter: int, sample_id: str) -> float:
    """One sigma in (0, 1]: a density over sigma, put on a grid of a thousandth, then shifted."""
    u = draw_unit(settings, seed=seed, counter=counter, sample_id=sample_id)
    on_grid = max(np.ceil(GRID * u), np.float32(1)) / GRID
    return float(shift_sigma(np.float32(on_grid), shift=settings.shift))


def shift_sigma(sigma: np.float32, *, shift: float) -> np.float32:
    """k sigma / (1 + (k - 1) sigma): SD3, arXiv:2403.03206, equation 23."""
    factor = np.float32(shift)
    return factor * sigma / (np.float32(1) + (factor - np.float32(1)) * sigma)


def draw_unit(settings: TimestepsConfig, *, seed: int, counter: int, sample_id: str) -> np.float32:
    """A draw from the density over (0, 1); a larger mean of the logit-normal is noisier."""
    if settings.density == "uniform":
        return np.float32(
            uniform(seed=seed, stream="timestep", counter=counter, sample_id=sample_id)
        )
    z = normal((), seed=seed, stream="timestep", counter=counter, sample_id=sample_id)
    logit = np.float32(settings.mean) + np.float32(settings.std) * np.float32(z)
    return np.float32(1) / (np.float32(1) + np.exp(-logit))
