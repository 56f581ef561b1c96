"""Turn plain values into a `Config` and find every problem in one pass. It knows no Hydra."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lib.errors import InputRefused, Problem
from lib.rules_across import problems_of
from lib.schema import Config


@dataclass(frozen=True)
class Reading:
    """What `read` found; where a value was refused, `config` holds that field's default."""

    config: Config
    problems: tuple[Problem, ...]


def read(raw: Mapping[str, Any]) -> Reading:
    """Turn plain values into a `Config` and list every problem: type, range, rule, no effect."""
    problems: list[Problem] = []
    config = _build(Config, raw, "", problems)
    refused = {problem.subject.split("=")[0] for problem in problems}
    ranged = [p for p in problems_of(config) if p.subject.split("=")[0] not in refused]
    return Reading(config=config, problems=tuple(sorted({*problems, *ranged})))


def parse(raw: Mapping[str, Any]) -> Config:
    """A valid `Config`, or `InputRefused` with all problems."""
    reading = read(raw)
    if reading.problems:
        raise InputRefused(reading.problems)
    return reading.config


def _build(cls: Any, raw: Any, prefix: str, problems: list[Problem]) -> Any:
    """One dataclass from one mapping; unknown names and wrong types become problems."""
    if not isinstance(raw, Mapping):
        problems.append(Problem(f"{prefix.rstrip('.')}={raw}", "is not a group of settings"))
        return cls()
    hints = typing.get_type_hints(cls)
    for name in raw:
        if name not in hints:
            allowed = ", ".join(sorted(hints))
            problems.append(Problem(f"{prefix}{name}={raw[name]}", "unknown setting", allowed))
    values = {}
    for name, hint in hints.items():
        if name not in raw:
            continue
        if dataclasses.is_dataclass(hint):
            values[name] = _build(hint, raw[name], f"{prefix}{name}.", problems)
        else:
            _convert(hint, raw[name], f"{prefix}{name}", values, problems)
    return cls(**values)


_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def _convert(
    hint: Any, value: Any, setting: str, values: dict[str, Any], problems: list[Problem]
) -> None:
    """Put the converted value under the setting's last name, or add a problem."""
    name = setting.rsplit(".", 1)[-1]
    optional = isinstance(hint, types.UnionType)
    if value is None and optional:
        values[name] = None
        return
    kind = next(k for k in typing.get_args(hint) if k is not types.NoneType) if optional else hint
    if typing.get_origin(kind) is list:
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            values[name] = list(value)
        else:
            problems.append(Problem(f"{setting}={value}", "not a list of texts", "[a, b]"))
        return
    if typing.get_origin(kind) is dict:
        numbers = _whole_numbers(value)
        if numbers is None:
            why = "not names with whole numbers"
            problems.append(Problem(f"{setting}={value}", why, "{a: 1, b: 2}"))
        else:
            values[name] = numbers
        return
    converted = _scalar(kind, value)
    if converted is None:
        allowed = _NAMES[kind] + (" or null" if optional else "")
        problems.append(Problem(f"{setting}={value}", f"not {_NAMES[kind]}", allowed))
    else:
        values[name] = converted


def _whole_numbers(value: Any) -> dict[str, int] | None:
    """A mapping of names to whole numbers, or None."""
    if not isinstance(value, Mapping):
        return None
    numbers = {str(name): _scalar(int, number) for name, number in value.items()}
    return None if None in numbers.values() else numbers


def _scalar(kind: type, value: Any) -> Any:
    """The value as `kind`, or None; a bool is no number."""
    if kind is bool:
        words = {"true": True, "false": False}
        return value if isinstance(value, bool) else words.get(str(value).lower())
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    if kind is str:
        return str(value)
    try:
        # float("nan") is a float; the rules say what it may be.
        return kind(value) if kind is float or isinstance(value, str) else _whole(value)
    except (ValueError, OverflowError):
        return None


def _whole(value: int | float) -> int | None:
    return int(value) if int(value) == value else None
