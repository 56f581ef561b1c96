"""Which family's modules an adapter file names, and whether it fits a base of that family."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

from lib.family import Family
from lib.foreign import Fault
from lib.hollow import Sizes, hollow_denoiser, linear_sizes
from lib.hub import Component
from lib.inspecting import OURS, Inspected
from lib.naming import KOHYA, PEFT
from lib.reading import Slice, targets_of
from lib.spelling import CONVOLUTION, Module

LEAST_SHARE = Fraction(1, 2)  # of the modules that a family must name to be guessed


@dataclass(frozen=True)
class Likely:
    """Families that a file may be for, the likeliest alone or several alike; and who says so."""

    families: tuple[str, ...]
    by: str


def likely(found: Inspected, families: Mapping[str, Family]) -> Likely:
    """By our header, else by names, then proportions of the weights, then by what is left out."""
    told = found.file.metadata.get(f"{OURS}family", "")
    named = _likeliest(found, families)
    if told in families and (told in named or not named):
        return Likely((told,), "its header")
    return Likely(named, "its modules' names")


def _likeliest(found: Inspected, families: Mapping[str, Family]) -> tuple[str, ...]:
    modules = [module for module in found.spelt.modules if not module.of_text]
    sizes = {pair.module.name: Fraction(pair.rows, pair.columns) for pair in found.pairs}
    likeness = {
        name: _likeness(modules, sizes, family) for name, family in families.items() if modules
    }
    best = max(likeness.values(), default=(0, 0, 0))
    if not modules or best[0] < LEAST_SHARE * len(modules):
        return ()
    return tuple(sorted(name for name, like in likeness.items() if like == best))


def _likeness(
    modules: Sequence[Module], sizes: Mapping[str, Fraction], family: Family
) -> tuple[int, int, int]:
    """Modules named, those in proportion, and minus the kinds of their siblings left out."""
    table = _table(family)
    patterns = {module.name: _pattern(module.stem) for module in modules}
    named = [name for name, pattern in patterns.items() if pattern in table]
    proportioned = [name for name in named if sizes.get(name) in table[patterns[name]]]
    there = set(patterns.values())
    leaves = {_leaf(pattern) for pattern in there & table.keys()}
    siblings = {pattern for pattern in table if _leaf(pattern) in leaves}
    return len(named), len(proportioned), -len(siblings - there)


@cache
def _table(family: Any) -> Mapping[str, frozenset[Fraction]]:
    """A family's modules in all spellings, numbers left out, with rows over columns."""
    facts = family.FACTS
    recipe = Component(facts.classes[facts.denoiser].split("|")[0], family.TINY[facts.denoiser], {})
    sizes = linear_sizes(hollow_denoiser(recipe))
    found: defaultdict[str, set[Fraction]] = defaultdict(set)
    for name, slices in _every(family, sizes).items():
        found[_pattern(name)].add(Fraction(*_whole(slices)))
    return {pattern: frozenset(ratios) for pattern, ratios in found.items()}


def _every(family: Family, sizes: Sizes) -> dict[str, list[Slice]]:
    """Modules by diffusers' names and by the originals, without prefix."""
    component = family.FACTS.denoiser
    found = {
        name.removeprefix(f"{component}."): slices
        for name, slices in targets_of(
            family.NAMES, sizes, format=PEFT, component=component
        ).items()
    }
    flat = targets_of(family.NAMES, sizes, format=KOHYA, component=component)
    return {**{n.removeprefix("lora_unet_"): slices for n, slices in flat.items()}, **found}


def _pattern(stem: str) -> str:
    return re.sub(r"\d+", "#", stem.replace(".", "_"))


def _leaf(pattern: str) -> str:
    """What a target would name: what follows the block's number."""
    return pattern.partition("#_")[2].removesuffix("_#") or pattern


def _whole(slices: Sequence[Slice]) -> tuple[int, int]:
    """Rows and columns of the matrix that the slices make up."""
    return slices[-1].start + slices[-1].rows, slices[-1].columns


@dataclass(frozen=True)
class Fit:
    """How a file meets a base: what keeps it from fitting, and how much of the base it adapts."""

    faults: tuple[Fault, ...]
    adapted: int
    linear: int
    left_alone: tuple[str, ...]  # modules of the base like those adapted, in other blocks


def fit(found: Inspected, family: Family, component: Component) -> Fit:
    """Names and sizes against the base's denoiser, in the way of the file's format."""
    sizes = linear_sizes(hollow_denoiser(component))
    names = _takes(found, family, sizes)
    ours = [module for module in found.spelt.modules if not module.of_text]
    kinds = {pair.module.name: pair.kind for pair in found.pairs}
    known = [module for module in ours if module.name in names]
    named = {
        f"modules that {component.class_name} does not have": [
            module.name
            for module in ours
            if module.name not in names and kinds.get(module.name) != CONVOLUTION
        ],
        "sizes other than the base's": list(_misshapen(found, names)),
    }
    adapted = {one.module for module in known for one in names[module.name]}
    alike = {_pattern(module) for module in adapted}
    return Fit(
        faults=tuple(Fault(what, tuple(where)) for what, where in named.items() if where),
        adapted=len(adapted),
        linear=len(sizes),
        left_alone=tuple(m for m in sizes if m not in adapted and _pattern(m) in alike),
    )


def _takes(found: Inspected, family: Family, sizes: Sizes) -> Mapping[str, list[Slice]]:
    """The names that a reader of this format takes; of formats without one, the names alone."""
    component, formats = family.FACTS.denoiser, found.spelt.formats
    if len(formats) == 1 and formats[0] in family.NAMES.formats:
        return targets_of(family.NAMES, sizes, format=formats[0], component=component)
    every = _every(family, sizes)
    return {
        module.name: slices
        for module in found.spelt.modules
        if (slices := every.get(module.stem) or every.get(module.stem.replace(".", "_")))
    }


def _misshapen(found: Inspected, names: Mapping[str, list[Slice]]) -> Iterator[str]:
    for pair in found.pairs:
        if slices := names.get(pair.module.name):
            rows, columns = _whole(slices)
            if (pair.rows, pair.columns) != (rows, columns):
                yield f"{pair.module.name} {pair.rows}x{pair.columns}, not {rows}x{columns}"
