"""Attention under a mask of keys, over the valid ones alone.

Flash attention's kernels take no mask, but runs of any length: the valid keys of all pictures are
put one after the other. A query attends to the same keys as under the mask, a padded one's too, so
that answers are those of a masked attention; its kernels took three times as long.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd import Function

DTYPES = (torch.bfloat16, torch.float16)
AMPERE = 8  # the major number of what it computes


class Runs(NamedTuple):
    """Where the keys of a batch lie when the valid ones come first; tokens are those of all."""

    source: torch.Tensor  # which token lies at a place
    place: torch.Tensor  # where a token lies
    valid: torch.Tensor  # of each token
    starts: torch.Tensor  # of the run of each picture, and where the last one ends


def computes_on(device: torch.device) -> bool:
    """Whether flash attention's kernels are for a device: Ampere and newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= AMPERE


def takes(query: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether those kernels can stand for a masked attention.

    Their backward does not repeat its bits: a run that asks for that keeps the masked one.
    """
    of_keys = mask.dtype == torch.bool and mask.ndim == 4 and mask.shape[1] == mask.shape[2] == 1
    repeats = torch.are_deterministic_algorithms_enabled()
    return of_keys and query.dtype in DTYPES and query.shape[-1] % 8 == 0 and not repeats


def attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Batch, tokens, heads, width; the mask is true for valid keys: batch, 1, 1, tokens."""
    batch, tokens, heads = query.shape[:3]
    most, times = (tokens, key.shape[1]), heads // key.shape[2]
    runs = runs_of(mask[:, 0, 0].expand(batch, -1))
    key, value = (_Packed.apply(x.flatten(0, 1), *runs[:3]) for x in (key, value))
    if times > 1:
        key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
    ends = torch.arange(batch + 1, device=query.device, dtype=torch.int32) * tokens
    found = over_runs(query.flatten(0, 1), key, value, ends, runs.starts, most)
    return found.unflatten(0, (batch, tokens))


def over_runs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    starts: torch.Tensor,
    most: tuple[int, int],
) -> torch.Tensor:
    """All tokens, heads, width; where runs of queries and of keys end, and how long one may be.

    torch's own function for it names a window, which FlashAttention-4 refuses in torch 2.11.
    """
    flash = torch.ops.aten._flash_attention_forward
    return flash(query, key, value, ends, starts, *most, 0.0, False, False)[0]


def runs_of(valid: torch.Tensor) -> Runs:
    """Of a mask: batch, tokens."""
    counts = valid.sum(dim=1).cumsum(0)
    flat = valid.flatten()
    first, later = flat.cumsum(0) - 1, (~flat).cumsum(0) - 1
    place = torch.where(flat, first, counts[-1] + later)
    source = torch.empty_like(place)
    source = source.scatter(0, place, torch.arange(len(place), device=place.device))
    starts = torch.cat([counts.new_zeros(1), counts]).int()
    return Runs(source, place, flat, starts)


class _Packed(Function):
    """Keys or values in their places; behind the runs nothing attends, and no gradient is made."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        source: torch.Tensor,
        place: torch.Tensor,
        valid: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(place, valid)
        return x[source]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        place, valid = ctx.saved_tensors
        found = gradients[0][place]
        return torch.where(valid[:, None, None], found, 0.0), None, None, None
