"""SDXL: a UNet over 4-channel latents, both CLIPs, and how each picture was cut; DDPM noise.

Facts are those of `diffusers.StableDiffusionXLPipeline`; the tests compare with that pipeline,
unmodified.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lib import autoencoders, naming, shapes, tiny
from lib import guidance as guidance_rules
from lib.components import load_encoder, load_model
from lib.errors import InputRefused, Problem
from lib.family import Conditioning, Facts, Frame, Record, Schedule
from lib.footprint import Costs
from lib.noise import DDPM

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from lib.hub import Base

FACTS = Facts(
    name="sdxl",
    pipelines=("StableDiffusionXLPipeline",),
    classes={
        "text_encoder": "CLIPTextModel",
        "tokenizer": "CLIPTokenizer",
        "text_encoder_2": "CLIPTextModelWithProjection",
        "tokenizer_2": "CLIPTokenizer",
        "vae": "AutoencoderKL",
        "unet": "UNet2DConditionModel",
        "scheduler": "EulerDiscreteScheduler|EulerAncestralDiscreteScheduler|DDIMScheduler|"
        "DDPMScheduler|DPMSolverMultistepScheduler|PNDMScheduler|UniPCMultistepScheduler",
    },
    text_components=("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
    autoencoder="vae",
    denoiser="unet",
    divisor=64,  # the autoencoder's 8, twice halved in the UNet: 32; buckets of 64, as it was made
    encode_routine="image-4d/1",
    caption_rule={
        "template": None,
        "positions": "all",  # the pads reach the denoiser, unmasked
        "mask": None,
        "states": "penultimate, not normed; pooled is the second encoder's projection",
        "unconditional": "zeros",  # or the empty text's, as the base's index says
    },
    max_text_tokens=77,
    draws_mode=False,
    noise=DDPM,
    costs=Costs(
        layers=(),
        width=("block_out_channels",),
        checkpointed=53.0,
        token_side=8,
        kept=(650.0, 500.0),
        weights=(2_567_463_684, 2_183_987_200),
    ),
    reference="stabilityai/stable-diffusion-xl-base-1.0",
    diffusers="0.18",
    shared_inputs=(("attn1.to_q", "attn1.to_k", "attn1.to_v"), ("attn2.to_k", "attn2.to_v")),
    license="openrail++",
    latent_dtypes=("fp32",),  # its autoencoder's activations are made for no less
    caption_settings=("force_zeros_for_empty_prompt",),
)

TEXT_LAYER = -2  # of both encoders' hidden states


def _original_names(modules: Sequence[str]) -> naming.Groups:
    """The authors' UNet counts its parts through; a level has one more on the way up."""
    levels: dict[tuple[str, str], int] = {}
    for module in modules:
        if found := re.match(r"(down|up)_blocks\.(\d+)\.resnets\.(\d+)\.", module):
            side, level, place = found.groups()
            levels[side, level] = max(levels.get((side, level), 0), int(place) + 1)
    return {original: (m,) for m in modules if (original := _original_name(m, levels))}


def _original_name(module: str, levels: Mapping[tuple[str, str], int]) -> str | None:
    if module in _EMBEDDINGS:
        return _EMBEDDINGS[module]
    found = re.fullmatch(
        r"(?:(down|up)_blocks\.(\d+)|mid_block)\.(resnets|attentions)\.(\d+)\.(.+)", module
    )
    if found is None:
        return None
    side, level, kind, place, rest = found.groups()
    rest = {"time_emb_proj": "emb_layers.1"}.get(rest, rest)
    if side is None:
        return f"middle_block.{1 if kind == 'attentions' else 2 * int(place)}.{rest}"
    inner = 1 if kind == "attentions" else 0
    before = sum(levels[side, str(one)] for one in range(int(level)))
    if side == "down":  # the first is the input convolution, and each level ends in a smaller one
        return f"input_blocks.{1 + before + int(level) + int(place)}.{inner}.{rest}"
    return f"output_blocks.{before + int(place)}.{inner}.{rest}"


_EMBEDDINGS = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}

NAMES = naming.Names(
    layouts={"kohya": naming.KOHYA_LAYOUT, "comfyui": naming.KOHYA_LAYOUT},  # it reads kohya's
    original=_original_names,
    aliases=("lora_unet_",),
    one_alpha=True,
)

_CLIP: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 77,
    "projection_dim": 32,
}

TINY: Mapping[str, Any] = {
    "version": 1,
    "seed": 0,
    "pipeline": {"force_zeros_for_empty_prompt": True},
    "scheduler": {
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "prediction_type": "epsilon",
        "timestep_spacing": "leading",
        "steps_offset": 1,
    },
    "vae": {
        **tiny.AUTOENCODER_KL,
        "latent_channels": 4,
        "scaling_factor": 0.13025,
        "force_upcast": True,
    },
    "text_encoder": {**_CLIP, "hidden_act": "quick_gelu"},
    "text_encoder_2": {**_CLIP, "hidden_act": "gelu"},
    "unet": {
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "block_out_channels": [16, 32],
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
        "transformer_layers_per_block": [1, 1],
        "attention_head_dim": [2, 4],
        "use_linear_projection": True,
        "cross_attention_dim": 64,  # both encoders' widths
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 32 + 6 * 8,  # pooled text and six numbers
    },
}


@dataclass(frozen=True)
class TextEncoders:
    """CLIP-L and CLIP-G with their tokenizers, frozen, in evaluation mode."""

    first: Any
    first_tokenizer: Any
    second: Any
    second_tokenizer: Any
    zeros_for_empty: bool


load_autoencoder = autoencoders.load_kl
encode_images = autoencoders.encode_pictures
decode_latents = autoencoders.decode_pictures
latent_shape = autoencoders.kl_shape
latent_constants = autoencoders.shift_and_scale
normalise, denormalise = autoencoders.scaled, autoencoders.unscaled
guide = guidance_rules.classifier_free


def load_text_encoders(base: Base, *, dtype: torch.dtype, device: Any) -> TextEncoders:
    from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

    projected = CLIPTextModelWithProjection
    return TextEncoders(
        first=load_encoder(CLIPTextModel, base, "text_encoder", dtype=dtype, device=device),
        first_tokenizer=CLIPTokenizer.from_pretrained(base.folder("tokenizer")),
        second=load_encoder(projected, base, "text_encoder_2", dtype=dtype, device=device),
        second_tokenizer=CLIPTokenizer.from_pretrained(base.folder("tokenizer_2")),
        zeros_for_empty=base.settings.get("force_zeros_for_empty_prompt", True),
    )


def encode_captions(
    encoders: TextEncoders, captions: Sequence[str], *, max_length: int
) -> list[dict[str, torch.Tensor]]:
    """Both encoders' states side by side at all `max_length` positions, and the second's
    projection.
    """
    import torch

    def encoded(encoder: Any, tokenizer: Any) -> Any:
        padded = tokenizer(
            list(captions),
            padding="max_length",
            max_length=max_length,
            truncation=True,
            return_tensors="pt",
        )
        ids = padded.input_ids.to(encoder.device, non_blocking=True)
        return encoder(ids, output_hidden_states=True)

    with torch.no_grad():
        first = encoded(encoders.first, encoders.first_tokenizer)
        second = encoded(encoders.second, encoders.second_tokenizer)
        states = [output.hidden_states[TEXT_LAYER] for output in (first, second)]
        embeds, pooled = torch.concat(states, dim=-1), second.text_embeds
    return [
        {"text_embeds": text.clone(), "pooled_embeds": vector.clone()}
        for text, vector in zip(embeds, pooled, strict=True)
    ]


def encode_unconditional(encoders: TextEncoders, *, max_length: int) -> dict[str, torch.Tensor]:
    """Zeros instead of the empty text's states, unless the base's index says otherwise."""
    record = encode_captions(encoders, [""], max_length=max_length)[0]
    if not encoders.zeros_for_empty:
        return record
    return {name: tensor.new_zeros(tensor.shape) for name, tensor in record.items()}


def caption_shapes(
    configs: Mapping[str, Mapping[str, Any]], *, max_length: int
) -> dict[str, tuple[int, ...]]:
    first, second = configs["text_encoder"], configs["text_encoder_2"]
    return {
        "text_embeds": (max_length, first["hidden_size"] + second["hidden_size"]),
        "pooled_embeds": (second["projection_dim"],),
    }


def distillation(base: Base) -> str | None:
    """Turbo and Lightning sample from the last step down; latent consistency embeds guidance."""
    if _embeds_guidance(base):
        return "time_cond_proj_dim is set"
    scheduler = base.component("scheduler").config
    # A velocity base with no signal at the last step rightly starts there.
    noise = scheduler.get("prediction_type", "epsilon") == "epsilon"
    trailing = scheduler.get("timestep_spacing") == "trailing"
    return "timestep_spacing is trailing" if noise and trailing else None


def _embeds_guidance(base: Base) -> bool:
    return base.component("unet").config.get("time_cond_proj_dim") is not None


def load_denoiser(base: Base, *, dtype: torch.dtype, device: Any) -> Any:
    from diffusers import UNet2DConditionModel

    if _embeds_guidance(base):
        why = "its UNet is fed the guidance scale (time_cond_proj_dim), which SDXL's is not"
        raise InputRefused(Problem(f"family.base={base.reference}", why, FACTS.reference))
    return load_model(UNet2DConditionModel, base, "unet", dtype=dtype, device=device)


def conditioning(records: Sequence[Record], frames: Sequence[Frame]) -> Conditioning:
    """Time ids stay float32: bfloat16 turns 517 pixels into 516."""
    import torch

    cuts = [[*frame.original, *frame.crop, *frame.size] for frame in frames]
    tensors = {n: torch.stack([r[n] for r in records]) for n in ("text_embeds", "pooled_embeds")}
    return Conditioning({**tensors, "time_ids": torch.tensor(cuts, dtype=torch.float32)})


def predict(
    denoiser: Any,
    noisy: shapes.Latents,
    level: shapes.Sigma,
    *,
    conditioning: Conditioning,
    guidance: float,
) -> shapes.Prediction:
    """The noise or the velocity; `noisy` has unit variance and `level` is the step, 0 to 999."""
    dtype = denoiser.conv_in.weight.dtype
    added = {
        "text_embeds": conditioning["pooled_embeds"].to(dtype),
        "time_ids": conditioning["time_ids"],
    }
    return denoiser(
        noisy.to(dtype),
        level,
        encoder_hidden_states=conditioning["text_embeds"].to(dtype),
        added_cond_kwargs=added,
        return_dict=False,
    )[0]


def sampling_schedule(steps: int, *, latent_size: tuple[int, int], base: Base) -> Schedule:
    """Euler's, at the steps that the base's scheduler spaces out."""
    from diffusers import EulerDiscreteScheduler

    scheduler: Any = EulerDiscreteScheduler.from_config(dict(base.component("scheduler").config))
    scheduler.set_timesteps(steps)
    return Schedule(
        sigmas=tuple(scheduler.sigmas[:-1].tolist()),
        levels=tuple(scheduler.timesteps.tolist()),
        scale=float(scheduler.init_noise_sigma),
    )


def guides(scale: float, *, base: Base) -> bool:
    return scale > 1


def build_tiny(folder: Path) -> None:
    import torch
    from diffusers import (
        AutoencoderKL,
        EulerDiscreteScheduler,
        StableDiffusionXLPipeline,
        UNet2DConditionModel,
    )
    from transformers import CLIPTextModelWithProjection

    first_tokenizer, second_tokenizer = tiny.clip_tokenizer(), tiny.clip_tokenizer(pad_token="!")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(TINY["seed"])
        second = tiny.clip_text_model(second_tokenizer, TINY["text_encoder_2"]).config
        scheduler: Any = EulerDiscreteScheduler(**TINY["scheduler"])
        pipeline = StableDiffusionXLPipeline(
            scheduler=scheduler,
            vae=AutoencoderKL(**TINY["vae"]),
            text_encoder=tiny.clip_text_model(first_tokenizer, TINY["text_encoder"]),
            tokenizer=first_tokenizer,
            text_encoder_2=CLIPTextModelWithProjection(second),
            tokenizer_2=second_tokenizer,
            unet=UNet2DConditionModel(**TINY["unet"]),
            add_watermarker=False,
            **TINY["pipeline"],
        )
    pipeline.save_pretrained(folder, safe_serialization=True)
