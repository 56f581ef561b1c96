"""Blocks in float8: what an activation makes between two products is made in float8 at once.

A product's x and its gradient are rows in float8 with a scale for each. What stands between is
written in the run's precision only where something else reads it, as an adapter's gradients do:
long rows less are written, and read again. The numbers are those of the layers apart.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch.autograd import Function
from torch.nn import functional

from lib import activations, float8_kernels, kernels, parallel
from lib.activations import CUBIC, DOUBLED
from lib.frozen import Fp8Linear
from lib.lowrank import Group
from lib.parallel import Columns
from lib.products import FP8, FP8_MAX, back, forth, in_fp8, up_back

GELU = {"doubled": DOUBLED, "cubic": CUBIC, "most": FP8_MAX}


def takes(group: Group, second: Any, columns: Columns) -> bool:
    """Whether a parallel block's products are in float8, its adapter on q, k and v alone."""
    if not isinstance(group.base, Fp8Linear) or not isinstance(second, Fp8Linear):
        return False
    if group.down is None or columns.query < columns.hidden:
        return False
    return all(up.rows[0] >= columns.query for up in group.ups)


def side_by_side(
    processor: Any,
    attn: Any,
    group: Group,
    second: Fp8Linear,
    x: torch.Tensor,
    columns: Columns,
    angles: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """What both products of a parallel block make of x: batch, tokens, features."""
    base: Any = group.base
    places = tuple(up.place for up in group.ups)
    query, key, value, hidden = _First.apply(
        *(x.to(base.dtype), group.down, base.bias, attn.norm_q.weight, attn.norm_k.weight),
        *(*angles, tuple(columns), attn.norm_q.eps, places),
        *(*(up.weight for up in group.ups), *base.stored),
    )
    attended = processor.dispatched(query, key, value, None)
    return _Second.apply(attended, hidden, second.bias, *second.stored)


class _First(Function):
    """The last of its answers goes to `_Second`, whose gradient is that of the activation's."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        down: torch.Tensor,
        bias: torch.Tensor | None,
        norm_q: torch.Tensor,
        norm_k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        columns: tuple[int, int, int],
        eps: float,
        places: tuple[tuple[int, int, int, int], ...],
        *tensors: torch.Tensor,
    ) -> Any:
        ups, stored = list(tensors[: len(places)]), list(tensors[len(places) :])
        flat = x.reshape(-1, x.shape[-1])
        low = functional.linear(flat, down)
        numbers = [number for place in places for number in place]
        found = _forth(*in_fp8(flat), stored, bias, x.dtype, low, ups, numbers)
        whole = found.reshape(*x.shape[:-1], -1)
        ctx.columns, ctx.eps, ctx.places = columns, eps, places
        ctx.save_for_backward(flat, low, down, whole, norm_q, norm_k, cos, sin, *tensors)
        query, key, value, hidden = parallel.cut(whole, columns, norm_q.shape[0])
        return *parallel.turned(query, key, (norm_q, norm_k), (cos, sin), eps), value, hidden

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        flat, low, down, whole, norm_q, norm_k, cos, sin, *tensors = ctx.saved_tensors
        ups, stored = _split(tensors, len(ctx.places))
        *_, hidden = parallel.cut(whole, ctx.columns, norm_q.shape[0])
        of_query, of_key, of_value, of_active = gradients
        turning = (norm_q, norm_k, cos, sin, list(ctx.columns), ctx.eps)
        heads = _rows(parallel.heads_back(of_query, of_key, of_value, whole, *turning))
        of_low, of_ups = up_back(heads, low, ups, ctx.places, from_row=ctx.columns[0])
        fed, scale = gelu_back_in_fp8(_rows(of_active), _rows(hidden), heads)
        found = _back(fed, scale, stored, whole.dtype, of_low, down)
        of_x = found.reshape(*whole.shape[:-1], -1)
        return of_x, of_low.t() @ flat, *[None] * 8, *of_ups, *[None] * len(stored)


class _Second(Function):
    @staticmethod
    def forward(
        ctx: Any,
        attended: torch.Tensor,
        hidden: torch.Tensor,
        bias: torch.Tensor | None,
        *stored: torch.Tensor,
    ) -> torch.Tensor:
        ctx.sides = (attended.shape[-1], hidden.shape[-1])
        ctx.save_for_backward(*stored)
        fed, scale = gelu_in_fp8(_rows(hidden), _rows(attended))
        found = _forth(fed, scale, list(stored), bias, hidden.dtype)
        return found.reshape(*hidden.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        gradient, stored = gradients[0], list(ctx.saved_tensors)
        found = _back(*in_fp8(_rows(gradient)), stored, gradient.dtype)
        parts = found.reshape(*gradient.shape[:-1], -1).split(ctx.sides, dim=-1)
        return *parts, None, *[None] * len(stored)


class _FeedForward(Function):
    """Two products with GELU between them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        second_bias: torch.Tensor | None,
        *stored: torch.Tensor,
    ) -> torch.Tensor:
        first, second = _split(stored, len(Fp8Linear.parts))
        hidden = _forth(*in_fp8(_rows(x)), first, bias, x.dtype)
        ctx.save_for_backward(hidden, *stored)
        fed, scale = gelu_in_fp8(hidden, None)
        found = _forth(fed, scale, second, second_bias, x.dtype)
        return found.reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        hidden, *stored = ctx.saved_tensors
        first, second = _split(stored, len(Fp8Linear.parts))
        gradient = gradients[0]
        of_active = _back(*in_fp8(_rows(gradient)), second, gradient.dtype)
        fed, scale = gelu_back_in_fp8(of_active, hidden, None)
        found = _back(fed, scale, first, gradient.dtype)
        return found.reshape(*gradient.shape[:-1], -1), *[None] * (2 + len(stored))


def _feed_forward(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """diffusers' FeedForward, whose GELU is its first product's."""
    first, second = module.net[0].proj, module.net[2]
    x = hidden_states.to(first.dtype)
    return _FeedForward.apply(x, first.bias, second.bias, *first.stored, *second.stored)


def engage(denoiser: Any) -> None:
    """Put it in the place of diffusers' where it does the same."""
    from diffusers.models.attention import FeedForward

    for module in denoiser.modules():
        if isinstance(module, FeedForward) and _fits(module.net):
            module.forward = MethodType(_feed_forward, module)


def disengage(denoiser: Any) -> None:
    """Put diffusers' back."""
    for module in denoiser.modules():
        if getattr(module.__dict__.get("forward"), "__func__", None) is _feed_forward:
            del module.forward


def _fits(net: Any) -> bool:
    if len(net) != 3 or getattr(net[0], "approximate", None) != "tanh" or net[1].p:
        return False
    return isinstance(getattr(net[0], "proj", None), Fp8Linear) and isinstance(net[2], Fp8Linear)


@torch.library.custom_op("darkroom::gelu_in_fp8", mutates_args=())
def gelu_in_fp8(x: torch.Tensor, beside: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of what is beside x, then of GELU's answers; the scale of each: rows, 1."""
    if kernels.runs_on(x):
        return float8_kernels.gelu_in_fp8(x, beside, **GELU)
    made = activations.gelu(x)
    return in_fp8(made if beside is None else torch.cat([beside, made], dim=1))


@torch.library.custom_op("darkroom::gelu_back_in_fp8", mutates_args=())
def gelu_back_in_fp8(
    gradient: torch.Tensor, x: torch.Tensor, beside: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the gradient of x, then of what is beside it; likewise."""
    if kernels.runs_on(x):
        return float8_kernels.gelu_back_in_fp8(gradient, x, beside, **GELU)
    made = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    activations.gelu_back(gradient, x, made)
    return in_fp8(made if beside is None else torch.cat([made, beside], dim=1))


@gelu_in_fp8.register_fake
def _(x: torch.Tensor, beside: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    return _sides(x, beside)


@gelu_back_in_fp8.register_fake
def _(_: Any, x: torch.Tensor, beside: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    return _sides(x, beside)


def _sides(x: torch.Tensor, beside: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = x.shape
    columns += 0 if beside is None else beside.shape[1]
    scales = x.new_empty(rows, 1, dtype=torch.float32)
    return x.new_empty(rows, columns, dtype=FP8), scales


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _split(tensors: Any, num: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return list(tensors[:num]), list(tensors[num:])


def _forth(
    x: torch.Tensor,
    scale: torch.Tensor,
    stored: list[torch.Tensor],
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    low: torch.Tensor | None = None,
    ups: list[torch.Tensor] | None = None,
    places: list[int] | None = None,
) -> torch.Tensor:
    rows = stored[0].shape[0]
    return forth(x, scale, "fp8", stored, bias, rows, dtype, low, ups or [], places or [])


def _back(
    gradient: torch.Tensor,
    scale: torch.Tensor,
    stored: list[torch.Tensor],
    dtype: torch.dtype,
    low: torch.Tensor | None = None,
    down: torch.Tensor | None = None,
) -> torch.Tensor:
    features = stored[2].shape[0]
    return back(gradient, scale, "fp8", stored, features, dtype, low, down)
