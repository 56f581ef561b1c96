"""Going on from another run's checkpoint: which one, and whether it fits (design 9)."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib import runs
from lib.errors import InputRefused, Problem
from lib.files import user_path
from lib.keys import Key, canonical_json, digest, file_digest
from lib.schema import AUTO, Config, with_mode

SETTING = "trainer.extend"
MANIFEST = "manifest.json"
# How long, and at which rate: what an extension is for. All else must be the run's own.
FREE = ("total_steps", "extends", "optimizer.lr", "lr_schedule.")
SHOWN = 12  # digits of a digest in a report


@dataclass(frozen=True)
class Extended:
    """The checkpoint that a run goes on from, and what the run that wrote it was made of."""

    path: Path
    step: int
    train_key: str
    digest: str  # the checkpoint's own
    identity: Mapping[str, Any]  # what that run's key is made of


def extended(config: Config) -> Extended | None:
    """The newest sound checkpoint of the run that `trainer.extend` names; refused without one."""
    if config.trainer.extend is None:
        return None
    folder = _folder(config)
    if folder is None:
        allowed = "a run's folder, or its name under paths.outputs"
        raise _refused(config, "no such run", allowed)
    record = _run_record(folder)
    if record is None:
        raise _refused(config, f"{folder} holds no run.json that says what it was made of")
    runs.refuse_if_running(user_path(config.paths.store), record["keys"]["train"])
    for path in reversed(runs.checkpoints(folder / "checkpoints")):
        sealed = sealed_record(path)
        if isinstance(sealed, Mapping):
            key = sealed["train_key"]
            return Extended(path, sealed["step"], key, sealed["digest"], record["identity"])
    raise _refused(config, f"{folder} holds no sound checkpoint")


def sealed_record(path: Path) -> Mapping[str, Any] | str:
    """A checkpoint's manifest with its digest, verified with the files that it lists, or why not.

    An OSError where one cannot be read.
    """
    try:
        record = json.loads((path / MANIFEST).read_bytes())
    except FileNotFoundError:
        return f"{MANIFEST} is not there"
    except ValueError:
        return f"{MANIFEST} is no JSON"
    if not isinstance(record, dict) or record.pop("digest", None) != (sealed := digest(record)):
        return f"the digest of {MANIFEST} does not match"
    for name, expected in record["files"].items():
        if not (path / name).is_file():
            return f"{name} is not there"
        if file_digest(path / name) != expected:
            return f"the digest of {name} does not match"
    return {**record, "digest": sealed}


def in_its_precision(config: Config) -> Config:
    """`precision=auto` goes on in the precision of the run that it extends."""
    if config.precision.mode != AUTO or (found := extended(config)) is None:
        return config
    return with_mode(config, found.identity["settings"]["precision.mode"])


def setting_problems(config: Config, settings: Mapping[str, Any]) -> Iterator[Problem]:
    """What can be said before the data is looked at: the run is there, and its settings."""
    found = extended(config)
    if found is None:
        return
    ours = json.loads(canonical_json(settings))  # numbers as a key holds them
    yield from _different(config, ours, found.identity["settings"])
    steps = config.trainer.max_steps
    if steps is not None and steps <= found.step:
        yield _too_short(config, steps, found)


def check(config: Config, key: Key, found: Extended, *, total_steps: int) -> None:
    """Refuse a run whose key differs from the extended one's in anything but length and rate."""
    problems = list(_different(config, _flat(key.inputs), _flat(found.identity)))
    if total_steps <= found.step:
        problems.append(_too_short(config, total_steps, found))
    if problems:
        raise InputRefused(problems)


def _different(
    config: Config, ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> Iterator[Problem]:
    """Each field in which they differ, with both values."""
    for name in sorted(ours.keys() | theirs.keys()):
        if name.startswith(FREE) or ours.get(name) == theirs.get(name):
            continue
        why = f"differs from the run that {SETTING}={config.trainer.extend} names"
        allowed = _shown(theirs.get(name))
        yield Problem(f"{name}={_shown(ours.get(name))}", why, allowed, f"or drop {SETTING}")


def _flat(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their public names, beside the other fields of a key."""
    return {**{n: v for n, v in inputs.items() if n != "settings"}, **inputs["settings"]}


def _shown(value: Any) -> str:
    text = "absent" if value is None else str(value)
    return text[:SHOWN] if len(text) == len(digest("")) else text


def _too_short(config: Config, total_steps: int, found: Extended) -> Problem:
    length = "max_steps" if config.trainer.max_steps is not None else "num_epochs"
    subject = f"trainer.{length}={getattr(config.trainer, length)}"
    why = f"makes {total_steps} steps in all, and {SETTING}={config.trainer.extend} has "
    return Problem(subject, f"{why}{found.step}", f"more than {found.step} steps")


def _folder(config: Config) -> Path | None:
    """By name under `paths.outputs`, else as a path."""
    name = config.trainer.extend or ""
    places = (user_path(config.paths.outputs) / name, user_path(name))
    return next((place for place in places if place.is_dir()), None)


def _run_record(folder: Path) -> Mapping[str, Any] | None:
    try:
        record = json.loads((folder / "run.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    known = isinstance(record, dict) and "identity" in record
    return record if known else None


def _refused(config: Config, why: str, allowed: str = "") -> InputRefused:
    return InputRefused(Problem(f"{SETTING}={config.trainer.extend}", why, allowed))
