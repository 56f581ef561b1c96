"""Drawing latents with a family's own `predict`; imports no pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from lib import shapes

if TYPE_CHECKING:
    from lib.family import Conditioning, Family


def euler(
    family: Family,
    denoiser: shapes.Module,
    noise: shapes.Noise,
    *,
    conditioning: Conditioning,
    sigmas: Sequence[float],
    guidance: float,
    unconditional: Conditioning | None = None,
    each_step: Callable[[], None] = lambda: None,
) -> shapes.Latents:
    """Euler's method along the flow, from sigma `sigmas[0]` to 0, in float32; returns latents.

    With an unconditional branch the velocity is u + s (c - u) (arXiv:2207.12598); without one the
    denoiser has the guidance embedded. `each_step` may raise, to stop between two steps.
    """
    import torch

    levels = torch.tensor([*sigmas, 0.0], dtype=torch.float32, device=noise.device)
    latents = noise
    with torch.no_grad():
        for level, following in pairwise(levels):
            each_step()
            sigma = level.expand(latents.shape[0])
            velocity = family.predict(
                denoiser, latents, sigma, conditioning=conditioning, guidance=guidance
            )
            if unconditional is not None:
                base = family.predict(
                    denoiser, latents, sigma, conditioning=unconditional, guidance=guidance
                )
                velocity = base + guidance * (velocity - base)
            latents = latents + (following - level) * velocity.float()
    return latents
