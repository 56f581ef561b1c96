"""FLUX.1: a guidance-distilled flow transformer over packed 16-channel latents, CLIP-L and T5-XXL.

Facts are those of `diffusers.FluxPipeline`; the tests compare with that pipeline, unmodified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lib import autoencoders, naming, packing, shapes, tiny
from lib import guidance as guidance_rules
from lib.components import load_encoder, load_model
from lib.family import Conditioning, Facts, Frame, Record, Schedule
from lib.footprint import Costs
from lib.noise import Flow
from lib.schedules import flow_schedule
from lib.timesteps import mu_of_tokens

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from lib.hub import Base

FACTS = Facts(
    name="flux",
    pipelines=("FluxPipeline",),
    classes={
        "text_encoder": "CLIPTextModel",
        "tokenizer": "CLIPTokenizer",
        "text_encoder_2": "T5EncoderModel",
        "tokenizer_2": "T5TokenizerFast",
        "vae": "AutoencoderKL",
        "transformer": "FluxTransformer2DModel",
        "scheduler": "FlowMatchEulerDiscreteScheduler",
    },
    text_components=("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
    autoencoder="vae",
    denoiser="transformer",
    divisor=16,  # the autoencoder's 8 times the 2x2 packing
    encode_routine="image-4d/1",
    caption_rule={
        "template": None,
        "positions": "all",  # the pads reach the denoiser, unmasked
        "mask": None,
        "unconditional": "clip-and-t5-of-empty",
    },
    max_text_tokens=512,
    draws_mode=False,
    noise=Flow,
    auto_modes=("bf16", "fp8", "int8", "nf4"),
    costs=Costs(
        lists=("transformer_blocks", "single_transformer_blocks"),
        layers=("num_layers", "num_single_layers"),
        kept=(15.9, 13.3),
        weights=(11_901_408_320, 8_606_711_808),
    ),
    reference="black-forest-labs/FLUX.1-dev",
    diffusers="0.30",
    shared_inputs=(
        ("proj_mlp", "attn.to_q", "attn.to_k", "attn.to_v"),  # of single blocks
        ("to_q", "to_k", "to_v"),
        ("add_q_proj", "add_k_proj", "add_v_proj"),
    ),
)

NAMES = naming.Names(
    layouts={
        "kohya": naming.KOHYA_LAYOUT,
        "comfyui": naming.Layout("transformer.", naming.A_B, original=False, alpha=True),
    },
    original=naming.by_table(
        {
            **naming.double_attention(),
            "double_blocks.*.img_mlp.0": "transformer_blocks.*.ff.net.0.proj",
            "double_blocks.*.img_mlp.2": "transformer_blocks.*.ff.net.2",
            "double_blocks.*.txt_mlp.0": "transformer_blocks.*.ff_context.net.0.proj",
            "double_blocks.*.txt_mlp.2": "transformer_blocks.*.ff_context.net.2",
            "double_blocks.*.img_mod.lin": "transformer_blocks.*.norm1.linear",
            "double_blocks.*.txt_mod.lin": "transformer_blocks.*.norm1_context.linear",
            "single_blocks.*.linear1": (
                *(f"single_transformer_blocks.*.attn.to_{part}" for part in "qkv"),
                "single_transformer_blocks.*.proj_mlp",
            ),
            "single_blocks.*.linear2": "single_transformer_blocks.*.proj_out",
            "single_blocks.*.modulation.lin": "single_transformer_blocks.*.norm.linear",
            "img_in": "x_embedder",
            "txt_in": "context_embedder",
            "final_layer.linear": "proj_out",
            **naming.embedders("time_text_embed", time="timestep", vector="text"),
        }
    ),
    aliases=("transformer.", ""),
    lost={"kohya": ("img_in", "txt_in", "final_layer", "time_in", "vector_in", "guidance_in")},
    widths={"linear1": (3072, 3072, 3072, 12288)},
)

FULL_DEPTH = (19, 38)  # blocks of both kinds; a shallower base is nobody's distillation

TINY: Mapping[str, Any] = {
    "version": 1,
    "seed": 0,
    "scheduler": {"shift": 3.0, "use_dynamic_shifting": True},
    "vae": tiny.AUTOENCODER_16,
    "text_encoder": {
        "hidden_size": 32,
        "intermediate_size": 37,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 77,
        "hidden_act": "quick_gelu",
        "projection_dim": 32,
    },
    "text_encoder_2": {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 37,
        "num_layers": 2,
        "num_heads": 4,
        "feed_forward_proj": "gated-gelu",
        "is_encoder_decoder": False,
        "use_cache": False,
    },
    "transformer": {
        "in_channels": 64,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "guidance_embeds": True,
        "axes_dims_rope": [4, 6, 6],
    },
}


@dataclass(frozen=True)
class TextEncoders:
    """CLIP-L and T5 with their tokenizers, frozen, in evaluation mode."""

    clip: Any
    clip_tokenizer: Any
    t5: Any
    t5_tokenizer: Any


load_autoencoder = autoencoders.load_kl
encode_images = autoencoders.encode_pictures
decode_latents = autoencoders.decode_pictures
latent_shape = autoencoders.kl_shape
latent_constants = autoencoders.shift_and_scale
normalise, denormalise = autoencoders.scaled, autoencoders.unscaled
guide = guidance_rules.classifier_free  # of bases that have no guidance embedded


def load_text_encoders(base: Base, *, dtype: torch.dtype, device: Any) -> TextEncoders:
    from transformers import CLIPTextModel, CLIPTokenizer, T5EncoderModel, T5Tokenizer

    return TextEncoders(
        clip=load_encoder(CLIPTextModel, base, "text_encoder", dtype=dtype, device=device),
        clip_tokenizer=CLIPTokenizer.from_pretrained(base.folder("tokenizer")),
        t5=load_encoder(T5EncoderModel, base, "text_encoder_2", dtype=dtype, device=device),
        t5_tokenizer=T5Tokenizer.from_pretrained(base.folder("tokenizer_2")),
    )


def encode_captions(
    encoders: TextEncoders, captions: Sequence[str], *, max_length: int
) -> list[dict[str, torch.Tensor]]:
    """T5's last states at all `max_length` positions, and CLIP's pooled state."""
    import torch

    def ids(tokenizer: Any, length: int) -> Any:
        padded = tokenizer(
            list(captions),
            padding="max_length",
            max_length=length,
            truncation=True,
            return_tensors="pt",
        )
        return padded.input_ids.to(encoders.clip.device, non_blocking=True)

    with torch.no_grad():
        clip_ids = ids(encoders.clip_tokenizer, encoders.clip_tokenizer.model_max_length)
        pooled = encoders.clip(clip_ids, output_hidden_states=False).pooler_output
        states = encoders.t5(ids(encoders.t5_tokenizer, max_length), output_hidden_states=False)[0]
    return [
        {"text_embeds": text, "pooled_embeds": vector}
        for text, vector in zip(states, pooled, strict=True)
    ]


def encode_unconditional(encoders: TextEncoders, *, max_length: int) -> dict[str, torch.Tensor]:
    """The record of the empty text; -dev has no such branch of its own."""
    return encode_captions(encoders, [""], max_length=max_length)[0]


def caption_shapes(
    configs: Mapping[str, Mapping[str, Any]], *, max_length: int
) -> dict[str, tuple[int, ...]]:
    return {
        "text_embeds": (max_length, configs["text_encoder_2"]["d_model"]),
        "pooled_embeds": (configs["text_encoder"]["hidden_size"],),
    }


def distillation(base: Base) -> str | None:
    """-schnell: of full depth, no guidance embedded, the schedule not shifted at all."""
    scheduler = base.component("scheduler").config
    shifted = scheduler.get("use_dynamic_shifting", False) or scheduler.get("shift", 1.0) != 1.0
    if shifted or _embeds_guidance(base) or _depth(base) != FULL_DEPTH:
        return None
    return "its schedule is -schnell's"


def _depth(base: Base) -> tuple[int, int]:
    config = base.component("transformer").config
    names = ("num_layers", "num_single_layers")
    return tuple(config.get(name, full) for name, full in zip(names, FULL_DEPTH, strict=True))


def _embeds_guidance(base: Base) -> bool:
    """-dev does; -schnell does not."""
    return bool(base.component("transformer").config.get("guidance_embeds", False))


def load_denoiser(base: Base, *, dtype: torch.dtype, device: Any) -> Any:
    from diffusers import FluxTransformer2DModel

    return load_model(FluxTransformer2DModel, base, "transformer", dtype=dtype, device=device)


def conditioning(records: Sequence[Record], frames: Sequence[Frame]) -> Conditioning:
    import torch

    names = ("text_embeds", "pooled_embeds")
    return Conditioning({name: torch.stack([r[name] for r in records]) for name in names})


def predict(
    denoiser: Any,
    noisy: shapes.Latents,
    level: shapes.Sigma,
    *,
    conditioning: Conditioning,
    guidance: float,
) -> shapes.Prediction:
    """The velocity noise - latents; the denoiser is fed sigma itself."""
    import torch

    batch, _, height, width = noisy.shape
    dtype, device = denoiser.x_embedder.weight.dtype, noisy.device
    text = conditioning["text_embeds"].to(dtype)
    scale = torch.full((batch,), guidance, dtype=torch.float32, device=device)
    # Times 1000 and back as the pipeline does: the last bit of some sigmas depends on it.
    time = level * 1000 / 1000
    prediction = denoiser(
        hidden_states=packing.packed(noisy).to(dtype),
        timestep=time,
        guidance=scale if denoiser.config.guidance_embeds else None,
        pooled_projections=conditioning["pooled_embeds"].to(dtype),
        encoder_hidden_states=text,
        txt_ids=torch.zeros(text.shape[1], 3, dtype=dtype, device=device),
        img_ids=_image_ids(height // 2, width // 2, dtype=dtype, device=device),
        return_dict=False,
    )[0]
    return packing.unpacked(prediction, height=height, width=width)


def _image_ids(height: int, width: int, *, dtype: torch.dtype, device: Any) -> Any:
    """(0, row, column) of each image token."""
    import torch

    ids = torch.zeros(height, width, 3, device=device)
    ids[..., 1] += torch.arange(height, device=device)[:, None]
    ids[..., 2] += torch.arange(width, device=device)[None, :]
    return ids.reshape(-1, 3).to(dtype)


def sampling_schedule(steps: int, *, latent_size: tuple[int, int], base: Base) -> Schedule:
    scheduler = base.component("scheduler").config
    mu = mu_of_tokens(packing.num_tokens(latent_size), scheduler=scheduler)
    return flow_schedule(steps, scheduler=scheduler, mu=mu)


def guides(scale: float, *, base: Base) -> bool:
    return scale > 1 and not _embeds_guidance(base)


def build_tiny(folder: Path) -> None:
    import torch
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        FluxPipeline,
        FluxTransformer2DModel,
    )

    clip_tokenizer, t5_tokenizer = tiny.clip_tokenizer(), tiny.t5_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(TINY["seed"])
        pipeline = FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(**TINY["scheduler"]),
            vae=AutoencoderKL(**TINY["vae"]),
            text_encoder=tiny.clip_text_model(clip_tokenizer, TINY["text_encoder"]),
            tokenizer=clip_tokenizer,
            text_encoder_2=tiny.t5_encoder(t5_tokenizer, TINY["text_encoder_2"]),
            tokenizer_2=t5_tokenizer,
            transformer=FluxTransformer2DModel(**TINY["transformer"]),
        )
    pipeline.save_pretrained(folder, safe_serialization=True)
