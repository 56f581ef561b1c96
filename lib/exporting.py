"""From a run's adapter to a file that other tools read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lib import files, tensors
from lib.family import Family
from lib.formats import DIFFUSERS_FILE, diffusers_file, prove_diffusers_file
from lib.records import from_stored
from lib.schema import Config


@dataclass(frozen=True)
class ExportedFile:
    path: Path
    num_flushed: int


def export_adapter(
    adapter: Path,
    folder: Path,
    *,
    config: Config,
    family: Family,
    provenance: Mapping[str, str],
) -> ExportedFile:
    """Write the adapter in `export.format`; it is proven under another name before it appears."""
    state = from_stored(tensors.decode(adapter.read_bytes()).tensors)
    exported = diffusers_file(
        state,
        adapter=config.adapter,
        facts=family.FACTS,
        dtype=config.export.dtype,
        provenance=provenance,
    )
    unproven = folder / f"unproven-{DIFFUSERS_FILE}"
    files.write_bytes(unproven, exported.data)
    prove_diffusers_file(
        unproven,
        state,
        adapter=config.adapter,
        facts=family.FACTS,
        dtype=config.export.dtype,
    )
    files.move(unproven, folder / DIFFUSERS_FILE)
    return ExportedFile(path=folder / DIFFUSERS_FILE, num_flushed=exported.num_flushed)
