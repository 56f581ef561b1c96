"""Activations of compiled blocks in the form that a GPU computes fast: the same functions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from lib import kernels

DOUBLED, CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715  # of GELU's polynomial


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x (1 + tanh u) / 2 of arXiv:1606.08415 as x sigmoid(2 u), in float32.

    A sigmoid is one exponential, where tanh takes branches; a compiled block's backward computes
    it again from x.
    """
    wide = x.float()
    found = wide * _share(wide)
    # A Function's answer that a cast hands on as it is has no gradient in torch 2.11's compiler.
    return found if found.dtype == x.dtype else found.to(x.dtype)


def _share(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(DOUBLED * (x + CUBIC * x * x * x))


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """The first half by its sigmoid, times the second (arXiv:2002.05202), as FLUX.2 has it."""
    first, second = x.chunk(2, dim=-1)
    return functional.silu(first) * second


def gelu_back(gradient: torch.Tensor, x: torch.Tensor, target: torch.Tensor) -> None:
    """The gradient of what `gelu` was given, into a target of its sides; rounded once."""
    if kernels.runs_on(x):
        kernels.gelu_back(gradient, x, target, doubled=DOUBLED, cubic=CUBIC)
        return
    wide = x.float()
    share = _share(wide)
    steepness = DOUBLED * (1 + 3 * CUBIC * wide * wide)
    target.copy_(gradient.float() * (share + wide * share * (1 - share) * steepness))


def swiglu_back(gradient: torch.Tensor, x: torch.Tensor, target: torch.Tensor) -> None:
    """The gradient of what `swiglu` was given, likewise."""
    if kernels.runs_on(x):
        kernels.swiglu_back(gradient, x, target)
        return
    given, (first, second) = gradient.float(), x.float().chunk(2, dim=-1)
    share = torch.sigmoid(first)
    of_first = given * second * share * (1 + first * (1 - share))
    target.copy_(torch.cat([of_first, given * first * share], dim=-1))


def engage(denoiser: Any) -> None:
    """Put it in the place of torch's in a denoiser's layers that have this kind of GELU."""
    from diffusers.models.activations import GELU

    for module in denoiser.modules():
        if getattr(module, "approximate", None) != "tanh":
            continue
        if isinstance(module, nn.GELU):
            module.forward = gelu  # type: ignore[method-assign]
        elif isinstance(module, GELU):
            module.gelu = gelu  # type: ignore[method-assign]


def disengage(denoiser: Any) -> None:
    """Put torch's back."""
    for module in denoiser.modules():
        for name in ("forward", "gelu"):
            if module.__dict__.get(name) is gelu:
                delattr(module, name)
