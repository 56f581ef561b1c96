"""Checkpoints: a staged folder, digests inside, renamed into place; at least two are kept (T1c)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lib import files, tensors
from lib.keys import canonical_json, digest, file_digest
from lib.records import from_stored, to_stored

KEEP = 2
STATE, MANIFEST = "state.safetensors", "manifest.json"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Checkpoint:
    """The state after `step` optimizer steps."""

    step: int
    num_samples_seen: int
    adapter: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, Mapping[str, torch.Tensor]]  # parameter name -> moment -> tensor
    ema: Mapping[str, torch.Tensor] = field(default_factory=dict)  # empty without an average


def optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, dict[str, torch.Tensor]]:
    """The optimizer's moments by parameter name."""
    return {
        name: {moment: optimizer.state[p][moment].detach() for moment in _MOMENTS}
        for name, p in parameters.items()
        if p in optimizer.state
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    state: Mapping[str, Mapping[str, torch.Tensor]],
) -> None:
    """Put saved moments back, each on its parameter's device."""
    for name, moments in state.items():
        parameter = parameters[name]
        optimizer.state[parameter] = {m: t.to(parameter.device) for m, t in moments.items()}


def save(folder: Path, checkpoint: Checkpoint, *, train_key: str) -> Path:
    """Publish a checkpoint, read it again, and only then drop the oldest beyond the two kept."""
    path = path_of(folder, checkpoint.step)
    _set_aside_if_damaged(path, train_key=train_key)
    if not path.exists():
        flat = {f"adapter/{name}": t for name, t in checkpoint.adapter.items()}
        flat |= {f"ema/{name}": t for name, t in checkpoint.ema.items()}
        for name, moments in checkpoint.optimizer.items():
            flat |= {f"{moment}/{name}": t for moment, t in moments.items()}
        with files.staged_folder(path) as staged:
            data = tensors.encode(to_stored(flat), metadata={"train_key": train_key})
            files.write_bytes(staged / STATE, data)
            record = {
                "step": checkpoint.step,
                "num_samples_seen": checkpoint.num_samples_seen,
                "train_key": train_key,
                "files": {STATE: file_digest(staged / STATE)},
            }
            sealed = {**record, "digest": digest(record)}
            files.write_bytes(staged / MANIFEST, canonical_json(sealed))
    load(path, train_key=train_key)
    for old in _paths(folder)[:-KEEP]:
        files.remove(old)
    return path


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps lies."""
    return folder / f"step-{step:08d}"


def load(path: Path, *, train_key: str) -> Checkpoint:
    """Read one checkpoint and verify it; ValueError says what is wrong."""
    record = json.loads((path / MANIFEST).read_bytes())
    if not isinstance(record, dict) or record.pop("digest", None) != digest(record):
        raise ValueError(f"the digest of {MANIFEST} does not match")
    if record["train_key"] != train_key:
        raise ValueError("it belongs to another run")
    if file_digest(path / STATE) != record["files"][STATE]:
        raise ValueError(f"the digest of {STATE} does not match")
    state = from_stored(tensors.decode((path / STATE).read_bytes()).tensors)
    optimizer: dict[str, dict[str, torch.Tensor]] = {}
    for moment in _MOMENTS:
        for name, tensor in _under(moment, state):
            optimizer.setdefault(name, {})[moment] = tensor
    return Checkpoint(
        step=record["step"],
        num_samples_seen=record["num_samples_seen"],
        adapter=dict(_under("adapter", state)),
        optimizer=optimizer,
        ema=dict(_under("ema", state)),
    )


@dataclass(frozen=True)
class Latest:
    """The newest sound checkpoint, and the newer ones that were not."""

    checkpoint: Checkpoint | None
    damaged: tuple[str, ...]


def latest(folder: Path, *, train_key: str) -> Latest:
    """The newest checkpoint that is whole; damaged newer ones are named and set aside."""
    damaged = []
    for path in reversed(_paths(folder)):
        try:
            return Latest(load(path, train_key=train_key), tuple(damaged))
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


def _paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"))


def _under(prefix: str, state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    start = f"{prefix}/"
    return ((n.removeprefix(start), t) for n, t in state.items() if n.startswith(start))
