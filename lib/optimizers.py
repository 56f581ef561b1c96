"""The optimizer and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from lib.schema import LrScheduleConfig, OptimizerConfig


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], config: OptimizerConfig
) -> torch.optim.AdamW:
    """Fused AdamW (arXiv:1711.05101); state float32 like its parameters, the rate a tensor."""
    tensors = list(parameters)
    rate = torch.tensor(config.lr, dtype=torch.float32, device=tensors[0].device)
    return torch.optim.AdamW(
        tensors,
        lr=rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def learning_rate(config: LrScheduleConfig, *, base: float, step: int, total_steps: int) -> float:
    """The rate that optimizer step `step` (from 0) uses; warm-up is (step + 1) / warm-up steps."""
    if step < config.warmup_steps:
        return base * (step + 1) / config.warmup_steps
    decaying = max(1, total_steps - config.warmup_steps)
    progress = (step - config.warmup_steps) / decaying
    return base * _decay(config, progress)


def _decay(config: LrScheduleConfig, progress: float) -> float:
    """The factor at `progress` in [0, 1) of the steps after the warm-up."""
    match config.name:
        case "constant" | "constant_with_warmup":
            return 1.0
        case "linear":
            return 1.0 - progress
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        case "cosine_with_restarts":
            return 0.5 * (1.0 + math.cos(math.pi * (progress * config.num_cycles % 1.0)))
        case "polynomial":
            return (1.0 - progress) ** config.power
        case _:
            raise ValueError(f"unknown schedule {config.name}")
