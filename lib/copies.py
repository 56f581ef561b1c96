"""The weights that train: float32 masters, gradients, and the copies that a step computes with.

An adapter's copies are in the run's precision; those of one kind are one buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lib.frozen import FrozenLinear
from lib.lowrank import ADAPTER, AdaptedLinear, Group
from lib.products import Up

MOST_RANKS = 256  # of matrices in one: beyond, its zeros cost more than the products that it saves


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
        runs = [run for group in adapted for run in _runs(group)]
        alone = [run.ups[0] for run in runs if len(run.ups) == 1]
        alike = list(_alike(run for run in runs if len(run.ups) > 1))
        ordered = [*(a for down in downs for a in down), *alone]
        self._num_down = sum(a.numel() for down in downs for a in down)
        self._num_alone = sum(parameter.numel() for parameter in ordered)
        ordered += [up for some in alike for run in some for up in run.ups]
        self._masters = torch.cat([p.detach().flatten() for p in ordered])
        self._gradient, self._incoming = (torch.zeros_like(self._masters) for _ in range(2))
        self._views = {}
        for parameter, part in zip(ordered, _parts(self._masters, ordered), strict=True):
            parameter.data = part
        for parameter, part in zip(ordered, _parts(self._gradient, ordered), strict=True):
            self._views[parameter] = part
        shapes = [*map(_stacked, downs), *(up.shape for up in alone)]
        self._computed = self._masters.new_empty(self._num_alone, dtype=dtype)
        self._leaves = [p.requires_grad_() for p in _shaped(self._computed, shapes)]
        self._arrivals = _shaped(self._incoming[: self._num_alone], shapes)
        self._owners = [*downs, *([up] for up in alone)]
        self._join(alike, dtype=dtype)
        _hand_out(adapted, runs, dict(zip(map(_names, self._owners), self._leaves, strict=True)))
        self.refresh()

    def _join(self, alike: Sequence[Sequence[_Run]], *, dtype: torch.dtype) -> None:
        """One leaf for each run of matrices B, those alike as one buffer."""
        self._diagonals, start = [], self._num_alone
        for some in alike:
            made = _Diagonals.of(some, self._masters[start:], self._incoming[start:], dtype)
            self._diagonals.append(made)
            self._leaves += [leaf.requires_grad_() for leaf in made.computed.detach().unbind()]
            self._arrivals += made.arrived.unbind()
            self._owners += [run.ups for run in some]
            start += made.masters.numel()

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
            torch._foreach_zero_([self._incoming, *(d.arrived for d in self._diagonals)])
        _copy([arrival for _, arrival, _ in found], [grad for grad, _, _ in found])
        for diagonals in self._diagonals:
            diagonals.gather()
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
        torch.mul(self._masters[end : self._num_alone], self._scale, out=self._computed[end:])
        for diagonals in self._diagonals:
            diagonals.refresh(self._scale)

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


@dataclass(frozen=True)
class _Run:
    """Neighbours in a group whose matrices B are alike: one matrix with each in its own place."""

    group: Group
    ups: list[nn.Parameter]
    rows: tuple[int, int]
    ranks: tuple[int, int]


def _runs(group: Group) -> list[_Run]:
    """A group's adapted members, neighbours together where one product can stand for them."""
    found: list[_Run] = []
    row = rank = 0
    for member, size in zip(group.members, group.sizes, strict=True):
        if isinstance(member, AdaptedLinear):
            up: Any = member.lora_B[ADAPTER].weight
            run = _Run(group, [up], (row, row + size), (rank, rank + up.shape[1]))
            rank = run.ranks[1]
            if found and _continues(found[-1], run):
                last = found.pop()
                run = _Run(
                    group, [*last.ups, up], (last.rows[0], row + size), (last.ranks[0], rank)
                )
            found.append(run)
        row += size
    return found


def _continues(last: _Run, run: _Run) -> bool:
    few = run.ranks[1] - last.ranks[0] <= MOST_RANKS
    near = last.rows[1] == run.rows[0] and last.ups[0].shape == run.ups[0].shape
    return few and near and isinstance(run.group.base, FrozenLinear)


def _alike(runs: Iterable[_Run]) -> Iterator[list[_Run]]:
    """Runs of as many matrices of one shape, together."""
    found: dict[Any, list[_Run]] = {}
    for run in runs:
        found.setdefault((len(run.ups), run.ups[0].shape), []).append(run)
    yield from found.values()


@dataclass(frozen=True)
class _Diagonals:
    """Runs alike as one buffer of matrices, which are zero but in the places of each B."""

    masters: torch.Tensor  # runs, matrices of a run, rows, ranks: as float32 masters lie
    incoming: torch.Tensor  # likewise
    computed: torch.Tensor  # runs, rows of a run, ranks of a run
    arrived: torch.Tensor  # likewise

    @classmethod
    def of(
        cls, runs: Sequence[_Run], masters: torch.Tensor, incoming: torch.Tensor, dtype: torch.dtype
    ) -> _Diagonals:
        num, (rows, rank) = len(runs[0].ups), runs[0].ups[0].shape
        compact = (len(runs), num, rows, rank)
        parts = [tensor[: math.prod(compact)].view(compact) for tensor in (masters, incoming)]
        made = masters.new_zeros(len(runs), num * rows, num * rank, dtype=dtype)
        return cls(parts[0], parts[1], made, torch.zeros_like(made))

    def refresh(self, scale: float) -> None:
        torch.mul(self.masters, scale, out=self._places(self.computed))

    def gather(self) -> None:
        self.incoming.copy_(self._places(self.arrived))

    def _places(self, whole: torch.Tensor) -> torch.Tensor:
        """Where each B is: runs, matrices of a run, rows, ranks."""
        (run, row, _), rank = whole.stride(), self.masters.shape[3]
        steps = (run, self.masters.shape[2] * row + rank, row, 1)
        return whole.as_strided(self.masters.shape, steps)


def _hand_out(
    adapted: Sequence[Group], runs: Sequence[_Run], leaves: Mapping[Any, torch.Tensor]
) -> None:
    """Give each group the leaves of its matrices."""
    for group in adapted:
        group.down = leaves[_names([m.lora_A[ADAPTER].weight for m in _adapted(group)])]
        group.ups = tuple(
            Up(leaves[_names(run.ups)], run.rows, run.ranks) for run in runs if run.group is group
        )


def _names(parameters: Sequence[nn.Parameter]) -> tuple[int, ...]:
    return tuple(map(id, parameters))


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Many at once; of one dtype, since a mixture is copied one by one."""
    for dtype in {target.dtype for target in targets}:
        pairs = [(t, s) for t, s in zip(targets, sources, strict=True) if t.dtype == dtype]
        torch._foreach_copy_([t for t, _ in pairs], [s for _, s in pairs])


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
