"""What an adapter changes: per module a product of two thin matrices, compared without forming it.

The scale of a module is alpha / rank, of rsLoRA (arXiv:2312.03732) alpha / sqrt(rank).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

HALVES = {"lora_A": "down", "lora_B": "up"}
# Wrappers that put parts of their own into names: PEFT's model, its adapters, torch.compile.
_WRAPPED = re.compile(r"^base_model\.model\.|(?<=\.)default\.|(?:^|(?<=\.))_orig_mod\.")
_KEY = re.compile(r"(?P<module>.+)\.(?P<half>lora_A|lora_B)\.weight")


@dataclass(frozen=True)
class Change:
    """The change of a module's weight, up @ down, in float64 and with its scale."""

    down: torch.Tensor
    up: torch.Tensor

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def is_zero(self) -> bool:
        return not (bool(self.up.any()) and bool(self.down.any()))


def unwrapped(name: str) -> str:
    """A tensor's name without what wrappers add, as the plain model has it."""
    return _WRAPPED.sub("", name)


def pairs_of(state: Mapping[str, torch.Tensor]) -> dict[str, Mapping[str, torch.Tensor]]:
    """A trained adapter's tensors by module: `lora_A` and `lora_B`; ValueError for any other."""
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in state.items():
        found = _KEY.fullmatch(unwrapped(name))
        if found is None or tensor.ndim != 2:
            raise ValueError(f"{name} is no part of a LoRA pair of a linear module")
        pairs.setdefault(found["module"], {})[found["half"]] = tensor
    if single := [module for module, pair in pairs.items() if pair.keys() != HALVES.keys()]:
        raise ValueError(f"half of a pair is missing: {single[:4]}")
    return {module: pairs[module] for module in sorted(pairs)}


def scale_of(description: Any, module: str, *, rank: int) -> float:
    """The factor with which PEFT multiplies a module's output, by its LoraConfig."""
    alpha = description.lora_alpha
    for pattern, own in (description.alpha_pattern or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = own
            break
    return alpha / (math.sqrt(rank) if description.use_rslora else rank)


def changes_of(state: Mapping[str, torch.Tensor], description: Any) -> dict[str, Change]:
    """What a trained adapter changes; the scale is in `up`."""
    changes = {}
    for module, pair in pairs_of(state).items():
        down, up = pair["lora_A"].double(), pair["lora_B"].double()
        scale = scale_of(description, module, rank=down.shape[0])
        changes[module] = Change(down, up * scale)
    return changes


def norm(change: Change) -> float:
    """The Frobenius norm of the change."""
    return float((_triangle(change.up) @ _triangle(change.down.T).T).norm())


def difference(one: Change, other: Change) -> float:
    """How far one change is from the other, relative to the other."""
    if one.up.shape[0] != other.up.shape[0] or one.down.shape[1] != other.down.shape[1]:
        return math.inf
    apart = Change(torch.cat([one.down, other.down]), torch.cat([one.up, -other.up], dim=1))
    distance, size = norm(apart), norm(other)
    return distance / size if size else (math.inf if distance else 0.0)


def _triangle(matrix: torch.Tensor) -> torch.Tensor:
    """R of the matrix's QR: as long in every direction, and small."""
    return torch.linalg.qr(matrix, mode="r").R
