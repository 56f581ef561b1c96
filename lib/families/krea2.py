"""Krea 2: a single-stream flow transformer told by several layers of Qwen3-VL at once.

Facts are those of `diffusers.Krea2Pipeline`; the tests compare with that pipeline, unmodified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lib import autoencoders, guidance, naming, packing, schedules, shapes, texts, timesteps, tiny
from lib.components import load_encoder, load_model
from lib.errors import InputRefused, Problem
from lib.family import Conditioning, Facts, Frame, Record, Schedule
from lib.footprint import Costs
from lib.noise import Flow

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from lib.hub import Base

PREFIX, SUFFIX = texts.PREFIX, texts.SUFFIX
# The prefix's states are dropped, the suffix's are kept.
PREFIX_TOKENS, SUFFIX_TOKENS = texts.PREFIX_TOKENS, texts.SUFFIX_TOKENS
TAPS = (2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35)  # where the base names no layers
DISTILLED_MU = 1.15

FACTS = Facts(
    name="krea2",
    pipelines=("Krea2Pipeline",),
    classes={
        "text_encoder": "Qwen3VLModel|Qwen3VLForConditionalGeneration",
        "tokenizer": "Qwen2Tokenizer",
        "vae": "AutoencoderKLQwenImage",
        "transformer": "Krea2Transformer2DModel",
        "scheduler": "FlowMatchEulerDiscreteScheduler",
    },
    text_components=("text_encoder", "tokenizer"),
    autoencoder="vae",
    denoiser="transformer",
    divisor=16,  # the autoencoder's 8 times the 2x2 packing
    encode_routine="video-5d/1",
    caption_rule={
        "template": [PREFIX, SUFFIX],  # the padding stands between them
        "positions": "valid",
        "mask": "padding, which takes no position",
        "unconditional": "qwen-of-empty",
    },
    max_text_tokens=512,
    min_text_tokens=SUFFIX_TOKENS + 1,
    draws_mode=False,
    noise=Flow,
    costs=Costs(kept=(30.0, 24.3), weights=(12_820_073_036, 12_155_092_992)),
    reference="krea/Krea-2-Raw",
    diffusers="0.39.0",
    shared_inputs=(("to_q", "to_k", "to_v", "to_gate"), ("gate", "up")),
    caption_settings=("text_encoder_select_layers",),
)

_ATTENTION = {"wq": "to_q", "wk": "to_k", "wv": "to_v", "wo": "to_out.0", "gate": "to_gate"}
_BLOCK = {
    **{f"attn.{original}": f"attn.{name}" for original, name in _ATTENTION.items()},
    **{f"mlp.{name}": f"ff.{name}" for name in ("gate", "up", "down")},
}
_BLOCKS = {
    "blocks.*": "transformer_blocks.*",
    **{f"txtfusion.{k}_blocks.*": f"text_fusion.{k}_blocks.*" for k in ("layerwise", "refiner")},
}

NAMES = naming.Names(
    # No kohya file: diffusers takes none for this family. No `.alpha`, which it refuses.
    layouts={"comfyui": naming.Layout("diffusion_model.", naming.A_B, original=True)},
    original=naming.by_table(
        {
            **{
                f"{theirs}.{original}": f"{ours}.{name}"
                for theirs, ours in _BLOCKS.items()
                for original, name in _BLOCK.items()
            },
            **{"first": "img_in", "last.linear": "final_layer.linear", "tproj.1": "time_mod_proj"},
            **{"tmlp.0": "time_embed.linear_1", "tmlp.2": "time_embed.linear_2"},
            **{"txtmlp.1": "txt_in.linear_1", "txtmlp.3": "txt_in.linear_2"},
            "txtfusion.projector": "text_fusion.projector",
        }
    ),
    aliases=("diffusion_model.", "transformer.", ""),
)

TINY: Mapping[str, Any] = {
    "version": 1,
    "seed": 0,
    "pipeline": {
        "text_encoder_select_layers": [1, 2, 4],
        "is_distilled": False,
        "patch_size": 2,
    },
    "scheduler": {
        "use_dynamic_shifting": True,
        "base_shift": 0.5,
        "max_shift": 1.15,
        "base_image_seq_len": 256,
        "max_image_seq_len": 6400,
    },
    "vae": tiny.AUTOENCODER_VIDEO,
    "text_encoder": {
        "text_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 2048,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
                "rope_theta": 1e6,
            },
        },
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 4,
            "out_hidden_size": 32,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
    },
    "transformer": {
        "in_channels": 64,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 64,
        "timestep_embed_dim": 16,
        "text_hidden_dim": 32,
        "num_text_layers": 3,
        "text_num_attention_heads": 2,
        "text_num_key_value_heads": 2,
        "text_intermediate_size": 32,
        "num_layerwise_text_blocks": 1,
        "num_refiner_text_blocks": 1,
        "axes_dims_rope": [4, 6, 6],
    },
}


@dataclass(frozen=True)
class TextEncoder:
    """Qwen3-VL with its tokenizer and the layers that are tapped, frozen, in evaluation mode."""

    model: Any
    tokenizer: Any
    taps: tuple[int, ...]


def load_text_encoders(base: Base, *, dtype: torch.dtype, device: Any) -> TextEncoder:
    from transformers import Qwen2Tokenizer, Qwen3VLModel

    tokenizer = Qwen2Tokenizer.from_pretrained(base.folder("tokenizer"))
    if tokenizer.padding_side != "right":
        why = f"its tokenizer pads on the {tokenizer.padding_side}, where the template starts"
        remedy = 'set "padding_side": "right" in tokenizer/tokenizer_config.json'
        raise InputRefused(Problem(f"family.base={base.reference}", why, "right", remedy))
    return TextEncoder(
        model=load_encoder(Qwen3VLModel, base, "text_encoder", dtype=dtype, device=device),
        tokenizer=tokenizer,
        taps=_taps(base.settings),
    )


def _taps(settings: Mapping[str, Any]) -> tuple[int, ...]:
    """Places in the encoder's hidden states, of which the first is the embedding."""
    return tuple(settings.get("text_encoder_select_layers") or TAPS)


def encode_captions(
    encoders: TextEncoder, captions: Sequence[str], *, max_length: int
) -> list[dict[str, torch.Tensor]]:
    """The tapped states of the caption and of the template's end: token, layer, feature."""
    import torch

    ids, valid = _tokens(encoders.tokenizer, captions, max_length=max_length)
    # A pad takes no position: the suffix stands right after its caption, whatever lies between.
    positions = (valid.long().cumsum(dim=-1) - 1).clamp(min=0)
    device = encoders.model.device
    with torch.no_grad():
        states = encoders.model(
            input_ids=ids.to(device, non_blocking=True),
            attention_mask=valid.to(device, non_blocking=True),
            position_ids=positions.expand(3, -1, -1).to(device, non_blocking=True),
            output_hidden_states=True,
            use_cache=False,
        ).hidden_states
    tapped = torch.stack([states[tap] for tap in encoders.taps], dim=2)[:, PREFIX_TOKENS:]
    return [
        {"text_embeds": texts.kept(text, its)}
        for text, its in zip(tapped, valid[:, PREFIX_TOKENS:], strict=True)
    ]


def _tokens(
    tokenizer: Any, captions: Sequence[str], *, max_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and what of them is no padding: prefix, caption, padding, suffix."""
    import torch

    if max_length <= SUFFIX_TOKENS:
        why = "leaves the caption no room beside its template"
        allowed = f"{SUFFIX_TOKENS + 1} to 512"
        raise InputRefused(Problem(f"captions.max_length={max_length}", why, allowed))
    begun = tokenizer(
        [PREFIX + caption for caption in captions],
        truncation=True,
        padding="max_length",
        max_length=max_length + PREFIX_TOKENS - SUFFIX_TOKENS,
        return_tensors="pt",
    )
    suffix = tokenizer([SUFFIX] * len(captions), return_tensors="pt")
    ids = torch.cat([begun.input_ids, suffix.input_ids], dim=1)
    return ids, torch.cat([begun.attention_mask, suffix.attention_mask], dim=1).bool()


def encode_unconditional(encoders: TextEncoder, *, max_length: int) -> dict[str, torch.Tensor]:
    """The record of the empty text in its template."""
    return encode_captions(encoders, [""], max_length=max_length)[0]


def caption_shapes(
    configs: Mapping[str, Mapping[str, Any]], *, max_length: int
) -> dict[str, tuple[int, ...]]:
    width = configs["text_encoder"]["text_config"]["hidden_size"]
    return {"text_embeds": (max_length, len(_taps(configs["pipeline"])), width)}


load_autoencoder = autoencoders.load_video
encode_images = autoencoders.encode_frames
decode_latents = autoencoders.decode_frames
latent_shape = autoencoders.video_shape
latent_constants = autoencoders.channel_moments
normalise = autoencoders.standardised
denormalise = autoencoders.unstandardised


def distillation(base: Base) -> str | None:
    return "is_distilled is true" if base.settings.get("is_distilled") else None


def load_denoiser(base: Base, *, dtype: torch.dtype, device: Any) -> Any:
    """Its norms stay float32, whatever the dtype."""
    from diffusers import Krea2Transformer2DModel

    return load_model(Krea2Transformer2DModel, base, "transformer", dtype=dtype, device=device)


def conditioning(records: Sequence[Record], frames: Sequence[Frame]) -> Conditioning:
    """Texts padded to the longest; a mask only where something is padded."""
    return Conditioning(texts.masked([record["text_embeds"] for record in records]))


def predict(
    denoiser: Any,
    noisy: shapes.Latents,
    level: shapes.Sigma,
    *,
    conditioning: Conditioning,
    guidance: float,
) -> shapes.Prediction:
    """The velocity noise - latents; the denoiser is fed sigma itself, and no guidance."""
    height, width = noisy.shape[2:]
    dtype = denoiser.img_in.bias.dtype  # of a quantised base too: biases are not quantised
    text = conditioning["text_embeds"].to(dtype)
    prediction = denoiser(
        hidden_states=packing.packed(noisy).to(dtype),
        encoder_hidden_states=text,
        # Times 1000 and back as the pipeline does: the last bit of some sigmas depends on it.
        timestep=level * 1000 / 1000,
        position_ids=_positions(text.shape[1], height // 2, width // 2, device=noisy.device),
        encoder_attention_mask=conditioning.get("text_mask"),
        return_dict=False,
    )[0]
    return packing.unpacked(prediction, height=height, width=width)


def _positions(text: int, rows: int, columns: int, *, device: Any) -> Any:
    """Zeros for the text, then (0, row, column) of each image token, in float32."""
    import torch

    ids = torch.zeros(rows, columns, 3, device=device)
    ids[..., 1] += torch.arange(rows, device=device)[:, None]
    ids[..., 2] += torch.arange(columns, device=device)[None, :]
    return torch.cat([torch.zeros(text, 3, device=device), ids.reshape(-1, 3)])


def sampling_schedule(steps: int, *, latent_size: tuple[int, int], base: Base) -> Schedule:
    """Shifted by the number of image tokens; a distilled base by a fixed amount."""
    scheduler = base.component("scheduler").config
    tokens = packing.num_tokens(latent_size)
    mu = timesteps.mu_of_tokens(tokens, scheduler=scheduler, most=6400)
    distilled = base.settings.get("is_distilled")
    return schedules.flow_schedule(steps, scheduler=scheduler, mu=DISTILLED_MU if distilled else mu)


def guides(scale: float, *, base: Base) -> bool:
    return scale > 0


guide = guidance.beyond_conditional


def build_tiny(folder: Path) -> None:
    import torch
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        Krea2Pipeline,
        Krea2Transformer2DModel,
    )

    tokenizer = tiny.qwen_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(TINY["seed"])
        pipeline = Krea2Pipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(**TINY["scheduler"]),
            vae=AutoencoderKLQwenImage(**TINY["vae"]),
            text_encoder=_tiny_encoder(tokenizer),
            tokenizer=tokenizer,
            transformer=Krea2Transformer2DModel(**TINY["transformer"]),
            **TINY["pipeline"],
        )
    pipeline.save_pretrained(folder, safe_serialization=True)


def _tiny_encoder(tokenizer: Any) -> Any:
    from transformers import Qwen3VLConfig, Qwen3VLModel

    recipe = TINY["text_encoder"]
    parts: dict[str, Any] = {
        "text_config": {**recipe["text_config"], "vocab_size": len(tokenizer)},
        "vision_config": recipe["vision_config"],
        **tiny.qwen_ids(tokenizer),
    }
    return Qwen3VLModel(Qwen3VLConfig(**parts))
