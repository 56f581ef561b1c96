"""Which way of running fits a GPU: its free memory beside what each way needs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from lib import frozen
from lib.few_bits import MODES
from lib.footprint import GIB, Footprint, Needs, Way, in_gib

HEADROOM = 1.1  # of what is predicted
BESIDE = GIB  # what libraries, graphs and gaps between tensors take

# By the steps a second that were measured (bench/results), the fastest first.
FASTEST = (
    Way("fp8", False),
    Way("bf16", False),
    Way("int8", False),
    Way("nf4", False),
    Way("bf16", True),
    Way("int8", True),
    Way("nf4", True),
)
ASKED = {"auto": (False, True), "always": (True,), "never": (False,)}
NATIVE_BF16 = 8  # major capability


@dataclass(frozen=True)
class Choice:
    """A way of running, and why; `refused` where not even the least can fit."""

    way: Way
    reason: str
    refused: bool = False
    blocks: int | None = None  # how many are computed again, where not all need be


def free_bytes(device: torch.device) -> int:
    """What a GPU has free, with what this process holds and no longer uses."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def fits(needed: Footprint, free: int) -> bool:
    return needed.peak * HEADROOM + BESIDE <= free


def fault_of(mode: str, device: torch.device) -> str:
    """Why a device cannot compute a precision, or nothing."""
    if mode == "fp32":
        return ""
    gpu = device.type == "cuda"
    if gpu and torch.cuda.get_device_capability(device)[0] < NATIVE_BF16:
        return "this GPU has no bfloat16 units"
    return frozen.fault_of(mode, device) if mode in MODES else ""


def choose(
    needs: Needs,
    device: torch.device,
    *,
    allowed: Iterable[str],
    compiled: bool,
    checkpointing: str = "auto",
) -> Choice:
    """The fastest way that the device can compute and that fits; `allowed` are precisions.

    `checkpointing` is what was asked of that. Where none fits for sure, the least; it is refused
    where it cannot fit.
    """
    if device.type != "cuda":
        return Choice(Way("fp32", False), "there is no GPU")
    faults = {mode: fault_of(mode, device) for mode in set(allowed)}
    asked = [way for way in FASTEST if way.checkpointing in ASKED[checkpointing]]
    able = [way for way in asked if faults.get(way.mode) == ""]
    if not able:
        return Choice(Way("fp32", False), "this GPU has no bfloat16 units")
    free, needed = free_bytes(device), needs(compiled=compiled)
    for way in able:
        if fits(needed[way], free):
            passed = "; ".join(_passed(way, asked, faults, needed))
            why = f"the fastest that fits: {_beside(needed[way], free)}"
            return Choice(way, f"{why}; {passed}" if passed else why)
    least = min(able, key=lambda way: needed[way].peak)
    why = f"none fits for sure; the least, {least}, needs {_beside(needed[least], free)}"
    return Choice(least, why, refused=needed[least].peak > free * HEADROOM)


def checkpointing(needs: Needs, device: torch.device, *, mode: str, compiled: bool) -> Choice:
    """Whether to compute activations again: only where keeping them does not fit."""
    keeping, again = Way(mode, False), Way(mode, True)
    if device.type != "cuda":
        return Choice(keeping, "there is no GPU whose memory could run out")
    needed, free = needs(compiled=compiled), free_bytes(device)
    if fits(needed[keeping], free):
        return Choice(keeping, f"it fits without: {_beside(needed[keeping], free)}")
    without = f"without it {_beside(needed[keeping], free)}"
    if fits(needed[again], free):
        blocks = _fewest(needed[keeping], free)
        which = f"{blocks} of {needed[keeping].blocks} blocks" if blocks else "all"
        why = f"{without}; {which} computed again, with all {in_gib(needed[again].peak)}"
        return Choice(again, why, blocks=blocks)
    return Choice(again, f"{without}; nor is it sure to fit with it: {in_gib(needed[again].peak)}")


def _fewest(keeping: Footprint, free: int) -> int | None:
    """How many blocks to compute again so that it fits; None: all, which can be fewer bytes."""
    beyond = keeping.peak - (free - BESIDE) / HEADROOM
    fewest = math.ceil(beyond / keeping.saving) if keeping.blocks else 0
    return fewest if 0 < fewest < keeping.blocks else None


def _beside(needed: Footprint, free: int) -> str:
    return f"{in_gib(needed.peak)} of {in_gib(free)} free"


def _passed(
    chosen: Way, asked: Iterable[Way], faults: Mapping[str, str], needed: Mapping[Way, Footprint]
) -> Iterator[str]:
    """Why each faster way is not taken."""
    told = set()
    for way in asked:
        if way == chosen:
            return
        if faults.get(way.mode) == "":
            yield f"{way} needs {in_gib(needed[way].peak)}"
        elif way.mode not in told:
            told.add(way.mode)
            why = faults.get(way.mode) or "not shown to train this family as bf16 does"
            yield f"{way.mode}: {why}"
