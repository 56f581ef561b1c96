"""Anyone's adapter file as changes of modules, by the naming rules of the tool it is meant for.

It knows nothing of how files are written here: keys are looked up in a table made from the names
that the base's modules have, as the tools do that load such files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lib.changes import Change
from lib.family import Family
from lib.hollow import Sizes
from lib.naming import COMFYUI, KOHYA, PEFT, Names
from lib.records import from_stored
from lib.tensors import decode

METADATA_KEY = "lora_adapter_metadata"
# What stands between a module and the end of a key, by the part of the pair that it is.
_SPELLINGS = {
    "down": (".lora_down.weight", ".lora_A.weight", ".lora_A.default.weight", ".lora.down.weight"),
    "up": (".lora_up.weight", ".lora_B.weight", ".lora_B.default.weight", ".lora.up.weight"),
    "alpha": (".alpha",),
    "magnitude": (".dora_scale", ".lora_magnitude_vector", ".lora_magnitude_vector.weight"),
}
_ENDINGS = {ending: part for part, endings in _SPELLINGS.items() for ending in endings}
KOHYA_ENDINGS = (".lora_down.weight", ".lora_up.weight", ".alpha")


@dataclass(frozen=True)
class Slice:
    """Rows of a matrix in the target that are one of diffusers' modules."""

    module: str
    start: int
    rows: int
    columns: int


@dataclass
class Found:
    """The tensors of one target module."""

    parts: dict[str, torch.Tensor] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Read:
    """What a file changes of a base, and the keys that its reader would leave out."""

    changes: Mapping[str, Change]
    unmatched: tuple[str, ...]


def split_key(key: str) -> tuple[str, str] | None:
    """The module's name and the part of the pair; None for a key of another kind."""
    for ending, part in _ENDINGS.items():
        if key.endswith(ending):
            return key.removesuffix(ending), part
    return None


def targets_of(
    names: Names, sizes: Sizes, *, format: str, component: str
) -> dict[str, list[Slice]]:
    """Every name that the format's reader knows, with the rows of the base that it stands for."""
    whole = {module: [Slice(module, 0, *size)] for module, size in sizes.items()}
    if format == PEFT:
        return {f"{component}.{module}": there for module, there in whole.items()}
    originals = {
        original: _slices(parts, sizes) for original, parts in names.original([*sizes]).items()
    }
    kohya = {f"lora_unet_{name.replace('.', '_')}": there for name, there in originals.items()}
    if format == KOHYA:
        return kohya
    assert format == COMFYUI
    dotted = {f"diffusion_model.{name}": there for name, there in originals.items()}
    aliased = {
        prefix + (module.replace(".", "_") if prefix.endswith("_") else module): there
        for prefix in names.aliases
        for module, there in whole.items()
    }
    return {**aliased, **kohya, **dotted}


def _slices(parts: tuple[str, ...], sizes: Sizes) -> list[Slice]:
    found, start = [], 0
    for module in parts:
        rows, columns = sizes[module]
        found.append(Slice(module, start, rows, columns))
        start += rows
    return found


def read_file(file: Path, family: Family, sizes: Sizes, *, format: str) -> Read:
    """A file of ours, with its digest, by the rules of a format."""
    decoded, component = decode(file.read_bytes()), family.FACTS.denoiser
    return read(
        from_stored(decoded.tensors),
        decoded.metadata,
        targets=targets_of(family.NAMES, sizes, format=format, component=component),
        format=format,
        component=component,
    )


def tensors_of(changes: Mapping[str, Change]) -> dict[str, torch.Tensor]:
    """Changes under PEFT's keys, in float32, at a scale of 1."""
    return {
        f"{module}.{half}.weight": tensor.float().contiguous()
        for module, change in changes.items()
        for half, tensor in (("lora_A", change.down), ("lora_B", change.up))
    }


def read(
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    *,
    targets: Mapping[str, list[Slice]],
    format: str,
    component: str,
) -> Read:
    """The changes of a base's modules; parts of a fused matrix that stay the same are none."""
    found, unmatched = _found(tensors, targets, format)
    described = _described(metadata, component) if format == PEFT else None
    changes: dict[str, Change] = {}
    for name, pair in found.items():
        fits = {"down", "up"} <= pair.parts.keys() and "magnitude" not in pair.parts
        rows, columns = targets[name][-1].start + targets[name][-1].rows, targets[name][-1].columns
        if not fits or not _fit(pair.parts, rows=rows, columns=columns):
            unmatched += pair.keys
            continue
        scale = _scale(pair.parts, module=name.removeprefix(f"{component}."), described=described)
        changes |= _split(pair.parts, targets[name], scale)
    return Read(changes, tuple(sorted(unmatched)))


def _found(
    tensors: Mapping[str, torch.Tensor], targets: Mapping[str, list[Slice]], format: str
) -> tuple[dict[str, Found], list[str]]:
    """The tensors by target module, and the keys that name none."""
    found: dict[str, Found] = {}
    unmatched = []
    for key, tensor in tensors.items():
        named = split_key(key)
        if named is None or named[0] not in targets or not _spelt_for(format, key):
            unmatched.append(key)
            continue
        one = found.setdefault(named[0], Found())
        one.parts[named[1]] = tensor
        one.keys.append(key)
    return found, unmatched


def _spelt_for(format: str, key: str) -> bool:
    if format == KOHYA:
        return key.endswith(KOHYA_ENDINGS)
    return format != PEFT or ".lora_A." in key or ".lora_B." in key


def _fit(parts: Mapping[str, torch.Tensor], *, rows: int, columns: int) -> bool:
    down, up = parts["down"], parts["up"]
    return (
        down.ndim == up.ndim == 2
        and down.shape[1] == columns
        and up.shape[0] == rows
        and down.shape[0] == up.shape[1]
    )


def _scale(
    parts: Mapping[str, torch.Tensor], *, module: str, described: Mapping[str, object] | None
) -> float:
    """By the file's description where the reader takes it, else `.alpha` over the rank, or 1."""
    rank = parts["down"].shape[0]
    if described is None:
        return float(parts["alpha"]) / rank if "alpha" in parts else 1.0
    return scale_told(described, alpha_told(described, module=module, rank=rank), rank=rank)


def alpha_told(described: Mapping[str, object], *, module: str, rank: int) -> float:
    """A module's alpha by PEFT's description: that of the first pattern that means it."""
    alpha = described.get("lora_alpha", rank)
    patterns = described.get("alpha_pattern")
    for pattern, own in patterns.items() if isinstance(patterns, dict) else ():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = own
            break
    assert isinstance(alpha, int | float)
    return alpha


def scale_told(described: Mapping[str, object], alpha: float, *, rank: int) -> float:
    """The factor that PEFT makes of an alpha, rank-stabilised if the description says so."""
    return alpha / (rank**0.5 if described.get("use_rslora") else rank)


def _described(metadata: Mapping[str, str], component: str) -> Mapping[str, object] | None:
    """PEFT's description of the adapter, if the file carries one."""
    if METADATA_KEY not in metadata:
        return None
    every, prefix = json.loads(metadata[METADATA_KEY]), f"{component}."
    return {n.removeprefix(prefix): v for n, v in every.items() if n.startswith(prefix)} or None


def _split(
    parts: Mapping[str, torch.Tensor], slices: list[Slice], scale: float
) -> Iterator[tuple[str, Change]]:
    """Each module's rows, without rows that are all zero where a matrix holds several modules."""
    down, up = parts["down"].double(), parts["up"].double() * scale
    for one in slices:
        rows = up[one.start : one.start + one.rows]
        if len(slices) == 1 or bool(rows.any()):
            used = rows.any(dim=0) if len(slices) > 1 else slice(None)
            yield one.module, Change(down[used], rows[:, used])
