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
