"""From a run's adapter to a file that other tools read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lib import files, tensors
from lib.adapter import is_untrained, peft_config
from lib.changes import changes_of
from lib.errors import InputRefused, Problem
from lib.family import Family
from lib.formats import DIFFUSERS_FILE, Target, adapter_file, split_widths_problem
from lib.hollow import hollow_denoiser, linear_sizes
from lib.hub import Component
from lib.naming import KOHYA, PEFT
from lib.proof import prove
from lib.records import from_stored
from lib.schema import Config


@dataclass(frozen=True)
class ExportedFile:
    """A proven file; `unread` says why diffusers could not be asked, if so."""

    path: Path
    num_flushed: int
    unread: str = ""

    def notes(self, dtype: str) -> Iterator[str]:
        """What a user should know of it."""
        if self.num_flushed:
            yield f"{self.num_flushed} values became 0 in export.dtype={dtype}"
        if self.unread:
            yield f"proven by the target's own rules alone: {self.unread}"


def export_adapter(
    adapter: Path,
    folder: Path,
    *,
    config: Config,
    family: Family,
    denoiser: Component,
    provenance: Mapping[str, str],
    stem: str = "adapter",
) -> ExportedFile:
    """Write the adapter in `export.format`; it is proven under another name before it appears."""
    state = from_stored(tensors.decode(adapter.read_bytes()).tensors)
    if is_untrained(state):
        why = "every B is zero: the adapter changes nothing"
        raise InputRefused(Problem(str(adapter), why, remedy="train it, for more steps"))
    description = peft_config(config.adapter)
    changes = changes_of(state, description)
    target = Target(
        format=config.export.format,
        dtype=config.export.dtype,
        names=family.NAMES,
        component=family.FACTS.denoiser,
        sizes=linear_sizes(hollow_denoiser(denoiser)),
    )
    exported = adapter_file(changes, target, description=description, provenance=provenance)
    name = DIFFUSERS_FILE if target.format == PEFT else f"{stem}.safetensors"
    unread = split_widths_problem(changes, target) if target.format == KOHYA else ""
    unproven = folder / f"unproven-{name}"
    files.write_bytes(unproven, exported.data)
    prove(
        unproven,
        changes,
        target,
        family=family,
        denoiser=denoiser,
        with_diffusers=not unread,
    )
    files.move(unproven, folder / name)
    return ExportedFile(folder / name, exported.num_flushed, unread)


def stem_of(folder: str, *, adapter: str) -> str:
    """A file's name after its run's: loaders cut names at dots and stumble over spaces."""
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", folder).strip("-") or "adapter"
    return plain if adapter == "adapter" else f"{plain}-{adapter}"
