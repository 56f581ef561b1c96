"""The exponential moving average of the adapter, with the usual ramp at its start (design 6)."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def decay_at(update: int, *, decay: float) -> float:
    """The decay of update s = 1, 2, ...: min(decay, s / (10 + s)), so the first is 1/11."""
    return min(decay, update / (10 + update))


def start(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The average before the first update: a copy of the adapter."""
    return {name: tensor.detach().clone() for name, tensor in parameters.items()}


@torch.no_grad()
def update(
    average: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    *,
    number: int,
    decay: float,
) -> None:
    """Move the average towards the parameters, in place."""
    weight = 1.0 - decay_at(number, decay=decay)
    targets = [parameters[name].detach() for name in average]
    torch._foreach_lerp_(list(average.values()), targets, weight)
