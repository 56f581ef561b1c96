"""Hydra's part: overrides -> one plain mapping -> `Config`, or one report of all refusals."""

import dataclasses
import difflib
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import AnyNode, BooleanNode, DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from lib.config import Reading, read
from lib.errors import InputRefused, Problem, without_credentials
from lib.schema import Config, settings_of
from stages.overrides import NAMED_VALUES, combinations, foreign, quoted, split_texts

CHECKOUT = Path(__file__).resolve().parent.parent
CONF = CHECKOUT / "conf"
NAME = "config"
WHOLE = "conf/"
HELP = """\
python -m stages.<stage> [group=option ...] [setting=value ...]

Runs the stage and all that is missing upstream. `+experiment=<name>` takes a whole recipe,
`--cfg job` shows the composed configuration, `-m setting=a,b` runs once for each value.

A text that holds one of , = # ~ ( ) [ ] { } or a letter beyond ASCII needs quotes of its own inside
the shell's: 'dataset.instance_prompt="a cat, red"'"""
REFUSALS = (HydraException, OmegaConfBaseException)
# Here and not in `register`: a launcher's process resolves paths before it calls us.
OmegaConf.register_new_resolver("checkout", lambda path: str(CHECKOUT / path), replace=True)


def compose(overrides: Sequence[str]) -> Config:
    """A valid configuration, or one report: Hydra's problems, types, rules and files."""
    try:
        reading = _read(overrides, typed=True)
    except REFUSALS:
        reading = _collect(overrides)
    problems = [*reading.problems, *_lone_launchers(overrides)]
    if problems:
        from lib.pipeline import graph

        refused = {problem.subject.split("=")[0] for problem in reading.problems}
        # Already refused: look at what lies on this machine, but wait for no network.
        found = graph.problems(reading.config, online=False)
        more = [problem for problem in found if problem.subject.split("=")[0] not in refused]
        raise InputRefused([*problems, *more])
    return reading.config


def _lone_launchers(overrides: Sequence[str]) -> list[Problem]:
    named = [override for override in overrides if override.startswith("hydra/launcher=")]
    return [Problem(o, "would have no effect on one run", remedy="add -m") for o in named]


def help_text() -> str:
    """How to write a command, the options of each group, and every setting with its default."""
    groups = sorted({file.parent for file in CONF.glob("*/**/*.yaml")})
    options = [
        f"  {folder.relative_to(CONF)}: {', '.join(sorted(f.stem for f in folder.glob('*.yaml')))}"
        for folder in groups
    ]
    return "\n".join([HELP, "", "Groups (group=option):", *options, "", "Settings:", shown([])])


def shown(overrides: Sequence[str]) -> str:
    """The composed configuration as YAML, interpolations as they stand; refused like a run."""
    try:
        raw = _raw(overrides, typed=True)
    except REFUSALS:
        raw = None
    if raw is None or reading_of(raw).problems:
        compose(overrides)  # refuses, and says why
        raise AssertionError("a refusal that compose does not make")
    return without_credentials(OmegaConf.to_yaml(raw).rstrip())


def check_sweep(overrides: Sequence[str]) -> None:
    """Refuse what no combination could run with, before Hydra makes the sweep's folder."""
    parsed, problems = [], []
    for override in overrides:
        try:
            parsed += OverridesParser.create().parse_overrides([override])
        except OverrideParseException as error:
            problems.append(_problem(override, error))
    problems += split_texts(parsed)
    for combination in combinations(parsed):
        problems += _refusals(combination)
    if problems:
        raise InputRefused(problems)


def _refusals(overrides: Sequence[str]) -> tuple[Problem, ...]:
    """Why a combination cannot be composed; a value out of range is its own run's matter."""
    try:
        if not foreign(_unresolved(_raw(overrides, typed=True))):
            return ()
    except REFUSALS:
        pass
    try:
        compose(overrides)
    except InputRefused as refused:
        return refused.problems
    return ()


def _read(overrides: Sequence[str], *, typed: bool) -> Reading:
    return reading_of(_raw(overrides, typed=typed))


def reading_of(raw: DictConfig) -> Reading:
    """What a composition says; of a value from elsewhere only the refusal, never the value."""
    elsewhere, defaults = foreign(_unresolved(raw)), dict(settings_of(Config()))
    with flag_override(raw, ["readonly", "struct"], [False, False]):
        for setting in elsewhere:
            OmegaConf.update(raw, setting, defaults.get(setting), merge=False)
    reading = read(_plain(raw))
    problems = [p for p in reading.problems if _setting(p) not in elsewhere]
    refused = {_setting(problem) for problem in problems} | elsewhere.keys()
    own = [p for p in problems if not _follows(raw, _setting(p), refused)]
    return Reading(reading.config, (*elsewhere.values(), *own))


def _raw(overrides: Sequence[str], *, typed: bool) -> DictConfig:
    register(typed=typed)
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
        remedy = f"add -m for one run with each, or for one text type {quoted(override)}"
        return Problem(override, "several values", remedy=remedy)
    if "Config group override must be" in why:
        return Problem(override, "not the name of an option", remedy="see --help for the names")
    if isinstance(error, OverrideParseException):
        remedy = f"for a text with special signs type {quoted(override)}" if "=" in override else ""
        return Problem(override, "cannot be read", "name=value", remedy)
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


def register(*, typed: bool) -> None:
    """The schema that the primary config lists first; read-only flags would refuse overrides."""
    node: Any = OmegaConf.create({})
    if typed:
        node = OmegaConf.structured(Config)
        _writable(node)
    for setting in NAMED_VALUES:  # Hydra takes no new name elsewhere; here a user writes them
        OmegaConf.update(node, setting, {}, force_add=True)
        OmegaConf.set_struct(OmegaConf.select(node, setting), False)
    ConfigStore.instance().store(name="schema", node=node)


def _writable(node: DictConfig) -> None:
    OmegaConf.set_readonly(node, None)
    for name in node:
        child = node._get_node(name)
        if isinstance(child, DictConfig):
            _writable(child)
        elif isinstance(child, BooleanNode):
            # OmegaConf takes any number but 0 for true; `lib.config` takes true and false.
            node.__dict__["_content"][name] = AnyNode(child._value(), key=name, parent=node)


def _unresolved(raw: DictConfig) -> dict[str, Any]:
    values: Any = OmegaConf.to_container(raw, resolve=False)
    return values


def _plain(raw: DictConfig) -> dict[str, Any]:
    """Plain values with interpolations resolved."""
    with flag_override(raw, "readonly", False):
        values: Any = OmegaConf.to_container(raw, resolve=True)
    return {str(name): value for name, value in values.items() if name != "hydra"}
