"""Phase one of flux-mini: its autoencoder, and the cached posteriors of every picture."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from examples.flux_mini.data import VARIANTS, Data, shifted, tinted
from lib.families import flux
from lib.family import Posterior

AUTOENCODER = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 8,
    "down_block_types": ["DownEncoderBlock2D"] * 3,
    "up_block_types": ["UpDecoderBlock2D"] * 3,
    "block_out_channels": [32, 64, 96],
    "layers_per_block": 1,
    "norm_num_groups": 16,
    "sample_size": 64,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "force_upcast": False,
    "mid_block_add_attention": False,
}


@dataclass(frozen=True)
class Cache:
    """Posteriors of every picture in every variant, and their constants."""

    mean: torch.Tensor  # variant, picture, channel, height, width
    std: torch.Tensor
    constants: dict[str, float]


def train_autoencoder(data: Data, *, steps: int, batch: int) -> Any:
    """L1 on pixels and on their gradients, and a tiny KL term."""
    from diffusers import AutoencoderKL

    device = data.pixels.device
    model: Any = AutoencoderKL(**AUTOENCODER).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    for step in range(steps):
        progress = step / steps
        rate = 2e-3 * min(1.0, (step + 1) / 100) * (0.5 + 0.5 * math.cos(math.pi * progress))
        optimizer.param_groups[0]["lr"] = rate
        chosen = data.train[torch.randint(len(data.train), (batch,))]
        pixels = tinted(shifted(data.pixels[chosen], int(torch.randint(len(VARIANTS), ()))))
        with torch.autocast(device.type, torch.bfloat16):
            posterior = model.encode(pixels).latent_dist
            decoded = model.decode(posterior.sample()).sample.float()
        loss = _distance(decoded, pixels) + 1e-5 * posterior.kl().mean() / 64
        update(loss, list(model.parameters()), optimizer)
        if step % 500 == 0:
            print(f"autoencoder step {step}: loss {loss.item():.4f}", flush=True)
    return model.requires_grad_(False).eval()


def _distance(decoded: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
    across = functional.l1_loss(decoded.diff(dim=-1), pixels.diff(dim=-1))
    down = functional.l1_loss(decoded.diff(dim=-2), pixels.diff(dim=-2))
    return functional.l1_loss(decoded, pixels) + 0.5 * (across + down)


def build_cache(autoencoder: Any, data: Data) -> Cache:
    """Encode all variants; shift and scale make the latents' mean 0 and their std 1."""
    found: list[Posterior] = []
    for variant in range(len(VARIANTS)):
        parts = [
            flux.encode_images(autoencoder, shifted(part, variant))
            for part in data.pixels.split(256)
        ]
        mean, std = torch.cat([p.mean for p in parts]), torch.cat([p.std for p in parts])
        found.append(Posterior(mean=mean, std=std))
    mean = torch.stack([p.mean for p in found]).to(data.pixels.device)
    std = torch.stack([p.std for p in found]).to(data.pixels.device)
    constants = {"shift": float(mean.mean()), "scale": float(1 / mean.std())}
    autoencoder.register_to_config(
        shift_factor=constants["shift"], scaling_factor=constants["scale"]
    )
    return Cache(mean, std, constants)


def update(
    loss: torch.Tensor, parameters: list[torch.Tensor], optimizer: torch.optim.Optimizer
) -> None:
    """One step on the gradients, clipped to norm 1."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad()


def psnr(autoencoder: Any, pixels: torch.Tensor) -> float:
    """Of the posterior's mode, in dB, on pictures in [-1, 1]."""
    decoded = flux.decode_latents(autoencoder, flux.encode_images(autoencoder, pixels).mean)
    return float(10 * torch.log10(4 / functional.mse_loss(decoded, pixels.cpu())))
