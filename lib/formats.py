"""Adapter files other tools read: what is trained, under their key names and in their scale.

Each module's scale is folded into its B (`up`), so that alpha = rank is right for every reader:
those that read `.alpha`, those that read PEFT's description, and those that know neither.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lib.changes import Change
from lib.errors import InputRefused, Problem
from lib.hollow import Sizes
from lib.naming import A_B, KOHYA, PEFT, Groups, Layout, Names
from lib.records import DTYPES, to_stored
from lib.tensors import encode

DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
METADATA_KEY = "lora_adapter_metadata"
DTYPE_REMEDY = "export.dtype=bf16 has the range of fp32"


@dataclass(frozen=True)
class Exported:
    """A file's bytes, and how many non-zero values its dtype turned to zero."""

    data: bytes
    num_flushed: int


@dataclass(frozen=True)
class Target:
    """What a file is for: format and dtype, and the family and base that it fits."""

    format: str
    dtype: str
    names: Names
    component: str  # the denoiser's name in the family's pipeline
    sizes: Sizes  # of the base's linear modules

    @property
    def layout(self) -> Layout:
        if self.format == PEFT:
            return Layout(f"{self.component}.", A_B, original=False)
        return self.names.layouts[self.format]


def adapter_file(
    changes: Mapping[str, Change],
    target: Target,
    *,
    description: Any,
    provenance: Mapping[str, str],
) -> Exported:
    """The file's bytes; `description` is PEFT's LoraConfig of the training."""
    refuse_lost(changes, target)
    dtype, layout = DTYPES[target.dtype], target.layout
    down, up = layout.halves
    tensors: dict[str, torch.Tensor] = {}
    mixed = len({change.rank for change in changes.values()}) > 1
    with_alpha = layout.alpha and not (mixed and target.names.one_alpha)
    for module, change in _in_layout(changes, target):
        key = layout.key(module)
        tensors[f"{key}.{down}.weight"] = _cast(change.down, dtype, target.dtype)
        tensors[f"{key}.{up}.weight"] = _cast(change.up, dtype, target.dtype)
        if with_alpha:
            tensors[f"{key}.alpha"] = torch.tensor(float(change.rank))
    header = {"format": "pt", **_format_header(target, description)}
    header |= {f"darkroom.{name}": value for name, value in provenance.items()}
    halves = [half for change in changes.values() for half in (change.down, change.up)]
    flushed = sum(int(((half != 0) & (half.to(dtype) == 0)).sum()) for half in halves)
    return Exported(encode(to_stored(tensors), metadata=header), num_flushed=flushed)


def refuse_lost(modules: Mapping[str, Any], target: Target) -> None:
    """Refuse modules that the format's readers would leave out, naming them."""
    if not target.layout.original:
        return
    groups = target.names.original([*target.sizes])
    kept = {
        part
        for original, parts in groups.items()
        if not original.startswith(target.names.lost.get(target.format, ()))
        for part in parts
    }
    if lost := sorted(modules.keys() - kept):
        shown = ", ".join(lost[:4]) + (f" and {len(lost) - 4} more" if len(lost) > 4 else "")
        others = [one for one in target.names.formats if one != target.format]
        why = f"its readers would leave out {shown}"
        problem = Problem(f"export.format={target.format}", why, ", ".join(others))
        raise InputRefused(problem)


def split_widths_problem(modules: Mapping[str, Any], target: Target) -> str:
    """Why diffusers cannot read this file although the tool it is for can, or nothing."""
    for original, parts in _used(target.names.original([*target.sizes]), modules).items():
        for ending, widths in target.names.widths.items():
            found = tuple(target.sizes[part][0] for part in parts)
            if original.endswith(ending) and found != widths:
                return f"diffusers splits {original} at {widths} alone, here it is {found}"
    return ""


def folded_description(description: Any) -> dict[str, Any]:
    """PEFT's description of the folded file, as plain JSON: scale 1 at every module.

    Sets become sorted lists, and no path of a machine is in it.
    """
    found = {n: sorted(v) if isinstance(v, set) else v for n, v in description.to_dict().items()}
    return {
        **found,
        "base_model_name_or_path": None,
        "lora_alpha": description.r,
        "use_rslora": False,
        "alpha_pattern": dict(description.rank_pattern or {}),
    }


def _format_header(target: Target, description: Any) -> dict[str, str]:
    if target.format == PEFT:
        described = folded_description(description)
        named = {f"{target.component}.{name}": value for name, value in described.items()}
        return {METADATA_KEY: json.dumps(named, indent=2, sort_keys=True)}
    if target.format != KOHYA:
        return {}
    rank = str(description.r)
    return {
        "ss_network_module": "networks.lora",
        "ss_network_dim": rank,
        "ss_network_alpha": rank,
    }


def _in_layout(changes: Mapping[str, Change], target: Target) -> Iterator[tuple[str, Change]]:
    """The changes by the layout's modules."""
    if not target.layout.original:
        yield from changes.items()
        return
    for original, parts in _used(target.names.original([*target.sizes]), changes).items():
        if len(parts) == 1:
            yield original, changes[parts[0]]
        else:
            yield original, _fused(changes, parts, target.sizes)


def _used(groups: Groups, modules: Mapping[str, Any]) -> Groups:
    return {name: parts for name, parts in groups.items() if not modules.keys().isdisjoint(parts)}


def _fused(changes: Mapping[str, Change], parts: Sequence[str], sizes: Sizes) -> Change:
    """One change of the matrix that holds the parts' rows: each part keeps a rank of its own."""
    there = [part for part in parts if part in changes]
    ranks, rows = [changes[part].rank for part in there], sum(sizes[part][0] for part in parts)
    up, column = torch.zeros(rows, sum(ranks), dtype=torch.float64), 0
    for part, rank in zip(there, ranks, strict=True):
        start = sum(sizes[before][0] for before in parts[: parts.index(part)])
        up[start : start + sizes[part][0], column : column + rank] = changes[part].up
        column += rank
    return Change(torch.cat([changes[part].down for part in there]), up)


def _cast(values: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """The values in the file's dtype; refused where one of them does not fit."""
    cast = values.to(dtype)
    if bad := int((~torch.isfinite(cast)).sum()):
        why = f"{bad} values are not finite in it, the greatest is {values.abs().max():g}"
        remedy = DTYPE_REMEDY if name == "fp16" else "the training has failed: see its events"
        raise InputRefused(Problem(f"export.dtype={name}", why, remedy=remedy))
    return cast
