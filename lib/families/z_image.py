"""Z-Image: a single-stream flow transformer that takes each picture and caption by itself; Qwen3.

Facts are those of `diffusers.ZImagePipeline`; the tests compare with that pipeline, unmodified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lib import autoencoders, naming, packing, shapes, texts, tiny
from lib import guidance as guidance_rules
from lib.components import load_encoder, load_model
from lib.errors import InputRefused, Problem
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
    name="z_image",
    pipelines=("ZImagePipeline",),
    classes={
        "text_encoder": "Qwen3Model|Qwen3ForCausalLM",
        "tokenizer": "Qwen2Tokenizer",
        "vae": "AutoencoderKL",
        "transformer": "ZImageTransformer2DModel",
        "scheduler": "FlowMatchEulerDiscreteScheduler",
    },
    text_components=("text_encoder", "tokenizer"),
    autoencoder="vae",
    denoiser="transformer",
    divisor=16,  # the autoencoder's 8 times the 2x2 patches
    encode_routine="image-4d/1",
    caption_rule={
        "template": "the tokenizer's chat, one user's turn, thinking on",
        "positions": "valid",  # the denoiser pads by itself, with tokens that it has learnt
        "mask": None,
        "states": "penultimate",
        "unconditional": "empty-in-template",
    },
    max_text_tokens=512,
    draws_mode=True,
    noise=Flow,
    costs=Costs(
        lists=("layers", "noise_refiner", "context_refiner"),
        layers=("n_layers", "n_refiner_layers"),
        width=("dim",),
        kept=(31.1, 15.6),
        weights=(6_154_908_736, 6_016_204_800),
    ),
    reference="Tongyi-MAI/Z-Image",
    diffusers="0.36",
    shared_inputs=(("to_q", "to_k", "to_v"), ("w1", "w3")),
    license="apache-2.0",
)

TEXT_LAYER = -2  # of the encoder's hidden states
THINKING = True  # the template leaves the answer open, instead of an empty thought
TURBO_SHIFT = 3.0  # of the distilled base's schedule; the dense one's is 6

_BLOCKS = ("layers.*", "noise_refiner.*", "context_refiner.*")
_OWN = ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3", "adaLN_modulation.0")

NAMES = naming.Names(
    layouts={
        "kohya": naming.KOHYA_LAYOUT,
        "comfyui": naming.Layout("diffusion_model.", naming.A_B, original=False, alpha=True),
    },
    original=naming.by_table(
        {
            **{
                f"{block}.attention.qkv": tuple(f"{block}.attention.to_{part}" for part in "qkv")
                for block in _BLOCKS
            },
            **{f"{block}.attention.out": f"{block}.attention.to_out.0" for block in _BLOCKS},
            **{f"{block}.{name}": f"{block}.{name}" for block in _BLOCKS for name in _OWN},
            **{name: name for name in ("t_embedder.mlp.0", "t_embedder.mlp.2", "cap_embedder.1")},
            "x_embedder": "all_x_embedder.2-1",
            "final_layer.linear": "all_final_layer.2-1.linear",
            "final_layer.adaLN_modulation.1": "all_final_layer.2-1.adaLN_modulation.1",
        }
    ),
    aliases=("diffusion_model.", "transformer.", ""),
    lost={"kohya": ("x_embedder", "final_layer")},
)

TINY: Mapping[str, Any] = {
    "version": 1,
    "seed": 0,
    "scheduler": {"shift": 6.0, "use_dynamic_shifting": False},
    "vae": tiny.AUTOENCODER_16,
    "text_encoder": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 2048,
    },
    "transformer": {
        "in_channels": 16,
        "dim": 32,
        "n_layers": 2,
        "n_refiner_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 2,
        "cap_feat_dim": 32,
        "axes_dims": [4, 6, 6],  # add up to a head's width
        "axes_lens": [1024, 512, 512],  # the first must exceed the longest caption, padded
    },
}


@dataclass(frozen=True)
class TextEncoders:
    """Qwen3 with its tokenizer, frozen, in evaluation mode."""

    encoder: Any
    tokenizer: Any


load_autoencoder = autoencoders.load_kl
encode_images = autoencoders.encode_pictures
decode_latents = autoencoders.decode_pictures
latent_shape = autoencoders.kl_shape
latent_constants = autoencoders.shift_and_scale
normalise, denormalise = autoencoders.scaled, autoencoders.unscaled
guide = guidance_rules.beyond_conditional


def load_text_encoders(base: Base, *, dtype: torch.dtype, device: Any) -> TextEncoders:
    from transformers import Qwen2Tokenizer, Qwen3Model

    return TextEncoders(
        encoder=load_encoder(Qwen3Model, base, "text_encoder", dtype=dtype, device=device),
        tokenizer=Qwen2Tokenizer.from_pretrained(base.folder("tokenizer")),
    )


def encode_captions(
    encoders: TextEncoders, captions: Sequence[str], *, max_length: int
) -> list[dict[str, torch.Tensor]]:
    """The states of each caption's own tokens, those of the chat template among them."""
    import torch

    _check_room(encoders.tokenizer, max_length)
    inputs = encoders.tokenizer(
        [_in_template(encoders.tokenizer, caption) for caption in captions],
        padding="max_length",
        max_length=max_length,
        truncation=True,
        return_tensors="pt",
    )
    mask = inputs.attention_mask.bool()
    with torch.no_grad():
        states = encoders.encoder(
            input_ids=inputs.input_ids.to(encoders.encoder.device, non_blocking=True),
            attention_mask=mask.to(encoders.encoder.device, non_blocking=True),
            output_hidden_states=True,
        ).hidden_states[TEXT_LAYER]
    return [
        {"text_embeds": texts.kept(text, valid)} for text, valid in zip(states, mask, strict=True)
    ]


def _check_room(tokenizer: Any, max_length: int) -> None:
    """Cut any shorter, the template's own tokens would be all that is left of every caption."""
    template = len(tokenizer(_in_template(tokenizer, "")).input_ids)
    if max_length <= template:
        why = f"leaves no room for a caption: the template takes {template}"
        allowed = f"{template + 1} to {FACTS.max_text_tokens}"
        raise InputRefused(Problem(f"captions.max_length={max_length}", why, allowed))


def _in_template(tokenizer: Any, caption: str) -> str:
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": caption}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=THINKING,
    )


def encode_unconditional(encoders: TextEncoders, *, max_length: int) -> dict[str, torch.Tensor]:
    """The empty text's record, in the template as any other."""
    return encode_captions(encoders, [""], max_length=max_length)[0]


def caption_shapes(
    configs: Mapping[str, Mapping[str, Any]], *, max_length: int
) -> dict[str, tuple[int, ...]]:
    return {"text_embeds": (max_length, configs["text_encoder"]["hidden_size"])}


def distillation(base: Base) -> str | None:
    """Turbo's schedule is shifted less than the dense base's."""
    shift = base.component("scheduler").config.get("shift", 1.0)
    return f"its schedule's shift is {shift}" if shift == TURBO_SHIFT else None


def load_denoiser(base: Base, *, dtype: torch.dtype, device: Any) -> Any:
    from diffusers import ZImageTransformer2DModel

    return load_model(ZImageTransformer2DModel, base, "transformer", dtype=dtype, device=device)


def conditioning(records: Sequence[Record], frames: Sequence[Frame]) -> Conditioning:
    """Stacked for the way to the device alone; `predict` cuts the padding off."""
    text, lengths = texts.padded([record["text_embeds"] for record in records])
    return Conditioning({"text_embeds": text}, lengths)


def predict(
    denoiser: Any,
    noisy: shapes.Latents,
    level: shapes.Sigma,
    *,
    conditioning: Conditioning,
    guidance: float,
) -> shapes.Prediction:
    """The velocity noise - latents; the denoiser is fed 1 - sigma and answers its negative."""
    import torch

    dtype = denoiser.x_pad_token.dtype
    text = conditioning["text_embeds"].to(dtype)
    captions = [row[:length] for row, length in zip(text, conditioning.lengths, strict=True)]
    # By way of a thousand as the pipeline does: the last bit of some times depends on it.
    time = (1000 - level * 1000) / 1000
    pictures = list(noisy.to(dtype).unsqueeze(2).unbind(dim=0))
    answers = denoiser(pictures, time, captions, return_dict=False)[0]
    return -torch.stack(answers).squeeze(2)


def sampling_schedule(steps: int, *, latent_size: tuple[int, int], base: Base) -> Schedule:
    """As the pipeline makes it: float32 from the start, another last bit than numpy's linspace."""
    import torch

    scheduler = base.component("scheduler").config
    return flow_schedule(
        steps,
        scheduler=scheduler,
        mu=mu_of_tokens(packing.num_tokens(latent_size), scheduler=scheduler),
        spaced=torch.linspace(1.0, 1 / steps, steps).tolist(),
    )


def guides(scale: float, *, base: Base) -> bool:
    return scale > 0


def build_tiny(folder: Path) -> None:
    import torch
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        ZImagePipeline,
        ZImageTransformer2DModel,
    )
    from transformers import Qwen3Config, Qwen3Model

    tokenizer = tiny.qwen_tokenizer()
    ids = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    text = Qwen3Config(vocab_size=len(tokenizer), **ids, **TINY["text_encoder"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(TINY["seed"])
        transformer = ZImageTransformer2DModel(**TINY["transformer"])
        for pad in (transformer.x_pad_token, transformer.cap_pad_token):
            torch.nn.init.normal_(pad, std=0.02)  # learnt in a real one; made as zeros
        pipeline = ZImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(**TINY["scheduler"]),
            vae=AutoencoderKL(**TINY["vae"]),
            text_encoder=Qwen3Model(text),
            tokenizer=tokenizer,
            transformer=transformer,
        )
    pipeline.save_pretrained(folder, safe_serialization=True)
