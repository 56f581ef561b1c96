"""Qwen-Image: a flow transformer over packed latents of a video autoencoder, told by Qwen2.5-VL.

Facts are those of `diffusers.QwenImagePipeline`; the tests compare with that pipeline, unmodified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lib import autoencoders, guidance, naming, packing, schedules, shapes, texts, timesteps, tiny
from lib.components import load_encoder, load_model
from lib.family import Conditioning, Facts, Frame, Record, Schedule
from lib.footprint import Costs
from lib.noise import Flow

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from lib.hub import Base

TEMPLATE = texts.PREFIX + "{}" + texts.SUFFIX
TEMPLATE_TOKENS = texts.PREFIX_TOKENS  # before the caption; their states are dropped
MOST_TOKENS = 1024  # the pipeline encodes up to so many and cuts to its length afterwards

FACTS = Facts(
    name="qwen_image",
    pipelines=("QwenImagePipeline",),
    classes={
        "text_encoder": "Qwen2_5_VLForConditionalGeneration",
        "tokenizer": "Qwen2Tokenizer",
        "vae": "AutoencoderKLQwenImage",
        "transformer": "QwenImageTransformer2DModel",
        "scheduler": "FlowMatchEulerDiscreteScheduler",
    },
    text_components=("text_encoder", "tokenizer"),
    autoencoder="vae",
    denoiser="transformer",
    divisor=16,  # the autoencoder's 8 times the 2x2 packing
    encode_routine="video-5d/1",
    caption_rule={
        "template": TEMPLATE,
        "positions": "valid",
        "mask": "padding",
        "unconditional": "qwen-of-space",
    },
    max_text_tokens=MOST_TOKENS,
    draws_mode=False,
    noise=Flow,
    costs=Costs(kept=(20.8, 14.1), weights=(20_430_401_088, 13_589_544_960)),
    reference="Qwen/Qwen-Image",
    diffusers="0.35.0",
    shared_inputs=(("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")),
    license="apache-2.0",
)

NAMES = naming.Names(
    layouts={
        "kohya": naming.KOHYA_LAYOUT,
        # Without `.alpha`, which some readers drop and others refuse beside these halves.
        "comfyui": naming.Layout("diffusion_model.", naming.A_B, original=False),
    },
    original=naming.same_names,
    aliases=("diffusion_model.", "transformer.", ""),
)

TINY: Mapping[str, Any] = {
    "version": 1,
    "seed": 0,
    "scheduler": {
        "use_dynamic_shifting": True,
        "base_shift": 0.5,
        "max_shift": 0.9,
        "base_image_seq_len": 256,
        "max_image_seq_len": 8192,
        "shift_terminal": 0.02,
    },
    "vae": tiny.AUTOENCODER_VIDEO,
    "text_encoder": {
        "text_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [2, 1, 1],
                "rope_theta": 1e6,
            },
        },
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 4,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [0],
            "patch_size": 14,
        },
    },
    "transformer": {
        "in_channels": 64,
        "out_channels": 16,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "axes_dims_rope": [4, 6, 6],
    },
}


@dataclass(frozen=True)
class TextEncoder:
    """Qwen2.5-VL with its tokenizer, frozen, in evaluation mode."""

    model: Any
    tokenizer: Any


def load_text_encoders(base: Base, *, dtype: torch.dtype, device: Any) -> TextEncoder:
    from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

    return TextEncoder(
        model=load_encoder(
            Qwen2_5_VLForConditionalGeneration, base, "text_encoder", dtype=dtype, device=device
        ),
        tokenizer=Qwen2Tokenizer.from_pretrained(base.folder("tokenizer")),
    )


def encode_captions(
    encoders: TextEncoder, captions: Sequence[str], *, max_length: int
) -> list[dict[str, torch.Tensor]]:
    """The last states of what follows the template's first tokens, at most `max_length` of them."""
    import torch

    tokens = encoders.tokenizer(
        [TEMPLATE.format(caption) for caption in captions],
        max_length=MOST_TOKENS + TEMPLATE_TOKENS,
        padding=True,
        truncation=True,
        return_tensors="pt",
    )
    device = encoders.model.device
    inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in tokens.items()}
    with torch.no_grad():
        # The model beneath the language head: logits over the vocabulary would fill the memory.
        states = encoders.model.model(**inputs, use_cache=False).last_hidden_state
    return [
        {"text_embeds": texts.kept(text, valid)[TEMPLATE_TOKENS:][:max_length].clone()}
        for text, valid in zip(states, tokens["attention_mask"], strict=True)
    ]


def encode_unconditional(encoders: TextEncoder, *, max_length: int) -> dict[str, torch.Tensor]:
    """The record of one space, the vendor's negative prompt."""
    return encode_captions(encoders, [" "], max_length=max_length)[0]


def caption_shapes(
    configs: Mapping[str, Mapping[str, Any]], *, max_length: int
) -> dict[str, tuple[int, ...]]:
    width = configs["text_encoder"]["text_config"]["hidden_size"]
    return {"text_embeds": (max_length, width)}


load_autoencoder = autoencoders.load_video
encode_images = autoencoders.encode_frames
decode_latents = autoencoders.decode_frames
latent_shape = autoencoders.video_shape
latent_constants = autoencoders.channel_moments
normalise = autoencoders.standardised
denormalise = autoencoders.unstandardised


def distillation(base: Base) -> str | None:
    """None: few-step variants of this family are adapters, not bases."""
    return None


def load_denoiser(base: Base, *, dtype: torch.dtype, device: Any) -> Any:
    from diffusers import QwenImageTransformer2DModel

    make_recordable()
    return load_model(QwenImageTransformer2DModel, base, "transformer", dtype=dtype, device=device)


def make_recordable() -> None:
    """Put our length of texts in the place of diffusers'.

    Its own makes a tensor of a number for each padded batch: a copy that no CUDA graph can record,
    for lengths that nothing reads.
    """
    from diffusers.models.transformers import transformer_qwenimage

    transformer_qwenimage.compute_text_seq_len_from_mask = _text_length


def _text_length(states: Any, mask: Any) -> tuple[int, None, Any]:
    """The length that positions are made for, and the mask as truth values."""
    return states.shape[1], None, None if mask is None else mask.bool()


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
    batch, _, height, width = noisy.shape
    dtype = denoiser.img_in.bias.dtype  # of a quantised base too: biases are not quantised
    prediction = denoiser(
        hidden_states=packing.packed(noisy).to(dtype),
        # Times 1000 and back as the pipeline does: the last bit of some sigmas depends on it.
        timestep=level * 1000 / 1000,
        guidance=None,
        encoder_hidden_states=conditioning["text_embeds"].to(dtype),
        encoder_hidden_states_mask=conditioning.get("text_mask"),
        img_shapes=[[(1, height // 2, width // 2)]] * batch,
        return_dict=False,
    )[0]
    return packing.unpacked(prediction, height=height, width=width)


def sampling_schedule(steps: int, *, latent_size: tuple[int, int], base: Base) -> Schedule:
    """Shifted by the number of image tokens, and stretched to the base's last sigma."""
    if steps == 1:  # where the stretch is 0 / 0, and the pipeline draws no number
        return Schedule((1.0,), levels=(1.0,))
    scheduler = base.component("scheduler").config
    tokens = packing.num_tokens(latent_size)
    mu = timesteps.mu_of_tokens(tokens, scheduler=scheduler)
    return schedules.flow_schedule(steps, scheduler=scheduler, mu=mu)


def guides(scale: float, *, base: Base) -> bool:
    return scale > 1


def guide(
    conditional: shapes.Prediction, unconditional: shapes.Prediction, *, scale: float
) -> shapes.Prediction:
    """u + s (c - u), each image token scaled to the length that it has in c."""
    combined = packing.packed(guidance.classifier_free(conditional, unconditional, scale=scale))
    length = packing.packed(conditional.float()).norm(dim=-1, keepdim=True)
    scaled = combined * (length / combined.norm(dim=-1, keepdim=True))
    height, width = conditional.shape[2:]
    return packing.unpacked(scaled, height=height, width=width)


def build_tiny(folder: Path) -> None:
    import torch
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )

    tokenizer = tiny.qwen_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(TINY["seed"])
        pipeline = QwenImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(**TINY["scheduler"]),
            vae=AutoencoderKLQwenImage(**TINY["vae"]),
            text_encoder=_tiny_encoder(tokenizer),
            tokenizer=tokenizer,
            transformer=QwenImageTransformer2DModel(**TINY["transformer"]),
        )
    pipeline.save_pretrained(folder, safe_serialization=True)


def _tiny_encoder(tokenizer: Any) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    recipe = TINY["text_encoder"]
    text = {**recipe["text_config"], "vocab_size": len(tokenizer), "bos_token_id": None, **ids}
    parts: dict[str, Any] = {
        "text_config": text,
        "vision_config": recipe["vision_config"],
        **tiny.qwen_ids(tokenizer),
    }
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**parts))
