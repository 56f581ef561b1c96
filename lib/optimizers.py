"""The optimizer and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from lib.events import Events
from lib.schema import LrScheduleConfig, OptimizerConfig
from lib.team import ALONE, Team

# bitsandbytes keeps the state of smaller tensors in float32: 8 bits would save next to nothing.
MIN_8BIT_SIZE = 4096


def usable(
    config: OptimizerConfig, *, device: torch.device, events: Events, team: Team = ALONE
) -> OptimizerConfig:
    """The configuration as this machine can do it: without 8 bits by float32, which is recorded."""
    if config.name != "adamw_8bit":
        return config
    fault = team.told(lambda: {"fault": fault_of_8bit(device)})["fault"]
    if not fault:
        return config
    events.decision("optimizer", "adamw", source="probe", reason=fault)
    return replace(config, name="adamw")


def fault_of_8bit(device: torch.device) -> str:
    """Why 8-bit AdamW cannot be used on a device, or nothing; found by one step."""
    probe = torch.nn.Parameter(torch.ones(MIN_8BIT_SIZE, device=device))
    probe.grad = torch.ones_like(probe)
    try:
        _adamw_8bit([probe], OptimizerConfig(name="adamw_8bit", lr=0.1)).step()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"bitsandbytes cannot be used: {type(error).__name__}: {error}"
    moved = probe.detach() != 1
    if bool(moved.all()) and bool(probe.isfinite().all()):
        return ""
    return "bitsandbytes moves weights wrongly"


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """The optimizer that the configuration names, with every argument given."""
    make = _adamw_8bit if config.name == "adamw_8bit" else _adamw
    return make(list(parameters), config)


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """What `optimizer.name` calls it."""
    return "adamw" if isinstance(optimizer, torch.optim.AdamW) else "adamw_8bit"


def moves_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of it is device work alone, which a CUDA graph can hold."""
    return isinstance(optimizer, torch.optim.AdamW)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The rate of the next step, kept where the optimizer reads it."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def update(optimizer: Any, *, finite: torch.Tensor) -> None:
    """One step; where the loss or the norm is not finite nothing moves."""
    if not moves_on_device(optimizer):
        if bool(finite):  # it has no gate of its own: the host waits for the answer
            optimizer.step()
        return
    # The fused kernel reads found_inf on the device: no weight moves on a non-finite step.
    optimizer.found_inf = (~finite).float()
    optimizer.grad_scale = None
    optimizer.step()


def _adamw_8bit(
    tensors: Sequence[torch.nn.Parameter], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """AdamW with moments of 8 bits in blocks of 256 (arXiv:2110.02861), the rate a number."""
    import bitsandbytes  # type: ignore[import-not-found]  # an extra: `quant`

    return bitsandbytes.optim.AdamW8bit(
        tensors,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        min_8bit_size=MIN_8BIT_SIZE,
    )


def _adamw(tensors: Sequence[torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """Fused AdamW (arXiv:1711.05101); state float32 like its parameters, the rate a tensor."""
    rate = torch.tensor(config.lr, dtype=torch.float32, device=tensors[0].device)
    return torch.optim.AdamW(
        tensors,
        lr=rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
        capturable=tensors[0].device.type == "cuda",  # its step may be part of a CUDA graph
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
