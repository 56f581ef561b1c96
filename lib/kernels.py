"""Kernels of our own for what no library reads once: in Triton, which torch's CUDA builds bring."""

# Triton reads a kernel's annotations, and knows none of what it is called with.
# ruff: noqa: ANN001, ANN202

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
    def _row_in_fp8(source, target, scales, columns, most: tl.constexpr, block: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        places = tl.arange(0, block)
        inside = places < columns
        values = tl.load(source + row * columns + places, mask=inside, other=0.0).to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(values), axis=0) / most, 1e-12)
        tl.store(scales + row, scale)
        scaled = tl.minimum(tl.maximum(values / scale, -most), most)
        tl.store(target + row * columns + places, scaled.to(tl.float8e4nv), mask=inside)

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

    @triton.jit
    def _heads_of(heads, width: tl.constexpr, block: tl.constexpr):
        """The token and the picture of a program, its heads, and the places in one."""
        token, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
        head = tl.program_id(2) * block + tl.arange(0, block)[:, None]
        return token, batch, head, tl.arange(0, width)[None, :], head < heads

    @triton.jit
    def _pairs(values, block: tl.constexpr, width: tl.constexpr):
        """The numbers of pairs apart, in a layout of their own that all of a kernel then keeps."""
        return tl.split(tl.reshape(values.to(tl.float32), (block, width // 2, 2)))

    @triton.jit
    def _scales(weight, plus, head, place, block: tl.constexpr, width: tl.constexpr):
        scales = tl.load(weight + place + tl.zeros_like(head)).to(tl.float32) + plus
        return _pairs(scales, block, width)

    @triton.jit
    def _angles(cos, sin, start, step, width: tl.constexpr):
        angle = start + tl.arange(0, width // 2)[None, :] * step
        return tl.load(cos + angle), tl.load(sin + angle)

    @triton.jit
    def _inverse(first, second, eps, width: tl.constexpr):
        squares = tl.sum(first * first + second * second, axis=1)
        return tl.rsqrt(squares / width + eps)[:, None]

    @triton.jit
    def _keep(target, first, second, inside, block: tl.constexpr, width: tl.constexpr):
        pairs = tl.join(first, second).to(target.dtype.element_ty)
        tl.store(target, tl.reshape(pairs, (block, width)), mask=inside)

    @triton.jit
    def _rotate(
        source,
        weight,
        cos,
        sin,
        target,
        eps,
        plus,
        heads,
        source_batch,
        source_token,
        source_head,
        angle_batch,
        angle_token,
        angle_pair,
        target_batch,
        width: tl.constexpr,
        block: tl.constexpr,
    ):
        """Some heads of a token; strides in elements."""
        token, batch, head, place, inside = _heads_of(heads, width, block)
        start = source + batch * source_batch + token * source_token + head * source_head
        values = tl.load(start + place, mask=inside, other=0.0)
        first, second = _pairs(values, block, width)
        of_first, of_second = _scales(weight, plus, head, place, block, width)
        c, s = _angles(cos, sin, batch * angle_batch + token * angle_token, angle_pair, width)
        inverse = _inverse(first, second, eps, width)
        first, second = first * inverse * of_first, second * inverse * of_second
        where = target + batch * target_batch + token * heads * width + head * width + place
        _keep(where, first * c - second * s, second * c + first * s, inside, block, width)

    @triton.jit
    def _rotate_back(
        gradient,
        source,
        weight,
        cos,
        sin,
        target,
        eps,
        plus,
        heads,
        gradient_batch,
        gradient_token,
        gradient_head,
        source_batch,
        source_token,
        source_head,
        angle_batch,
        angle_token,
        angle_pair,
        target_batch,
        width: tl.constexpr,
        block: tl.constexpr,
    ):
        token, batch, head, place, inside = _heads_of(heads, width, block)
        begin = gradient + batch * gradient_batch + token * gradient_token + head * gradient_head
        given = tl.load(begin + place, mask=inside, other=0.0)
        start = source + batch * source_batch + token * source_token + head * source_head
        values = tl.load(start + place, mask=inside, other=0.0)
        first, second = _pairs(values, block, width)
        one, other = _pairs(given, block, width)
        of_first, of_second = _scales(weight, plus, head, place, block, width)
        c, s = _angles(cos, sin, batch * angle_batch + token * angle_token, angle_pair, width)
        inverse = _inverse(first, second, eps, width)
        first, second = first * inverse, second * inverse
        one, other = (one * c + other * s) * of_first, (other * c - one * s) * of_second
        mean = tl.sum(one * first + other * second, axis=1)[:, None] / width
        one, other = (one - first * mean) * inverse, (other - second * mean) * inverse
        where = target + batch * target_batch + token * heads * width + head * width + place
        _keep(where, one, other, inside, block, width)


HEADS = 8  # of a program: 8 of 128 numbers are 16 bytes for each of 128 threads


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


def rotate(
    x: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    target: torch.Tensor,
    *,
    eps: float,
    plus: float,
) -> None:
    """Batch, tokens, heads, width: normed and turned, into a part of a whole tensor."""
    (cos, sin), x = _alike(cos, sin), _dense_heads(x)
    launch: Any = _rotate
    launch[_grid(x)](
        *(x, weight, cos, sin, target, eps, plus, x.shape[2]),
        *(*x.stride()[:3], *_steps(cos), target.stride(0), x.shape[3], HEADS),
    )


def rotate_back(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    target: torch.Tensor,
    *,
    eps: float,
    plus: float,
) -> None:
    """The gradient of what `rotate` was given."""
    cos, sin = _alike(cos, sin)
    gradient, x = _dense_heads(gradient), _dense_heads(x)
    launch: Any = _rotate_back
    launch[_grid(x)](
        *(gradient, x, weight, cos, sin, target, eps, plus, x.shape[2]),
        *(*gradient.stride()[:3], *x.stride()[:3], *_steps(cos), target.stride(0)),
        *(x.shape[3], HEADS),
    )


def _grid(x: torch.Tensor) -> tuple[int, int, int]:
    batch, tokens, heads, _ = x.shape
    return tokens, batch, triton.cdiv(heads, HEADS)


def _dense_heads(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _alike(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in float32 and laid out alike, as one kernel steps through them."""
    cos, sin = cos.float(), sin.float()
    return (cos, sin) if cos.stride() == sin.stride() else (cos.contiguous(), sin.contiguous())


def _steps(angles: torch.Tensor) -> tuple[int, int, int]:
    batch, token, pair = angles.stride()
    return (batch if angles.shape[0] > 1 else 0), token, pair
