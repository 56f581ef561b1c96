"""How an adapter is computed in training: layers that are fed the same tensor answer together.

q, k and v, say, share one product with their frozen weights, one with the A of their adapters and,
where these are alike, one with a matrix that has each B in its own rows and ranks: fewer and
larger products, which is most of the speed at batch 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import nn
from torch.nn import functional

from lib.frozen import FrozenLinear
from lib.products import Up

ADAPTER = "default"


class AdaptedLinear(PeftLinear):
    """PEFT's layer, but in a bound denoiser its group answers for it."""

    group: Group | None = None
    place: int = 0

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.group is None or self.disable_adapters:
            return super().forward(x, *args, **kwargs)
        return self.group.answer(self.place, x)


class SharingLinear(nn.Module):
    """A frozen layer without an adapter that is fed what adapted ones are."""

    def __init__(self, base_layer: nn.Module):
        super().__init__()
        self.base_layer = base_layer
        self.group: Group | None = None
        self.place = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) if self.group is None else self.group.answer(self.place, x)


@dataclass(eq=False)
class Group:
    """Layers that are fed the same tensor, in the order in which they are called.

    The first call computes all; the others fetch their part.
    """

    members: Sequence[AdaptedLinear | SharingLinear]
    base: nn.Module  # the rows of all members' frozen weights
    sizes: tuple[int, ...]  # rows of each
    down: torch.Tensor | None = None  # the A of all adapted members: sum of ranks, features
    ups: tuple[Up, ...] = ()  # every B times the adapter's scale, some of them together
    dropout: nn.Module | None = None
    _fed: torch.Tensor | None = None
    _answers: Sequence[torch.Tensor] | None = None

    def answer(self, place: int, x: torch.Tensor) -> torch.Tensor:
        if len(self.members) == 1:
            return self.whole(x)
        if place == 0:
            self._answers = self.whole(x).split(self.sizes, dim=-1)
            self._fed = None if torch.compiler.is_compiling() else x
        answers, fed = self._answers, self._fed
        if answers is None or (fed is not None and fed is not x):
            raise RuntimeError("layers declared to share their input are fed another one each")
        if place == len(self.members) - 1:
            self._answers = self._fed = None
        return answers[place]

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """What all members answer, one after the other: columns of one tensor."""
        if self.down is None:
            return self.base(x)
        if self.dropout is None and isinstance(self.base, FrozenLinear):
            return self.base.adapted(x, down=self.down, ups=self.ups)
        # One member, whose adapter is fed something else or computes in another precision.
        inner = x if self.dropout is None else self.dropout(x)
        low = functional.linear(inner, self.down)
        return self.base(x) + functional.linear(low, self.ups[0].weight)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied denoiser computes each layer by itself, by PEFT's own code."""
        return


def group_of(layers: Sequence[Any]) -> Group | None:
    """The group of exactly these, in this order, while it answers for them all by one product."""
    group = getattr(layers[0], "group", None)
    if group is None or group.dropout is not None or len(group.members) != len(layers):
        return None
    if any(layer is not member for layer, member in zip(layers, group.members, strict=True)):
        return None
    return None if any(getattr(layer, "disable_adapters", False) for layer in layers) else group
