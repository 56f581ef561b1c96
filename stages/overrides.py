"""Overrides and values as texts: quotes, sweeps over them, and what comes from elsewhere."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from lib.errors import Problem
from lib.schema import CAPTION_TEXTS, Config, settings_of

# What a value may take from elsewhere: another setting, a path of the checkout.
OURS = re.compile(r"\$\{(checkout:[^${}]*|[\w.]+)\}")
# Captions and prompts: a comma in one is a comma, and no second run.
FREE_TEXT = (*CAPTION_TEXTS, "sample.negative_prompt")
# Settings whose value is a mapping with names of the user's own.
NAMED_VALUES = tuple(name for name, value in settings_of(Config()) if isinstance(value, dict))


def quoted(override: str) -> str:
    """An override as it is typed in a shell so that its value is one text."""
    name, _, value = override.partition("=")
    # As Hydra reads it: backslashes count as such only before a quote.
    escaped = re.sub(r'(\\*)("|$)', lambda m: m[1] * 2 + (f"\\{m[2]}" if m[2] else ""), value)
    return shlex.quote(f'{name}="{escaped}"')


def combinations(parsed: Sequence[Any]) -> Iterator[tuple[str, ...]]:
    """Combinations of a sweep in which each listed value occurs, few of them."""
    choices = [values for override in parsed if (values := _values(override))]
    first = tuple(values[0] for values in choices)
    yield first
    for place, values in enumerate(choices):
        for value in values[1:]:
            yield (*first[:place], value, *first[place + 1 :])


def split_texts(parsed: Sequence[Any]) -> Iterator[Problem]:
    """Free texts that their commas would cut into several runs."""
    for override in parsed:
        if override.key_or_group in FREE_TEXT and _is_list(override):
            parts = override.value().list
            if not all(hasattr(part, "quote") for part in parts):
                word = override.input_line
                why = f"its commas would make {len(parts)} runs"
                remedy = f"for one text type {quoted(word)}; for one run with each quote each"
                yield Problem(word, why, remedy=remedy)


def foreign(values: Mapping[str, Any]) -> dict[str, Problem]:
    """Settings whose value would come from elsewhere, such as a token from the environment."""
    found = {}
    for setting, text in _texts(values):
        if "${" in OURS.sub("", text) and not setting.startswith("hydra."):
            why = "reads what is no setting, and the run's files would keep it"
            remedy = "write the value; secrets belong in the environment and are found there"
            found[setting] = Problem(f"{setting}={text}", why, "${a.setting}", remedy)
    return found


def _texts(values: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Texts of nested mappings by their dotted names; those within a setting by the setting's."""
    if prefix in NAMED_VALUES:
        yield from ((prefix, text) for _, text in _texts(values))
    elif isinstance(values, Mapping):
        for name, value in values.items():
            yield from _texts(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(values, list):
        for value in values:
            yield from _texts(value, prefix)
    elif isinstance(values, str):
        yield prefix, values


def _values(override: Any) -> list[str]:
    """Every value of a list, one of a range, and none of what only Hydra can look up."""
    if not override.is_sweep_override():
        return [override.input_line]
    if not (_is_list(override) or override.is_range_sweep()):
        return []
    name = override.get_key_element()
    values = islice(override.sweep_string_iterator(), 1 if override.is_range_sweep() else None)
    return [f"{name}={value}" for value in values]


def _is_list(override: Any) -> bool:
    """Whether the values to sweep over are written out; a pattern's are not."""
    return override.is_choice_sweep() and hasattr(override.value(), "list")
