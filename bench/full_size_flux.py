"""A full-size FLUX.1 pipeline with random weights: speed and memory are true, pictures are not.

    python -m bench.full_size_flux FOLDER

The denoiser has FLUX.1-dev's shape (11.9 B parameters), the encoders are CLIP-L, the encoder of
T5-XXL and the autoencoder in theirs, all bfloat16: 34 GB. Tokenizers and so vocabularies are tiny.
"""

import argparse
import os
import time
from pathlib import Path

# Before the libraries are there: their notices are noise.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")

import torch

from bench.full_size_bases import FULL
from lib import tiny
from lib.quiet import without_library_bars

CLIP = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
    "projection_dim": 768,
}
T5 = {
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
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


def build(folder: Path, *, device: str) -> None:
    """Save the pipeline folder; 17 B random numbers are quick on a GPU, so they are made there."""
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
        pipeline = FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
            vae=AutoencoderKL(**VAE),
            text_encoder=tiny.clip_text_model(clip_tokenizer, CLIP),
            tokenizer=clip_tokenizer,
            text_encoder_2=tiny.t5_encoder(t5_tokenizer, T5),
            tokenizer_2=t5_tokenizer,
            transformer=FluxTransformer2DModel(**FULL["flux"]["transformer"]),
        )
    models = (pipeline.transformer, pipeline.text_encoder_2, pipeline.vae)
    sizes = [sum(p.numel() for p in model.parameters()) / 1e9 for model in models]
    print("parameters, B: denoiser {:.2f}, T5 {:.2f}, autoencoder {:.3f}".format(*sizes))
    with without_library_bars():
        pipeline.save_pretrained(folder, safe_serialization=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    began = time.monotonic()
    build(arguments.folder, device="cuda" if torch.cuda.is_available() else "cpu")
    print(f"{arguments.folder} made in {time.monotonic() - began:.0f} s")
