"""Whether a base can be trained as a family, found before any weight is read."""

import re
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lib import hub_download
from lib.components import QUANTISED
from lib.errors import Problem
from lib.family import Facts, Family
from lib.hub import INDEX, Base, UnbuiltTiny, class_name
from lib.schema import AUTO

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
NF4 = "bitsandbytes nf4"  # the one kind of few bits that is read
# Words in the names of checkpoints distilled to few steps.
DISTILLED = re.compile(r"(?<![a-z])(turbo|schnell|lightning|hyper|lcm|dmd2?|distilled)(?![a-z])")


def base_problems(base: Base, *, family: Family, others: Mapping[str, Facts]) -> Iterator[Problem]:
    """Whatever keeps a base from being this family's: its index, its files, how it is stored."""
    found = list(index_problems(base, family=family, others=others))
    yield from found
    if not found and not isinstance(base, UnbuiltTiny):
        yield from _quantised(f"family.base={base.reference}", base, family.FACTS)


def stored_kind(base: Base, family: Family) -> str:
    """How the base stores its denoiser: the precision that computes it so, or "" if dense."""
    return "nf4" if _storage(base, family.FACTS.denoiser) == NF4 else ""


def precision_problem(base: Base, *, family: Family, mode: str) -> Problem | None:
    """A denoiser that is stored in few bits, and a precision that it is not stored in."""
    kind, facts = stored_kind(base, family), family.FACTS
    if kind == "" or mode in (kind, AUTO):
        return None
    why = f"{base.reference} stores its {facts.denoiser} in {kind}"
    remedy = f"use precision={kind}, or a dense base such as {facts.reference}"
    return Problem(f"precision.mode={mode}", why, f"{kind}, {AUTO}", remedy)


def family_of(base: Base, families: Mapping[str, Facts]) -> str | None:
    """The family whose pipeline a base's index names, if it can be read."""
    try:
        pipeline = base.index().get("_class_name")
    except (OSError, ValueError):
        return None
    return next((name for name, facts in families.items() if pipeline in facts.pipelines), None)


def index_problems(base: Base, *, family: Family, others: Mapping[str, Facts]) -> Iterator[Problem]:
    """What can be said by the index and the names of files, in no time."""
    if isinstance(base, UnbuiltTiny):
        return
    setting = f"family.base={base.reference}"
    if not (base.root / INDEX).is_file():
        yield _no_index(setting, base.root)
        return
    try:
        index = base.index()
    except ValueError as error:
        yield Problem(setting, f"{INDEX} cannot be read ({error})", remedy="save it again")
        return
    if wrong := list(_pipeline_problems(setting, index, family.FACTS, others)):
        yield from wrong
        return
    yield from _component_problems(setting, base, index, family.FACTS)


def distillation_problem(base: Base, *, family: Family) -> Problem | None:
    """A base made for few steps, by its name or by what its configuration says."""
    if isinstance(base, UnbuiltTiny):
        return None
    named = DISTILLED.search(base.reference.rsplit("/", 1)[-1].lower())
    why = f"{named[0]!r} is in its name" if named else family.distillation(base)
    if why is None:
        return None
    return Problem(
        f"family.base={base.reference}",
        f"is distilled to few steps ({why}): training undoes that while the loss falls",
        f"the undistilled {family.FACTS.reference}",
        "or add family.allow_distilled=true",
    )


def diffusers_problem(facts: Facts) -> Problem | None:
    """A diffusers without the family's pipeline."""
    installed = version("diffusers")
    if _release(installed) >= _release(facts.diffusers):
        return None
    why = f"diffusers {installed} has no {facts.pipelines[0]}"
    remedy = "pip install -U diffusers"
    return Problem(f"family={facts.name}", why, f"diffusers {facts.diffusers} or newer", remedy)


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def _no_index(setting: str, root: Path) -> Problem:
    """A folder that is no pipeline; of a quantised single file at least that is said."""
    if any(root.rglob("*.gguf")):
        allowed = "a dense pipeline of safetensors"
        return Problem(setting, "holds GGUF files, which cannot be trained on", allowed)
    return Problem(setting, f"has no {INDEX}", "a folder made by a pipeline's save_pretrained")


def _pipeline_problems(
    setting: str, index: Mapping[str, Any], facts: Facts, others: Mapping[str, Facts]
) -> Iterator[Problem]:
    pipeline = index.get("_class_name")
    if pipeline not in facts.pipelines:
        fitting = [name for name, other in others.items() if pipeline in other.pipelines]
        remedy = f"use family={fitting[0]}" if fitting else ""
        why = f"holds a {pipeline}; family={facts.name} needs {' or '.join(facts.pipelines)}"
        yield Problem(setting, why, remedy=remedy)


def _component_problems(
    setting: str, base: Base, index: Mapping[str, Any], facts: Facts
) -> Iterator[Problem]:
    for name, expected in facts.classes.items():
        found = class_name(index, name)
        if name not in index:
            yield Problem(setting, f"{INDEX} names no {name}", expected)
        elif not _is_one_of(found, expected):
            allowed = expected.replace("|", ", ")
            yield Problem(setting, f"{name} is a {found}", allowed)
        elif not base.remote and _only_pickles(base.root / name):
            remedy = "save it again with safe_serialization=True"
            yield Problem(setting, f"{name} has pickled weights only", "safetensors", remedy)


def _quantised(setting: str, base: Base, facts: Facts) -> Iterator[Problem]:
    """Components stored in few bits, by their own configuration, whatever the base is called."""
    models = [name for name in facts.classes if not name.startswith(("tokenizer", "scheduler"))]
    kinds = {name: kind for name in models if (kind := _storage(base, name))}
    read = [n for n, kind in kinds.items() if kind == NF4 and n != facts.autoencoder]
    if refused := [f"{name} ({kind})" for name, kind in kinds.items() if name not in read]:
        why = f"is stored quantised: {', '.join(refused)}"
        allowed = f"a dense base such as {facts.reference}"
        remedy = "or one with the denoiser, or text encoders, in bitsandbytes' nf4"
        yield Problem(setting, why, allowed, remedy)
    elif read and find_spec("bitsandbytes") is None:
        why = f"stores {', '.join(read)} in bitsandbytes' nf4, and bitsandbytes is not installed"
        yield Problem(setting, why, remedy='pip install -e ".[quant]"')


def _storage(base: Base, component: str) -> str:
    """The method by which a component is quantised, by its configuration, or ""."""
    found = base.component(component).config.get(QUANTISED)
    if not found:
        return ""
    method = found.get("quant_method", "an unnamed method")
    if method != "bitsandbytes":
        return str(method)
    kind = found.get("bnb_4bit_quant_type", "fp4") if found.get("load_in_4bit") else "int8"
    return f"{method} {kind}"


def _is_one_of(found: str, expected: str) -> bool:
    """transformers 5 made the `Fast` tokenizer classes aliases of the plain ones."""
    return found.removesuffix("Fast") in (one.removesuffix("Fast") for one in expected.split("|"))


def _only_pickles(folder: Path) -> bool:
    if not folder.is_dir() or hub_download.weight_files(folder):
        return False
    return any(path.suffix in PICKLES for path in folder.iterdir())
