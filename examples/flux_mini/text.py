"""The text encoders of flux-mini: CLIP for the pooled state, T5 for tokens, as FLUX has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from examples.flux_mini import tokenizers
from examples.flux_mini.data import Data, noisy_phrases, phrases, plain_words
from lib import tiny
from lib.families import flux
from lib.family import Conditioning

TEXT_TOKENS = 24
CLIP = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "hidden_act": "quick_gelu",
    "projection_dim": 128,
}
T5 = {
    "d_model": 128,
    "d_kv": 32,
    "d_ff": 256,
    "num_layers": 2,
    "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
    "dropout_rate": 0.0,
    "is_encoder_decoder": False,
    "use_cache": False,
}


@dataclass(frozen=True)
class Text:
    """Both text encoders with their tokenizers, and the token ids of every caption."""

    encoders: flux.TextEncoders
    clip_ids: torch.Tensor  # picture, phrase, token
    t5_ids: torch.Tensor
    empty: tuple[torch.Tensor, torch.Tensor]


def make_text(data: Data, *, seed: int) -> Text:
    """Fresh encoders, and every caption as tokens."""
    source, words = np.random.default_rng(seed), plain_words(data.names)
    captions = [
        [*phrases(name), *noisy_phrases(name, words=words, source=source)] for name in data.names
    ]
    corpus = [text for texts in captions for text in texts]
    known = [text for name in data.names for text in phrases(name)]
    device = data.pixels.device
    clip_tokenizer = tokenizers.clip_tokenizer(known, length=CLIP["max_position_embeddings"])
    t5_tokenizer = tokenizers.t5_tokenizer(known, length=TEXT_TOKENS)
    encoders = flux.TextEncoders(
        clip=tiny.clip_text_model(clip_tokenizer, CLIP).to(device),
        clip_tokenizer=clip_tokenizer,
        t5=tiny.t5_encoder(t5_tokenizer, T5).to(device),
        t5_tokenizer=t5_tokenizer,
    )

    def ids(tokenizer: Any, texts: list[str]) -> torch.Tensor:
        length = tokenizer.model_max_length
        padded = tokenizer(texts, padding="max_length", max_length=length, truncation=True)
        return torch.tensor(padded.input_ids, device=device)

    def both(texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        return ids(clip_tokenizer, texts), ids(t5_tokenizer, texts)

    clip_ids, t5_ids = both(corpus)
    by_picture = (len(captions), len(captions[0]))
    return Text(
        encoders,
        clip_ids.unflatten(0, by_picture),
        t5_ids.unflatten(0, by_picture),
        empty=both([""]),
    )


def conditioning(
    encoders: flux.TextEncoders, clip_ids: torch.Tensor, t5_ids: torch.Tensor
) -> Conditioning:
    """What the pipeline's `encode_prompt` gives, with gradients: no mask, pads included."""
    pooled = encoders.clip(clip_ids).pooler_output
    return Conditioning(
        {"text_embeds": encoders.t5(t5_ids).last_hidden_state, "pooled_embeds": pooled}
    )
