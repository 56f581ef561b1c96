"""GELU of compiled blocks in the form that a GPU computes fast: the same function."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x (1 + tanh u) / 2 of arXiv:1606.08415 as x sigmoid(2 u), in float32.

    A sigmoid is one exponential, where tanh takes branches; a compiled block's backward computes
    it again from x.
    """
    wide = x.float()
    doubled = 2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (wide * torch.sigmoid(doubled)).to(x.dtype)


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
