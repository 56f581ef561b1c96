"""Adapter files other tools read: key names, metadata, and the proof by reading back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lib.adapter import peft_config
from lib.family import Facts
from lib.records import DTYPES, to_stored
from lib.schema import AdapterConfig
from lib.tensors import encode

DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
METADATA_KEY = "lora_adapter_metadata"


@dataclass(frozen=True)
class Exported:
    """A file's bytes, and how many non-zero values its dtype turned to zero."""

    data: bytes
    num_flushed: int


def diffusers_file(
    state: Mapping[str, torch.Tensor],
    *,
    adapter: AdapterConfig,
    facts: Facts,
    dtype: str,
    provenance: Mapping[str, str],
) -> Exported:
    """PEFT keys under the component's name, and its LoraConfig as `lora_adapter_metadata`."""
    tensors = {f"{facts.denoiser}.{name}": t.to(DTYPES[dtype]) for name, t in state.items()}
    flushed = sum(
        int(((t != 0) & (tensors[f"{facts.denoiser}.{name}"] == 0)).sum())
        for name, t in state.items()
    )
    metadata = {f"{facts.denoiser}.{k}": v for k, v in _peft_metadata(adapter).items()}
    header = {
        "format": "pt",
        METADATA_KEY: json.dumps(metadata, indent=2, sort_keys=True),
        **{f"darkroom.{name}": value for name, value in provenance.items()},
    }
    return Exported(encode(to_stored(tensors), metadata=header), num_flushed=flushed)


def prove_diffusers_file(
    path: Path,
    state: Mapping[str, torch.Tensor],
    *,
    adapter: AdapterConfig,
    facts: Facts,
    dtype: str,
) -> None:
    """Read with diffusers' own reader: every tensor and the alpha as trained, or ValueError."""
    import diffusers

    pipeline = getattr(diffusers, facts.pipelines[0])
    found, *_, metadata = pipeline.lora_state_dict(
        str(path.parent),
        weight_name=path.name,
        use_safetensors=True,
        return_lora_metadata=True,
        local_files_only=True,
    )
    expected = {f"{facts.denoiser}.{name}": t.to(DTYPES[dtype]) for name, t in state.items()}
    if found.keys() != expected.keys():
        raise ValueError(f"keys differ: {sorted(found.keys() ^ expected.keys())[:4]}")
    changed = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    if changed:
        raise ValueError(f"tensors differ: {changed[:4]}")
    read = {name: metadata.get(f"{facts.denoiser}.{name}") for name in ("r", "lora_alpha")}
    if read != {"r": adapter.rank, "lora_alpha": adapter.alpha}:
        raise ValueError(f"rank and alpha read back as {read}")


def _peft_metadata(adapter: AdapterConfig) -> dict[str, Any]:
    """Plain JSON values; sets become sorted lists, and no path of a machine is in it."""
    config = peft_config(adapter).to_dict()
    config["base_model_name_or_path"] = None
    return {name: sorted(v) if isinstance(v, set) else v for name, v in config.items()}
