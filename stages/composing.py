"""Hydra's part: overrides -> one plain mapping -> `Config`, or one report of all refusals."""

from collections.abc import Callable, Sequence
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from lib.config import Reading, read
from lib.errors import InputRefused, Problem
from lib.schema import Config
from stages import CHECKOUT

CONF = CHECKOUT / "conf"
NAME = "config"
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


def with_hydra(job: Callable[[Config], int], arguments: Sequence[str]) -> int:
    """Hydra's own flags: --help, --cfg, --info, --multirun."""
    import sys

    import hydra

    from stages import guarded

    _register(typed=True)
    codes: list[int] = []

    def task(raw: DictConfig) -> None:
        reading = read(_plain(raw))
        if reading.problems:
            raise InputRefused(reading.problems)
        codes.append(guarded(lambda: job(reading.config)))

    sys.argv[1:] = list(arguments)
    hydra.main(version_base="1.3", config_path=str(CONF), config_name=NAME)(task)()
    return max(codes, default=0)


def _read(overrides: Sequence[str], *, typed: bool) -> Reading:
    _register(typed=typed)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return read(_plain(hydra_compose(NAME, overrides=list(overrides))))


def _collect(overrides: Sequence[str]) -> Reading:
    """Each override alone, without types; then the good ones together, types and rules by us."""
    problems, good = [], []
    for override in overrides:
        try:
            _read([override], typed=False)
            good.append(override)
        except REFUSALS as error:
            problems.append(_problem(override, error))
    try:
        reading = _read(good, typed=False)
    except REFUSALS as error:
        reading = read({})
        problems.append(_problem(" ".join(good) or "conf/", error))
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
        return Problem(override, "no such option", ", ".join(options))
    if "not in struct" in why or "Could not override" in why:
        return Problem(override, "unknown setting", remedy="see --help for the names")
    return Problem(override, why)


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
