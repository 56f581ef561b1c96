"""Blocks whose attention and feed-forward are parallel: their first product, cut and put together.

Its columns are q, k, v and what the feed-forward's activation is given. A compiler makes each
part's gradient a tensor and then joins them; here each is written into its columns of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import Function

from lib import activations, head_kernels, kernels, lowrank, rotary

HALF_MAX = 65504.0


class Columns(NamedTuple):
    """Where parts of a first product start: q, then k and v, and the feed-forward's."""

    query: int
    hidden: int
    size: int  # of q, of k and of v


def side_by_side(
    processor: Any,
    attn: Any,
    whole: torch.Tensor,
    columns: Columns,
    angles: tuple[torch.Tensor, torch.Tensor],
    *,
    gated: bool,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """What attention and the activation, SwiGLU or GELU, make of a first product: the second's x.

    Batch, tokens, columns.
    """
    norms = (attn.norm_q.weight, attn.norm_k.weight)
    query, key, value, active = _Parts.apply(
        whole, *norms, *angles, tuple(columns), gated, attn.norm_q.eps
    )
    return torch.cat([processor.dispatched(query, key, value, mask), active], dim=-1)


class _Parts(Function):
    @staticmethod
    def forward(
        ctx: Any,
        whole: torch.Tensor,
        norm_q: torch.Tensor,
        norm_k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        columns: tuple[int, int, int],
        gated: bool,
        eps: float,
    ) -> Any:
        ctx.columns, ctx.gated, ctx.eps = columns, gated, eps
        ctx.save_for_backward(whole, norm_q, norm_k, cos, sin)
        query, key, value, hidden = cut(whole, columns, norm_q.shape[0])
        query, key = turned(query, key, (norm_q, norm_k), (cos, sin), eps)
        active = activations.swiglu(hidden) if gated else activations.gelu(hidden)
        return query, key, value, active

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        settings = (list(ctx.columns), ctx.gated, ctx.eps)
        return parallel_back(*gradients, *ctx.saved_tensors, *settings), *[None] * 7


@torch.library.custom_op("darkroom::parallel_back", mutates_args=())
def parallel_back(
    of_query: torch.Tensor,
    of_key: torch.Tensor,
    of_value: torch.Tensor,
    of_active: torch.Tensor,
    whole: torch.Tensor,
    norm_q: torch.Tensor,
    norm_k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    columns: list[int],
    gated: bool,
    eps: float,
) -> torch.Tensor:
    """The gradient of a first product: batch, tokens, columns."""
    found = whole.new_empty(whole.shape)
    *heads, hidden = cut(whole, columns, norm_q.shape[0])
    *to_heads, to_hidden = cut(found, columns, norm_q.shape[0])
    gradients, turning = (of_query, of_key, of_value), (norm_q, norm_k, cos, sin)
    _turn_back(gradients, heads, to_heads, turning, eps=eps)
    activated_back = activations.swiglu_back if gated else activations.gelu_back
    activated_back(of_active, hidden, to_hidden)
    return found


@parallel_back.register_fake
def _(_query: Any, _key: Any, _value: Any, _active: Any, whole: torch.Tensor, *_: Any) -> Any:
    return whole.new_empty(whole.shape)


@torch.library.custom_op("darkroom::heads_back", mutates_args=())
def heads_back(
    of_query: torch.Tensor,
    of_key: torch.Tensor,
    of_value: torch.Tensor,
    whole: torch.Tensor,
    norm_q: torch.Tensor,
    norm_k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    columns: list[int],
    eps: float,
) -> torch.Tensor:
    """The columns of q, k and v of that gradient alone."""
    found = whole.new_empty(*whole.shape[:-1], 3 * columns[2])
    *heads, _ = cut(whole, columns, norm_q.shape[0])
    *to_heads, _ = cut(found, (0, 0, columns[2]), norm_q.shape[0])
    turning = (norm_q, norm_k, cos, sin)
    _turn_back((of_query, of_key, of_value), heads, to_heads, turning, eps=eps)
    return found


@heads_back.register_fake
def _(_query: Any, _key: Any, _value: Any, whole: torch.Tensor, *rest: Any) -> Any:
    return whole.new_empty(*whole.shape[:-1], 3 * rest[4][2])


def turned(
    query: torch.Tensor,
    key: torch.Tensor,
    norms: Sequence[torch.Tensor],
    angles: Sequence[torch.Tensor],
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k as attention takes them."""
    cos, sin = angles
    query, key = (
        rotary.rotate([x], [norm], [cos], [sin], eps, 0.0)
        for x, norm in zip((query, key), norms, strict=True)
    )
    return query, key


def _turn_back(
    gradients: Sequence[torch.Tensor],
    heads: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    turning: tuple[torch.Tensor, ...],
    *,
    eps: float,
) -> None:
    """The gradients of q and k before norm and rotation, and v's, into targets of dense heads."""
    *norms, cos, sin = turning
    for number, norm in enumerate(norms):
        given, x, target = gradients[number], heads[number], targets[number]
        rotary.turn_back(given, x, norm, cos, sin, target, eps=eps)
    if kernels.runs_on(gradients[2]):
        head_kernels.copy(gradients[2], targets[2])
    else:
        targets[2].copy_(gradients[2])


def cut(whole: torch.Tensor, columns: Sequence[int], width: int) -> Sequence[torch.Tensor]:
    """q, k and v of batch, tokens, heads, width; the feed-forward's of batch, tokens, columns."""
    start, hidden, size = columns
    heads = whole[..., start : start + 3 * size].unflatten(-1, (3, -1, width))
    return *heads.unbind(-3), whole[..., hidden : hidden + whole.shape[-1] - 3 * size]


def flux_block(
    block: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: Any = None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """FLUX.1's single block, where its first layers are one product; else nothing.

    As diffusers' FluxSingleTransformerBlock has it: the texts' answer, the pictures'.
    """
    attn, beside = block.attn, getattr(block.attn.processor, "beside", None)
    if beside is None or image_rotary_emb is None or joint_attention_kwargs:
        return None
    if attn.fused_projections or getattr(block.act_mlp, "approximate", None) != "tanh":
        return None
    group = lowrank.group_of((block.proj_mlp, attn.to_q, attn.to_k, attn.to_v))
    if group is None:
        return None
    texts = encoder_hidden_states.shape[1]
    residual = torch.cat([encoder_hidden_states, hidden_states], dim=1)
    normed, gate = block.norm(residual, emb=temb)
    answer = beside(attn, group, block.proj_out, normed, image_rotary_emb)
    found = residual + gate.unsqueeze(1) * answer
    if found.dtype == torch.float16:
        found = found.clip(-HALF_MAX, HALF_MAX)
    return found[:, :texts], found[:, texts:]


BLOCKS = {"FluxSingleTransformerBlock": flux_block}
