"""Frozen linear layers, dense or in few bits: how each kind stores its weight.

How they multiply: `lib.products`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from lib.products import NF4_BLOCK, Up, in_fp8, product

INT8_MAX = 127.0


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

    kind: ClassVar[str]
    parts: tuple[str, ...]  # what the weight is made of, in the order that its products take

    def __init__(self, linear: nn.Linear, dtype: torch.dtype):
        nn.Module.__init__(self)  # and not that of a class beside this one
        self.out_features, self.in_features = linear.weight.shape
        self.dtype, bias = dtype, linear.bias
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def stored(self) -> Sequence[torch.Tensor]:
        """What the weight is made of."""
        return [getattr(self, name) for name in self.parts]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return product(x, self)

    def adapted(self, x: torch.Tensor, *, down: torch.Tensor, ups: Sequence[Up]) -> torch.Tensor:
        """With an adapter's part."""
        return product(x, self, down=down, ups=ups)

    def part(self, start: int, stop: int) -> nn.Module:
        """Some of the rows as a layer of its own."""
        return _Part(self, start, stop)


class _Part(nn.Module):
    def __init__(self, whole: FrozenLinear, start: int, stop: int):
        super().__init__()
        self.whole, self._rows = whole, slice(start, stop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.whole(x)[..., self._rows]


class DenseLinear(FrozenLinear):
    """The very weight of a dense layer."""

    kind = "dense"
    parts = ("weight",)

    def __init__(self, linear: nn.Linear):
        super().__init__(linear, linear.weight.dtype)
        self.weight = linear.weight


class Fp8Linear(FrozenLinear):
    """Both orders of the weight in float8, a scale a row; activations and gradients as they come.

    e4m3 throughout: with a scale for each row a gradient needs no wider range.
    """

    kind = "fp8"
    parts = ("forth_weight", "forth_scale", "back_weight", "back_scale")

    def __init__(self, linear: nn.Linear):
        weight = linear.weight.detach()
        super().__init__(linear, weight.dtype)
        for name, matrix in (("forth", weight), ("back", weight.t())):
            stored, scale = in_fp8(matrix)
            self.register_buffer(f"{name}_weight", stored)
            self.register_buffer(f"{name}_scale", scale.t().contiguous())


class Int8Linear(FrozenLinear):
    """Whole numbers of 8 bits and a scale a row; products are of the run's own precision."""

    kind = "int8"
    parts = ("weight_int8", "scale")

    def __init__(self, linear: nn.Linear):
        weight = linear.weight.detach()
        super().__init__(linear, weight.dtype)
        scale = (weight.abs().amax(-1).float() / INT8_MAX).clamp_min(1e-12)
        self.register_buffer(
            "weight_int8", (weight.float() / scale[:, None]).round().to(torch.int8)
        )
        self.register_buffer("scale", scale.to(weight.dtype))


class Nf4Linear(FrozenLinear):
    """bitsandbytes' storage: blocks of 64 in NF4, their maxima in 8 bits (arXiv:2305.14314).

    What is already stored may hold its maxima in float32, and so none of the three that follow.
    """

    kind = "nf4"
    PARTS: ClassVar = ("packed", "maxima", "maxima_code", "nested_maxima", "offset", "code")

    def __init__(self, linear: nn.Linear, stored: Mapping[str, torch.Tensor] | None = None):
        weight = linear.weight.detach()
        super().__init__(linear, weight.dtype)
        found = in_nf4(weight) if stored is None else stored
        self.parts = tuple(name for name in self.PARTS if name in found)
        for name in self.parts:
            self.register_buffer(name, found[name])


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
