"""FLUX.2 klein: a flow transformer over patchified latents, with Qwen3 read at three depths.

Facts are those of `diffusers.Flux2KleinPipeline`; the tests compare with that pipeline, unmodified.
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

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from lib.hub import Base

TEXT_LAYERS = (9, 18, 27)  # of the encoder's hidden states, side by side

FACTS = Facts(
    name="flux2_klein",
    pipelines=("Flux2KleinPipeline",),
    classes={
        "text_encoder": "Qwen3ForCausalLM",
        "tokenizer": "Qwen2TokenizerFast",
        "vae": "AutoencoderKLFlux2",
        "transformer": "Flux2Transformer2DModel",
        "scheduler": "FlowMatchEulerDiscreteScheduler",
    },
    text_components=("text_encoder", "tokenizer"),
    autoencoder="vae",
    denoiser="transformer",
    divisor=16,  # the autoencoder's 8 times the 2x2 patches
    encode_routine="image-4d/1",
    caption_rule={
        "template": "the tokenizer's chat, one user's turn, thinking off",
        "positions": "all",  # the pads reach the denoiser, unmasked
        "mask": None,
        "states": list(TEXT_LAYERS),
        "unconditional": "empty-in-template",
    },
    max_text_tokens=512,
    draws_mode=True,
    noise=Flow,
    costs=Costs(
        lists=("transformer_blocks", "single_transformer_blocks"),
        layers=("num_layers", "num_single_layers"),
        kept=(23.0, 17.6),
        weights=(3_875_544_576, 3_680_501_760),
    ),
    reference="black-forest-labs/FLUX.2-klein-base-4B",
    diffusers="0.37",
    shared_inputs=(("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")),
    license="apache-2.0",
)

NAMES = naming.Names(
    layouts={
        "kohya": naming.KOHYA_LAYOUT,
        # Without `.alpha`, which diffusers' converter refuses.
        "comfyui": naming.Layout("diffusion_model.", naming.A_B, original=True),
    },
    original=naming.by_table(
        {
            **naming.double_attention(),
            "double_blocks.*.img_mlp.0": "transformer_blocks.*.ff.linear_in",
            "double_blocks.*.img_mlp.2": "transformer_blocks.*.ff.linear_out",
            "double_blocks.*.txt_mlp.0": "transformer_blocks.*.ff_context.linear_in",
            "double_blocks.*.txt_mlp.2": "transformer_blocks.*.ff_context.linear_out",
            "single_blocks.*.linear1": "single_transformer_blocks.*.attn.to_qkv_mlp_proj",
            "single_blocks.*.linear2": "single_transformer_blocks.*.attn.to_out",
            "single_stream_modulation.lin": "single_stream_modulation.linear",
            "double_stream_modulation_img.lin": "double_stream_modulation_img.linear",
            "double_stream_modulation_txt.lin": "double_stream_modulation_txt.linear",
            "img_in": "x_embedder",
            "txt_in": "context_embedder",
            "final_layer.linear": "proj_out",
            **naming.embedders("time_guidance_embed", time="timestep"),
        }
    ),
    aliases=("transformer.", ""),
    lost={"kohya": ("guidance_in", "single_stream_modulation", "double_stream_modulation")},
)

TINY: Mapping[str, Any] = {
    "version": 1,
    "seed": 0,
    "pipeline": {"is_distilled": False},
    "scheduler": {"use_dynamic_shifting": True, "time_shift_type": "exponential"},
    "vae": {**tiny.AUTOENCODER_KL, "latent_channels": 8, "batch_norm_eps": 1e-4},
    "text_encoder": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 28,  # as deep as the last one that is read
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
    "transformer": {
        "in_channels": 32,
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 48,
        "timestep_guidance_channels": 32,
        "axes_dims_rope": [4, 4, 4, 4],
        "guidance_embeds": False,
    },
}


@dataclass(frozen=True)
class TextEncoders:
    """Qwen3 with its tokenizer, frozen, in evaluation mode."""

    encoder: Any
    tokenizer: Any


encode_images = autoencoders.encode_pictures
decode_latents = autoencoders.decode_pictures
latent_shape = autoencoders.kl_shape
guide = guidance_rules.classifier_free


def load_text_encoders(base: Base, *, dtype: torch.dtype, device: Any) -> TextEncoders:
    from transformers import Qwen2Tokenizer, Qwen3ForCausalLM

    return TextEncoders(
        encoder=load_encoder(Qwen3ForCausalLM, base, "text_encoder", dtype=dtype, device=device),
        tokenizer=Qwen2Tokenizer.from_pretrained(base.folder("tokenizer")),
    )


def encode_captions(
    encoders: TextEncoders, captions: Sequence[str], *, max_length: int
) -> list[dict[str, torch.Tensor]]:
    """Three layers' states side by side at all `max_length` positions."""
    import torch
    from einops import rearrange

    inputs = encoders.tokenizer(
        [_templated(encoders.tokenizer, caption) for caption in captions],
        return_tensors="pt",
        padding="max_length",
        truncation=True,
        max_length=max_length,
    ).to(encoders.encoder.device)
    with torch.no_grad():
        # The model beneath the language head: nothing here asks for logits over the vocabulary.
        states = encoders.encoder.model(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            output_hidden_states=True,
            use_cache=False,
        ).hidden_states
    taken = torch.stack([states[layer] for layer in TEXT_LAYERS])
    side_by_side = rearrange(taken, "k b l d -> b l (k d)")
    return [{"text_embeds": text.clone()} for text in side_by_side]


def _templated(tokenizer: Any, caption: str) -> str:
    turn = [{"role": "user", "content": caption}]
    return tokenizer.apply_chat_template(
        turn, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )


def encode_unconditional(encoders: TextEncoders, *, max_length: int) -> dict[str, torch.Tensor]:
    return encode_captions(encoders, [""], max_length=max_length)[0]


def caption_shapes(
    configs: Mapping[str, Mapping[str, Any]], *, max_length: int
) -> dict[str, tuple[int, ...]]:
    width = len(TEXT_LAYERS) * configs["text_encoder"]["hidden_size"]
    return {"text_embeds": (max_length, width)}


def load_autoencoder(base: Base, *, dtype: torch.dtype, device: Any) -> Any:
    from diffusers import AutoencoderKLFlux2

    return load_model(AutoencoderKLFlux2, base, "vae", dtype=dtype, device=device)


def latent_constants(base: Base) -> dict[str, Any]:
    """The running moments of the autoencoder's batch norm, which lie beside its weights."""
    moments = base.numbers("vae", "bn.running_mean", "bn.running_var")
    return {
        "mean": moments["bn.running_mean"],
        "variance": moments["bn.running_var"],
        "eps": base.component("vae").config["batch_norm_eps"],
    }


def normalise(raw_latents: shapes.RawLatents, constants: Mapping[str, Any]) -> shapes.Latents:
    """Patchified 2x2 first: noise is drawn in that layout."""
    from einops import rearrange

    patches = rearrange(raw_latents, "b c (h p) (w q) -> b (c p q) h w", p=2, q=2)
    mean, std = _moments(patches, constants)
    return (patches - mean) / std


def denormalise(latents: shapes.Latents, constants: Mapping[str, Any]) -> shapes.RawLatents:
    from einops import rearrange

    mean, std = _moments(latents, constants)
    return rearrange(latents * std + mean, "b (c p q) h w -> b c (h p) (w q)", p=2, q=2)


def _moments(patches: Any, constants: Mapping[str, Any]) -> tuple[Any, Any]:
    mean = patches.new_tensor(constants["mean"]).view(1, -1, 1, 1)
    variance = patches.new_tensor(constants["variance"]).view(1, -1, 1, 1)
    return mean, (variance + constants["eps"]).sqrt()


def distillation(base: Base) -> str | None:
    return "is_distilled is true" if base.settings.get("is_distilled") else None


def load_denoiser(base: Base, *, dtype: torch.dtype, device: Any) -> Any:
    from diffusers import Flux2Transformer2DModel

    return load_model(Flux2Transformer2DModel, base, "transformer", dtype=dtype, device=device)


def conditioning(records: Sequence[Record], frames: Sequence[Frame]) -> Conditioning:
    import torch

    return Conditioning({"text_embeds": torch.stack([r["text_embeds"] for r in records])})


def predict(
    denoiser: Any,
    noisy: shapes.Latents,
    level: shapes.Sigma,
    *,
    conditioning: Conditioning,
    guidance: float,
) -> shapes.Prediction:
    """The velocity noise - latents; the denoiser is fed sigma itself, and no guidance."""
    from einops import rearrange

    batch, _, height, width = noisy.shape
    dtype, device = denoiser.x_embedder.weight.dtype, noisy.device
    text = conditioning["text_embeds"].to(dtype)
    prediction = denoiser(
        hidden_states=rearrange(noisy, "b c h w -> b (h w) c").to(dtype),
        timestep=level * 1000 / 1000,  # as the pipeline does: the last bit of some depends on it
        guidance=None,
        encoder_hidden_states=text,
        txt_ids=_ids(1, 1, text.shape[1], batch=batch, device=device),
        img_ids=_ids(height, width, 1, batch=batch, device=device),
        return_dict=False,
    )[0]
    return rearrange(prediction, "b (h w) c -> b c h w", h=height, w=width)


def _ids(height: int, width: int, length: int, *, batch: int, device: Any) -> Any:
    """(0, row, column, text position) of each token: b n 4."""
    import torch

    axes = (torch.arange(size, device=device) for size in (1, height, width, length))
    return torch.cartesian_prod(*axes).expand(batch, -1, -1)


def sampling_schedule(steps: int, *, latent_size: tuple[int, int], base: Base) -> Schedule:
    scheduler = base.component("scheduler").config
    return flow_schedule(steps, scheduler=scheduler, mu=_mu(packing.num_tokens(latent_size), steps))


def _mu(tokens: int, steps: int) -> float:
    """The vendor's fit: linear in tokens at 10 and at 200 steps, and between them in steps."""
    at_200 = 0.00016927 * tokens + 0.45666666
    if tokens > 4300:
        return at_200
    at_10 = 8.73809524e-05 * tokens + 1.89833333
    slope = (at_200 - at_10) / 190.0
    return slope * steps + (at_200 - 200.0 * slope)


def guides(scale: float, *, base: Base) -> bool:
    return scale > 1 and not base.settings.get("is_distilled")


def build_tiny(folder: Path) -> None:
    import torch
    from diffusers import (
        AutoencoderKLFlux2,
        FlowMatchEulerDiscreteScheduler,
        Flux2KleinPipeline,
        Flux2Transformer2DModel,
    )
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = tiny.qwen_tokenizer()
    ids = {name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id")}
    text_config: Any = {"vocab_size": len(tokenizer), "bos_token_id": None, **ids}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(TINY["seed"])
        vae: Any = AutoencoderKLFlux2(**TINY["vae"])
        vae.bn.running_mean.normal_(std=0.5)  # else a batch norm that changes nothing
        vae.bn.running_var.uniform_(0.5, 2.0)
        pipeline = Flux2KleinPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(**TINY["scheduler"]),
            vae=vae,
            text_encoder=Qwen3ForCausalLM(Qwen3Config(**text_config, **TINY["text_encoder"])),
            tokenizer=tokenizer,
            transformer=Flux2Transformer2DModel(**TINY["transformer"]),
            **TINY["pipeline"],
        )
    pipeline.save_pretrained(folder, safe_serialization=True)
