"""Text encoders and autoencoders at full size, and bases of them with random weights.

In the form of a family's TINY. Values are those of the published config.json files, as public code
quotes them; vocabularies are those of the tiny tokenizers, so embeddings alone are small.
"""

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from bench.full_size_bases import FULL
from bench.full_size_flux import CLIP, T5, VAE
from lib.family import Family
from lib.quiet import without_library_bars

_KL_SHAPE = {
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "sample_size": 1024,
    "mid_block_add_attention": True,
}
_KL_4 = {**_KL_SHAPE, "latent_channels": 4, "scaling_factor": 0.13025, "force_upcast": True}
# Qwen-Image's vae/config.json: the class's defaults.
_VIDEO = {
    "base_dim": 96,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "temperal_downsample": [False, True, True],
}
_CLIP_G = {
    **CLIP,
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "hidden_act": "gelu",
    "projection_dim": 1280,
}
_QWEN3_4B = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}
_QWEN25_VL_7B = {
    "text_config": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128000,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [16, 24, 24],
            "rope_theta": 1e6,
        },
    },
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "patch_size": 14,
    },
}
_QWEN3_VL_4B = {
    "text_config": {
        **_QWEN3_4B,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
            "rope_theta": 5e6,
        },
    },
    "vision_config": {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "out_hidden_size": 2560,
        "deepstack_visual_indexes": [5, 11, 17],
        "num_position_embeddings": 2304,
    },
}

ENCODERS: Mapping[str, Mapping[str, Any]] = {
    "flux": {"text_encoder": CLIP, "text_encoder_2": T5, "vae": VAE},
    "sdxl": {"text_encoder": CLIP, "text_encoder_2": _CLIP_G, "vae": _KL_4},
    "qwen_image": {"text_encoder": _QWEN25_VL_7B, "vae": _VIDEO},
    "z_image": {"text_encoder": _QWEN3_4B, "vae": VAE},
    "krea2": {
        "text_encoder": _QWEN3_VL_4B,
        "vae": _VIDEO,
        "pipeline": {"text_encoder_select_layers": [2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35]},
    },
    "flux2_klein": {"text_encoder": _QWEN3_4B, "vae": {**_KL_SHAPE, "latent_channels": 32}},
}
# What of an encoder does not show in the shapes of its records: cut short, it is made at once.
_SHORT = {"num_layers": 1, "num_hidden_layers": 2, "d_ff": 64, "intermediate_size": 64, "depth": 1}


def with_encoders(family: Family) -> Mapping[str, Any]:
    """The recipe of full-size encoders and autoencoder beside a tiny denoiser."""
    return _merged(family.TINY, ENCODERS[family.FACTS.name])


def with_denoiser(family: Family) -> Mapping[str, Any]:
    """That of a full-size denoiser, beside encoders as wide as it needs and as short as they go."""
    name = family.FACTS.name
    given = {part: _short(ENCODERS[name][part]) for part in ENCODERS[name] if "encoder" in part}
    if name in ("krea2", "flux2_klein"):  # whose records are made of layers deep inside
        given = dict(ENCODERS[name])
    denoiser = {family.FACTS.denoiser: FULL[name][family.FACTS.denoiser]}
    return {**_merged(family.TINY, {**ENCODERS[name], **given}), **denoiser}


def make_base(
    family: Family, recipe: Mapping[str, Any], folder: Path, *, device: torch.device
) -> None:
    """Save a pipeline folder of a recipe; on a GPU in bfloat16, and made there."""
    assert isinstance(family, ModuleType)
    kept = family.TINY
    family.TINY = recipe  # type: ignore[attr-defined]  # what `build_tiny` builds
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with torch.device(device), without_library_bars():
            family.build_tiny(folder)
    finally:
        torch.set_default_dtype(torch.float32)
        family.TINY = kept  # type: ignore[attr-defined]


def _merged(tiny: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe with other values for what is given, by component."""
    both = {name: {**tiny.get(name, {}), **values} for name, values in given.items()}
    return {**tiny, **both}


def _short(config: Mapping[str, Any]) -> dict[str, Any]:
    inner = {n: _short(v) if isinstance(v, Mapping) else v for n, v in config.items()}
    return {n: min(v, _SHORT[n]) if n in _SHORT else v for n, v in inner.items()}
