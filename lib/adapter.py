"""The LoRA adapter (arXiv:2106.09685): injected by PEFT, float32, initialised by us."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from lib import shapes
from lib.errors import InputRefused, Problem
from lib.lowrank import ADAPTER, AdaptedLinear
from lib.naming import expression, is_named
from lib.random import normal
from lib.schema import AdapterConfig


@dataclass(frozen=True)
class Injected:
    """The adapter's parameters by PEFT's names; modules of each target and rank pattern."""

    parameters: Mapping[str, torch.nn.Parameter]
    matches: Mapping[str, int]
    patterns: Mapping[str, int] = field(default_factory=dict)


def target_matches(module_names: Sequence[str], targets: Sequence[str]) -> dict[str, int]:
    """How many modules each target names: by the whole name or a dotted suffix."""
    return {
        target: sum(is_named(name, target=target) for name in module_names) for target in targets
    }


def _pattern(targets: Sequence[str]) -> str:
    """A regular expression over module names, which may end in a target."""
    return rf"(?:.*\.)?(?:{'|'.join(map(expression, targets))})"


def check_targets(
    denoiser: shapes.Module, targets: Sequence[str], ranks: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Match counts of targets and of the patterns of `ranks`; all that is wrong in one report.

    An entry must match a linear layer, and a pattern one that a target matches too.
    """
    linears = [n for n, m in denoiser.named_modules() if isinstance(m, torch.nn.Linear)]
    adapted = [n for n in linears if any(is_named(n, target=target) for target in targets)]
    matches, ranked = target_matches(linears, targets), target_matches(adapted, [*(ranks or {})])
    problems = [
        Problem(f"adapter.targets={target}", "matches no linear layer", _leaves(linears))
        for target, count in matches.items()
        if count == 0
    ]
    problems += [
        Problem(f"adapter.rank_pattern={name}", "matches no adapted module", _leaves(adapted))
        for name, count in ranked.items()
        if count == 0
    ]
    problems += _rank_conflicts(adapted, ranks or {})
    if problems:
        raise InputRefused(problems)
    return {**matches, **ranked}


def _leaves(module_names: Sequence[str]) -> str:
    """The last parts of the names, of those in lists none: what a target is likely to be."""
    leaves = {name.rsplit(".", 1)[-1] for name in module_names if not name[-1].isdigit()}
    return ", ".join(sorted(leaves))


def _rank_conflicts(adapted: Sequence[str], ranks: Mapping[str, int]) -> Iterator[Problem]:
    """Each set of patterns that give one module several ranks, once."""
    told: set[tuple[str, ...]] = set()
    for name in adapted:
        found = tuple(pattern for pattern in ranks if is_named(name, target=pattern))
        if len({ranks[pattern] for pattern in found}) > 1 and found not in told:
            told.add(found)
            given = ", ".join(f"{pattern}:{ranks[pattern]}" for pattern in found)
            yield Problem(
                f"adapter.rank_pattern={given}",
                f"give {name} several ranks",
                "one rank for a module",
                "write longer names that match other modules",
            )


def peft_config(config: AdapterConfig) -> LoraConfig:
    """PEFT's description of the adapter; exported files carry it as metadata."""
    return LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # PEFT computes with it as a number
        use_rslora=config.rslora,
        rank_pattern={expression(name): rank for name, rank in config.rank_pattern.items()},
        alpha_pattern={
            expression(name): alpha_of(config, rank) for name, rank in config.rank_pattern.items()
        },
        target_modules=_peft_targets(config.targets),
        lora_dropout=config.dropout,
        init_lora_weights="gaussian",
        bias="none",
    )


def scale_of(config: AdapterConfig) -> float:
    """What the product of B and A is multiplied by, in every module."""
    return config.alpha / (math.sqrt(config.rank) if config.rslora else config.rank)


def alpha_of(config: AdapterConfig, rank: int) -> float:
    """The alpha with which a module of this rank has the scale of the others."""
    if config.rslora:
        return config.alpha * math.sqrt(rank / config.rank)
    return config.alpha * rank / config.rank


def _peft_targets(targets: Sequence[str]) -> list[str] | str:
    """Names as they are, which PEFT matches as we do; an expression where one has a `*`."""
    return _pattern(targets) if any("*" in target for target in targets) else list(targets)


def inject(denoiser: Any, config: AdapterConfig, *, seed: int) -> Injected:
    """Add the adapter: A normal with std 1/rank, B zero, both float32 whatever the base's dtype."""
    matches = check_targets(denoiser, config.targets, config.rank_pattern)
    described = peft_config(config)
    described._register_custom_module({torch.nn.Linear: AdaptedLinear})
    device = next(denoiser.parameters()).device
    with torch.device("meta"):  # PEFT would draw too, and move its numbers one by one
        denoiser.add_adapter(described, adapter_name=ADAPTER)
    drawn = _drawn(parameters_of(denoiser), seed=seed, device=device)
    denoiser.load_state_dict(drawn, strict=False, assign=True)
    parameters = parameters_of(denoiser)
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    return Injected(
        parameters=parameters,
        matches={name: matches[name] for name in config.targets},
        patterns={name: matches[name] for name in config.rank_pattern},
    )


def parameters_of(denoiser: Any) -> dict[str, torch.nn.Parameter]:
    """The adapter's parameters by PEFT's names."""
    return {n: p for n, p in denoiser.named_parameters() if "lora_" in n}


def _drawn(
    parameters: Mapping[str, torch.Tensor], *, seed: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """First values by name, parts of one tensor: hundreds of small ones are slow to move."""
    sides = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    drawn = [_initial(name, shape, seed).ravel() for name, shape in sides.items()]
    flat = torch.from_numpy(np.concatenate(drawn))
    parts = flat.to(device).split([part.size for part in drawn])
    return {
        name: part.view(shape) for (name, shape), part in zip(sides.items(), parts, strict=True)
    }


def _initial(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """A's draw depends on the module's name and rank alone, not on the order of injection."""
    if "lora_B" in name:
        return np.zeros(shape, dtype=np.float32)
    draw = normal(shape, seed=seed, stream="adapter_init", counter=0, sample_id=name)
    return draw / np.float32(shape[0])


def state_dict(denoiser: Any) -> dict[str, torch.Tensor]:
    """The adapter's tensors under PEFT's keys: `<module>.lora_A.weight`."""
    tensors = get_peft_model_state_dict(denoiser, adapter_name=ADAPTER)
    return {name: tensor.detach() for name, tensor in tensors.items()}


def renamed(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by their parameters' names, under PEFT's keys."""
    return {name.replace(f".{ADAPTER}", ""): tensor for name, tensor in parameters.items()}


def load_state_dict(
    parameters: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]
) -> None:
    """Copy saved tensors into the injected parameters; both must name the same set."""
    named = renamed(parameters)
    if named.keys() != state.keys():
        raise ValueError(f"adapter keys differ: {sorted(named.keys() ^ state.keys())[:4]}")
    copy_into(named, state)


@torch.no_grad()
def copy_into(target: Mapping[str, torch.Tensor], source: Mapping[str, torch.Tensor]) -> None:
    """Overwrite each tensor with the one of the same name."""
    for name, tensor in target.items():
        tensor.copy_(source[name])


def is_untrained(state: Mapping[str, torch.Tensor]) -> bool:
    """Every B is zero: the adapter changes nothing."""
    return not any(bool(t.any()) for name, t in state.items() if "lora_B" in name)
