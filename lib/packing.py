"""Latents as image tokens: squares of 2x2, features in the order channel, row, column."""

from __future__ import annotations

from lib import shapes


def packed(latents: shapes.AnyTensor) -> shapes.AnyTensor:
    """b c h w -> b n (4 c), row by row."""
    from einops import rearrange

    return rearrange(latents, "b c (h p) (w q) -> b (h w) (c p q)", p=2, q=2)


def unpacked(tokens: shapes.AnyTensor, *, height: int, width: int) -> shapes.AnyTensor:
    """The inverse, to latents of this height and width."""
    from einops import rearrange

    squares = {"h": height // 2, "w": width // 2, "p": 2, "q": 2}
    return rearrange(tokens, "b (h w) (c p q) -> b c (h p) (w q)", **squares)


def num_tokens(latent_size: tuple[int, int]) -> int:
    """Of latents of this height and width."""
    height, width = latent_size
    return (height // 2) * (width // 2)
