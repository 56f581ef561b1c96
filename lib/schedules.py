"""Sampling schedules of flow pipelines, made by diffusers' own scheduler as a base configures it.

Training draws its levels elsewhere (`lib.timesteps`): a scheduler's table is no density.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lib.family import Schedule


def flow_schedule(
    steps: int,
    *,
    scheduler: Mapping[str, Any],
    mu: float | None,
    spaced: Sequence[float] | None = None,
) -> Schedule:
    """linspace(1, 1/n, n), shifted: by exp(mu) where the base shifts by resolution.

    `spaced` is that line where a pipeline rounds it otherwise.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler

    made: Any = FlowMatchEulerDiscreteScheduler.from_config(dict(scheduler))
    line = np.linspace(1.0, 1 / steps, steps).tolist() if spaced is None else list(spaced)
    made.set_timesteps(sigmas=line, mu=mu)
    sigmas = tuple(made.sigmas[:-1].tolist())
    return Schedule(sigmas, levels=sigmas)


def mu_of_tokens(tokens: int, *, scheduler: Mapping[str, Any], most: int = 4096) -> float:
    """Linear in the number of image tokens, through the two points that a base's scheduler names.

    `most` is the pipeline's own default for the second point.
    """
    fewest = scheduler.get("base_image_seq_len", 256)
    most = scheduler.get("max_image_seq_len", most)
    low, high = scheduler.get("base_shift", 0.5), scheduler.get("max_shift", 1.15)
    slope = (high - low) / (most - fewest)
    return tokens * slope + (low - slope * fewest)
