"""The run registry: a record per train key says which folder holds the run, and its state."""

import json
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import yaml
from filelock import FileLock

from lib import files, stopping
from lib.errors import DarkroomError, Problem, StateRefused, Stopped, without_credentials
from lib.events import Events
from lib.keys import file_digest
from lib.leases import Owner, is_alive, this_process
from lib.schema import Config, to_plain
from lib.stopping import STOP_FILE

LIBRARIES = ("torch", "diffusers", "transformers", "peft", "numpy", "pillow", "safetensors")
ADAPTER_FILE, EMA_FILE = "adapter/adapter.safetensors", "ema/adapter.safetensors"

_CHECKPOINT = re.compile(r"step-([0-9]{8})")

State = Literal["running", "complete", "stopped"]


@dataclass(frozen=True)
class Claim:
    """A folder of our own for a key: `resumed` when it holds an earlier attempt at the same run."""

    key: str
    folder: Path
    resumed: bool


def record_path(store: Path, key: str) -> Path:
    return store / "runs" / f"{key}.json"


def read(store: Path, key: str) -> Mapping[str, Any] | None:
    """The record of a key, or None."""
    path = record_path(store, key)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        remedy = "remove the file: the run is then made again, in a new folder"
        raise StateRefused(Problem(str(path), "is no run record", remedy=remedy)) from error


def completed(store: Path, key: str) -> Path | None:
    """The folder of the complete run of a key, if it still holds the adapter it was left with."""
    record = read(store, key)
    if record is None or record["state"] != "complete":
        return None
    folder = Path(record["folder"])
    return folder if _adapters(folder) == record["adapters"] else None


def _adapters(folder: Path) -> dict[str, str]:
    """The digests of the adapter and of its average, as far as they are there."""
    paths = {name: folder / name for name in (ADAPTER_FILE, EMA_FILE)}
    return {name: file_digest(path) for name, path in paths.items() if path.is_file()}


def claim(
    store: Path,
    key: str,
    *,
    outputs: Path,
    name: str,
    manifests: Sequence[Sequence[str]],
    rerun: bool,
) -> Claim:
    """Take the run's folder exclusively, before step 1; refused while another process has it."""
    files.make_folder(record_path(store, key).parent)
    # Two processes that both find a dead owner must not both resume.
    with FileLock(record_path(store, key).with_suffix(".lock")):
        record = read(store, key)
        refuse_if_running(store, key)
        resumable = record and record["state"] != "complete" and not rerun
        folder = Path(record["folder"]) if record and resumable else None
        resumed = folder is not None and folder.is_dir()
        if folder is not None:
            remedy = "remove the file, then the same command resumes"
            stopping.refuse_if_asked(folder / STOP_FILE, whom="this run", remedy=remedy)
        if folder is None or not resumed:
            folder = files.claim_folder(outputs / name)
        files.write_json(
            record_path(store, key),
            {
                "state": "running",
                "folder": str(folder.resolve()),
                "process": asdict(this_process()),
                "manifests": [list(item) for item in manifests],
            },
        )
    return Claim(key=key, folder=folder, resumed=resumed)


def refuse_if_running(store: Path, key: str) -> None:
    """A process on another host cannot be asked, so it counts as alive."""
    record = read(store, key)
    if record is None or record["state"] != "running":
        return
    owner = Owner(**record["process"])
    if owner.is_here and not is_alive(owner):
        return
    why = f"is running: process {owner.pid} on {owner.host}, folder {record['folder']}"
    raise StateRefused(Problem(f"run {key[:12]}", why, remedy="wait for it, or stop it"))


@contextmanager
def held(store: Path, claim: Claim) -> Iterator[None]:
    """While the block runs the run is ours; it leaves complete, or stopped on any way out."""
    state: State = "stopped"
    try:
        yield
        state = "complete"
    finally:
        _finish(store, claim.key, state=state)


def steps_done(store: Path, key: str, *, rerun: bool) -> int:
    """Steps that the newest checkpoint of an unfinished run holds, by its folder's name."""
    record = read(store, key)
    if record is None or rerun or record["state"] == "complete":
        return 0
    return _newest_step(Path(record["folder"]))


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoints by their steps, the last one last; other names are a user's copies."""
    named = {path: _CHECKPOINT.fullmatch(path.name) for path in folder.glob("step-*")}
    steps = {int(found[1]): path for path, found in named.items() if found}
    return [steps[step] for step in sorted(steps)]


def _newest_step(folder: Path) -> int:
    found = checkpoints(folder / "checkpoints")
    return int(found[-1].name.removeprefix("step-")) if found else 0


def describe(
    claim: Claim,
    config: Config,
    *,
    keys: Mapping[str, str],
    identity: Mapping[str, Any],
    events: Events,
) -> None:
    """Leave config.yaml and run.json in the run's folder, and write events there from now on.

    `identity` is what the train key is made of: what an extension is compared with.
    """
    events.attach(claim.folder / "events.jsonl")
    if (claim.folder / "run.json").exists():
        return
    text = yaml.safe_dump(to_plain(_public(config)), sort_keys=False, allow_unicode=True)
    files.write_bytes(claim.folder / "config.yaml", text.encode("utf-8"))
    files.write_json(
        claim.folder / "run.json",
        {
            "keys": keys,
            "identity": identity,
            "versions": versions(),
            "git_commit": git_commit(),
            "decisions": {},
        },
    )


@contextmanager
def ending(claim: Claim) -> Iterator[None]:
    """Leave in run.json how the block ended, at which checkpoint, and what was decided."""
    ended = {"state": "failed"}
    try:
        yield
        ended = {"state": "complete"}
    except Stopped as stopped:
        ended = {"state": "stopped", "why": stopped.by}
        raise
    except DarkroomError as error:
        ended["why"] = type(error).__name__
        raise
    finally:
        path = claim.folder / "run.json"
        record = json.loads(path.read_text(encoding="utf-8"))
        step, decided = _newest_step(claim.folder), _decisions(claim.folder)
        files.write_json(path, {**record, "ended": {**ended, "step": step}, "decisions": decided})


def _decisions(folder: Path) -> dict[str, Any]:
    """The last decision on each matter, from the run's events."""
    found = {}
    for event in _events(folder):
        if event["kind"] == "decision":
            what = ("value", "source", "reason")
            found[event["name"]] = {name: event[name] for name in what}
    return found


def _public(config: Config) -> Config:
    """The configuration as it may lie in a folder that is copied and shared."""
    uri = config.tracker.uri and without_credentials(config.tracker.uri)
    return replace(config, tracker=replace(config.tracker, uri=uri))


def recorded_metric(folder: Path, name: str) -> list[tuple[int, float]]:
    """(step, value) in a run's events; a step that was run twice counts as it ran last."""
    found: dict[int, float] = {}
    for event in _events(folder):
        if event["kind"] == "metric" and name in event:
            found[event["step"]] = event[name]
    return sorted(found.items())


def _events(folder: Path) -> Iterator[Mapping[str, Any]]:
    text = (folder / "events.jsonl").read_text(encoding="utf-8")
    return map(json.loads, text.splitlines())


def versions() -> dict[str, str]:
    """The interpreter and the libraries whose arithmetic a run depends on."""
    found = {name: metadata.version(name) for name in LIBRARIES}
    return {"python": platform.python_version(), **found}


def git_commit() -> str | None:
    """The checkout's commit, `-dirty` when tracked files differ; None without git."""
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _finish(store: Path, key: str, *, state: State) -> None:
    """Record how a run ended; a complete one with its adapters' digests."""
    record = dict(read(store, key) or {})
    record["state"] = state
    if state == "complete":
        record["adapters"] = _adapters(Path(record["folder"]))
    files.write_json(record_path(store, key), record)
