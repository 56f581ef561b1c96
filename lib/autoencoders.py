"""The two kinds of autoencoder: of pictures (b c h w), and of videos, fed one frame.

A family whose autoencoder is one of them takes these functions as its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lib import shapes
from lib.components import load_model
from lib.family import Posterior

if TYPE_CHECKING:
    import torch

    from lib.hub import Base


def load_kl(base: Base, *, dtype: torch.dtype, device: Any) -> Any:
    from diffusers import AutoencoderKL

    return load_model(AutoencoderKL, base, "vae", dtype=dtype, device=device)


def load_video(base: Base, *, dtype: torch.dtype, device: Any) -> Any:
    from diffusers import AutoencoderKLQwenImage

    return load_model(AutoencoderKLQwenImage, base, "vae", dtype=dtype, device=device)


def encode_pictures(autoencoder: Any, pixels: shapes.Pixels) -> Posterior:
    import torch

    with torch.no_grad():
        inputs = pixels.to(autoencoder.device, autoencoder.dtype)
        distribution = autoencoder.encode(inputs).latent_dist
    return Posterior(mean=distribution.mean.float(), std=distribution.std.float())


def encode_frames(autoencoder: Any, pixels: shapes.Pixels) -> Posterior:
    import torch

    with torch.no_grad():
        inputs = pixels.to(autoencoder.device, autoencoder.dtype)[:, :, None]
        distribution = autoencoder.encode(inputs).latent_dist
    mean, std = distribution.mean[:, :, 0], distribution.std[:, :, 0]
    return Posterior(mean=mean.float(), std=std.float())


def decode_pictures(autoencoder: Any, raw_latents: shapes.RawLatents) -> shapes.Pixels:
    import torch

    with torch.no_grad():
        inputs = raw_latents.to(autoencoder.device, autoencoder.dtype)
        return autoencoder.decode(inputs, return_dict=False)[0].float().cpu()


def decode_frames(autoencoder: Any, raw_latents: shapes.RawLatents) -> shapes.Pixels:
    import torch

    with torch.no_grad():
        inputs = raw_latents.to(autoencoder.device, autoencoder.dtype)[:, :, None]
        return autoencoder.decode(inputs, return_dict=False)[0][:, :, 0].float().cpu()


def kl_shape(config: Mapping[str, Any], *, height: int, width: int) -> tuple[int, int, int]:
    factor = 2 ** (len(config["block_out_channels"]) - 1)
    return config["latent_channels"], height // factor, width // factor


def video_shape(config: Mapping[str, Any], *, height: int, width: int) -> tuple[int, int, int]:
    factor = 2 ** len(config["temperal_downsample"])
    return config["z_dim"], height // factor, width // factor


def shift_and_scale(base: Base) -> dict[str, Any]:
    """One shift and one factor for all channels; a shift of null is 0."""
    config = base.component("vae").config
    return {"shift": config.get("shift_factor") or 0.0, "scale": config["scaling_factor"]}


def scaled(raw_latents: shapes.RawLatents, constants: Mapping[str, Any]) -> shapes.Latents:
    return (raw_latents - constants["shift"]) * constants["scale"]


def unscaled(latents: shapes.Latents, constants: Mapping[str, Any]) -> shapes.RawLatents:
    return latents / constants["scale"] + constants["shift"]


def channel_moments(base: Base) -> dict[str, Any]:
    """A mean and a standard deviation for each channel; pipelines keep the latter's reciprocal."""
    config = base.component("vae").config
    return {"mean": list(config["latents_mean"]), "std": list(config["latents_std"])}


def standardised(raw_latents: shapes.RawLatents, constants: Mapping[str, Any]) -> shapes.Latents:
    mean, std = (_per_channel(raw_latents, constants[name]) for name in ("mean", "std"))
    return (raw_latents - mean) / std


def unstandardised(latents: shapes.Latents, constants: Mapping[str, Any]) -> shapes.RawLatents:
    mean, std = (_per_channel(latents, constants[name]) for name in ("mean", "std"))
    return latents * std + mean


def _per_channel(latents: Any, values: list[float]) -> Any:
    return latents.new_tensor(values).view(1, -1, 1, 1)
