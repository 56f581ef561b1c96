"""The exponential moving average of the adapter, with the usual ramp at its start (design 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch


def decay_at(update: int, *, decay: float) -> float:
    """The decay of update s = 1, 2, ...: min(decay, s / (10 + s)), so the first is 1/11."""
    return min(decay, update / (10 + update))


def start(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The average before the first update: a copy of the adapter."""
    return {name: tensor.detach().clone() for name, tensor in parameters.items()}


@torch.no_grad()
def move(
    averages: Sequence[torch.Tensor], values: Sequence[torch.Tensor], *, weight: torch.Tensor
) -> None:
    """Move averages towards values in place, by a weight that lies on the device."""
    for average, value in zip(averages, values, strict=True):
        average.lerp_(value, weight)
