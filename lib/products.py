"""A frozen layer's product, with an adapter's part in the same tensor.

    y = W x + b + B (A x)        dx = W' dy + A' (B' dy)

Each second term is added where the first one lies: as tensors of their own they would be written
and read again, and the sums kept beside their terms for the backward. A frozen weight has no
gradient, and one in few bits is wide for the time of a product alone. Design 6; QLoRA,
arXiv:2305.14314.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch.autograd import Function
from torch.nn import functional

from lib import float8_kernels, kernels

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
WIDE = 8192  # columns
NF4_BLOCK, NESTED_BLOCK = 64, 256


class Held(Protocol):
    """A frozen weight as it is stored: rows, features."""

    kind: ClassVar[str]
    out_features: int
    in_features: int
    dtype: torch.dtype

    @property
    def bias(self) -> torch.Tensor | None: ...

    @property
    def stored(self) -> Sequence[torch.Tensor]: ...


class Up(NamedTuple):
    """A matrix B: rows, ranks; over which rows of the product it goes, and over which ranks."""

    weight: torch.Tensor
    rows: tuple[int, int]
    ranks: tuple[int, int]

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Rows and ranks, as plain numbers."""
        return *self.rows, *self.ranks


def product(
    x: torch.Tensor, held: Held, *, down: torch.Tensor | None = None, ups: Sequence[Up] = ()
) -> torch.Tensor:
    """What a frozen layer answers to x, with its adapter or without, in its own precision."""
    places = tuple(up.place for up in ups)
    sides = (held.out_features, held.in_features)
    tensors = (*(up.weight for up in ups), *held.stored)
    return _Product.apply(x.to(held.dtype), down, held.bias, held.kind, sides, places, *tensors)


class _Product(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        down: torch.Tensor | None,
        bias: torch.Tensor | None,
        kind: str,
        sides: tuple[int, int],
        places: tuple[tuple[int, int, int, int], ...],
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        ups, stored = list(tensors[: len(places)]), list(tensors[len(places) :])
        flat = x.reshape(-1, sides[1])
        low = None if down is None else functional.linear(flat, down)
        ctx.kind, ctx.sides, ctx.places, ctx.shape = kind, sides, places, x.shape
        if down is None:
            ctx.save_for_backward(*tensors)
        else:
            ctx.save_for_backward(flat, low, down, *tensors)
        fed, scale = in_fp8(flat) if kind == "fp8" else (flat, None)
        numbers = [number for place in places for number in place]
        compute = forth if torch.compiler.is_compiling() else _forth
        found = compute(fed, scale, kind, stored, bias, sides[0], x.dtype, low, ups, numbers)
        return found.reshape(*x.shape[:-1], sides[0])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        num_ups, (rows, features) = len(ctx.places), ctx.sides
        gradient, tensors = gradients[0].reshape(-1, rows), ctx.saved_tensors
        down = low_gradient = gradient_down = None
        gradients_up: list[torch.Tensor] = []
        if num_ups:
            flat, low, down, *tensors = tensors
            low_gradient, gradients_up = up_back(gradient, low, tensors[:num_ups], ctx.places)
            gradient_down = low_gradient.t() @ flat
        stored = list(tensors[num_ups:])
        fed, scale = in_fp8(gradient) if ctx.kind == "fp8" else (gradient, None)
        compute = back if torch.compiler.is_compiling() else _back
        dtype = gradient.dtype
        found = compute(fed, scale, ctx.kind, stored, features, dtype, low_gradient, down)
        nothing = [None] * len(stored)
        return found.reshape(ctx.shape), gradient_down, *[None] * 4, *gradients_up, *nothing


def up_back(
    gradient: torch.Tensor,
    low: torch.Tensor,
    ups: Sequence[torch.Tensor],
    places: Sequence[tuple[int, int, int, int]],
    *,
    from_row: int = 0,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The gradients of A x and of each B; a gradient's columns are a product's rows from one on."""
    parts, of_ups = [], []
    for up, (start, stop, first, last) in zip(ups, places, strict=True):
        part = gradient[:, start - from_row : stop - from_row]
        parts.append(part @ up)
        of_ups.append(part.t() @ low[:, first:last])
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1), of_ups


def _forth(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    kind: str,
    stored: list[torch.Tensor],
    bias: torch.Tensor | None,
    rows: int,
    dtype: torch.dtype,
    low: torch.Tensor | None,
    ups: list[torch.Tensor],
    places: list[int],
) -> torch.Tensor:
    """Tokens, rows; x as it is multiplied, in float8 with a scale for each token."""
    if kind == "fp8":
        found = _fp8_product(x, scale, stored[0], stored[1], bias, dtype)
    else:
        found = functional.linear(x, _wide(kind, stored, (rows, x.shape[-1]), dtype), bias)
    if low is not None:
        for number, up in enumerate(ups):
            start, stop, first, last = places[4 * number : 4 * number + 4]
            found[:, start:stop].addmm_(low[:, first:last], up.t())
    return found


def _back(
    gradient: torch.Tensor,
    scale: torch.Tensor | None,
    kind: str,
    stored: list[torch.Tensor],
    features: int,
    dtype: torch.dtype,
    low: torch.Tensor | None,
    down: torch.Tensor | None,
) -> torch.Tensor:
    """Tokens, features; `low` is the gradient of A x."""
    if kind == "fp8":
        found = _fp8_product(gradient, scale, stored[2], stored[3], None, dtype)
    else:
        found = gradient @ _wide(kind, stored, (gradient.shape[-1], features), dtype)
    return found if low is None or down is None else found.addmm_(low, down)


# Operators of their own: a compiler sees neither the sum in place, which it would make a tensor of,
# nor that both widen the same weight, which it would keep wide from one to the other.
forth = torch.library.custom_op("darkroom::forth", _forth, mutates_args=())
back = torch.library.custom_op("darkroom::back", _back, mutates_args=())


@forth.register_fake
def _(x: Any, scale: Any, kind: Any, stored: Any, bias: Any, rows: Any, dtype: Any, *_: Any) -> Any:
    return x.new_empty(x.shape[0], rows, dtype=dtype)


@back.register_fake
def _(gradient: Any, scale: Any, kind: Any, stored: Any, features: Any, dtype: Any, *_: Any) -> Any:
    return gradient.new_empty(gradient.shape[0], features, dtype=dtype)


def _wide(
    kind: str, stored: Sequence[torch.Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """The weight: rows, features."""
    if kind == "nf4":
        return from_nf4(stored, shape, dtype)
    return from_int8(stored[0], stored[1]) if kind == "int8" else stored[0]


def _fp8_product(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """x @ weight.T for a weight of shape rows, features; the scale of a row of each."""
    assert scale is not None
    if x.device.type == "cuda":
        return torch._scaled_mm(
            x,
            weight.t(),
            scale_a=scale,
            scale_b=weight_scale,
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=True,
        )
    # The same numbers by a plain product.
    found = (x.float() @ weight.float().t() * scale * weight_scale).to(dtype)
    return found if bias is None else found + bias


def in_fp8(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in float8, and the scale of each: rows, 1."""
    if kernels.runs_on(matrix) and matrix.shape[-1] >= WIDE:
        return wide_in_fp8(matrix)
    scale = (matrix.abs().amax(-1, keepdim=True).float() / FP8_MAX).clamp_min(1e-12)
    return (matrix.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).contiguous(), scale


@torch.library.custom_op("darkroom::wide_in_fp8", mutates_args=())
def wide_in_fp8(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of long rows: a compiler would make their numbers twice, for the scale and by it."""
    return float8_kernels.rows_in_fp8(matrix, most=FP8_MAX)


@wide_in_fp8.register_fake
def _(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = matrix.new_empty(matrix.shape[0], 1, dtype=torch.float32)
    return matrix.new_empty(matrix.shape, dtype=FP8), scale


def from_int8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The weight: rows, features; `scale` is that of each row."""
    if kernels.runs_on(weight):
        return kernels.widened(weight, scale)
    return weight.to(scale.dtype) * scale[:, None]


def from_nf4(
    stored: Sequence[torch.Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """The weight: rows, features; the bits of bitsandbytes' own kernels."""
    packed, maxima, *nested, code = stored
    if kernels.runs_on(packed):
        sizes = {"block": NF4_BLOCK, "nested_block": NESTED_BLOCK}
        return kernels.widened_nf4(stored, shape, dtype, **sizes)
    maxima = plain_maxima(maxima, *nested)
    if packed.is_cuda:
        from bitsandbytes import functional as bnb  # type: ignore[import-not-found]

        kind: Any = {"blocksize": NF4_BLOCK, "quant_type": "nf4", "dtype": dtype, "code": code}
        return bnb.dequantize_4bit(packed, bnb.QuantState(maxima, torch.Size(shape), **kind))
    # On CPUs with AVX-512 bitsandbytes' own errs where a block ends within a row.
    whole = functional.pad(packed.view(-1), (0, NF4_BLOCK // 2 * len(maxima) - len(packed)))
    pairs = torch.cartesian_prod(code, code)  # the numbers of each byte, high bits first
    found = functional.embedding(whole.int(), pairs).view(-1, NF4_BLOCK).mul_(maxima[:, None])
    return found.view(-1)[: shape[0] * shape[1]].view(shape).to(dtype)


def plain_maxima(maxima: torch.Tensor, *nested: torch.Tensor) -> torch.Tensor:
    """The largest value of each block in float32, as `dequantize_4bit` finds it."""
    from bitsandbytes import functional as bnb  # type: ignore[import-not-found]

    if not nested:
        return maxima
    code, of_maxima, offset = nested
    state = bnb.QuantState(of_maxima, blocksize=NESTED_BLOCK, code=code, dtype=torch.float32)
    return bnb.dequantize_blockwise(maxima, state) + offset
