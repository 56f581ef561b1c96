"""How a run computes on this machine: levers that change its speed and not its mathematics.

Each is recorded with its reason; one that cannot engage falls back, which is recorded too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lib import attention
from lib.device import float32_products
from lib.events import Events
from lib.schema import Config

WORTH_COMPILING = 100  # steps that earn back the seconds which compiling takes


@dataclass(frozen=True)
class Levers:
    """What engages."""

    compile: bool = False
    cuda_graphs: bool = False
    flash4: bool = False


def choose(config: Config, *, device: torch.device, total_steps: int, events: Events) -> Levers:
    """The levers of a run on a device, as the configuration and the device allow."""
    asked = config.trainer

    def recorded(name: str, value: Any, setting: str, reason: str) -> None:
        events.decision(
            name, value, source="auto" if setting == "auto" else "config", reason=reason
        )

    compiles, why = _compiles(asked.compile, device, total_steps)
    recorded("compile", compiles, asked.compile, why)
    captures, why = _captures(config, device)
    recorded("cuda_graphs", captures, asked.cuda_graphs, why)
    fault = "as asked" if asked.attention == "flash" else attention.fault_of_flash4(device)
    name = "torch's own" if fault else "flash 4"
    recorded("attention", name, asked.attention, f"flash 4: {fault}" if fault else "measured right")
    rounds = asked.tf32
    reason = "as asked" if rounds else "float32 products keep all their digits"
    events.decision("tf32", rounds, source="config", reason=reason)
    return Levers(compile=compiles, cuda_graphs=captures, flash4=not fault)


@contextmanager
def kernels(config: Config, *, flash4: bool) -> Iterator[None]:
    """The process's settings of attention and float32 products for a run; restored after it."""
    with attention.engaged(flash4=flash4), float32_products(tf32=config.trainer.tf32):
        yield


def _compiles(asked: str, device: torch.device, total_steps: int) -> tuple[bool, str]:
    if asked == "never":
        return False, "as asked"
    if asked == "always":
        return True, "as asked; blocks compile at the first step of each shape"
    if device.type != "cuda":
        return False, "on a CPU compiling takes longer than a short run"
    if total_steps < WORTH_COMPILING:
        return False, f"fewer than {WORTH_COMPILING} steps"
    return True, "blocks compile at the first step of each shape"


def _captures(config: Config, device: torch.device) -> tuple[bool, str]:
    asked = config.trainer.cuda_graphs
    if asked == "never":
        return False, "as asked"
    if device.type != "cuda":
        return False, "there is no GPU"
    if config.adapter.dropout > 0:
        return False, "adapter.dropout draws anew in each step"
    return True, "one graph for each shape, recorded at its second step"
