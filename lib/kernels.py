"""Kernels of our own for what no library reads once: in Triton, which torch's CUDA builds bring."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

HERE = find_spec("triton") is not None

if TYPE_CHECKING or HERE:
    import triton  # type: ignore[import-not-found]
    from triton import language as tl  # type: ignore[import-not-found]

    @triton.jit
    def _row_in_fp8(source, target, scales, columns, most: tl.constexpr, block: tl.constexpr):  # noqa: ANN001, ANN202
        row = tl.program_id(0).to(tl.int64)
        places = tl.arange(0, block)
        inside = places < columns
        values = tl.load(source + row * columns + places, mask=inside, other=0.0).to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(values), axis=0) / most, 1e-12)
        tl.store(scales + row, scale)
        scaled = tl.minimum(tl.maximum(values / scale, -most), most)
        tl.store(target + row * columns + places, scaled.to(tl.float8e4nv), mask=inside)

    @triton.jit
    def _widen(source, scales, target, columns, block: tl.constexpr):  # noqa: ANN001, ANN202
        row = tl.program_id(0).to(tl.int64)
        places = tl.program_id(1) * block + tl.arange(0, block)
        inside = places < columns
        values = tl.load(source + row * columns + places, mask=inside, other=0).to(tl.float32)
        scaled = values * tl.load(scales + row).to(tl.float32)
        tl.store(target + row * columns + places, scaled.to(target.dtype.element_ty), mask=inside)


def widened(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows of whole numbers times the scale of each, in the scales' precision."""
    rows, columns = weight.shape
    found = torch.empty_like(weight, dtype=scales.dtype)
    block = min(triton.next_power_of_2(columns), 4096)
    launch: Any = _widen
    launch[(rows, triton.cdiv(columns, block))](weight, scales, found, columns, block)
    return found


def rows_in_fp8(matrix: torch.Tensor, *, most: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in float8 (e4m3) and the scale of each, read once: a row fits a block's registers."""
    rows, columns = matrix.shape
    stored = torch.empty_like(matrix, dtype=torch.float8_e4m3fn)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=matrix.device)
    block = triton.next_power_of_2(columns)
    warps = 16 if block > 2**14 else 8
    launch: Any = _row_in_fp8
    launch[(rows,)](matrix, stored, scales, columns, most, block, num_warps=warps)
    return stored, scales
