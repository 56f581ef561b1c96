"""What DVC sees of the graph: a stage's settings, a pointer to what it made, metrics (design 4)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lib import files, runs
from lib.errors import Problem, StateRefused
from lib.events import Events
from lib.files import user_path
from lib.keys import canonical_json, digest
from lib.pipeline import prepare_dataset, train
from lib.pipeline.graph import STAGES
from lib.schema import Config
from lib.store import Manifest

# One more pointer for each: who needs the texts alone does not run again for another picture.
PARTS = ("captions", "images")


def write_settings(config: Config) -> None:
    """For each stage the settings that enter its key, upstream's excepted."""
    for stage in STAGES:
        _write(_settings_path(stage, config), _settings(stage, config))


def check_settings(stage: str, config: Config) -> None:
    """Refuse when DVC decided by other settings than the ones composed now."""
    path = _settings_path(stage, config)
    if not path.is_file() or path.read_bytes() != _line(_settings(stage, config)):
        why = "is not what the configuration says now"
        raise StateRefused(Problem(str(path), why, remedy="run `dvc repro`, which composes first"))


def publish(manifest: Manifest, config: Config, events: Events) -> None:
    """Leave a stage's pointers, and the record for which gc keeps what they point to."""
    folder = _folder(config)
    if manifest.stage == train.STAGE:
        _publish_metrics(manifest, config, events)
    for name, pointer in _pointers(manifest, user_path(config.paths.outputs)).items():
        _write(folder / f"{name}.json", pointer)
    record = {
        "folder": str(folder.resolve()),
        "manifests": [[manifest.stage, manifest.key]],
    }
    store = user_path(config.paths.store)
    files.write_json(runs.record_path(store, f"dvc-{manifest.stage}"), record)


def _pointers(manifest: Manifest, outputs: Path) -> dict[str, dict[str, str]]:
    """The same bytes for the same manifest: no time, no path of a machine."""
    made = {
        "inputs": manifest.inputs,
        "entries": sorted([ref.kind, ref.key, ref.size_bytes] for ref in manifest.refs()),
        "payload": _portable(manifest.payload, f"{outputs.resolve()}/"),
    }
    pointers = {manifest.stage: {"key": manifest.key, "digest": digest(made)}}
    if manifest.stage == prepare_dataset.STAGE:
        keys = manifest.payload["keys"]
        pointers |= {part: {"key": keys[part]} for part in PARTS}
    return pointers


def _portable(value: Any, outputs: str) -> Any:
    """The value with files under the outputs by their names alone."""
    if isinstance(value, Mapping):
        return {name: _portable(item, outputs) for name, item in value.items()}
    if isinstance(value, list):
        return [_portable(item, outputs) for item in value]
    return Path(value).name if isinstance(value, str) and value.startswith(outputs) else value


def _publish_metrics(manifest: Manifest, config: Config, events: Events) -> None:
    """`metrics.json` and `loss.csv`: what does not depend on the machine's speed."""
    run = runs.completed(user_path(config.paths.store), manifest.key)
    assert run is not None
    losses = _losses(run / "events.jsonl", events)
    last = max(losses)
    mean = sum(losses.values()) / len(losses)
    _write(
        _folder(config) / "metrics.json",
        {"steps": last, "loss": losses[last], "loss_mean": mean},
    )
    rows = ["step,loss", *(f"{step},{losses[step]}" for step in sorted(losses))]
    files.write_bytes(_folder(config) / "loss.csv", "".join(f"{row}\n" for row in rows).encode())


def _losses(path: Path, events: Events) -> dict[int, float]:
    """The loss of each step; a step that was made again after a kill counts once."""
    losses: dict[int, float] = {}
    torn = 0
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            event = json.loads(line)
        except ValueError:  # a power cut may leave a part of a line
            torn += 1
            continue
        if event["kind"] == "metric" and "loss" in event:
            losses[event["step"]] = event["loss"]
    if torn:
        events.warning(f"{torn} unreadable lines left out of the metrics: {path}")
    if not losses:
        remedy = "remove the run's folder: the next `dvc repro` trains it again"
        raise StateRefused(Problem(str(path), "holds no loss", remedy=remedy))
    return losses


def _settings(stage: str, config: Config) -> dict[str, Any]:
    module, _ = STAGES[stage]
    return module.key_settings(config)


def _settings_path(stage: str, config: Config) -> Path:
    return _folder(config) / "config" / f"{stage}.json"


def _folder(config: Config) -> Path:
    return user_path(config.paths.outputs) / "dvc"


def _write(path: Path, value: Any) -> None:
    files.write_bytes(path, _line(value))


def _line(value: Any) -> bytes:
    return canonical_json(value) + b"\n"
