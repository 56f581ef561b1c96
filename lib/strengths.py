"""With what factor each module of an adapter file counts: `.alpha`, or PEFT's description."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lib.foreign import Fault, Foreign
from lib.naming import PEFT
from lib.reading import METADATA_KEY, alpha_told, scale_told
from lib.spelling import Module

# A pattern of a stranger's that could take for ever: a repeated group, or many repetitions.
_COSTLY = re.compile(r"\)[*+?{]|(?:[*+{].*){5}", re.S)
GREATEST = 1e30  # beyond it a number is no alpha, and may be none that can be divided


@dataclass(frozen=True)
class Strength:
    """A module's alpha, None where the file has none, and its factor."""

    alpha: float | None
    scale: float


@dataclass(frozen=True)
class Described:
    """PEFT's description, by the component's name in the pipeline."""

    components: Mapping[str, Mapping[str, Any]]
    faults: tuple[Fault, ...] = ()

    def of(self, module: Module) -> Mapping[str, Any] | None:
        return self.components.get(module.prefix[:-1]) if module.format == PEFT else None


def described(metadata: Mapping[str, str]) -> Described:
    """What the header says in PEFT's words, as far as it can be followed."""
    if METADATA_KEY not in metadata:
        return Described({})
    try:
        found = json.loads(metadata[METADATA_KEY])
    except (ValueError, RecursionError):
        found = None
    components: dict[str, dict[str, Any]] = {}
    for name, value in found.items() if isinstance(found, dict) else ():
        component, _, setting = name.partition(".")
        components.setdefault(component, {})[setting] = value
    wrong = [name for name, of in components.items() if not _can_be_followed(of)]
    faults = [Fault(f"{METADATA_KEY} cannot be followed", tuple(sorted(wrong)))] if wrong else []
    if not isinstance(found, dict):
        faults.append(Fault(f"{METADATA_KEY} is no JSON of names and values"))
    sound = {name: of for name, of in components.items() if name not in wrong}
    return Described(sound, tuple(faults))


def strength(
    module: Module, *, rank: int, alpha: float | None, of: Mapping[str, Any] | None
) -> Strength:
    """By the description where there is one, else alpha / rank, or 1."""
    if of is None:
        return Strength(alpha, 1.0 if alpha is None else alpha / rank)
    told = alpha_told(of, module=module.stem, rank=rank)
    return Strength(told, scale_told(of, told, rank=rank))


def alpha_of(file: Foreign, key: str) -> float | None:
    """The value of an `.alpha`: one finite number above 0, else None."""
    place = file.places[key]
    if math.prod(place.shape) != 1:
        return None
    value = float(file.tensor(key).double())
    return value if math.isfinite(value) and value > 0 else None


def _can_be_followed(of: Mapping[str, Any]) -> bool:
    patterns = of.get("alpha_pattern") or {}
    return (
        isinstance(patterns, dict)
        and all(map(_is_number, [of.get("lora_alpha", 1), *patterns.values()]))
        and all(map(_is_cheap, patterns))
        and isinstance(of.get("use_rslora") or False, bool)
    )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < GREATEST


def _is_cheap(pattern: str) -> bool:
    if _COSTLY.search(pattern):
        return False
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return False
    return True
