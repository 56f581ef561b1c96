"""The noise processes: the one place that says what noisy latents and their target are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from lib import shapes
from lib.timesteps import draw_sigma

if TYPE_CHECKING:
    from lib.schema import TimestepsConfig


class NoiseProcess(Protocol):
    """How a level is drawn, latents are noised, and what the denoiser should answer."""

    name: str  # enters train keys

    def draw_level(
        self, settings: TimestepsConfig, *, seed: int, counter: int, sample_id: str
    ) -> float: ...

    def add_noise(
        self, latents: shapes.Latents, noise: shapes.Noise, level: shapes.Sigma
    ) -> shapes.Latents: ...

    def target(
        self, latents: shapes.Latents, noise: shapes.Noise, level: shapes.Sigma
    ) -> shapes.Target: ...


class Flow:
    """Rectified flow (arXiv:2209.03003): straight from latents (sigma 0) to noise (sigma 1)."""

    name = "flow-velocity"

    def draw_level(
        self, settings: TimestepsConfig, *, seed: int, counter: int, sample_id: str
    ) -> float:
        """Sigma in (0, 1]."""
        return draw_sigma(settings, seed=seed, counter=counter, sample_id=sample_id)

    def add_noise(
        self, latents: shapes.Latents, noise: shapes.Noise, level: shapes.Sigma
    ) -> shapes.Latents:
        """noisy = (1 - sigma) latents + sigma noise, in float32."""
        sigma = level.view(-1, 1, 1, 1)
        return (1.0 - sigma) * latents + sigma * noise

    def target(
        self, latents: shapes.Latents, noise: shapes.Noise, level: shapes.Sigma
    ) -> shapes.Target:
        """The velocity noise - latents: d noisy / d sigma."""
        return noise - latents


FLOW = Flow()
