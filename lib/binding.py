"""A denoiser made ready to train: layers grouped by shared input, base quantised, adapter copied.

The adapter is injected before (PEFT knows dense layers); quantisation comes after (design 6).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from lib import frozen, prequantised
from lib.copies import Copies
from lib.few_bits import in_few_bits
from lib.lowrank import ADAPTER, AdaptedLinear, Group, SharingLinear

Layer = AdaptedLinear | SharingLinear


def bind(
    denoiser: Any,
    parameters: Mapping[str, nn.Parameter],
    *,
    shared: Sequence[Sequence[str]],
    mode: str,
    device: torch.device,
    dtype: torch.dtype,
    scale: float,
    dropout: bool = False,
) -> Copies:
    """Groups of layers on the device, in the precision of `mode`, and the adapter's copies.

    `shared` are names under one parent that are fed the same tensor, in the order of their calls.
    With dropout each layer draws its own, so none shares. What a base stores in few bits is held
    as it is, and then so is what it stores dense.
    """
    quantises = mode in frozen.KINDS and not prequantised.is_stored(denoiser)
    quantised = set(quantisable(denoiser)) if quantises else set()
    layers = dict(linears(denoiser))
    groups = []
    for names in _grouped(denoiser, layers, [] if dropout else shared, dtype=dtype):
        kind = mode if quantised.issuperset(names) else ""
        groups.append(_group(denoiser, layers, names, kind=kind, device=device, dtype=dtype))
    for name, layer in dict(linears(denoiser)).items():
        if name in quantised and isinstance(layer, nn.Linear):
            _replace(denoiser, name, frozen.KINDS[mode](layer.to(device)))
    denoiser.to(device)
    return Copies(parameters, groups, dtype=dtype, scale=scale)


def linears(denoiser: Any) -> Iterator[tuple[str, Any]]:
    """Linear layers by name: adapted ones as such, without what is inside them."""
    inside = ""
    for name, module in denoiser.named_modules():
        if inside and name.startswith(inside):
            continue
        if isinstance(module, AdaptedLinear | SharingLinear):
            inside = f"{name}."
            yield name, module
        elif isinstance(module, nn.Linear):
            yield name, module


def quantisable(denoiser: Any) -> list[str]:
    """Layers inside the repeated blocks, but for modulations and odd or small shapes."""
    kinds = _repeated(denoiser)
    blocks = {name for name, module in denoiser.named_modules() if type(module).__name__ in kinds}
    return in_few_bits({n: _sides(layer) for n, layer in linears(denoiser)}, blocks=blocks)


def _repeated(denoiser: Any) -> Sequence[str]:
    """Class names of the blocks that a denoiser is made of; of one that names none, its own."""
    return denoiser._repeated_blocks or [type(denoiser).__name__]


def _sides(layer: Any) -> tuple[int, int]:
    base = _base(layer)
    return base.in_features, base.out_features


def _base(layer: Any) -> Any:
    return layer.base_layer if isinstance(layer, AdaptedLinear | SharingLinear) else layer


def _grouped(
    denoiser: Any,
    layers: Mapping[str, Any],
    shared: Sequence[Sequence[str]],
    *,
    dtype: torch.dtype,
) -> Iterator[tuple[str, ...]]:
    """The declared groups that this denoiser has, then every other adapted layer by itself."""
    may_join = partial(_alike, layers, dtype=dtype)
    taken: set[str] = set()
    for members in shared:
        for parent, _ in denoiser.named_modules():
            names = tuple(f"{parent}.{member}" if parent else member for member in members)
            if layers.keys() >= set(names) and not taken & set(names) and may_join(names):
                taken |= set(names)
                yield names
    for name, layer in layers.items():
        if name not in taken and isinstance(layer, AdaptedLinear):
            yield (name,)


def _alike(layers: Mapping[str, Any], names: Sequence[str], *, dtype: torch.dtype) -> bool:
    """Whether one product can stand for all: in the run's precision, of one kind and input."""
    bases = [_base(layers[name]) for name in names]
    kinds = {(type(b), b.in_features, b.bias is None) for b in bases}
    in_precision = all(b.weight.dtype == dtype for b in bases)
    return len(kinds) == 1 and in_precision and prequantised.may_join(bases)


def _group(
    denoiser: Any,
    layers: Mapping[str, Any],
    names: Sequence[str],
    *,
    kind: str,
    device: torch.device,
    dtype: torch.dtype,
) -> Group:
    members: list[Any] = [_member(denoiser, name, layers[name]) for name in names]
    bases = [member.base_layer.to(device) for member in members]
    sizes = tuple(base.out_features for base in bases)
    whole = bases[0] if len(bases) == 1 else _joined(bases)
    if kind:
        whole = frozen.KINDS[kind](whole)
    if isinstance(whole, frozen.FrozenLinear):
        _hand_parts(members, whole, sizes)
    elif whole.weight.dtype == dtype:
        whole = frozen.DenseLinear(whole)
    group = Group(members, whole, sizes)
    for place, member in enumerate(members):
        member.group, member.place = group, place
    drops = members[0].lora_dropout[ADAPTER] if len(members) == 1 else None
    group.dropout = drops if isinstance(drops, nn.Dropout) else None
    return group


def _joined(bases: Sequence[Any]) -> Any:
    stored = isinstance(bases[0], prequantised.StoredNf4)
    return prequantised.joined(bases) if stored else frozen.joined(bases)


def _member(denoiser: Any, name: str, layer: Any) -> Layer:
    """The layer, of a plain one inside a shell that its group can answer for."""
    if isinstance(layer, AdaptedLinear | SharingLinear):
        return layer
    shell = SharingLinear(layer)
    _replace(denoiser, name, shell)
    return shell


def _hand_parts(members: Sequence[Any], whole: Any, sizes: Sequence[int]) -> None:
    """What each member computes alone, for a copy of the denoiser outside its group."""
    start = 0
    for member, size in zip(members, sizes, strict=True):
        member.base_layer = whole if len(members) == 1 else whole.part(start, start + size)
        start += size


def _replace(denoiser: Any, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(denoiser.get_submodule(parent), leaf, module)
