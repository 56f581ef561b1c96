"""The families by name; `get` is the only dynamic import of the project."""

import importlib
import pkgutil
from typing import cast

from lib.errors import InputRefused, Problem
from lib.family import Family


def names() -> tuple[str, ...]:
    """The modules beside this one."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def get(name: str) -> Family:
    """The family's module; an unknown name is refused."""
    if name not in names():
        raise InputRefused(Problem(f"family.name={name}", "unknown family", ", ".join(names())))
    return cast(Family, importlib.import_module(f"lib.families.{name}"))
