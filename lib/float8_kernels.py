"""Rows in float8 with a scale for each, of what lies there and of what is made of it; in Triton.

A row is read twice, the second time from the caches: for its largest number, and to be scaled. What
an activation makes of it stays in registers meanwhile, and is written in float8 alone.
"""

# Triton reads a kernel's annotations, and knows none of what it is called with.
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lib.kernels import HERE

if TYPE_CHECKING or HERE:
    import triton  # type: ignore[import-not-found]
    from triton import language as tl  # type: ignore[import-not-found]

    from lib.kernels import gelu_share, gelu_slope

    @triton.jit
    def _some(row, first, columns, block: tl.constexpr):
        """Some of a row's numbers."""
        places = first + tl.arange(0, block)
        return tl.load(row + places, mask=places < columns, other=0.0)

    @triton.jit
    def _made(gradient, source, first, columns, doubled, cubic, block: tl.constexpr):
        """GELU's answers or its gradients, rounded as a tensor of them would be."""
        x = _some(source, first, columns, block)
        wide = x.to(tl.float32)
        if gradient is None:
            found = wide * gelu_share(wide, doubled, cubic)
        else:
            given = _some(gradient, first, columns, block).to(tl.float32)
            found = given * gelu_slope(wide, doubled, cubic)
        return found.to(x.dtype)

    @triton.jit
    def _keep(target, values, first, columns, inverse, block: tl.constexpr):
        """None is too large, by its row's scale; what is no number stays none."""
        places = first + tl.arange(0, block)
        scaled = values.to(tl.float32) * inverse
        tl.store(target + places, scaled.to(tl.float8e4nv), mask=places < columns)

    @triton.jit
    def _rows_in_fp8(
        plain,
        gradient,
        source,
        target,
        scales,
        plain_row,
        gradient_row,
        source_row,
        num_plain: tl.constexpr,
        num_made: tl.constexpr,
        plain_start: tl.constexpr,
        made_start: tl.constexpr,
        doubled: tl.constexpr,
        cubic: tl.constexpr,
        most: tl.constexpr,
        block: tl.constexpr,
    ):
        """Strides in elements; the target's rows are dense."""
        row = tl.program_id(0).to(tl.int64)
        target += row * (num_plain + num_made)
        largest = tl.zeros([block], tl.float32)
        if plain is not None:
            plain += row * plain_row
            for first in range(0, num_plain, block):
                values = _some(plain, first, num_plain, block)
                largest = tl.maximum(largest, tl.abs(values.to(tl.float32)))
        if gradient is not None:
            gradient += row * gradient_row
        made = ()
        if source is not None:
            source += row * source_row
            for first in tl.static_range(0, num_made, block):
                some = _made(gradient, source, first, num_made, doubled, cubic, block)
                largest = tl.maximum(largest, tl.abs(some.to(tl.float32)))
                made = made + (some,)  # noqa: RUF005  # which Triton does not read
        scale = tl.maximum(tl.max(largest, axis=0) / most, 1e-12)
        tl.store(scales + row, scale)
        inverse = 1 / scale
        if plain is not None:
            for first in range(0, num_plain, block):
                values = _some(plain, first, num_plain, block)
                _keep(target + plain_start, values, first, num_plain, inverse, block)
        if source is not None:
            for number in tl.static_range(0, len(made)):
                first = number * block
                _keep(target + made_start, made[number], first, num_made, inverse, block)


# Numbers of a row at a time, and how many warps share them; half as many what is made of them.
BLOCK, WARPS = 4096, 16


def rows_in_fp8(matrix: torch.Tensor, *, most: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in float8 (e4m3), and the scale of each: rows, 1."""
    return _launch(matrix, None, None, most=most)


def gelu_in_fp8(
    x: torch.Tensor, beside: torch.Tensor | None, *, doubled: float, cubic: float, most: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Likewise of x sigmoid(doubled (x + cubic x x x)), after the columns of what is beside it."""
    return _launch(beside, None, x, doubled=doubled, cubic=cubic, most=most)


def gelu_back_in_fp8(
    gradient: torch.Tensor,
    x: torch.Tensor,
    beside: torch.Tensor | None,
    *,
    doubled: float,
    cubic: float,
    most: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Likewise of the gradient of x, before the columns of what is beside it."""
    return _launch(beside, gradient, x, doubled=doubled, cubic=cubic, most=most)


def _launch(
    plain: torch.Tensor | None,
    gradient: torch.Tensor | None,
    source: torch.Tensor | None,
    *,
    most: float,
    doubled: float = 0.0,
    cubic: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    given = [None if t is None else _dense_rows(t) for t in (plain, gradient, source)]
    num_plain, _, num_made = (0 if t is None else t.shape[1] for t in given)
    there = next(t for t in given if t is not None)
    stored = there.new_empty(len(there), num_plain + num_made, dtype=torch.float8_e4m3fn)
    scales = there.new_empty(len(there), 1, dtype=torch.float32)
    starts = (0, num_plain) if gradient is None else (num_made, 0)
    warps = WARPS if source is None else WARPS // 2
    launch: Any = _rows_in_fp8
    launch[(len(there),)](
        *(*given, stored, scales, *(0 if t is None else t.stride(0) for t in given)),
        *(num_plain, num_made, *starts, doubled, cubic, most, BLOCK),
        num_warps=warps,
    )
    return stored, scales


def _dense_rows(matrix: torch.Tensor) -> torch.Tensor:
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()
