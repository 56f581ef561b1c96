"""How a run computes on this machine: levers that change its speed and not its mathematics.

Each is recorded with its reason; one that cannot engage falls back, which is recorded too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lib.events import Events
from lib.schema import Config

WORTH_COMPILING = 100  # steps that earn back the seconds which compiling takes


@dataclass(frozen=True)
class Levers:
    """What engages."""

    compile: bool = False
    cuda_graphs: bool = False


def choose(config: Config, *, device: torch.device, total_steps: int, events: Events) -> Levers:
    """The levers of a run on a device, as the configuration and the device allow."""
    compiles, why = _compiles(config.trainer.compile, device, total_steps)
    source = "auto" if config.trainer.compile == "auto" else "config"
    events.decision("compile", compiles, source=source, reason=why)
    captures, why = _captures(config, device)
    source = "auto" if config.trainer.cuda_graphs == "auto" else "config"
    events.decision("cuda_graphs", captures, source=source, reason=why)
    return Levers(compile=compiles, cuda_graphs=captures)


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
