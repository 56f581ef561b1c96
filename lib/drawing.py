"""Drawing the grid of samples: the base, then each adapter, from the same noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from lib import pictures, stopping
from lib.batches import Records
from lib.device import pick_device, release
from lib.events import Events
from lib.family import Conditioning, Family, Frame, Schedule, process_of
from lib.hollow import linear_sizes
from lib.hub import Base
from lib.naming import PEFT
from lib.random import normal
from lib.reading import read_file, tensors_of
from lib.records import DTYPES, compute_dtype
from lib.sampling import euler
from lib.schema import Config
from lib.store import Store

TITLES = {"base": "base", "adapter": "adapter", "ema": "EMA", "target": "held-out target"}

Column = list[torch.Tensor]  # a prompt's latents, one picture for each seed


@dataclass(frozen=True)
class GridRequest:
    """What is drawn: prompts with their entries, and what is known of the autoencoder."""

    prompts: tuple[str, ...]
    captions: tuple[str, ...]  # entry keys
    unconditional: str  # entry key
    constants: Mapping[str, Any]


@dataclass(frozen=True)
class Sampler:
    """Draws a request's pictures with whatever denoiser it is handed."""

    config: Config
    family: Family
    base: Base  # its autoencoder decodes
    canvas: Base  # its denoiser draws, by its schedule
    request: GridRequest
    store: Store

    def column(
        self, denoiser: Any, *, each_step: Callable[[], None] = lambda: None
    ) -> Iterator[torch.Tensor]:
        """Final latents of each prompt; the noise depends on the prompt's place and the seed."""
        schedule, unconditional = self._schedule(), self._unconditional()
        process = process_of(self.family, self.canvas)
        for row, caption in enumerate(self.request.captions):
            yield euler(
                self.family,
                denoiser,
                self._noise(row),
                conditioning=self._conditioning(caption),
                schedule=schedule,
                process=process,
                guidance=self.config.sample.guidance,
                unconditional=unconditional,
                each_step=each_step,
            )

    def decode(self, autoencoder: Any, latents: torch.Tensor) -> Image.Image:
        """One prompt's pictures, side by side."""
        raw = self.family.denormalise(latents, self.request.constants)
        pixels = torch.cat([self.family.decode_latents(autoencoder, one[None]) for one in raw])
        return pictures.to_image(np.concatenate(list(pixels.numpy()), axis=2))

    def load_autoencoder(self) -> Any:
        dtype = DTYPES[self.config.latents.dtype]
        return self.family.load_autoencoder(self.base, dtype=dtype, device=pick_device())

    def grid(
        self, columns: Mapping[str, Sequence[Image.Image | None]], *, with_prompts: bool = True
    ) -> Image.Image:
        """The table of pictures; None leaves a cell empty."""
        rows = [list(row) for row in zip(*columns.values(), strict=True)]
        titles = [TITLES.get(name, name) for name in columns]
        prompts = self.request.prompts if with_prompts else [""] * len(rows)
        return pictures.grid(rows, columns=titles, captions=prompts)

    def _shape(self) -> tuple[int, int, int]:
        side = self._side()
        autoencoder = self.base.component(self.family.FACTS.autoencoder).config
        return self.family.latent_shape(autoencoder, height=side, width=side)

    def _noise(self, row: int) -> torch.Tensor:
        """In the layout that `normalise` makes, which a family may have patchified."""
        raw = torch.zeros(1, *self._shape())
        shape = tuple(self.family.normalise(raw, self.request.constants).shape[1:])
        first = self.config.sample.seed
        drawn = [
            normal(shape, seed=seed, stream="noise", counter=row, sample_id="sample")
            for seed in range(first, first + self.config.sample.num_seeds)
        ]
        return torch.from_numpy(np.stack(drawn)).to(pick_device())

    def _schedule(self) -> Schedule:
        _, height, width = self._shape()
        return self.family.sampling_schedule(
            self.config.sample.steps, latent_size=(height, width), base=self.canvas
        )

    def _conditioning(self, key: str) -> Conditioning:
        record, side = Records(self.store, max_bytes=0)("captions", key), self._side()
        count = self.config.sample.num_seeds
        whole = Frame(original=(side, side), crop=(0, 0), size=(side, side))
        return self.family.conditioning([record] * count, [whole] * count).to(pick_device())

    def _unconditional(self) -> Conditioning | None:
        if not self.family.guides(self.config.sample.guidance, base=self.canvas):
            return None
        return self._conditioning(self.request.unconditional)

    def _side(self) -> int:
        return self.config.buckets.resolution


def draw_columns(
    sampler: Sampler, *, adapters: Mapping[str, Path], events: Events
) -> dict[str, Sequence[Image.Image]]:
    """The pictures of a grid by column: of the base, then with each exported file."""
    columns = _latents(sampler, adapters=adapters, events=events)
    release()  # the denoiser, which no name holds any more
    autoencoder = sampler.load_autoencoder()
    return {
        name: [sampler.decode(autoencoder, latents) for latents in column]
        for name, column in columns.items()
    }


def _latents(
    sampler: Sampler, *, adapters: Mapping[str, Path], events: Events
) -> dict[str, Column]:
    """Final latents by column."""
    dtype = compute_dtype(sampler.config.precision.mode)
    denoiser = sampler.family.load_denoiser(sampler.canvas, dtype=dtype, device=pick_device())
    columns: dict[str, Column] = {"base": [], **{name: [] for name in adapters}}
    total, done = len(columns) * len(sampler.request.prompts), 0
    for name, drawn in columns.items():
        if name in adapters:
            _load(denoiser, adapters[name], sampler)
        for latents in sampler.column(denoiser):
            drawn.append(latents)
            done += 1
            stopping.check()
            events.progress(done, total, unit="samples")
    return columns


def _load(denoiser: Any, file: Path, sampler: Sampler) -> None:
    """Put one exported file on the denoiser, with diffusers' own loader, in place of any other."""
    if getattr(denoiser, "peft_config", None):
        denoiser.unload_lora()
    prefix, format = sampler.family.FACTS.denoiser, sampler.config.export.format
    if format == PEFT:
        denoiser.load_lora_adapter(
            str(file.parent),
            weight_name=file.name,
            prefix=prefix,
            use_safetensors=True,
            local_files_only=True,
        )
        return
    found = read_file(file, sampler.family, linear_sizes(denoiser), format=format)
    denoiser.load_lora_adapter(tensors_of(found.changes), prefix=None)
