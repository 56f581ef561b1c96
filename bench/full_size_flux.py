"""A full-size FLUX.1 base with random weights: speed and memory are true, pictures are not.

    python -m bench.full_size_flux FOLDER

The denoiser has FLUX.1-dev's shape (11.9 B parameters, bf16, 24 GB on disk); the text encoders have
its widths and one layer, since only what they hand on matters here.
"""

import argparse
from pathlib import Path

import torch

from lib import tiny
from lib.quiet import without_library_bars

CLIP = {
    "hidden_size": 768,
    "intermediate_size": 768,
    "num_hidden_layers": 1,
    "num_attention_heads": 12,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
    "projection_dim": 768,
}
T5 = {
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 1024,
    "num_layers": 1,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
    "is_encoder_decoder": False,
    "use_cache": False,
}
VAE = {
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "latent_channels": 16,
    "sample_size": 1024,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
DENOISER = {"guidance_embeds": True}  # the class's other defaults are FLUX.1's


def build(folder: Path, *, device: str) -> None:
    """Save the pipeline folder; 12 B random numbers are quick on a GPU, so they are made there."""
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        FluxPipeline,
        FluxTransformer2DModel,
    )

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    clip_tokenizer, t5_tokenizer = tiny.clip_tokenizer(), tiny.t5_tokenizer()
    with torch.device(device):
        denoiser = FluxTransformer2DModel(**DENOISER)
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=AutoencoderKL(**VAE),
        text_encoder=tiny.clip_text_model(clip_tokenizer, CLIP),
        tokenizer=clip_tokenizer,
        text_encoder_2=tiny.t5_encoder(t5_tokenizer, T5),
        tokenizer_2=t5_tokenizer,
        transformer=denoiser,
    )
    with without_library_bars():
        pipeline.save_pretrained(folder, safe_serialization=True)
    print(f"{sum(p.numel() for p in denoiser.parameters()) / 1e9:.2f} B parameters in {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    build(arguments.folder, device="cuda" if torch.cuda.is_available() else "cpu")
