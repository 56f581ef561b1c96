"""A head's norm and its rotation at once: q and k as attention takes them, of all streams joined.

Root mean square norm (arXiv:1910.07467), then each pair of neighbours turned by its token's angle
(RoFormer, arXiv:2104.09864). In one kernel numbers are read once, where a compiler's read them
three times and write the norm between; in float32 throughout, rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import Function

from lib import head_kernels, kernels


class Stream(NamedTuple):
    """Tokens of one stream: x is of batch, tokens, heads, width; half the width are pairs."""

    x: torch.Tensor
    weight: torch.Tensor  # of the norm: width
    cos: torch.Tensor  # batch or 1, tokens, pairs
    sin: torch.Tensor  # likewise


def rotated(streams: Sequence[Stream], *, eps: float, plus: float = 0.0) -> torch.Tensor:
    """All tokens, stream after stream: batch, tokens, heads, width.

    The norm's scale is its weight plus a number, which is 0 but for weights stored around zero.
    """
    tensors = [tensor for tensors in zip(*streams, strict=True) for tensor in tensors]
    return _Rotation.apply(len(streams), eps, plus, *tensors)


class _Rotation(Function):
    @staticmethod
    def forward(ctx: Any, num: int, eps: float, plus: float, *tensors: torch.Tensor) -> Any:
        ctx.num, ctx.eps, ctx.plus = num, eps, plus
        ctx.save_for_backward(*tensors)
        return rotate(*_lists(tensors, num), eps, plus)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        lists = _lists(ctx.saved_tensors, ctx.num)
        found = rotate_back(gradients[0], *lists, ctx.eps, ctx.plus)
        return None, None, None, *found, *[None] * (3 * ctx.num)


def _lists(tensors: Sequence[torch.Tensor], num: int) -> list[list[torch.Tensor]]:
    """What streams have, kind by kind: x, weights, cosines, sines."""
    return [list(tensors[start : start + num]) for start in range(0, 4 * num, num)]


# Operators of their own, which a compiler calls as they are.
@torch.library.custom_op("darkroom::rotate", mutates_args=())
def rotate(
    xs: list[torch.Tensor],
    weights: list[torch.Tensor],
    cosines: list[torch.Tensor],
    sines: list[torch.Tensor],
    eps: float,
    plus: float,
) -> torch.Tensor:
    """Batch, all tokens, heads, width."""
    found = _empty(xs)
    for x, weight, cos, sin, part in zip(
        xs, weights, cosines, sines, _parts(found, xs), strict=True
    ):
        if kernels.runs_on(x):
            head_kernels.rotate(x, weight, cos, sin, part, eps=eps, plus=plus)
        else:
            part.copy_(_turned(x.float() * _inverse(x, eps) * _scale(weight, plus), cos, sin))
    return found


@torch.library.custom_op("darkroom::rotate_back", mutates_args=())
def rotate_back(
    gradient: torch.Tensor,
    xs: list[torch.Tensor],
    weights: list[torch.Tensor],
    cosines: list[torch.Tensor],
    sines: list[torch.Tensor],
    eps: float,
    plus: float,
) -> list[torch.Tensor]:
    """The gradient of each x, whole tensors of their own."""
    found = [x.new_empty(x.shape) for x in xs]
    for x, weight, cos, sin, part, whole in zip(
        xs, weights, cosines, sines, _parts(gradient, xs), found, strict=True
    ):
        turn_back(part, x, weight, cos, sin, whole, eps=eps, plus=plus)
    return found


def turn_back(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    target: torch.Tensor,
    *,
    eps: float,
    plus: float = 0.0,
) -> None:
    """The gradient of one stream's x, into a target whose heads are dense."""
    if kernels.runs_on(x):
        head_kernels.rotate_back(gradient, x, weight, cos, sin, target, eps=eps, plus=plus)
        return
    of_normed = _turned(gradient.float(), cos, -sin) * _scale(weight, plus)
    inverse = _inverse(x, eps)
    normed = x.float() * inverse
    mean = (of_normed * normed).mean(-1, keepdim=True)
    target.copy_((of_normed - normed * mean) * inverse)


@rotate.register_fake
def _(xs: Any, *_: Any) -> Any:
    return _empty(xs)


@rotate_back.register_fake
def _(gradient: Any, xs: Any, *_: Any) -> Any:
    return [x.new_empty(x.shape) for x in xs]


def _empty(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    batch, _, heads, width = xs[0].shape
    return xs[0].new_empty(batch, sum(x.shape[1] for x in xs), heads, width)


def _parts(joint: torch.Tensor, xs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return joint.split([x.shape[1] for x in xs], dim=1)


def _inverse(x: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)


def _scale(weight: torch.Tensor, plus: float) -> torch.Tensor:
    return weight.float() + plus


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Each pair by its angle, in float32."""
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)  # of every head
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.stack(turned, dim=-1).flatten(-2)
