"""What lies beside an exported adapter: a sidecar that tools read, a model card that people read.

Captions, prompts and folder names are in neither, nor in a file's header, unless `export.prompts`
asks for them; pictures then carry their prompts too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from PIL import Image

from lib import files, pictures
from lib.family import Facts
from lib.files import user_path
from lib.hub import Base
from lib.naming import COMFYUI, KOHYA, PEFT
from lib.schema import Config
from lib.store import Manifest

CARD, GRID = "README.md", "grid.png"
_PLACE = "<!-- samples -->"  # where the card shows the grid, once there is one
_CHAIN = ("manifest", "captions", "latents", "denoiser")  # of the train key's inputs


@dataclass(frozen=True)
class About:
    """What is said of an adapter; `private` is said only when asked."""

    name: str
    facts: Facts
    base: str | None  # a Hub id
    revision: str | None
    config: Config
    steps: int
    digests: Mapping[str, str]
    settings: Mapping[str, Any]
    private: Mapping[str, str] = field(default_factory=dict)


def about(name: str, config: Config, *, facts: Facts, base: Base, train: Manifest) -> About:
    """What a complete run's configuration and record tell."""
    repo, commit = base.remote or (None, None)
    digests = {part: train.inputs[part] for part in _CHAIN if isinstance(train.inputs[part], str)}
    return About(
        name=name,
        facts=facts,
        base=repo,
        revision=commit,
        config=config,
        steps=train.payload["settings"]["total_steps"],
        digests={**digests, "train": train.key},
        settings=train.payload["settings"],
        private=_private(config) if config.export.prompts else {},
    )


def _private(config: Config) -> dict[str, str]:
    texts = {"dataset": user_path(config.dataset.root).resolve().name}
    if config.dataset.instance_prompt is not None:
        texts["instance_prompt"] = config.dataset.instance_prompt
    return texts


def header(about: About, *, adapter: str) -> dict[str, str]:
    """What the file itself says of where it comes from; texts only."""
    config = about.config
    named = {
        "adapter": adapter,
        "family": about.facts.name,
        "base": about.base or "local",
        "revision": about.revision or "",
        "rank": str(config.adapter.rank),
        "alpha": f"{config.adapter.alpha:g}",
        "steps": str(about.steps),
        "trigger": config.dataset.trigger or "",
        "resolution": str(config.buckets.resolution),
        **{f"{part}_key": digest for part, digest in about.digests.items()},
        **about.private,
    }
    return {name: text for name, text in named.items() if text}


def write_sidecar(about: About, file: Path, *, adapter: str) -> None:
    """`<name>.json` beside the file: what a catalogue of adapters needs to know."""
    config = about.config
    files.write_json(
        file.with_suffix(".json"),
        {
            "name": about.name,
            "source": "darkroom",
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "adapter": adapter,
            "format": config.export.format,
            "dtype": config.export.dtype,
            "family": about.facts.name,
            "families": [about.facts.name],
            "base_model": about.base,
            "base_revision": about.revision,
            "rank": config.adapter.rank,
            "alpha": config.adapter.alpha,
            "steps": about.steps,
            "resolution": config.buckets.resolution,
            "trigger": config.dataset.trigger,
            "keys": dict(about.digests),
            **about.private,
        },
    )


def write_card(about: About, folder: Path, *, made: Mapping[str, str]) -> None:
    """README.md: how to load the files, and how they were trained; `made` maps adapter to file."""
    of = about.base or about.facts.reference
    sections = [
        _front_matter(about),
        f"# {about.name}",
        f"A LoRA adapter for {of}, trained for {about.steps} steps.",
        _PLACE,
        "## Use\n\n" + "\n\n".join(_how_to_load(about, made)),
        "## Training\n\n" + "\n".join(_table(about.settings)),
    ]
    files.write_bytes(folder / CARD, ("\n\n".join(sections) + "\n").encode())


def add_grid(folder: Path, picture: Image.Image, *, prompts: Sequence[str] = ()) -> None:
    """Put a grid beside the card and into it; a card that somebody took away stays away."""
    card = folder / CARD
    if not card.is_file():
        return
    pictures.save(picture, folder / GRID)
    text = card.read_text(encoding="utf-8")
    listed = "".join(f"\n- {_plain(prompt)}" for prompt in prompts)
    shown = f"![base, adapter and average from the same noise]({GRID})\n{listed}".rstrip()
    files.write_bytes(card, text.replace(_PLACE, shown).encode())


def _front_matter(about: About) -> str:
    """YAML for the Hub; a JSON text is one of YAML too."""
    known = about.base == about.facts.reference and about.facts.license
    values: dict[str, Any] = {"license": known or "other"}
    if not known:
        values["license_name"] = "that-of-the-base"
        if about.base:
            values["license_link"] = f"https://huggingface.co/{about.base}"
    if about.base:
        values |= {"base_model": about.base, "base_model_relation": "adapter"}
    values["library_name"] = "diffusers"
    values["tags"] = ["text-to-image", "lora", "diffusers", "template:sd-lora", about.facts.name]
    if prompt := about.private.get("instance_prompt"):
        values["instance_prompt"] = prompt
    lines = [f"{name}: {json.dumps(value)}" for name, value in values.items()]
    return "\n".join(["---", *lines, "---"])


def _how_to_load(about: About, made: Mapping[str, str]) -> Iterator[str]:
    names = {"adapter": "the adapter", "ema": "its average over the training (EMA)"}
    yield "\n".join(f"- `{file}`: {names[adapter]}" for adapter, file in made.items())
    if trigger := about.config.dataset.trigger:
        yield f"Begin a prompt with `{trigger}`."
    format, first = about.config.export.format, made["adapter"]
    if format == COMFYUI:
        yield "Put it into ComfyUI's `models/loras` and load it with a LoRA loader, at strength 1."
    if format == KOHYA:
        yield "Tools that read kohya's names (`lora_unet_...`) load it, at strength 1."
    if format in (PEFT, KOHYA):
        pipeline, base = about.facts.pipelines[0], about.base or "<the base>"
        yield "\n".join(
            [
                "```python",
                f"from diffusers import {pipeline}",
                "",
                f'pipeline = {pipeline}.from_pretrained("{base}")',
                f'pipeline.load_lora_weights(".", weight_name="{first}")',
                "```",
            ]
        )


def _table(settings: Mapping[str, Any]) -> Iterator[str]:
    yield "| setting | value |"
    yield "|---|---|"
    for name, value in sorted(settings.items()):
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        yield f"| `{name}` | {_plain(str(shown))} |"


def _plain(text: str) -> str:
    """A text on one line, that ends no table's cell."""
    return " ".join(text.split()).replace("|", "\\|")
