"""The noise processes: the one place that says what noisy latents and their target are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from lib import shapes
from lib.errors import InputRefused, Problem
from lib.timesteps import (
    POINTS,
    TOKENS,
    draw_sigma,
    draw_unit,
    shift_sigma,
    shifted_by_size,
    size_problems,
)

if TYPE_CHECKING:
    from lib.schema import ObjectiveConfig, TimestepsConfig


DDPM_DEFAULTS = {  # of diffusers' schedulers; what the configuration of a base leaves out
    "beta_start": 0.0001,
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "num_train_timesteps": 1000,
    "prediction_type": "epsilon",
    "rescale_betas_zero_snr": False,
    "trained_betas": None,
}


@runtime_checkable
class NoiseProcess(Protocol):
    """How a level is drawn, latents are noised, and what the denoiser should answer.

    A level is what `predict` is told; a sampler steps over sigmas, from `Schedule`.
    """

    weightings: ClassVar[tuple[str, ...]]  # what `objective.weighting` may be
    shifts: ClassVar[bool]  # whether `timesteps.shift` has a meaning

    @classmethod
    def of(cls, scheduler: Mapping[str, Any]) -> NoiseProcess:
        """The process of a base, from its scheduler's configuration."""
        ...

    @property
    def identity(self) -> Any:
        """What enters train keys."""
        ...

    def problems(self, settings: TimestepsConfig) -> Iterator[Problem]:
        """Why the base's scheduler cannot be followed as the settings ask."""
        ...

    def points(self, settings: TimestepsConfig) -> Mapping[str, Any]:
        """The scheduler's numbers that move levels: what enters train keys beside `identity`."""
        ...

    def draw_level(
        self, settings: TimestepsConfig, *, tokens: int, seed: int, counter: int, sample_id: str
    ) -> float:
        """Of a picture that is so many image tokens."""
        ...

    def level_at(self, place: float, *, settings: TimestepsConfig, tokens: int) -> float:
        """The level at a place in (0, 1] of a uniform density."""
        ...

    def noisiness(self, level: float) -> float:
        """Where a level stands in (0, 1]."""
        ...

    def add_noise(
        self, latents: shapes.Latents, noise: shapes.Noise, level: shapes.Sigma
    ) -> shapes.Latents: ...

    def target(
        self, latents: shapes.Latents, noise: shapes.Noise, level: shapes.Sigma
    ) -> shapes.Target: ...

    def loss_weight(self, level: shapes.Sigma, objective: ObjectiveConfig) -> shapes.PerSample:
        """By how much each sample's loss is multiplied."""
        ...

    def denoiser_input(self, latents: shapes.Latents, sigma: shapes.Scalar) -> shapes.Latents:
        """A sampler's latents as the denoiser was trained to see them."""
        ...

    def derivative(
        self, latents: shapes.Latents, prediction: shapes.Prediction, sigma: shapes.Scalar
    ) -> shapes.Latents:
        """d latents / d sigma along a sampler's path."""
        ...


class Flow:
    """Rectified flow (arXiv:2209.03003): straight from latents (sigma 0) to noise (sigma 1)."""

    weightings: ClassVar[tuple[str, ...]] = ("none", "bell")
    shifts: ClassVar[bool] = True

    def __init__(self, scheduler: Mapping[str, Any]):
        self._scheduler = scheduler

    @classmethod
    def of(cls, scheduler: Mapping[str, Any]) -> Flow:
        """Of the scheduler only its shift by size is used, and that by choice; never its table."""
        return cls(scheduler)

    @property
    def identity(self) -> Any:
        return "flow-velocity"

    def problems(self, settings: TimestepsConfig) -> Iterator[Problem]:
        yield from size_problems(settings, scheduler=self._scheduler)

    def points(self, settings: TimestepsConfig) -> Mapping[str, Any]:
        if settings.shift_by != TOKENS:
            return {}
        return {name: self._scheduler.get(name, usual) for name, usual in POINTS.items()}

    def draw_level(
        self, settings: TimestepsConfig, *, tokens: int, seed: int, counter: int, sample_id: str
    ) -> float:
        """Sigma in (0, 1]."""
        own = shifted_by_size(settings, tokens=tokens, scheduler=self._scheduler)
        return draw_sigma(own, seed=seed, counter=counter, sample_id=sample_id)

    def level_at(self, place: float, *, settings: TimestepsConfig, tokens: int) -> float:
        own = shifted_by_size(settings, tokens=tokens, scheduler=self._scheduler)
        return float(shift_sigma(np.float32(place), shift=own.shift))

    def noisiness(self, level: float) -> float:
        return level

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

    def loss_weight(self, level: shapes.Sigma, objective: ObjectiveConfig) -> shapes.PerSample:
        """1, or a bell over sigma with mean 1 over (0, 1], 0 at its lower end."""
        import torch

        if objective.weighting == "none":
            return torch.ones_like(level)
        grid = _bell(torch.arange(1000, dtype=torch.float64) / 1000)
        lowest = grid.min()
        return ((_bell(level.double()) - lowest) / (grid - lowest).mean()).float()

    def denoiser_input(self, latents: shapes.Latents, sigma: shapes.Scalar) -> shapes.Latents:
        return latents

    def derivative(
        self, latents: shapes.Latents, prediction: shapes.Prediction, sigma: shapes.Scalar
    ) -> shapes.Latents:
        return prediction.float()


class DDPM:
    """Denoising diffusion (arXiv:2006.11239) over 1000 steps; a level is the step, 0 to 999.

    The target is the noise or the velocity (arXiv:2202.00512), as the base's scheduler says.
    """

    weightings: ClassVar[tuple[str, ...]] = ("none", "min_snr")
    shifts: ClassVar[bool] = False

    def __init__(self, config: Mapping[str, Any]):
        self._config = config

    @classmethod
    def of(cls, scheduler: Mapping[str, Any]) -> DDPM:
        """With the base's own betas: those of a bare scheduler differ, and train without a word."""
        config = {**DDPM_DEFAULTS, **scheduler}
        if problems := list(_ddpm_problems(config)):
            raise InputRefused(problems)
        return cls(config)

    @property
    def identity(self) -> Any:
        return {"name": "ddpm", **{name: self._config[name] for name in DDPM_DEFAULTS}}

    def problems(self, settings: TimestepsConfig) -> Iterator[Problem]:
        """None: what it cannot be, `of` refuses, and a shift is refused by `shifts`."""
        yield from ()

    def points(self, settings: TimestepsConfig) -> Mapping[str, Any]:
        return {}

    @cached_property
    def _scheduler(self) -> Any:
        from diffusers import DDPMScheduler

        return DDPMScheduler.from_config(dict(self._config))

    def draw_level(
        self, settings: TimestepsConfig, *, tokens: int, seed: int, counter: int, sample_id: str
    ) -> float:
        place = draw_unit(settings, seed=seed, counter=counter, sample_id=sample_id)
        return float(min(np.floor(np.float32(1000) * place), np.float32(999)))

    def level_at(self, place: float, *, settings: TimestepsConfig, tokens: int) -> float:
        return float(np.ceil(1000 * place) - 1)  # of a Python number: 0.127 is not 127.00001

    def noisiness(self, level: float) -> float:
        return (level + 1) / 1000

    def add_noise(
        self, latents: shapes.Latents, noise: shapes.Noise, level: shapes.Sigma
    ) -> shapes.Latents:
        return self._scheduler.add_noise(latents, noise, level.long())

    def target(
        self, latents: shapes.Latents, noise: shapes.Noise, level: shapes.Sigma
    ) -> shapes.Target:
        if self._predicts_noise:
            return noise
        return self._scheduler.get_velocity(latents, noise, level.long())

    def loss_weight(self, level: shapes.Sigma, objective: ObjectiveConfig) -> shapes.PerSample:
        """1, or min(snr, gamma) over snr, of a velocity over snr + 1 (arXiv:2303.09556)."""
        import torch

        if objective.weighting == "none":
            return torch.ones_like(level)
        kept = self._scheduler.alphas_cumprod.to(level.device)[level.long()]
        snr = kept / (1 - kept)
        return snr.clamp(max=objective.snr_gamma) / (snr if self._predicts_noise else snr + 1)

    def denoiser_input(self, latents: shapes.Latents, sigma: shapes.Scalar) -> shapes.Latents:
        """Of unit variance again: a sampler's latents grow with sigma."""
        return latents / (sigma**2 + 1) ** 0.5

    def derivative(
        self, latents: shapes.Latents, prediction: shapes.Prediction, sigma: shapes.Scalar
    ) -> shapes.Latents:
        predicted = prediction.float()
        if self._predicts_noise:
            clean = latents - sigma * predicted
        else:
            clean = predicted * (-sigma / (sigma**2 + 1) ** 0.5) + latents / (sigma**2 + 1)
        return (latents - clean) / sigma

    @property
    def _predicts_noise(self) -> bool:
        return self._config["prediction_type"] == "epsilon"


def _ddpm_problems(config: Mapping[str, Any]) -> Iterator[Problem]:
    """What a base's scheduler may not be, since its training would be something else."""
    kind, subject = config["prediction_type"], "the base's scheduler"
    if kind not in ("epsilon", "v_prediction"):
        yield Problem(subject, f"has prediction_type={kind}", "epsilon, v_prediction")
    if kind == "epsilon" and config["rescale_betas_zero_snr"]:
        why = "has rescale_betas_zero_snr=true: the last step holds noise alone, which it predicts"
        yield Problem(subject, why, "prediction_type v_prediction with it")
    if config["num_train_timesteps"] != 1000:
        yield Problem(subject, f"has num_train_timesteps={config['num_train_timesteps']}", "1000")


def _bell(sigma: Any) -> Any:
    return (-2 * (sigma - 0.5) ** 2).exp()
