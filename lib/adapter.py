"""The LoRA adapter (arXiv:2106.09685): injected by PEFT, float32, initialised by us."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from lib import shapes
from lib.errors import InputRefused, Problem
from lib.random import normal
from lib.schema import AdapterConfig

ADAPTER = "default"


@dataclass(frozen=True)
class Injected:
    """The adapter's parameters by PEFT's names, and how many modules each target matched."""

    parameters: Mapping[str, torch.nn.Parameter]
    matches: Mapping[str, int]


def target_matches(module_names: Sequence[str], targets: Sequence[str]) -> dict[str, int]:
    """How many modules each target names: by the whole name or a dotted suffix."""
    return {
        target: sum(re.fullmatch(_pattern([target]), name) is not None for name in module_names)
        for target in targets
    }


def _pattern(targets: Sequence[str]) -> str:
    """A regular expression over module names; `*` stands for one part of a name."""
    parts = "|".join(re.escape(target).replace(r"\*", "[^.]+") for target in targets)
    return rf"(?:.*\.)?(?:{parts})"


def check_targets(denoiser: shapes.Module, targets: Sequence[str]) -> dict[str, int]:
    """Match counts; an entry that matches no linear layer is refused, with near names."""
    linears = [n for n, m in denoiser.named_modules() if isinstance(m, torch.nn.Linear)]
    matches = target_matches(linears, targets)
    leaves = sorted({name.rsplit(".", 1)[-1] for name in linears if not name[-1].isdigit()})
    problems = [
        Problem(f"adapter.targets={target}", "matches no linear layer", ", ".join(leaves))
        for target, count in matches.items()
        if count == 0
    ]
    if problems:
        raise InputRefused(problems)
    return matches


def peft_config(config: AdapterConfig) -> LoraConfig:
    """PEFT's description of the adapter; exported files carry it as metadata."""
    return LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # PEFT computes with it as a number
        target_modules=_peft_targets(config.targets),
        lora_dropout=config.dropout,
        init_lora_weights="gaussian",
        bias="none",
    )


def _peft_targets(targets: Sequence[str]) -> list[str] | str:
    """Names as they are, which PEFT matches as we do; an expression where one has a `*`."""
    return _pattern(targets) if any("*" in target for target in targets) else list(targets)


def inject(denoiser: Any, config: AdapterConfig, *, seed: int) -> Injected:
    """Add the adapter: A normal with std 1/rank, B zero, both float32 whatever the base's dtype."""
    matches = check_targets(denoiser, config.targets)
    with torch.random.fork_rng(devices=[]):  # PEFT draws too; its numbers are replaced below
        denoiser.add_adapter(peft_config(config), adapter_name=ADAPTER)
    parameters = parameters_of(denoiser)
    for name, parameter in parameters.items():
        parameter.data = _initial(name, tuple(parameter.shape), config, seed).to(parameter.device)
        parameter.requires_grad_(True)
    return Injected(parameters=parameters, matches=matches)


def parameters_of(denoiser: Any) -> dict[str, torch.nn.Parameter]:
    """The adapter's parameters by PEFT's names."""
    return {n: p for n, p in denoiser.named_parameters() if "lora_" in n}


def _initial(name: str, shape: tuple[int, ...], config: AdapterConfig, seed: int) -> torch.Tensor:
    """A's draw depends on the module's name alone, not on the order of injection."""
    if "lora_B" in name:
        return torch.zeros(shape)
    draw = normal(shape, seed=seed, stream="adapter_init", counter=0, sample_id=name)
    return torch.from_numpy(draw) / config.rank


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
