"""Frozen linear layers in few bits: no weight gradient, nothing dequantised is kept.

Each kind stores a weight once and multiplies twice, forward and for the input's gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
INT8_MAX = 127.0
NF4_BLOCK, NESTED_BLOCK = 64, 256


def joined(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One layer with the rows of all, whose weights become parts of its own."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    whole = linear_of(weight, joined_bias(linears))
    for linear, part in zip(linears, weight.split([x.out_features for x in linears]), strict=True):
        linear.weight = nn.Parameter(part, requires_grad=False)
    return whole


def joined_bias(linears: Sequence[Any]) -> torch.Tensor | None:
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return torch.cat([bias.detach() for bias in biases]) if biases else None


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """A frozen layer with these, at whatever device and in whatever precision they are."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


class FrozenLinear(nn.Module):
    """What the kinds share: rows, features, a dense bias, and the dtype computed in."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype):
        nn.Module.__init__(self)  # and not that of a class beside this one
        self.out_features, self.in_features = linear.weight.shape
        self.dtype, bias = dtype, linear.bias
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = self._product(x.to(self.dtype))
        return product if self.bias is None else product + self.bias

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def part(self, start: int, stop: int) -> nn.Module:
        """Some of the rows as a layer of its own."""
        return _Part(self, start, stop)


class _Part(nn.Module):
    def __init__(self, whole: FrozenLinear, start: int, stop: int):
        super().__init__()
        self.whole, self._rows = whole, slice(start, stop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.whole(x)[..., self._rows]


class Fp8Linear(FrozenLinear):
    """Both orders of the weight in float8, a scale a row; activations and gradients as they come.

    e4m3 throughout: with a scale for each row a gradient needs no wider range.
    """

    def __init__(self, linear: nn.Linear):
        weight = linear.weight.detach()
        super().__init__(linear, weight.dtype)
        for name, matrix in (("forth", weight), ("back", weight.t())):
            stored, scale = in_fp8(matrix)
            self.register_buffer(f"{name}_weight", stored)
            self.register_buffer(f"{name}_scale", scale.t().contiguous())

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return _Fp8Product.apply(
            x, self.forth_weight, self.forth_scale, self.back_weight, self.back_scale
        )


class _Fp8Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, scale: Any, back: Any, back_scale: Any) -> Any:
        ctx.save_for_backward(back, back_scale)
        return _fp8_product(x, weight, scale)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        back, back_scale = ctx.saved_tensors
        return _fp8_product(gradient, back, back_scale), None, None, None, None


def _fp8_product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x @ weight.T for a weight of shape rows, features; the scale of a row of each."""
    stored, row_scale = in_fp8(x.reshape(-1, x.shape[-1]))
    if x.device.type == "cuda":
        product = torch._scaled_mm(
            stored,
            weight.t(),
            scale_a=row_scale,
            scale_b=scale,
            out_dtype=x.dtype,
            use_fast_accum=True,
        )
    else:  # the same numbers by a plain product
        product = (stored.float() @ weight.float().t() * row_scale * scale).to(x.dtype)
    return product.reshape(*x.shape[:-1], weight.shape[0])


def in_fp8(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in float8, and the scale of each: rows, 1."""
    scale = (matrix.abs().amax(-1, keepdim=True).float() / FP8_MAX).clamp_min(1e-12)
    return (matrix.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).contiguous(), scale


class Int8Linear(FrozenLinear):
    """Whole numbers of 8 bits and a scale a row; products are of the run's own precision."""

    def __init__(self, linear: nn.Linear):
        weight = linear.weight.detach()
        super().__init__(linear, weight.dtype)
        scale = (weight.abs().amax(-1).float() / INT8_MAX).clamp_min(1e-12)
        self.register_buffer(
            "weight_int8", (weight.float() / scale[:, None]).round().to(torch.int8)
        )
        self.register_buffer("scale", scale.to(weight.dtype))

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return _Int8Product.apply(x, self.weight_int8, self.scale)


class _Int8Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, scale: Any) -> Any:
        ctx.save_for_backward(weight, scale)
        return int8_forth(x, weight) * scale

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        weight, scale = ctx.saved_tensors
        return int8_back(gradient * scale, weight), None, None


# Operators of their own, forth and back apart: a compiler would see that both widen the same
# weight, and keep it wide from one to the other, which is the memory that few bits save.
@torch.library.custom_op("darkroom::int8_forth", mutates_args=())
def int8_forth(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T, the weight widened to x's precision for the time of the product."""
    return functional.linear(x, weight.to(x.dtype))


@torch.library.custom_op("darkroom::int8_back", mutates_args=())
def int8_back(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """gradient @ weight."""
    return gradient @ weight.to(gradient.dtype)


@int8_forth.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@int8_back.register_fake
def _(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return gradient.new_empty(*gradient.shape[:-1], weight.shape[1])


class Nf4Linear(FrozenLinear):
    """bitsandbytes' storage: blocks of 64 in NF4, their maxima in 8 bits (arXiv:2305.14314).

    What is already stored may hold its maxima in float32, and so none of the three that follow.
    """

    PARTS: ClassVar = ("packed", "maxima", "maxima_code", "nested_maxima", "offset", "code")

    def __init__(self, linear: nn.Linear, stored: Mapping[str, torch.Tensor] | None = None):
        weight = linear.weight.detach()
        super().__init__(linear, weight.dtype)
        found = in_nf4(weight) if stored is None else stored
        self.parts = tuple(name for name in self.PARTS if name in found)
        for name in self.parts:
            self.register_buffer(name, found[name])

    @property
    def stored(self) -> list[torch.Tensor]:
        """What the weight is made of."""
        return [getattr(self, name) for name in self.parts]

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return _Nf4Product.apply(x, self.out_features, *self.stored)


def in_nf4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A weight as a layer's parts."""
    from bitsandbytes import functional as bnb  # type: ignore[import-not-found]

    state: Any
    packed, state = bnb.quantize_4bit(
        weight.contiguous(), blocksize=NF4_BLOCK, compress_statistics=True, quant_type="nf4"
    )
    nested = state.state2
    found = (packed, state.absmax, nested.code, nested.absmax, state.offset, state.code)
    return dict(zip(Nf4Linear.PARTS, found, strict=True))


class _Nf4Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Any, rows: int, *stored: Any) -> Any:
        ctx.save_for_backward(*stored)
        ctx.features = x.shape[-1]
        return nf4_forth(x, list(stored), rows)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        stored = list(ctx.saved_tensors)
        return nf4_back(gradient, stored, ctx.features), *[None] * (1 + len(stored))


@torch.library.custom_op("darkroom::nf4_forth", mutates_args=())
def nf4_forth(x: torch.Tensor, stored: list[torch.Tensor], rows: int) -> torch.Tensor:
    """x @ weight.T, the weight widened for the time of the product."""
    return functional.linear(x, from_nf4(stored, (rows, x.shape[-1]), x.dtype))


@torch.library.custom_op("darkroom::nf4_back", mutates_args=())
def nf4_back(gradient: torch.Tensor, stored: list[torch.Tensor], features: int) -> torch.Tensor:
    """gradient @ weight."""
    return gradient @ from_nf4(stored, (gradient.shape[-1], features), gradient.dtype)


@nf4_forth.register_fake
def _(x: torch.Tensor, stored: list[torch.Tensor], rows: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], rows)


@nf4_back.register_fake
def _(gradient: torch.Tensor, stored: list[torch.Tensor], features: int) -> torch.Tensor:
    return gradient.new_empty(*gradient.shape[:-1], features)


def from_nf4(
    stored: Sequence[torch.Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """The weight: rows, features; by bitsandbytes' own kernels."""
    from bitsandbytes import functional as bnb  # type: ignore[import-not-found]

    packed, maxima, *nested, code = stored
    kind: Any = {"blocksize": NF4_BLOCK, "quant_type": "nf4", "dtype": dtype, "code": code}
    state = bnb.QuantState(plain_maxima(maxima, *nested), shape=torch.Size(shape), **kind)
    return bnb.dequantize_4bit(packed, state)


def plain_maxima(maxima: torch.Tensor, *nested: torch.Tensor) -> torch.Tensor:
    """The largest value of each block in float32, as `dequantize_4bit` finds it."""
    from bitsandbytes import functional as bnb  # type: ignore[import-not-found]

    if not nested:
        return maxima
    code, of_maxima, offset = nested
    state = bnb.QuantState(of_maxima, blocksize=NESTED_BLOCK, code=code, dtype=torch.float32)
    return bnb.dequantize_blockwise(maxima, state) + offset


KINDS = {"fp8": Fp8Linear, "int8": Int8Linear, "nf4": Nf4Linear}


def fault_of(mode: str, device: torch.device) -> str:
    """Why this device cannot compute layers of a kind, or nothing; found by one product."""
    if (
        mode == "fp8"
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device) < (8, 9)
    ):
        return "this GPU has no float8 products (compute capability 8.9 or newer)"
    weight = torch.linspace(-1, 1, 64 * 64, device=device).view(64, 64).to(torch.bfloat16)
    x = torch.eye(64, device=device, dtype=torch.bfloat16).requires_grad_()
    try:
        product = KINDS[mode](linear_of(weight, None))(x)
        product.sum().backward()
    except (ImportError, OSError, RuntimeError, AttributeError, NotImplementedError) as error:
        return f"cannot be computed here: {type(error).__name__}: {str(error).splitlines()[0]}"
    near = torch.allclose(product.float(), weight.float().t(), atol=0.15)
    return "" if near else "is computed wrongly here"
