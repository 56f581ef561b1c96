"""Making a run's trainer: the denoiser in its precision, adapter, optimizer, and the levers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from lib import adapter, compiling, ema, frozen, levers, stopping
from lib.binding import bind
from lib.components import QUANTISED
from lib.copies import Copies
from lib.device import pick_device
from lib.errors import InputRefused, Problem
from lib.events import Events
from lib.family import Family
from lib.footprint import Needs
from lib.hub import Base
from lib.optimizers import make_optimizer, usable
from lib.recomputing import recompute
from lib.records import compute_dtype
from lib.replays import Replays
from lib.schema import Config
from lib.team import ALONE, Team
from lib.training.step import Trainer


def make_trainer(
    config: Config,
    family: Family,
    base: Base,
    events: Events,
    *,
    total_steps: int,
    team: Team = ALONE,
    needs: Needs | None = None,
) -> Trainer:
    """The denoiser in the run's precision with a fresh adapter and its optimizer.

    Without `needs` it is not known whether a step fits, and nothing is computed again for it.
    """
    device, mode = pick_device(), config.precision.mode
    events.decision("device", str(device), source="machine", reason="the first GPU, else the CPU")
    check_precision(mode, device)
    chosen = levers.choose(
        config,
        device=device,
        total_steps=total_steps,
        events=events,
        needs=needs,
        masked=family.FACTS.masked_texts,
    )
    denoiser, injected, weights = _adapted(config, family, base, events, device=device)
    _engage(
        chosen, denoiser, fixed_text=family.FACTS.fixed_texts, dropout=config.adapter.dropout > 0
    )
    optimizer = usable(config.optimizer, device=device, events=events, team=team)
    return Trainer(
        family=family,
        denoiser=denoiser,
        parameters=injected.parameters,
        optimizer=make_optimizer(injected.parameters.values(), optimizer),
        device=device,
        autocast_dtype=None if mode == "fp32" else compute_dtype(mode),
        max_grad_norm=config.trainer.max_grad_norm,
        seed=config.seed,
        dropout=config.adapter.dropout,
        ema_decay=config.trainer.ema_decay,
        ema=ema.start(injected.parameters) if config.trainer.ema_decay > 0 else {},
        team=team,
        asked=stopping.asked,
        weights=weights,
        replays=Replays(
            device,
            enabled=chosen.cuda_graphs,
            refused=partial(_fell_back, events, "cuda_graphs"),
        ),
        flash4=chosen.flash4,
        uncompile=partial(_uncompile, denoiser, events) if chosen.compile else None,
    )


def _adapted(
    config: Config, family: Family, base: Base, events: Events, *, device: torch.device
) -> tuple[Any, adapter.Injected, Copies]:
    """The denoiser on the device in the run's precision, its adapter, and what is kept of that."""
    mode, drops = config.precision.mode, config.adapter.dropout > 0
    dtype = compute_dtype(mode)
    # Layers in few bits go to the device one by one: the dense base need not fit there.
    first = torch.device("cpu") if mode in frozen.KINDS else device
    denoiser = family.load_denoiser(base, dtype=dtype, device=first)
    injected = adapter.inject(denoiser, config.adapter, seed=config.seed)
    _record_matches(injected, events)
    if drops:
        denoiser.train()
    copies = bind(
        denoiser,
        injected.parameters,
        shared=family.FACTS.shared_inputs,
        mode=mode,
        device=device,
        dtype=dtype,
        scale=adapter.scale_of(config.adapter),
        dropout=drops,
    )
    _record_precision(mode, denoiser, events)
    return denoiser, injected, copies


def check_precision(mode: str, device: torch.device) -> None:
    """Refuse a precision that this machine cannot compute."""
    fault = frozen.fault_of(mode, device) if mode in frozen.KINDS else ""
    if fault:
        remedy = 'pip install -e ".[quant]"' if mode == "nf4" else "use precision=bf16"
        raise InputRefused(Problem(f"precision.mode={mode}", fault, "fp32, bf16", remedy))


def _engage(chosen: levers.Levers, denoiser: Any, *, fixed_text: bool, dropout: bool) -> None:
    if chosen.checkpointing:
        recompute(denoiser, blocks=chosen.blocks, dropout=dropout)
    if chosen.compile:
        compiling.compile_blocks(denoiser, fixed_text=fixed_text)


def _uncompile(denoiser: Any, events: Events, why: str) -> None:
    compiling.run_as_written(denoiser)
    _fell_back(events, "compile", why)


def _fell_back(events: Events, lever: str, why: str) -> None:
    events.decision(lever, False, source="fell back", reason=why)


def _record_precision(mode: str, denoiser: Any, events: Events) -> None:
    """How much of the base is in few bits; what is not stays as it was loaded."""
    if mode in frozen.KINDS:
        layers = [m for m in denoiser.modules() if isinstance(m, frozen.FrozenLinear)]
        weights = sum(layer.out_features * layer.in_features for layer in layers)
        stored = QUANTISED in denoiser.config
        rest = "as the base stores them" if stored else "modulations and embedders stay dense"
        reason = f"{weights / 1e6:.1f} M weights in {mode}; {rest}"
        events.decision("precision", f"{len(layers)} products", source="config", reason=reason)


def _record_matches(injected: adapter.Injected, events: Events) -> None:
    for name, matched in (("targets", injected.matches), ("rank_pattern", injected.patterns)):
        counts = ", ".join(f"{target} {count}" for target, count in matched.items())
        if counts:
            reason = "modules that each matches"
            events.decision(f"adapter.{name}", counts, source="base", reason=reason)
