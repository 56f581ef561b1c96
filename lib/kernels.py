"""Kernels of our own for what no library reads once: in Triton, which torch's CUDA builds bring."""

# Triton reads a kernel's annotations, and knows none of what it is called with.
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

HERE = find_spec("triton") is not None

if TYPE_CHECKING or HERE:
    import triton  # type: ignore[import-not-found]
    from triton import language as tl  # type: ignore[import-not-found]

    @triton.jit
    def _widen(source, scales, target, columns, block: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        places = tl.program_id(1) * block + tl.arange(0, block)
        inside = places < columns
        values = tl.load(source + row * columns + places, mask=inside, other=0).to(tl.float32)
        scaled = values * tl.load(scales + row).to(tl.float32)
        tl.store(target + row * columns + places, scaled.to(target.dtype.element_ty), mask=inside)

    @triton.jit
    def _widen_nf4(
        packed,
        maxima,
        maxima_code,
        nested_maxima,
        offset,
        code,
        target,
        num_bytes,
        num_values,
        blocks: tl.constexpr,
        block: tl.constexpr,
        nested_block: tl.constexpr,
    ):
        first = tl.program_id(0).to(tl.int64) * blocks
        numbers = first + tl.arange(0, blocks)
        largest = tl.load(maxima + numbers, mask=numbers * block < num_values, other=0)
        if offset is not None:
            tl.static_assert(nested_block % blocks == 0)
            scale = tl.load(nested_maxima + first // nested_block)
            largest = tl.load(maxima_code + largest.to(tl.int32)) * scale + tl.load(offset)
        pairs = first * (block // 2) + tl.arange(0, blocks * block // 2)
        pair = tl.load(packed + pairs, mask=pairs < num_bytes, other=0).to(tl.int32)
        nibbles = tl.reshape(tl.join(pair >> 4, pair & 15), [blocks * block])
        # The table lies in shared memory: its 16 entries in a bank each, so that none waits.
        values = tl.gather(tl.load(code + tl.arange(0, 16)), nibbles, 0)
        values = tl.reshape(values, [blocks, block]) * largest[:, None]
        places = first * block + tl.arange(0, blocks * block)
        wide = tl.reshape(values, [blocks * block]).to(target.dtype.element_ty)
        tl.store(target + places, wide, mask=places < num_values)

    LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)

    @triton.jit
    def _places(columns, block: tl.constexpr, even: tl.constexpr):
        """The row of a program, some of its columns, and which of them there are."""
        row = tl.program_id(0).to(tl.int64)
        places = tl.program_id(1) * block + tl.arange(0, block)
        return row, places, (places < columns) | even

    @triton.jit
    def gelu_share(x, doubled: tl.constexpr, cubic: tl.constexpr):
        """sigmoid(doubled (x + cubic x x x)), which GELU is x times of; x in float32.

        By a power of two and sums of products: a fifth fewer instructions.
        """
        power = x * (-doubled * LOG2_E - doubled * cubic * LOG2_E * (x * x))
        return 1 / (1 + tl.exp2(power))

    @triton.jit
    def gelu_slope(x, doubled: tl.constexpr, cubic: tl.constexpr):
        share = gelu_share(x, doubled, cubic)
        return share * (1 + (1 - share) * (x * (doubled + 3 * doubled * cubic * (x * x))))

    @triton.jit
    def _gelu_back(
        gradient,
        source,
        target,
        doubled: tl.constexpr,
        cubic: tl.constexpr,
        columns,
        gradient_row,
        source_row,
        target_row,
        block: tl.constexpr,
        even: tl.constexpr,
    ):
        """Strides in elements."""
        row, places, inside = _places(columns, block, even)
        given = tl.load(gradient + row * gradient_row + places, mask=inside).to(tl.float32)
        x = tl.load(source + row * source_row + places, mask=inside).to(tl.float32)
        found = given * gelu_slope(x, doubled, cubic)
        where = target + row * target_row + places
        tl.store(where, found.to(target.dtype.element_ty), mask=inside)

    @triton.jit
    def _swiglu_back(
        gradient,
        source,
        target,
        columns,
        gradient_row,
        source_row,
        target_row,
        block: tl.constexpr,
        even: tl.constexpr,
    ):
        """Of x sigmoid(x) y, whose x lie in the first columns and y in as many more."""
        row, places, inside = _places(columns, block, even)
        given = tl.load(gradient + row * gradient_row + places, mask=inside).to(tl.float32)
        start = source + row * source_row + places
        x = tl.load(start, mask=inside).to(tl.float32)
        y = tl.load(start + columns, mask=inside).to(tl.float32)
        share = 1 / (1 + tl.exp2(-LOG2_E * x))
        given *= share
        of_x = given * y * (1 + x * (1 - share))
        where = target + row * target_row + places
        tl.store(where, of_x.to(target.dtype.element_ty), mask=inside)
        of_y = given * x
        tl.store(where + columns, of_y.to(target.dtype.element_ty), mask=inside)


COLUMNS = 1024  # of a program: 16 bytes for each of 128 threads


def runs_on(tensor: torch.Tensor) -> bool:
    """Whether these kernels take a tensor."""
    return tensor.is_cuda and HERE


def widened(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows of whole numbers times the scale of each, in the scales' precision."""
    rows, columns = weight.shape
    found = torch.empty_like(weight, dtype=scales.dtype)
    block = min(triton.next_power_of_2(columns), 4096)
    launch: Any = _widen
    launch[(rows, triton.cdiv(columns, block))](weight, scales, found, columns, block)
    return found


def widened_nf4(
    stored: Sequence[torch.Tensor],
    shape: tuple[int, int],
    dtype: torch.dtype,
    *,
    block: int,
    nested_block: int,
) -> torch.Tensor:
    """Two numbers a byte, by a code times the maximum of each block, as bitsandbytes rounds."""
    packed, maxima, *nested, code = stored
    maxima_code, nested_maxima, offset = nested or (None, None, None)
    found = torch.empty(shape, dtype=dtype, device=packed.device)
    blocks = 64
    launch: Any = _widen_nf4
    launch[(triton.cdiv(found.numel(), blocks * block),)](
        packed,
        maxima,
        maxima_code,
        nested_maxima,
        offset,
        code,
        found,
        packed.numel(),
        found.numel(),
        blocks,
        block,
        nested_block,
        num_warps=4,
        enable_fp_fusion=False,  # a product is rounded before the offset is added to it
    )
    return found


def gelu_back(
    gradient: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    *,
    doubled: float,
    cubic: float,
) -> None:
    """The gradient of x sigmoid(doubled (x + cubic x x x)), into columns of a whole tensor."""
    _rows_back(_gelu_back, gradient, x, target, doubled, cubic)


def swiglu_back(gradient: torch.Tensor, x: torch.Tensor, target: torch.Tensor) -> None:
    """The gradient of the first half, times its sigmoid, times the second."""
    _rows_back(_swiglu_back, gradient, x, target)


def _rows_back(
    launch: Any, gradient: torch.Tensor, x: torch.Tensor, target: torch.Tensor, *constants: float
) -> None:
    """A program for some columns of the gradient's in a row; the target is of x's sides."""
    gradient, x = (t if t.stride(-1) == 1 else t.contiguous() for t in (gradient, x))
    gradient, x = gradient.flatten(0, -2), x.flatten(0, -2)
    target = target.view(x.shape)
    rows, columns = gradient.shape
    launch[(rows, triton.cdiv(columns, COLUMNS))](
        *(gradient, x, target, *constants, columns),
        *(t.stride(0) for t in (gradient, x, target)),
        *(COLUMNS, columns % COLUMNS == 0),
    )
