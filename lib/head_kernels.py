"""Kernels of heads: their norm and rotation, forth and back, and their copy; in Triton."""

# Triton reads a kernel's annotations, and knows none of what it is called with.
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lib.kernels import HERE

if TYPE_CHECKING or HERE:
    import triton  # type: ignore[import-not-found]
    from triton import language as tl  # type: ignore[import-not-found]

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
        target_token,
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
        where = target + batch * target_batch + token * target_token + head * width + place
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
        target_token,
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
        where = target + batch * target_batch + token * target_token + head * width + place
        _keep(where, one, other, inside, block, width)

    @triton.jit
    def _copy(
        source,
        target,
        heads,
        source_batch,
        source_token,
        source_head,
        target_batch,
        target_token,
        width: tl.constexpr,
        block: tl.constexpr,
    ):
        token, batch, head, place, inside = _heads_of(heads, width, block)
        start = source + batch * source_batch + token * source_token + head * source_head
        values = tl.load(start + place, mask=inside, other=0.0)
        where = target + batch * target_batch + token * target_token + head * width + place
        tl.store(where, values, mask=inside)


HEADS = 8  # of a program: 8 of 128 numbers are 16 bytes for each of 128 threads


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
        *(*x.stride()[:3], *_steps(cos), *target.stride()[:2], x.shape[3], HEADS),
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
        *(*gradient.stride()[:3], *x.stride()[:3], *_steps(cos), *target.stride()[:2]),
        *(x.shape[3], HEADS),
    )


def copy(x: torch.Tensor, target: torch.Tensor) -> None:
    """Batch, tokens, heads, width, of any strides into tokens of dense heads."""
    x = _dense_heads(x)
    launch: Any = _copy
    launch[_grid(x)](
        *(x, target, x.shape[2], *x.stride()[:3], *target.stride()[:2], x.shape[3], HEADS),
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
