"""`precision=auto`: decided once for a request and kept in the store (design 3 and 8)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lib import files
from lib.errors import InputRefused, Problem
from lib.events import Events
from lib.extending import in_its_precision
from lib.few_bits import MODES
from lib.fitting import stored_kind
from lib.pipeline import train
from lib.pipeline.budget import needs_of
from lib.pipeline.contract import Inputs, StagePlan
from lib.schema import AUTO, Config, with_mode
from lib.store import Store

if TYPE_CHECKING:
    from lib.choosing import Choice


@dataclass(frozen=True)
class Decision:
    """A precision for one request, and why."""

    mode: str
    reason: str


def known(config: Config, inputs: Inputs, store: Store) -> Config:
    """The configuration with what `auto` was decided to be, where that is known."""
    given = _given(config, inputs)
    if given.precision.mode != AUTO or given.precision.redecide or not train.identified(inputs):
        return given
    found = _recalled(store, train.request_of(given, inputs))
    return with_mode(given, found.mode) if found else given


def decided(config: Config, inputs: Inputs, store: Store, events: Events) -> Config:
    """The configuration with `auto` decided, on this machine where it was not yet."""
    if config.precision.mode != AUTO:
        return config
    given = _given(config, inputs)
    if given.precision.mode != AUTO:
        why = "as the base is stored, or the run that is extended was trained"
        events.decision("precision.mode", given.precision.mode, source="auto", reason=why)
        return given
    found = _decide(
        store,
        train.request_of(config, inputs),
        lambda: _measured(config, inputs, store),
        again=config.precision.redecide,
    )
    events.decision("precision.mode", found.mode, source="auto", reason=found.reason)
    return with_mode(config, found.mode)


def check_machine(config: Config, planned: Callable[[], Iterable[StagePlan]]) -> None:
    """A precision in few bits that cannot be computed here, refused before anything is encoded.

    What `auto` takes was computed; the others need no probe, nor torch where nothing is missing.
    """
    if config.precision.mode not in MODES:
        return
    if all(found.hit for found in planned() if found.stage == train.STAGE):
        return
    from lib.device import pick_device
    from lib.training.making import check_precision

    check_precision(config.precision.mode, pick_device())


def _given(config: Config, inputs: Inputs) -> Config:
    """What needs no measuring: a run goes on as it began, a base in few bits stays so."""
    config = in_its_precision(config)
    kind = stored_kind(inputs.base, inputs.family)
    return with_mode(config, kind) if config.precision.mode == AUTO and kind else config


def choice_of(config: Config, inputs: Inputs, store: Store) -> Choice:
    """The way that this machine would run a request now."""
    from lib import choosing, levers
    from lib.device import pick_device, release

    device = pick_device()
    release()
    steps = train.total_steps(config, inputs)
    compiled, _ = levers.compiles(config.trainer.compile, device, steps)
    return choosing.choose(
        needs_of(config, inputs, store),
        device,
        allowed=inputs.family.FACTS.auto_modes,
        compiled=compiled,
        checkpointing=config.trainer.gradient_checkpointing,
    )


def _measured(config: Config, inputs: Inputs, store: Store) -> Decision:
    choice = choice_of(config, inputs, store)
    if choice.refused:
        remedy = "smaller buckets.resolution or trainer.micro_batch, or another GPU"
        raise InputRefused(Problem(f"precision.mode={AUTO}", choice.reason, remedy=remedy))
    return Decision(choice.way.mode, choice.reason)


def _recalled(store: Store, request: str) -> Decision | None:
    """What was decided for a request, if anything readable is there."""
    try:
        return Decision(**json.loads(_path(store, request).read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _decide(store: Store, request: str, make: Callable[[], Decision], *, again: bool) -> Decision:
    """The decision for a request, made where there is none yet; the first of several stands."""
    path = _path(store, request)
    files.make_folder(path.parent)
    with files.locked(path.with_suffix(".lock")):
        if not again and (found := _recalled(store, request)):
            return found
        made = make()
        files.write_json(path, asdict(made))
        return made


def _path(store: Store, request: str) -> Path:
    return store.root / "decisions" / f"{request}.json"
