"""Drawing the grid of samples: the base, then each exported adapter, from the same noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from lib import pictures
from lib.batches import Records
from lib.device import freed, pick_device
from lib.events import Events
from lib.family import Family
from lib.hub import Base
from lib.random import normal
from lib.records import DTYPES
from lib.sampling import euler
from lib.schema import Config
from lib.store import Store

TITLES = {"base": "base", "adapter": "adapter", "ema": "EMA"}


@dataclass(frozen=True)
class GridRequest:
    """What is drawn: prompts with their entries, and the exported files by column."""

    prompts: tuple[str, ...]
    captions: tuple[str, ...]  # entry keys
    unconditional: str  # entry key
    adapters: Mapping[str, Path]
    constants: Mapping[str, Any]


def draw_grid(
    config: Config,
    family: Family,
    base: Base,
    *,
    request: GridRequest,
    store: Store,
    events: Events,
) -> Image.Image:
    """The grid's picture; the denoiser is freed before the autoencoder loads."""
    latents = _latents(config, family, base, request=request, store=store, events=events)
    images = _decoded(config, family, base, latents, constants=request.constants)
    columns = list(latents)
    return pictures.grid(
        [[images[column][row] for column in columns] for row in range(len(request.prompts))],
        columns=[TITLES[column] for column in columns],
        captions=request.prompts,
    )


def _latents(
    config: Config,
    family: Family,
    base: Base,
    *,
    request: GridRequest,
    store: Store,
    events: Events,
) -> dict[str, list[torch.Tensor]]:
    """Final latents by column, a row for each prompt; every column starts from the same noise."""
    device, dtype = pick_device(), DTYPES[config.precision.mode]
    records = Records(store, max_bytes=0)
    columns: dict[str, list[torch.Tensor]] = {"base": [], **{name: [] for name in request.adapters}}
    total, done = len(columns) * len(request.prompts), 0
    with freed(family.load_denoiser(base, dtype=dtype, device=device)) as denoiser:
        for column, drawn in columns.items():
            if column in request.adapters:
                _load(denoiser, request.adapters[column], prefix=family.FACTS.denoiser)
            for row, caption in enumerate(request.captions):
                drawn.append(
                    _draw(
                        config,
                        family,
                        base,
                        denoiser,
                        row=row,
                        records=records,
                        caption=caption,
                        unconditional=request.unconditional,
                    )
                )
                done += 1
                events.progress(done, total, unit="samples")
    return columns


def _draw(
    config: Config,
    family: Family,
    base: Base,
    denoiser: Any,
    *,
    row: int,
    records: Records,
    caption: str,
    unconditional: str,
) -> torch.Tensor:
    device = pick_device()
    side = config.buckets.resolution
    autoencoder = base.component(family.FACTS.autoencoder).config
    shape = (1, *family.latent_shape(autoencoder, height=side, width=side))
    noise = normal(shape, seed=config.sample.seed, stream="noise", counter=row, sample_id="sample")
    sigmas = family.sampling_sigmas(
        config.sample.steps, latent_size=shape[2:], scheduler=base.component("scheduler").config
    )
    embedded = family.embeds_guidance(base.component(family.FACTS.denoiser).config)
    branch = None if embedded else family.conditioning([records("captions", unconditional)])
    return euler(
        family,
        denoiser,
        torch.from_numpy(noise).to(device),
        conditioning=family.conditioning([records("captions", caption)]).to(device),
        sigmas=sigmas.tolist(),
        guidance=config.sample.guidance,
        unconditional=branch.to(device) if branch else None,
    )


def _load(denoiser: Any, file: Path, *, prefix: str) -> None:
    """Put one exported file on the denoiser, with diffusers' own loader, in place of any other."""
    if getattr(denoiser, "peft_config", None):
        denoiser.unload_lora()
    denoiser.load_lora_adapter(
        str(file.parent),
        weight_name=file.name,
        prefix=prefix,
        use_safetensors=True,
        local_files_only=True,
    )


def _decoded(
    config: Config,
    family: Family,
    base: Base,
    latents: Mapping[str, list[torch.Tensor]],
    *,
    constants: Mapping[str, Any],
) -> dict[str, list[Image.Image]]:
    dtype = DTYPES[config.latents.dtype]
    with freed(family.load_autoencoder(base, dtype=dtype, device=pick_device())) as autoencoder:
        return {
            column: [
                pictures.to_image(
                    family.decode_latents(autoencoder, family.denormalise(z, constants))[0].numpy()
                )
                for z in drawn
            ]
            for column, drawn in latents.items()
        }
