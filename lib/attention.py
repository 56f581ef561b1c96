"""Attention kernels of a training run: torch's flash attention, or its fourth release.

cuDNN's stay off: in FLUX's backward they read illegal memory (H200, torch 2.11, cuDNN 9.19; seen
again in bench/results/2026-11-30-h200-train-step.md). FlashAttention-4 (the extra `flash`) is half
again as fast on Hopper; torch puts it in the place of its own kernels, and takes it out again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from lib import ragged
from lib.device import without_cudnn_attention

CAPABILITIES = (9, 10)  # major ones of the GPUs that its kernels are written for
NEAR = 0.02  # relative error of bfloat16 kernels; seen: 0.004
SHAPE = (1, 2, 256, 128)  # batch, heads, tokens, width, as the families have them
PADDED = slice(40, 100)  # tokens that a mask hides
STEPS = (12.9898, 78.233, 37.719, 4.581)


def _flash_attn_fwd(*args: Any, **kwargs: Any) -> Any:
    """What torch asks of a release; this one returns more."""
    from flash_attn.cute.interface import (  # type: ignore[import-not-found]
        _flash_attn_fwd as forward,
    )

    return forward(*args, **kwargs)[:2]


def _flash_attn_bwd(*args: Any, **kwargs: Any) -> Any:
    from flash_attn.cute.interface import (  # type: ignore[import-not-found]
        _flash_attn_bwd as backward,
    )

    return backward(*args, **kwargs)[:3]


@contextmanager
def engaged(*, flash4: bool) -> Iterator[None]:
    """The run's kernels for the block; what was there before comes back."""
    with without_cudnn_attention():
        if not flash4:
            yield
            return
        from torch.nn.attention._fa4 import register_flash_attention_fa4

        handle = register_flash_attention_fa4(__name__)
        try:
            yield
        finally:
            handle.remove()


def fault_of_flash4(device: torch.device, *, masked: bool = False) -> str:
    """Why FlashAttention-4 cannot be used on a device, or nothing; found by one attention.

    Where texts are masked, by one over runs of tokens too: that is a kernel of its own.
    """
    if device.type != "cuda":
        return "there is no GPU"
    if torch.cuda.get_device_capability(device)[0] not in CAPABILITIES:
        return "its kernels are for Hopper and Blackwell GPUs"
    kinds = (False, True) if masked else (False,)
    try:
        with engaged(flash4=True):
            found = [_attended(device, SDPBackend.FLASH_ATTENTION, masked=kind) for kind in kinds]
    except (ImportError, OSError, RuntimeError, AttributeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    with without_cudnn_attention():
        expected = [_attended(device, SDPBackend.MATH, masked=kind) for kind in kinds]
    near = all(
        (a - b).norm() <= NEAR * b.norm()
        for one, other in zip(found, expected, strict=True)
        for a, b in zip(one, other, strict=True)
    )
    return "" if near else "its numbers are wrong here"


def _attended(
    device: torch.device, backend: SDPBackend, *, masked: bool = False
) -> list[torch.Tensor]:
    """Output and gradients over fixed numbers, in float32."""
    query, key, value, gradient = (
        _scattered(step, device=device).requires_grad_(step != STEPS[-1]) for step in STEPS
    )
    mask = None
    if masked:
        mask = torch.ones(1, 1, 1, SHAPE[2], dtype=torch.bool, device=device)
        mask[..., PADDED] = False
    if mask is not None and backend == SDPBackend.FLASH_ATTENTION:
        tokens_first = (x.transpose(1, 2) for x in (query, key, value))
        answer = ragged.attended(*tokens_first, mask=mask).transpose(1, 2)
    else:
        with sdpa_kernel(backend):
            answer = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    gradients = torch.autograd.grad(answer, (query, key, value), gradient)
    return [tensor.detach().float() for tensor in (answer, *gradients)]


def _scattered(step: float, *, device: torch.device) -> torch.Tensor:
    """Numbers as good as random: sums of regular ones cancel, and leave rounding alone."""
    count = math.prod(SHAPE)
    ramp = torch.arange(1, count + 1, device=device, dtype=torch.float32)
    return (torch.sin(ramp * step) * 43758.5453).frac().mul(3).view(SHAPE).to(torch.bfloat16)
