"""Samples, captions, reports: a folder of pictures -> what trains, what does not, and why."""

import hashlib
import json
import os
import posixpath
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lib.errors import Problem
from lib.images import ImageError, decode

EXTENSIONS = (".jpeg", ".jpg", ".png", ".webp")
METADATA = "metadata.jsonl"
NO_CAPTION = "no caption"

_CAPTION_FIELDS = ("text", "caption")
_NEAR_METADATA = re.compile(r"(?!metadata\.jsonl$)(?i:metadata\.(json.*|csv|parquet))")


@dataclass(frozen=True)
class Candidate:
    """A picture and its caption before the picture was read; `name` is its relative POSIX path."""

    name: str
    path: Path
    caption: str


@dataclass(frozen=True)
class Discovery:
    """What a folder holds; `found` counts pictures, `hidden` those that were passed over unseen."""

    candidates: tuple[Candidate, ...]
    problems: tuple[Problem, ...]
    drops: Mapping[str, tuple[str, ...]]
    found: int
    captions_from: Mapping[str, int]
    hidden: int


@dataclass(frozen=True)
class Sample:
    """A picture that can be trained on; the size is in pixels, upright."""

    name: str
    image_key: str
    height: int
    width: int
    caption: str
    repeats: int = 1


@dataclass(frozen=True)
class Report:
    """Every picture found was kept, or dropped by name under a kind."""

    found: int
    kept: int
    dropped: Mapping[str, tuple[str, ...]]
    captions_from: Mapping[str, int]

    def __post_init__(self) -> None:
        assert self.found == self.kept + sum(map(len, self.dropped.values()))


@dataclass(frozen=True)
class _Tree:
    files: Mapping[str, Path]
    pictures: Mapping[str, Path]
    problems: tuple[Problem, ...]
    hidden: int


@dataclass(frozen=True)
class _Row:
    subject: str
    name: str
    caption: str | None


@dataclass(frozen=True)
class _Caption:
    text: str
    source: str


def _suffix(name: str) -> str:
    return PurePosixPath(name).suffix.lower()


def _stem(name: str) -> str:
    """A name without its last suffix, so that `v1.0 front.png` keeps its dot."""
    return PurePosixPath(name).with_suffix("").as_posix()


def _shown(text: str) -> str:
    """Text that can be printed and hashed: undecodable characters escaped."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _is_picture(name: str) -> bool:
    return _suffix(name) in EXTENSIONS


def _is_metadata(name: str) -> bool:
    return posixpath.basename(name) == METADATA


def _is_hidden(name: str) -> bool:
    parts = name.split("/")
    return parts[-1] == "Thumbs.db" or any(part[0] == "." or part == "__MACOSX" for part in parts)


def _entry_problem(name: str, path: Path) -> Problem | None:
    if os.path.isdir(path):
        return Problem(_shown(name), "is a link to a folder", "links to files", "link each picture")
    if not (_is_picture(name) or _suffix(name) == ".txt" or _is_metadata(name)):
        return None
    if _shown(name) != name:
        return Problem(_shown(name), "has a name that is not UTF-8", remedy="rename it")
    if not os.path.exists(path):
        return Problem(name, "is a link to nothing", remedy="remove it or restore its target")
    if not os.path.isfile(path):
        return Problem(name, "is no regular file", remedy="move it out of the data set")
    return None


def _entries(root: Path, *, errors: list[OSError]) -> Iterator[Path]:
    """Files, and links to folders, which are not entered."""
    for folder, folders, names in os.walk(root, onerror=errors.append):
        yield from (Path(folder, name) for name in names)
        yield from (Path(folder, name) for name in folders if os.path.islink(Path(folder, name)))


def _survey(root: Path) -> _Tree:
    errors: list[OSError] = []
    files: dict[str, Path] = {}
    problems: list[Problem] = []
    hidden = 0
    for path in _entries(root, errors=errors):
        name = path.relative_to(root).as_posix()
        if _is_hidden(name):
            hidden += _is_picture(name)
        elif problem := _entry_problem(name, path):
            problems.append(problem)
        else:
            files[name] = path
    problems += [Problem(_shown(str(error.filename)), f"{error.strerror}") for error in errors]
    files = dict(sorted(files.items()))
    pictures = {name: path for name, path in files.items() if _is_picture(name)}
    return _Tree(files=files, pictures=pictures, problems=tuple(problems), hidden=hidden)


def _read_text(name: str, path: Path) -> str | Problem:
    """UTF-8 without byte-order mark; CRLF becomes LF: a caption is the same on any system."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        return Problem(name, f"cannot be read ({error.strerror})")
    except UnicodeDecodeError as error:
        why = f"is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}"
        return Problem(name, why, remedy="save it as UTF-8")
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def _parse_row(line: str, *, subject: str, folder: str) -> _Row | Problem:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        return Problem(subject, "the line is not a JSON object", "one JSON object a line")
    file_name = row.get("file_name")
    fields = [field for field in _CAPTION_FIELDS if field in row]
    if not isinstance(file_name, str) or len(fields) != 1:
        why = f"has the fields {_shown(', '.join(row))}"
        return Problem(subject, why, f"file_name, and one of {', '.join(_CAPTION_FIELDS)}")
    caption = row[fields[0]]
    if not isinstance(caption, str | None) or _shown(caption or "") != (caption or ""):
        return Problem(subject, f"{fields[0]} is no text", "a string, or null for none")
    name = posixpath.normpath(posixpath.join(folder, file_name.replace("\\", "/")))
    return _Row(subject=subject, name=name, caption=caption)


def _rows(files: Mapping[str, Path]) -> Iterator[_Row | Problem]:
    for metadata in filter(_is_metadata, files):
        text = _read_text(metadata, files[metadata])
        if isinstance(text, Problem):
            yield text
            continue
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                subject = f"{metadata}:{number}"
                yield _parse_row(line, subject=subject, folder=posixpath.dirname(metadata))


def _from_rows(tree: _Tree, *, problems: set[Problem]) -> dict[str, _Caption]:
    """Captions of all metadata files; what is wrong with a row joins `problems`."""
    taken: dict[str, _Row] = {}
    for row in _rows(tree.files):
        if isinstance(row, Problem):
            problems.add(row)
        elif row.name not in tree.pictures:
            why = f"there is no picture {_shown(row.name)} in the data set"
            problems.add(Problem(row.subject, why, "a path relative to the metadata file"))
        elif row.name in taken:
            problems.add(Problem(row.subject, f"repeats {taken[row.name].subject}: {row.name}"))
        else:
            taken[row.name] = row
    return {
        name: _Caption(text=row.caption, source="metadata")
        for name, row in taken.items()
        if row.caption is not None
    }


def _sidecar_caption(sidecars: Sequence[str], *, files: Mapping[str, Path]) -> _Caption | Problem:
    name = sidecars[0]
    if len(sidecars) > 1:
        return Problem(name, f"captions the same picture as {sidecars[1]}", remedy="keep one")
    text = _read_text(name, files[name])
    if isinstance(text, Problem):
        return text
    return _Caption(text=text, source="sidecar" if text.strip() else "empty sidecar")


def _from_sidecars(tree: _Tree) -> dict[str, _Caption | Problem]:
    sidecars: dict[str, list[str]] = {}
    for name in tree.files:
        if _suffix(name) == ".txt":
            sidecars.setdefault(_stem(name), []).append(name)
    return {
        name: _sidecar_caption(sidecars[_stem(name)], files=tree.files)
        for name in tree.pictures
        if _stem(name) in sidecars
    }


def _hints(root: Path, *, tree: _Tree, dropped: Sequence[str]) -> Iterator[Problem]:
    """No pictures, no captions, or a metadata file whose name is nearly right."""
    for name in tree.files if dropped else ():
        if _NEAR_METADATA.fullmatch(posixpath.basename(name)):
            why = f"is not read, and {len(dropped)} pictures have no caption"
            yield Problem(_shown(name), why, METADATA, "rename or remove it")
    if not tree.pictures:
        counts = Counter(_suffix(name) or "no suffix" for name in tree.files)
        seen = ", ".join(f"{number} {_shown(suffix)}" for suffix, number in sorted(counts.items()))
        why = f"holds no pictures; seen: {seen or 'no files'}, {tree.hidden} hidden pictures"
        yield Problem(f"dataset.root={root}", why, ", ".join(EXTENSIONS))
    elif len(dropped) == len(tree.pictures):
        ways = f".txt sidecars, {METADATA}, dataset.instance_prompt"
        yield Problem(f"dataset.root={root}", "no picture has a caption", ways)


def discover(root: Path, *, instance_prompt: str | None) -> Discovery:
    """Every picture below a folder with its caption; all that is wrong is named, nothing raised.

    A sidecar goes before a metadata row, and this before the instance prompt.
    """
    tree = _survey(root)
    problems = set(tree.problems)
    prompt = _Caption(text=instance_prompt or "", source="instance_prompt")
    prompted = {} if instance_prompt is None else dict.fromkeys(tree.pictures, prompt)
    found = {**prompted, **_from_rows(tree, problems=problems), **_from_sidecars(tree)}
    problems |= {caption for caption in found.values() if isinstance(caption, Problem)}
    captions = {name: item for name, item in sorted(found.items()) if isinstance(item, _Caption)}
    dropped = tuple(name for name in tree.pictures if name not in found)
    return Discovery(
        candidates=tuple(
            Candidate(name=name, path=tree.files[name], caption=caption.text.strip())
            for name, caption in captions.items()
        ),
        problems=tuple(sorted(problems or _hints(root, tree=tree, dropped=dropped))),
        drops={NO_CAPTION: dropped} if dropped else {},
        found=len(tree.pictures),
        captions_from=dict(sorted(Counter(item.source for item in captions.values()).items())),
        hidden=tree.hidden,
    )


def inspect(candidate: Candidate) -> Sample | Problem:
    """Read a picture once: the bytes that are hashed are the bytes that are decoded."""
    try:
        data = candidate.path.read_bytes()
        image = decode(data)
    except OSError as error:
        return Problem(candidate.name, f"cannot be read ({error.strerror})")
    except ImageError as error:
        return Problem(candidate.name, str(error))
    return Sample(
        name=candidate.name,
        image_key=hashlib.sha256(data).hexdigest(),
        height=image.height,
        width=image.width,
        caption=candidate.caption,
    )
