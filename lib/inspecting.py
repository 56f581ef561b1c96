"""What an adapter file holds: its modules, how far each changes its weight, what is wrong."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lib.foreign import Fault, Foreign, open_foreign
from lib.naming import KOHYA, PEFT
from lib.reading import KOHYA_ENDINGS
from lib.spelling import CONVOLUTION, DORA, LORA, Module, Spelt, spelt
from lib.strengths import Described, Strength, alpha_of, described, strength
from lib.tensors import Tensor, entry_digest, is_finite

OURS = "darkroom."
_DIGEST = re.compile(r"[0-9a-f]{64}")
MEASURED = (LORA, DORA, CONVOLUTION)


@dataclass(frozen=True)
class Pair:
    """A module whose two halves fit each other; `size` is the greatest rows and columns."""

    module: Module
    kind: str
    rows: int
    columns: int
    strength: Strength
    rank: int
    norm: float  # of the change, Frobenius; NaN where a half is not finite


@dataclass(frozen=True)
class Inspected:
    """A file, understood as far as it can be."""

    file: Foreign
    spelt: Spelt
    pairs: tuple[Pair, ...]
    dtypes: Mapping[str, int]
    notes: tuple[Fault, ...]
    faults: tuple[Fault, ...]

    @property
    def kinds(self) -> Mapping[str, int]:
        """Modules by kind; a convolution is told by its sizes."""
        by_size = {pair.module.name: pair.kind for pair in self.pairs}
        found = Counter(by_size.get(m.name, m.kind) for m in self.spelt.modules)
        return found + Counter({kind: len(keys) for kind, keys in self.spelt.others.items()})


def inspect_file(path: Path) -> Inspected:
    """Read a file of anyone's; refused where it is none that can be looked into."""
    file = open_foreign(path)
    found = spelt(file.names)
    told = described(file.metadata)
    broken = _not_finite(file) if found.modules or found.others else ()
    pairs = tuple(_pairs(file, found, told, broken=set(broken)))
    faults = [*file.faults, *told.faults, *_digest_faults(file)]
    named = {
        "values that are not finite": broken,
        "one module under two names or spellings": found.twins,
        "keys that no reader of adapters takes": found.unknown,
        **_pair_faults(file, found, {pair.module.name for pair in pairs}),
        **_alpha_faults(file, found, pairs, told),
        **_name_faults(found),
    }
    faults += [Fault(what, tuple(names)) for what, names in named.items() if names]
    dtypes = _dtypes(file, found)
    faults += _whole_faults(found, pairs, dtypes)
    return Inspected(file, found, pairs, dtypes, tuple(_notes(file, found, pairs)), tuple(faults))


def _not_finite(file: Foreign) -> tuple[str, ...]:
    places = file.places.items()
    return tuple(sorted(n for n, p in places if not is_finite(p.dtype, file.data(n))))


def _pairs(file: Foreign, found: Spelt, told: Described, *, broken: set[str]) -> Iterator[Pair]:
    for module in found.modules:
        if module.kind not in MEASURED or not {"down", "up"} <= module.parts.keys():
            continue
        halves = [file.places.get(module.parts[part]) for part in ("down", "up")]
        if None in halves or not _fit(*(half.shape for half in halves if half)):
            continue
        down, up = (half.shape for half in halves if half)
        alpha = module.parts.get("alpha")
        value = alpha_of(file, alpha) if alpha in file.places and alpha else None
        strong = strength(module, rank=down[0], alpha=value, of=told.of(module))
        finite = broken.isdisjoint((module.parts["down"], module.parts["up"]))
        yield Pair(
            module,
            kind=CONVOLUTION if max(down[2:], default=1) > 1 else module.kind,
            rows=up[0],
            columns=down[1],
            strength=strong,
            rank=down[0],
            norm=_norm(file, module) * abs(strong.scale) if finite else math.nan,
        )


def _fit(down: tuple[int, ...], up: tuple[int, ...]) -> bool:
    """Both of a linear layer, or both of a convolution whose second is of one pixel."""
    return (
        len(down) == len(up)
        and len(down) in (2, 4)
        and down[0] == up[1]
        and 0 not in (*down, *up)
        and set(up[2:]) <= {1}
    )


def _norm(file: Foreign, module: Module) -> float:
    """Frobenius norm of B A, by the small matrices B'B and A A' where these are the smaller ones.

    Twelve digits are more than anybody reads; a proof takes `lib.changes.norm`.
    """
    down, up = (file.tensor(module.parts[part]).double().flatten(1) for part in ("down", "up"))
    if down.shape[0] > min(up.shape[0], down.shape[1]):
        return float((up @ down).norm())
    squared = float(((up.T @ up) * (down @ down.T)).sum())
    return math.sqrt(max(squared, 0.0)) if math.isfinite(squared) else math.inf


def _pair_faults(file: Foreign, found: Spelt, measured: set[str]) -> dict[str, list[str]]:
    """Modules that lack a half, and those whose halves are of sizes that do not meet."""
    lora = [module for module in found.modules if module.kind in (LORA, DORA)]
    halves = {m.name: {"down", "up"} & m.parts.keys() for m in lora}
    return {
        "A without B": [name for name, there in halves.items() if there == {"down"}],
        "B without A": [name for name, there in halves.items() if there == {"up"}],
        "neither A nor B": [name for name, there in halves.items() if not there],
        "A and B do not fit each other": [
            module.name
            for module in lora
            if len(halves[module.name]) == 2
            and module.name not in measured
            and {module.parts["down"], module.parts["up"]} <= file.places.keys()
        ],
    }


def _alpha_faults(
    file: Foreign, found: Spelt, pairs: tuple[Pair, ...], told: Described
) -> dict[str, list[str]]:
    alphas = {m.name: m.parts["alpha"] for m in found.modules if "alpha" in m.parts}
    lacking = [pair.module for pair in pairs if pair.module.name not in alphas]
    flat = [module for module in lacking if module.format == KOHYA]
    # Without any, readers take the rank, which is all that ranks of several sizes can mean.
    needed = not alphas and len({pair.rank for pair in pairs}) == 1
    readable = {name: key for name, key in alphas.items() if key in file.places}
    return {
        "alpha is missing here, not elsewhere": [m.name for m in lacking] if alphas else [],
        "alpha is missing, which kohya's format needs": [m.name for m in flat] if needed else [],
        "alpha is not one number above 0": [
            name for name, key in readable.items() if alpha_of(file, key) is None
        ],
        "alpha is there twice, as a tensor and in the header's description": [
            module.name for module in found.modules if module.name in alphas and told.of(module)
        ],
    }


def _name_faults(found: Spelt) -> dict[str, list[str]]:
    """Names that the readers of their format do not take."""
    ours = [module for module in found.modules if not module.of_text]
    return {
        "several formats in one file": list(found.formats) if len(found.formats) > 1 else [],
        "names hold what a wrapper put there": [
            m.name for m in ours if m.stem != m.name.removeprefix(m.prefix)
        ],
        "not spelt as readers of this format expect": [
            key
            for module in ours
            for part, key in module.parts.items()
            if part in ("down", "up") and not _is_spelt_for(module, key)
        ],
    }


def _is_spelt_for(module: Module, key: str) -> bool:
    if module.format == KOHYA:
        return key.endswith(KOHYA_ENDINGS)
    # Of a U-Net diffusers takes the older spellings too.
    return module.prefix != "transformer." or ".lora_A." in key or ".lora_B." in key


def _dtypes(file: Foreign, found: Spelt) -> Mapping[str, int]:
    """How many tensors are of each dtype; an alpha is often wider than the halves."""
    keys = [key for m in found.modules for part, key in m.parts.items() if part != "alpha"]
    return Counter(file.places[key].dtype for key in keys if key in file.places)


def _whole_faults(
    found: Spelt, pairs: tuple[Pair, ...], dtypes: Mapping[str, int]
) -> Iterator[Fault]:
    if not found.modules and not found.others:
        yield Fault("no adapter: no key is of an adapted module")
    if pairs and all(pair.norm == 0 for pair in pairs):
        yield Fault("every change is zero (B, or A): the adapter does nothing")
    if len(dtypes) > 1:
        yield Fault("several dtypes", tuple(f"{n} {dtype}" for dtype, n in sorted(dtypes.items())))


def _digest_faults(file: Foreign) -> Iterator[Fault]:
    """Files of ours carry a digest of all else."""
    told = file.metadata.get("digest", "")
    if not _DIGEST.fullmatch(told) or file.faults:
        return
    stored = {n: Tensor(p.dtype, p.shape, file.data(n)) for n, p in file.places.items()}
    try:
        same = entry_digest(stored, metadata=file.metadata) == told
    except UnicodeEncodeError:  # half a character, which nothing of ours writes
        same = False
    if not same:
        yield Fault("its digest does not match: it was changed after it was written")


def _notes(file: Foreign, found: Spelt, pairs: tuple[Pair, ...]) -> Iterator[Fault]:
    """What is worth knowing and no fault."""
    still = [pair.module.name for pair in pairs if pair.norm == 0]
    if 0 < len(still) < len(pairs):
        yield Fault("modules that stay as they are (B, or A, is zero)", tuple(still))
    by_size = {pair.module.name: pair.kind for pair in pairs}
    odd: dict[str, list[str]] = {}
    for module in found.modules:
        kind = by_size.get(module.name, module.kind)
        if kind != LORA:
            odd.setdefault(kind, []).append(module.name)
    for kind, names in odd.items():
        how = "measured without magnitude" if kind == DORA else "not measured"
        if kind != CONVOLUTION:
            yield Fault(f"{kind}, {how}", tuple(names))
    for kind, keys in found.others.items():
        yield Fault(f"{kind}, not measured", keys)
    if text := [module.name for module in found.modules if module.of_text]:
        yield Fault("modules of text encoders, which no base here takes", tuple(text))
    plain = [p for p in pairs if p.strength.alpha is None and p.module.format != PEFT]
    if plain and len(plain) == len(pairs):
        yield Fault("no alpha: readers take the rank, a scale of 1")
    if any(name.startswith(OURS) for name in file.metadata) and "digest" not in file.metadata:
        yield Fault("its header is ours, its digest is gone: another tool has written it again")
