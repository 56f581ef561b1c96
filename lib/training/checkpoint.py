"""Checkpoints: a staged folder, digests inside, renamed into place; at least two are kept (T1c)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lib import files, tensors
from lib.errors import Problem, StateRefused
from lib.extending import MANIFEST, sealed_record
from lib.keys import canonical_json, digest, file_digest
from lib.optimizers import name_of
from lib.records import from_stored, to_stored
from lib.runs import checkpoints

KEEP = 2
STATE = "state.safetensors"
Held = Mapping[str, torch.Tensor | int | float]


@dataclass(frozen=True)
class OptimizerState:
    """What an optimizer holds for each parameter, by the parameter's name, and which one it is."""

    name: str
    held: Mapping[str, Held] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """The state after `step` optimizer steps."""

    step: int
    num_samples_seen: int
    adapter: Mapping[str, torch.Tensor]
    optimizer: OptimizerState
    ema: Mapping[str, torch.Tensor] = field(default_factory=dict)  # empty without an average


def optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> OptimizerState:
    """All that the optimizer holds, whatever its tensors and numbers are called."""
    held = {
        name: _plain(optimizer.state[p]) for name, p in parameters.items() if p in optimizer.state
    }
    return OptimizerState(name_of(optimizer), held)


def _plain(state: Held) -> Held:
    return {n: v.detach() if isinstance(v, torch.Tensor) else v for n, v in state.items()}


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    state: OptimizerState,
) -> None:
    """Put back what was held, tensors on their parameter's device; of another one it is refused."""
    if (live := name_of(optimizer)) != state.name:
        why = f"the run's checkpoint is of {state.name}, and its moments fit no other"
        remedy = f"go on where {state.name} works, or train again with rerun=true"
        raise StateRefused(Problem(f"optimizer.name={live}", why, state.name, remedy))
    for name, held in state.held.items():
        where = parameters[name].device
        optimizer.state[parameters[name]] = {
            n: v.to(where) if isinstance(v, torch.Tensor) else v for n, v in held.items()
        }


def save(folder: Path, checkpoint: Checkpoint, *, train_key: str) -> Path:
    """Publish a checkpoint, read it again, and only then drop the oldest beyond the two kept."""
    path = path_of(folder, checkpoint.step)
    _set_aside_if_damaged(path, train_key=train_key)
    if not path.exists():
        flat = {f"adapter/{name}": t for name, t in checkpoint.adapter.items()}
        flat |= {f"ema/{name}": t for name, t in checkpoint.ema.items()}
        flat |= {f"optimizer/{at}": t for at, t in _tensors(checkpoint.optimizer)}
        with files.staged_folder(path) as staged:
            data = tensors.encode(to_stored(flat), metadata={"train_key": train_key})
            files.write_bytes(staged / STATE, data)
            record = {
                "step": checkpoint.step,
                "num_samples_seen": checkpoint.num_samples_seen,
                "train_key": train_key,
                "optimizer": {
                    "name": checkpoint.optimizer.name,
                    "numbers": _numbers(checkpoint.optimizer),
                },
                "files": {STATE: file_digest(staged / STATE)},
            }
            sealed = {**record, "digest": digest(record)}
            files.write_bytes(staged / MANIFEST, canonical_json(sealed))
    load(path, train_key=train_key)
    for old in checkpoints(folder)[:-KEEP]:
        files.remove(old)
    return path


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps lies."""
    return folder / f"step-{step:08d}"


def load(path: Path, *, train_key: str) -> Checkpoint:
    """Read one checkpoint and verify it; ValueError says what is wrong."""
    record = sealed_record(path)
    if isinstance(record, str):
        raise ValueError(record)
    if record["train_key"] != train_key:
        raise ValueError("it belongs to another run")
    state = from_stored(tensors.decode((path / STATE).read_bytes()).tensors)
    return Checkpoint(
        step=record["step"],
        num_samples_seen=record["num_samples_seen"],
        adapter=dict(_under("adapter", state)),
        optimizer=_optimizer(record["optimizer"], dict(_under("optimizer", state))),
        ema=dict(_under("ema", state)),
    )


def _tensors(state: OptimizerState) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor by its own name and its parameter's."""
    for name, held in state.held.items():
        for own, value in held.items():
            if isinstance(value, torch.Tensor):
                yield f"{own}/{name}", value


def _numbers(state: OptimizerState) -> dict[str, dict[str, Any]]:
    """The plain numbers of each parameter, such as a count of steps."""
    return {
        name: {n: v for n, v in held.items() if not isinstance(v, torch.Tensor)}
        for name, held in state.held.items()
    }


def _optimizer(record: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> OptimizerState:
    """What `_tensors` and `_numbers` took apart."""
    held: dict[str, dict[str, Any]] = {n: dict(v) for n, v in record["numbers"].items()}
    for at, tensor in tensors.items():
        own, _, name = at.partition("/")
        held[name][own] = tensor
    return OptimizerState(record["name"], held)


@dataclass(frozen=True)
class Latest:
    """The newest sound checkpoint, the newer ones that were not, and where it lies."""

    checkpoint: Checkpoint | None
    damaged: tuple[str, ...]
    path: Path | None = None


def latest(folder: Path, *, train_key: str) -> Latest:
    """The newest checkpoint that is whole; damaged newer ones are named and set aside."""
    damaged = []
    for path in reversed(checkpoints(folder)):
        try:
            return Latest(load(path, train_key=train_key), tuple(damaged), path)
        except (OSError, ValueError, KeyError) as error:
            damaged.append(f"{path.name}: {error}")
            _set_aside(path)
    return Latest(None, tuple(damaged))


def _set_aside_if_damaged(path: Path, *, train_key: str) -> None:
    """A damaged checkpoint of this step makes room for the good one."""
    if not path.exists():
        return
    try:
        load(path, train_key=train_key)
    except (OSError, ValueError, KeyError):
        _set_aside(path)


def _set_aside(path: Path) -> None:
    """Out of the count of those that are kept, there to be looked at."""
    files.move(path, files.free_name(path.with_name(f"damaged-{path.name}")))


def _under(prefix: str, state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    start = f"{prefix}/"
    return ((n.removeprefix(start), t) for n, t in state.items() if n.startswith(start))
