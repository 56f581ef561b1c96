"""How an adapter is computed in training: copies in the run's precision, one product for many.

The adapter's weights stay float32 masters; each step computes with copies of them. Linear layers
that are fed the same tensor (q, k and v, say) share one product with their frozen weights and one
with the A of their adapters: fewer and larger products, which is most of the speed at batch 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import nn
from torch.nn import functional

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
    ranks: tuple[int, ...] = ()  # of the adapted members
    ups: tuple[torch.Tensor | None, ...] = ()  # of each its B times the adapter's scale
    dropout: nn.Module | None = None
    _fed: torch.Tensor | None = None
    _answers: list[torch.Tensor] | None = None

    def answer(self, place: int, x: torch.Tensor) -> torch.Tensor:
        if len(self.members) == 1:
            return self._computed(x)[0]
        if place == 0:
            self._answers = self._computed(x)
            self._fed = None if torch.compiler.is_compiling() else x
        answers, fed = self._answers, self._fed
        if answers is None or (fed is not None and fed is not x):
            raise RuntimeError("layers declared to share their input are fed another one each")
        if place == len(self.members) - 1:
            self._answers = self._fed = None
        return answers[place]

    def _computed(self, x: torch.Tensor) -> list[torch.Tensor]:
        bases = self.base(x).split(self.sizes, dim=-1)
        if self.down is None:
            return list(bases)
        inner = x if self.dropout is None else self.dropout(x)
        lows = iter(functional.linear(inner, self.down).split(self.ranks, dim=-1))
        return [
            base if up is None else base + functional.linear(next(lows), up)
            for base, up in zip(bases, self.ups, strict=True)
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied denoiser computes each layer by itself, by PEFT's own code."""
        return


class Weights:
    """The parameters that train, where each backward leaves its gradients by itself."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]):
        self.names = list(parameters)
        self.parameters = list(parameters.values())

    def clear(self) -> None:
        """No gradients, before a step."""
        for parameter in self.parameters:
            parameter.grad = None

    def gather(self) -> None:
        """Add what the last backward left to the parameters' gradients."""

    def refresh(self) -> None:
        """Let the next prediction see the parameters as they are now."""

    def complete(self) -> None:
        """A gradient of zeros for each parameter that has none."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def gradients(self) -> list[torch.Tensor]:
        """All gradients, as few tensors."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def values(self) -> list[torch.Tensor]:
        """All parameters, as few tensors."""
        return [parameter.detach() for parameter in self.parameters]

    def adopt(self, average: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of an average, by parameter name, in the order of `values`."""
        return [average[name] for name in self.names] if average else []

    def keep(self, learning: Sequence[bool]) -> None:
        """Gradients of those that learn alone: another with zeros would still decay."""
        for parameter, learns in zip(self.parameters, learning, strict=True):
            if not learns:
                parameter.grad = None

    @property
    def learning(self) -> tuple[bool, ...]:
        """Which parameters have had a gradient."""
        return tuple(parameter.grad is not None for parameter in self.parameters)


class Copies(Weights):
    """Adapters as flat buffers: masters, gradients, and the copies that a step computes with.

    The A of all groups come first, then each B, so that a cast, a sum or an average is one kernel.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        groups: Sequence[Group],
        *,
        dtype: torch.dtype,
        scale: float,
    ):
        super().__init__(parameters)
        self._scale = scale
        adapted = [group for group in groups if _adapted(group)]
        downs = [[m.lora_A[ADAPTER].weight for m in _adapted(group)] for group in adapted]
        ups = [m.lora_B[ADAPTER].weight for group in groups for m in _adapted(group)]
        ordered = [*(a for down in downs for a in down), *ups]
        self._num_down = sum(a.numel() for down in downs for a in down)
        device = ordered[0].device
        self._masters = torch.cat([p.detach().flatten() for p in ordered])
        self._gradient, self._incoming = (torch.zeros_like(self._masters) for _ in range(2))
        self._computed = torch.empty(self._masters.shape, dtype=dtype, device=device)
        self._views = {}
        for parameter, part in zip(ordered, _parts(self._masters, ordered), strict=True):
            parameter.data = part
        for parameter, part in zip(ordered, _parts(self._gradient, ordered), strict=True):
            self._views[parameter] = part
        shapes = [_stacked(down) for down in downs] + [up.shape for up in ups]
        self._owners = [*downs, *([up] for up in ups)]
        self._leaves = [p.requires_grad_() for p in _shaped(self._computed, shapes)]
        self._arrivals = _shaped(self._incoming, shapes)
        self._hand_out(adapted)
        self.refresh()

    def _hand_out(self, adapted: Sequence[Group]) -> None:
        ups = iter(self._leaves[len(adapted) :])
        for group, down in zip(adapted, self._leaves, strict=False):
            group.down = down
            group.ranks = tuple(m.r[ADAPTER] for m in _adapted(group))
            group.ups = tuple(
                next(ups) if isinstance(m, AdaptedLinear) else None for m in group.members
            )

    @property
    def leaves(self) -> Sequence[torch.Tensor]:
        """The copies that a step computes with."""
        return self._leaves

    def clear(self) -> None:
        self._gradient.zero_()

    @torch.no_grad()
    def gather(self) -> None:
        """In float32, whatever the copies' precision."""
        found = [
            (leaf.grad, arrival, owners)
            for leaf, arrival, owners in zip(
                self._leaves, self._arrivals, self._owners, strict=True
            )
            if leaf.grad is not None
        ]
        if len(found) < len(self._leaves):
            self._incoming.zero_()
        torch._foreach_copy_([arrival for _, arrival, _ in found], [grad for grad, _, _ in found])
        if self._scale != 1.0:
            self._incoming[self._num_down :].mul_(self._scale)
        self._gradient.add_(self._incoming)
        for leaf in self._leaves:
            leaf.grad = None
        for _, _, owners in found:
            for parameter in owners:
                parameter.grad = self._views[parameter]

    @torch.no_grad()
    def refresh(self) -> None:
        end = self._num_down
        self._computed[:end].copy_(self._masters[:end])
        torch.mul(self._masters[end:], self._scale, out=self._computed[end:])

    def complete(self) -> None:
        for parameter in self.parameters:
            parameter.grad = self._views[parameter]

    def gradients(self) -> list[torch.Tensor]:
        return [self._gradient]

    def values(self) -> list[torch.Tensor]:
        return [self._masters]

    def adopt(self, average: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """As one buffer too, of which the average's tensors become parts."""
        if not average:
            return []
        names = dict(zip(self.parameters, self.names, strict=True))
        ordered = [average[names[parameter]] for parameter in self._views]
        flat = torch.cat([tensor.flatten() for tensor in ordered])
        for parameter, part in zip(self._views, _parts(flat, ordered), strict=True):
            average[names[parameter]] = part
        return [flat]


def _adapted(group: Group) -> list[Any]:
    return [member for member in group.members if isinstance(member, AdaptedLinear)]


def _stacked(tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
    """The shape of matrices put on top of each other."""
    return sum(t.shape[0] for t in tensors), tensors[0].shape[1]


def _parts(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return _shaped(flat, [tensor.shape for tensor in like])


def _shaped(flat: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """A flat buffer cut into tensors of these shapes, in order."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [
        part.view(shape) for part, shape in zip(flat.detach().split(sizes), shapes, strict=True)
    ]
