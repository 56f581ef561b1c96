"""Attention of compiled blocks: diffusers' own processors, but q and k normed and turned at once.

Same layers in the same order, same attention; only `lib.rotary` stands where each processor has a
norm, a join of streams and a rotation. What has no norm or no rotation keeps diffusers' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from lib import float8, parallel, ragged, rotary
from lib.lowrank import Group
from lib.parallel import Columns
from lib.rotary import Stream

Angles = tuple[torch.Tensor, torch.Tensor]  # cosines and sines: batch or 1, tokens, pairs


class _Part(NamedTuple):
    """A stream's answers, and the norms of its q and k: batch, tokens, heads times width."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    norm_q: Any
    norm_k: Any
    angles: Angles


class Processor:
    """In the place of one of diffusers', which it keeps for what it does not do itself."""

    replaces: ClassVar[tuple[str, ...]]
    plus: ClassVar = 0.0  # of weights of norms that are stored around zero

    def __init__(self, own: Any, *, flash: bool = False):
        self.own, self.flash = own, flash  # whether flash attention's kernels are for this device

    def attended(self, parts: Sequence[_Part], mask: torch.Tensor | None) -> torch.Tensor:
        """Of all streams, one after the other: batch, tokens, heads times width."""
        query = self._turned([(part.query, part.norm_q, part.angles) for part in parts])
        key = self._turned([(part.key, part.norm_k, part.angles) for part in parts])
        values = [_heads(part.value, part.norm_k) for part in parts]
        value = values[0] if len(values) == 1 else torch.cat(values, dim=1)
        return self.dispatched(query, key, value, mask)

    def dispatched(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Each of batch, tokens, heads, width, of k and v fewer heads; the mask is of keys."""
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        if self.flash and mask is not None and ragged.takes(query, mask):
            return ragged.attended(query, key, value, mask).flatten(2, 3)
        if (times := query.shape[2] // key.shape[2]) > 1:
            key, value = (x.repeat_interleave(times, dim=2) for x in (key, value))
        found = dispatch_attention_fn(
            query, key, value, attn_mask=mask, backend=self.own._attention_backend
        )
        return found.flatten(2, 3).to(query.dtype)

    def _turned(self, parts: Sequence[tuple[torch.Tensor, Any, Angles]]) -> torch.Tensor:
        streams = [Stream(_heads(x, norm), norm.weight, *angles) for x, norm, angles in parts]
        return rotary.rotated(streams, eps=parts[0][1].eps, plus=self.plus)


def _heads(x: torch.Tensor, norm: Any) -> torch.Tensor:
    return x.unflatten(-1, (-1, norm.weight.shape[0]))


def _of_pairs(cos: torch.Tensor, sin: torch.Tensor) -> Angles:
    """Of tables that have each pair's angle twice: tokens, width."""
    return cos[None, :, ::2], sin[None, :, ::2]


def _of_complex(turns: torch.Tensor) -> Angles:
    """Of unit numbers, one a pair; their tokens and pairs are the last two sides."""
    real = torch.view_as_real(turns if turns.ndim == 3 else turns[None])
    return real[..., 0], real[..., 1]


def _own(attn: Any, x: torch.Tensor, angles: Angles) -> _Part:
    """The stream of pictures, or the only one."""
    layers = (attn.to_q, attn.to_k, attn.to_v)  # in the order that a group is called in
    query, key, value = (layer(x) for layer in layers)
    return _Part(query, key, value, attn.norm_q, attn.norm_k, angles)


def _added(attn: Any, x: torch.Tensor, angles: Angles) -> _Part:
    """The stream of texts."""
    layers = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
    query, key, value = (layer(x) for layer in layers)
    return _Part(query, key, value, attn.norm_added_q, attn.norm_added_k, angles)


def _answers(attn: Any, found: torch.Tensor, texts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What goes back to the pictures, and to the texts that came first."""
    text, image = found[:, :texts].contiguous(), found[:, texts:].contiguous()
    return attn.to_out[1](attn.to_out[0](image)), attn.to_add_out(text)


class Flux(Processor):
    """FLUX.1's blocks of both kinds, and FLUX.2's double ones."""

    replaces = ("FluxAttnProcessor", "Flux2AttnProcessor")

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Angles | None = None,
    ) -> Any:
        if image_rotary_emb is None or attn.fused_projections:
            return self.own(
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
            )
        cos, sin = _of_pairs(*image_rotary_emb)
        texts = 0 if encoder_hidden_states is None else encoder_hidden_states.shape[1]
        image = _own(attn, hidden_states, (cos[:, texts:], sin[:, texts:]))
        if encoder_hidden_states is None:
            return self.attended([image], attention_mask)
        text = _added(attn, encoder_hidden_states, (cos[:, :texts], sin[:, :texts]))
        return _answers(attn, self.attended([text, image], attention_mask), texts)

    def beside(
        self, attn: Any, group: Group, second: Any, x: torch.Tensor, image_rotary_emb: Angles
    ) -> torch.Tensor:
        """What a single block's two products make; the feed-forward's columns come before q."""
        hidden = sum(group.sizes) - 3 * attn.inner_dim
        columns = Columns(query=hidden, hidden=0, size=attn.inner_dim)
        angles = _of_pairs(*image_rotary_emb)
        if float8.takes(group, second, columns):
            return float8.side_by_side(self, attn, group, second, x, columns, angles)
        whole = group.whole(x)
        return second(parallel.side_by_side(self, attn, whole, columns, angles, gated=False))


class FluxParallel(Processor):
    """FLUX.2's single blocks, whose first product is q, k, v and the feed-forward's."""

    replaces = ("Flux2ParallelSelfAttnProcessor",)

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Angles | None = None,
    ) -> torch.Tensor:
        if image_rotary_emb is None or type(attn.mlp_act_fn).__name__ != "Flux2SwiGLU":
            return self.own(attn, hidden_states, attention_mask, image_rotary_emb)
        columns = Columns(query=0, hidden=3 * attn.inner_dim, size=attn.inner_dim)
        found = parallel.side_by_side(
            self,
            attn,
            attn.to_qkv_mlp_proj(hidden_states),
            columns,
            _of_pairs(*image_rotary_emb),
            gated=True,
            mask=attention_mask,
        )
        return attn.to_out(found)


class QwenImage(Processor):
    """Its double blocks; the mask is of text tokens."""

    replaces = ("QwenDoubleStreamAttnProcessor2_0",)

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if image_rotary_emb is None or attention_mask is not None:
            return self.own(
                attn,
                hidden_states,
                encoder_hidden_states,
                encoder_hidden_states_mask,
                attention_mask,
                image_rotary_emb,
            )
        mask = None
        if encoder_hidden_states_mask is not None:
            pictures = encoder_hidden_states_mask.new_ones(
                hidden_states.shape[:2], dtype=torch.bool
            )
            mask = torch.cat([encoder_hidden_states_mask, pictures], dim=1)[:, None, None, :]
        turns, text_turns = image_rotary_emb
        image = _own(attn, hidden_states, _of_complex(turns))
        text = _added(attn, encoder_hidden_states, _of_complex(text_turns))
        found = self.attended([text, image], mask)
        return _answers(attn, found, encoder_hidden_states.shape[1])


class ZImage(Processor):
    """One stream, whose tokens have angles of their own in each picture."""

    replaces = ("ZSingleStreamAttnProcessor",)

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        freqs_cis: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if freqs_cis is None:
            return self.own(attn, hidden_states, encoder_hidden_states, attention_mask, freqs_cis)
        part = _own(attn, hidden_states, _of_complex(freqs_cis))
        if attention_mask is not None and attention_mask.ndim == 2:
            attention_mask = attention_mask[:, None, None, :]
        return attn.to_out[1](attn.to_out[0](self.attended([part], attention_mask)))


class Krea2(Processor):
    """One stream with fewer heads of k and v, and a gate."""

    replaces = ("Krea2AttnProcessor",)
    plus = 1.0

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Angles | None = None,
    ) -> torch.Tensor:
        if image_rotary_emb is None:
            return self.own(attn, hidden_states, attention_mask, image_rotary_emb)
        part = _own(attn, hidden_states, _of_pairs(*image_rotary_emb))
        gate = attn.to_gate(hidden_states)
        found = self.attended([part], attention_mask)
        return attn.to_out[0](found * torch.sigmoid(gate))


KINDS = (Flux, FluxParallel, QwenImage, ZImage, Krea2)
OURS = {name: kind for kind in KINDS for name in kind.replaces}
NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")


def engage(denoiser: Any) -> None:
    """Put ours where diffusers' are."""
    flash = ragged.computes_on(next(denoiser.parameters()).device)
    for module in denoiser.modules():
        kind = OURS.get(type(getattr(module, "processor", None)).__name__)
        if kind is not None and _fits(module):
            module.processor = kind(module.processor, flash=flash)


def disengage(denoiser: Any) -> None:
    """Put diffusers' back."""
    for module in denoiser.modules():
        if isinstance(getattr(module, "processor", None), Processor):
            module.processor = module.processor.own


def _fits(attn: Any) -> bool:
    """Whether the norms of heads are alike, by the root mean square and with a weight alone."""
    norms = [norm for name in NORMS if (norm := getattr(attn, name, None)) is not None]
    alike = len({(getattr(norm, "eps", None), _width(norm)) for norm in norms}) == 1
    return alike and norms[0].eps is not None and _width(norms[0]) > 0


def _width(norm: Any) -> int:
    """How many numbers of a head it takes, where a kernel can; else 0."""
    weight = getattr(norm, "weight", None)
    if weight is None or getattr(norm, "bias", None) is not None:
        return 0
    width = weight.shape[0]
    return width if width > 1 and width & (width - 1) == 0 else 0
