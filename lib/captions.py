"""The captions of each picture: sidecars, metadata rows, the instance prompt, a folder's words."""

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lib.errors import Problem
from lib.metadata import Row, rows
from lib.schema import DatasetConfig
from lib.survey import (
    MAX_SIDECAR_BYTES,
    Tree,
    folded,
    is_sidecar,
    read_text,
    shown,
    stem,
)

MAX_REPEATS = 10_000
_REPEATS = re.compile(r"([0-9]+)_(.+)", re.S)


@dataclass(frozen=True)
class Captions:
    """One picture's captions; `source` is the kind of place they come from, `subject` the place."""

    texts: tuple[str, ...]
    source: str
    subject: str


@dataclass(frozen=True)
class Folder:
    """A folder as kohya's trainers read it: `10_a cat` is ten repeats, captioned `a cat`."""

    name: str
    repeats: int
    words: str


def captions_of(
    tree: Tree, *, options: DatasetConfig, problems: set[Problem]
) -> dict[str, Captions]:
    """Captions by picture; what is wrong joins `problems`.

    A sidecar goes before a metadata row, this before the instance prompt, this before a folder's
    words.
    """
    found: dict[str, Captions] = {}
    if options.folder_repeats:
        for name, folder in repeat_folders(tree.pictures).items():
            found[name] = Captions((folder.words,), "folder", folder.name)
    if options.instance_prompt is not None:
        prompt = Captions((options.instance_prompt.strip(),), "instance_prompt", "")
        found |= dict.fromkeys(tree.pictures, prompt)
    found |= _from_rows(tree, problems=problems)
    found |= _from_sidecars(tree, problems=problems)
    return {
        name: _decorated(found[name], name=name, options=options, problems=problems)
        for name in sorted(found)
    }


def repeat_folders(pictures: Sequence[str]) -> dict[str, Folder]:
    """The nearest folder of each picture that is named by a number and words."""
    found = {}
    for name in pictures:
        parts = posixpath.dirname(name).split("/")
        for depth in range(len(parts), 0, -1):
            if match := _REPEATS.fullmatch(parts[depth - 1]):
                folder = "/".join(parts[:depth])
                found[name] = Folder(folder, _number(match[1]), match[2].strip())
                break
    return found


def folder_problems(folders: Mapping[str, Folder]) -> set[Problem]:
    """Folders whose number is no number of repeats."""
    return {
        Problem(
            shown(folder.name),
            "dataset.folder_repeats reads the number as repeats",
            f"1 to {MAX_REPEATS}",
            "rename the folder",
        )
        for folder in folders.values()
        if not 1 <= folder.repeats <= MAX_REPEATS
    }


def orphans(tree: Tree) -> tuple[str, ...]:
    """Sidecars that caption no picture."""
    stems = {stem(name) for name in tree.pictures}
    return tuple(n for n in tree.files if is_sidecar(n) and stem(n) not in stems)


def shared_sidecars(tree: Tree) -> tuple[str, ...]:
    """Sidecars with the pictures that they caption, where these are several."""
    pictures: dict[str, list[str]] = {}
    for name in tree.pictures:
        pictures.setdefault(stem(name), []).append(name)
    return tuple(
        f"{name} ({', '.join(pictures[stem(name)])})"
        for name in tree.files
        if is_sidecar(name) and len(pictures.get(stem(name), ())) > 1
    )


def _number(digits: str) -> int:
    """A folder's number; one that is too long to be meant is too large, whatever it is."""
    return int(digits) if len(digits) <= 9 else 10**9


def _from_rows(tree: Tree, *, problems: set[Problem]) -> dict[str, Captions]:
    taken: dict[str, Row] = {}
    known, pictures = set(tree.pictures), {folded(name): name for name in tree.pictures}
    for row in rows(tree.files):
        if isinstance(row, Problem):
            problems.add(row)
        elif row.name not in known:
            problems.add(_no_picture(row, pictures.get(folded(row.name))))
        elif row.name in taken:
            why = f"repeats {taken[row.name].subject}: {row.name}"
            problems.add(Problem(row.subject, why))
        else:
            taken[row.name] = row
    return {
        name: Captions(row.captions, "metadata" if any(row.captions) else "empty row", row.subject)
        for name, row in taken.items()
        if row.captions is not None
    }


def _no_picture(row: Row, nearly: str | None) -> Problem:
    why = f"there is no picture {shown(row.name)} in the data set"
    remedy = f"{nearly} differs in case or in how accents are stored" if nearly else ""
    return Problem(row.subject, why, "a path relative to the metadata file", remedy)


def _from_sidecars(tree: Tree, *, problems: set[Problem]) -> dict[str, Captions]:
    sidecars: dict[str, list[str]] = {}
    for name in filter(is_sidecar, tree.files):
        sidecars.setdefault(stem(name), []).append(name)
    read = {
        key: _one_caption(sidecars[key], files=tree.files)
        for key in {stem(name) for name in tree.pictures} & sidecars.keys()
    }
    problems |= {one for one in read.values() if isinstance(one, Problem)}
    problems |= _misspelt(tree)
    return {
        name: caption
        for name in tree.pictures
        if isinstance(caption := read.get(stem(name)), Captions)
    }


def _one_caption(names: Sequence[str], *, files: Mapping[str, Path]) -> Captions | Problem:
    """The one caption that a picture's sidecars hold."""
    texts = {}
    for name in names:
        text = read_text(name, files[name], max_bytes=MAX_SIDECAR_BYTES)
        if isinstance(text, Problem):
            return text
        texts[name] = text.strip()
    if len(set(texts.values())) > 1:
        why = f"captions the same picture as {names[1]}, otherwise"
        return Problem(names[0], why, remedy="keep one")
    text = texts[names[0]]
    return Captions((text,), "sidecar" if text else "empty sidecar", names[0])


def _misspelt(tree: Tree) -> set[Problem]:
    """Sidecars whose picture is there under nearly the same name."""
    pictures = {folded(stem(name)): name for name in tree.pictures}
    return {
        Problem(
            name,
            f"does not caption {pictures[folded(stem(name))]}: case or accents differ",
            remedy="rename one of them",
        )
        for name in orphans(tree)
        if folded(stem(name)) in pictures
    }


def _decorated(
    captions: Captions, *, name: str, options: DatasetConfig, problems: set[Problem]
) -> Captions:
    """With the prefix and the trigger before each text, in this order of speaking."""
    texts = tuple(
        _triggered(f"{options.prefix or ''}{text}".strip(), options.trigger)
        for text in captions.texts
    )
    if len(set(texts)) < len(texts):
        why = f"two captions of {name} are one with dataset.trigger and dataset.prefix"
        problems.add(Problem(captions.subject, why, remedy="remove one"))
    return replace(captions, texts=texts)


def _triggered(text: str, trigger: str | None) -> str:
    if trigger is None or re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", text):
        return text
    return f"{trigger}, {text}" if text else trigger
