"""Drawing latents with a family's own `predict`; imports no pipeline."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

from lib import shapes

if TYPE_CHECKING:
    from lib.family import Conditioning, Family, Schedule
    from lib.noise import NoiseProcess


def euler(
    family: Family,
    denoiser: shapes.Module,
    noise: shapes.Noise,
    *,
    conditioning: Conditioning,
    schedule: Schedule,
    process: NoiseProcess,
    guidance: float,
    unconditional: Conditioning | None = None,
    each_step: Callable[[], None] = lambda: None,
) -> shapes.Latents:
    """Euler's method from `schedule.sigmas[0]` to 0, in float32; returns latents.

    With an unconditional branch the two predictions become one by the family's rule.
    `each_step` may raise, to stop between two steps.
    """
    import torch

    sigmas = torch.tensor([*schedule.sigmas, 0.0], dtype=torch.float32, device=noise.device)
    levels = torch.tensor(schedule.levels, dtype=torch.float32, device=noise.device)
    latents = noise * schedule.scale
    with torch.no_grad():
        for (sigma, following), level in zip(pairwise(sigmas), levels, strict=True):
            each_step()
            seen = process.denoiser_input(latents, sigma)
            step = level.expand(latents.shape[0])
            prediction = family.predict(
                denoiser, seen, step, conditioning=conditioning, guidance=guidance
            )
            if unconditional is not None:
                other = family.predict(
                    denoiser, seen, step, conditioning=unconditional, guidance=guidance
                )
                prediction = family.guide(prediction, other, scale=guidance)
            latents = latents + (following - sigma) * process.derivative(latents, prediction, sigma)
    return latents
