"""How a run computes on this machine: levers that change its speed and not its mathematics.

Each is recorded with its reason; one that cannot engage falls back, which is recorded too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lib import attention, choosing, footprint
from lib.choosing import Choice
from lib.device import float32_products, repeatable, timed_convolutions
from lib.events import Events
from lib.footprint import Needs, Way
from lib.schema import Config


@dataclass(frozen=True)
class Levers:
    """What engages."""

    compile: bool = False
    checkpointing: bool = False
    blocks: int | None = None  # that are computed again; None: all
    cuda_graphs: bool = False
    flash4: bool = False


def choose(
    config: Config,
    *,
    device: torch.device,
    total_steps: int,
    events: Events,
    needs: Needs | None = None,
    masked: bool = False,
) -> Levers:
    """The levers of a run on a device, as the configuration and the device allow.

    `masked`: whether texts are padded, and attention must not see it.
    """
    asked = config.trainer

    def recorded(name: str, value: Any, setting: str, reason: str) -> None:
        events.decision(
            name, value, source="auto" if setting == "auto" else "config", reason=reason
        )

    compiled, why = compiles(asked.compile, device, total_steps)
    recorded("compile", compiled, asked.compile, why)
    again = _checkpoints(config, device, needs, compiled=compiled)
    found = again.way.checkpointing
    recorded("gradient_checkpointing", found, asked.gradient_checkpointing, again.reason)
    captures, why = _captures(config, device)
    recorded("cuda_graphs", captures, asked.cuda_graphs, why)
    fault = _fault_of_flash4(config, device, masked=masked)
    name = "torch's own" if fault else "flash 4"
    recorded("attention", name, asked.attention, f"flash 4: {fault}" if fault else "measured right")
    rounds = asked.tf32
    reason = "as asked" if rounds else "float32 products keep all their digits"
    events.decision("tf32", rounds, source="config", reason=reason)
    for name in ("cudnn_benchmark", "deterministic"):
        if getattr(asked, name):
            events.decision(name, True, source="config", reason="as asked")
    return Levers(
        compile=compiled,
        checkpointing=found,
        blocks=again.blocks,
        cuda_graphs=captures,
        flash4=not fault,
    )


@contextmanager
def kernels(config: Config, *, flash4: bool) -> Iterator[None]:
    """The process's settings for a run, of attention and products; restored after it."""
    asked = config.trainer
    with (
        attention.engaged(flash4=flash4),
        float32_products(tf32=asked.tf32),
        repeatable(asked.deterministic),
        timed_convolutions(asked.cudnn_benchmark),
    ):
        yield


def compiles(asked: str, device: torch.device, total_steps: int) -> tuple[bool, str]:
    if asked == "never":
        return False, "as asked"
    if asked == "always":
        return True, "as asked; blocks compile at the first step of each shape"
    if device.type != "cuda":
        return False, "on a CPU compiling takes longer than a short run"
    if not footprint.compiles(asked, total_steps=total_steps):
        return False, f"fewer than {footprint.WORTH_COMPILING} steps"
    return True, "blocks compile at the first step of each shape"


def _checkpoints(
    config: Config, device: torch.device, needs: Needs | None, *, compiled: bool
) -> Choice:
    asked, mode = config.trainer.gradient_checkpointing, config.precision.mode
    if asked == "always":
        return Choice(Way(mode, True), "as asked; less memory, about a third more time")
    if asked == "never":
        return Choice(Way(mode, False), "as asked")
    if needs is None:
        return Choice(Way(mode, False), "it is not known what a step needs")
    return choosing.checkpointing(needs, device, mode=mode, compiled=compiled)


def _fault_of_flash4(config: Config, device: torch.device, *, masked: bool) -> str:
    if config.trainer.attention == "flash":
        return "as asked"
    if config.trainer.deterministic:
        return "trainer.deterministic"
    return attention.fault_of_flash4(device, masked=masked)


def _captures(config: Config, device: torch.device) -> tuple[bool, str]:
    asked = config.trainer.cuda_graphs
    if asked == "never":
        return False, "as asked"
    if device.type != "cuda":
        return False, "there is no GPU"
    if config.adapter.dropout > 0:
        return False, "adapter.dropout draws anew in each step"
    return True, "one graph for each shape, recorded at its second step"
