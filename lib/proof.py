"""The proof of an exported file: what its readers make of it is what was trained, module by module.

Two readers: diffusers, as a user calls it, and `lib.reading`, which follows the rules of the tool
that the file is for and shares nothing with what wrote it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lib.changes import Change, difference
from lib.family import Family
from lib.formats import Target
from lib.hollow import hollow_denoiser, hollow_pipeline
from lib.hub import Component
from lib.reading import read_file
from lib.records import DTYPES

TOLERANCE = 1e-6  # of the weight change, relative: readers compute in the file's dtype


class NotProven(ValueError):
    """A reader makes something else of the file than was trained."""


def prove(
    path: Path,
    changes: Mapping[str, Change],
    target: Target,
    *,
    family: Family,
    denoiser: Component,
    with_diffusers: bool = True,
) -> None:
    """Read the file back; NotProven names the reader, and the modules that differ."""
    expected = {module: _cast(change, target.dtype) for module, change in changes.items()}
    readers = {"the target's rules": _by_rules(path, target, family)}
    if with_diffusers:
        readers["diffusers"] = _by_diffusers(path, family, denoiser)
    for reader, found in readers.items():
        _compare(found, expected, reader)


def _by_rules(path: Path, target: Target, family: Family) -> Mapping[str, Change]:
    found = read_file(path, family, target.sizes, format=target.format)
    if found.unmatched:
        raise NotProven(f"keys that no module has: {list(found.unmatched[:4])}")
    return found.changes


def _by_diffusers(path: Path, family: Family, made_of: Component) -> Mapping[str, Change]:
    """Loaded into the family's pipeline, whose denoiser has the base's modules and no weights."""
    denoiser = hollow_denoiser(made_of)
    pipeline = hollow_pipeline(denoiser, family.FACTS)
    try:
        with warnings.catch_warnings():
            # PEFT's, of modules that do not match: what it made of the file is compared below.
            warnings.simplefilter("ignore", RuntimeWarning)
            pipeline.load_lora_weights(
                str(path.parent),
                weight_name=path.name,
                adapter_name="read",
                use_safetensors=True,
                local_files_only=True,
            )
    except (ValueError, KeyError, RuntimeError, AssertionError, NotImplementedError) as error:
        raise NotProven(f"diffusers refuses the file: {error}") from error
    return loaded_changes(denoiser, adapter="read")


def loaded_changes(denoiser: Any, *, adapter: str) -> dict[str, Change]:
    """What an adapter on a denoiser does, by the layers that PEFT put there."""
    changes = {}
    for name, module in denoiser.named_modules():
        if adapter in getattr(module, "lora_A", {}):
            down, up = module.lora_A[adapter].weight, module.lora_B[adapter].weight
            scale = module.scaling[adapter]
            changes[name] = Change(down.detach().double(), up.detach().double() * scale)
    return changes


def _compare(found: Mapping[str, Change], expected: Mapping[str, Change], reader: str) -> None:
    """Equal changes of equal modules; a module that stays as it is may be named or not."""
    moved = {name for name, change in expected.items() if not change.is_zero}
    read = {name for name, change in found.items() if not change.is_zero}
    if moved != read:
        raise NotProven(f"modules differ by {reader}: {sorted(moved ^ read)[:4]}")
    wrong = [name for name in moved if not difference(found[name], expected[name]) <= TOLERANCE]
    if wrong:
        raise NotProven(f"weight changes differ by {reader}: {sorted(wrong)[:4]}")


def _cast(change: Change, dtype: str) -> Change:
    """The change as the dtype holds its two halves."""
    stored = DTYPES[dtype]
    return Change(change.down.to(stored).double(), change.up.to(stored).double())
