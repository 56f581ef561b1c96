"""Hydra's part: overrides -> one plain mapping -> `Config`, or one report of all refusals."""

import dataclasses
import difflib
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from lib.config import Reading, read
from lib.errors import InputRefused, Problem
from lib.files import user_path
from lib.schema import Config

CHECKOUT = Path(__file__).resolve().parent.parent
CONF = CHECKOUT / "conf"
NAME = "config"
WHOLE = "conf/"
HELP = """\
python -m stages.<stage> [group=option ...] [setting=value ...]

Runs the stage and all that is missing upstream. `+experiment=<name>` takes a whole recipe,
`--cfg job` shows the composed configuration, `-m setting=a,b` runs once for each value."""
REFUSALS = (HydraException, OmegaConfBaseException)


def compose(overrides: Sequence[str]) -> Config:
    """A valid configuration, or one report: Hydra's problems, types, rules and files."""
    try:
        reading = _read(overrides, typed=True)
    except REFUSALS:
        reading = _collect(overrides)
    if reading.problems:
        from lib.pipeline import graph

        refused = {problem.subject.split("=")[0] for problem in reading.problems}
        # Already refused: look at what lies on this machine, but wait for no network.
        found = graph.problems(reading.config, online=False)
        more = [problem for problem in found if problem.subject.split("=")[0] not in refused]
        raise InputRefused([*reading.problems, *more])
    return reading.config


def help_text() -> str:
    """How to write a command, the options of each group, and every setting with its default."""
    groups = {folder.name: folder for folder in sorted(CONF.iterdir()) if folder.is_dir()}
    options = [
        f"  {name}: {', '.join(sorted(file.stem for file in folder.glob('*.yaml')))}"
        for name, folder in groups.items()
    ]
    return "\n".join([HELP, "", "Groups (group=option):", *options, "", "Settings:", shown([])])


def shown(overrides: Sequence[str]) -> str:
    """The composed configuration as YAML, interpolations as they stand; refused like a run."""
    try:
        raw = _raw(overrides, typed=True)
    except REFUSALS:
        raw = None
    if raw is None or read(_plain(raw)).problems:
        compose(overrides)  # refuses, and says why
        raise AssertionError("a refusal that compose does not make")
    return OmegaConf.to_yaml(raw).rstrip()


@dataclass(frozen=True)
class Combination:
    """One combination of a sweep: its overrides, what was read, the sweep's own folder."""

    overrides: tuple[str, ...]
    reading: Reading
    folder: Path


HydraJob = Callable[[Combination], None]


def with_hydra(job: HydraJob, arguments: Sequence[str]) -> None:
    """Hydra's own flags, --multirun among them: the job runs once for each combination.

    What it raises would end the whole command.
    """
    import sys

    import hydra
    from hydra.core.hydra_config import HydraConfig

    _register(typed=True)

    def task(raw: DictConfig) -> None:
        ours = HydraConfig.get()
        folder = user_path(ours.sweep.dir)
        job(Combination(tuple(ours.overrides.task), read(_plain(raw)), folder))

    sys.argv[1:] = list(arguments)
    hydra.main(version_base="1.3", config_path=str(CONF), config_name=NAME)(task)()


def _read(overrides: Sequence[str], *, typed: bool) -> Reading:
    raw = _raw(overrides, typed=typed)
    reading = read(_plain(raw))
    refused = {_setting(problem) for problem in reading.problems}
    own = tuple(p for p in reading.problems if not _follows(raw, _setting(p), refused))
    return Reading(reading.config, own)


def _raw(overrides: Sequence[str], *, typed: bool) -> DictConfig:
    _register(typed=typed)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return _composed(overrides)


def _composed(overrides: Sequence[str]) -> DictConfig:
    """Hydra's composition; a file that is no YAML is refused by itself, whatever else is wrong."""
    try:
        return hydra_compose(NAME, overrides=list(overrides))
    except MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{mark.name} line {mark.line + 1}" if mark else str(CONF)
        raise InputRefused(Problem(where, f"is not YAML: {error.problem}")) from error
    except REFUSALS:
        raise
    except ValueError as error:  # a group that is given a number or null
        raise HydraException(str(error)) from error


def _setting(problem: Problem) -> str:
    return problem.subject.split("=")[0]


def _follows(raw: DictConfig, setting: str, refused: set[str]) -> bool:
    """Whether a setting only repeats another that is refused too: that is one mistake."""
    node: Any = raw
    for part in setting.split("."):
        node = node._get_node(part, validate_access=False) if isinstance(node, DictConfig) else None
    value = node._value() if node is not None and node._is_interpolation() else ""
    return isinstance(value, str) and value.strip("${}") in refused


def _collect(overrides: Sequence[str]) -> Reading:
    """Each override alone, without types; then the good ones together, types and rules by us."""
    problems: list[Problem] = []
    alone: dict[str, Reading] = {}
    for override in overrides:
        try:
            alone[override] = _read([override], typed=False)
        except REFUSALS as error:
            problems.append(_problem(override, error))
    try:
        reading = alone.popitem()[1] if len(alone) == 1 else _read([*alone], typed=False)
    except REFUSALS as error:
        if not alone:  # a file of conf/ is wrong: no override can be judged
            raise InputRefused(_problem(WHOLE, error)) from error
        reading = read({})
        problems.append(_problem(" ".join(alone), error))
    return Reading(reading.config, tuple(sorted({*problems, *reading.problems})))


def _problem(override: str, error: Exception) -> Problem:
    """Hydra's message in our words: what was refused, why, and what there is instead."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    why = lines[0] if lines else type(error).__name__
    cause = error.__cause__
    if cause and str(cause).strip():
        why = str(cause).strip().splitlines()[0]
    options = [
        line for line in lines[1:] if " " not in line and "=" not in line and ":" not in line
    ]
    if "Available options" in str(error):
        why = why if override == WHOLE else "no such option"
        return Problem(override, why, ", ".join(options))
    if "not in struct" in why or "Could not override" in why:
        return Problem(override, "unknown setting", remedy=_nearest(override))
    if "Ambiguous value" in why:
        return Problem(override, "several values", remedy="add -m for one run with each")
    if "Config group override must be" in why:
        return Problem(override, "not the name of an option", remedy="see --help for the names")
    if "parsing override" in why or "viable alternative" in why or "input" in why:
        return Problem(override, "cannot be read", "name=value; quote values with special signs")
    return Problem(override, why)


def _nearest(override: str) -> str:
    """The setting or group that was probably meant."""
    given = override.split("=")[0].lstrip("+~")
    if (CONF / given).is_dir():
        return f"add a +: +{override}"
    names = [*_names(Config), *(f.name for f in CONF.iterdir() if f.is_dir())]
    close = difflib.get_close_matches(given, names, n=1)
    return f"did you mean {close[0]}?" if close else "see --help for the names"


def _names(schema: Any, prefix: str = "") -> Iterator[str]:
    for name, hint in typing.get_type_hints(schema).items():
        if dataclasses.is_dataclass(hint):
            yield from _names(hint, f"{prefix}{name}.")
        else:
            yield prefix + name


def _register(*, typed: bool) -> None:
    """The schema that the primary config lists first; read-only flags would refuse overrides."""
    node: Any = {}
    if typed:
        node = OmegaConf.structured(Config)
        _writable(node)
    ConfigStore.instance().store(name="schema", node=node)
    OmegaConf.register_new_resolver("checkout", lambda path: str(CHECKOUT / path), replace=True)


def _writable(node: DictConfig) -> None:
    OmegaConf.set_readonly(node, None)
    for name in node:
        child = node._get_node(name)
        if isinstance(child, DictConfig):
            _writable(child)


def _plain(raw: DictConfig) -> dict[str, Any]:
    """Plain values with interpolations resolved."""
    with flag_override(raw, "readonly", False):
        values: Any = OmegaConf.to_container(raw, resolve=True)
    return {str(name): value for name, value in values.items() if name != "hydra"}
