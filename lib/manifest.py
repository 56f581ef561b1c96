"""Samples, drops, reports: a folder of pictures -> what trains, what does not, and why."""

import hashlib
import posixpath
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lib.captions import (
    Folder,
    captions_of,
    folder_problems,
    orphans,
    repeat_folders,
    shared_sidecars,
)
from lib.errors import Problem
from lib.images import FORMAT, TOO_SMALL, Facts, ImageError, facts_of
from lib.metadata import is_near
from lib.schema import DatasetConfig
from lib.survey import (
    EXTENSIONS,
    FOREIGN,
    MAX_PICTURE_BYTES,
    Tree,
    read_regular,
    shown,
    suffix,
    survey,
)

NO_CAPTION = "no caption"
BELOW_MIN_SIDE = "smaller than dataset.min_side"
ANIMATED = "animated"
# What a report notes of pictures and files beside what was dropped.
LINKS = "links that were followed"
COPIES = "pictures that are the same bytes"
SHARED = "sidecars that caption several pictures"
ORPHANS = "sidecars that caption no picture"
UNREAD = "files that are not read, though nearly named like metadata"
REPEATS = "folders named like repeats (dataset.folder_repeats=true reads them so)"
FIRST_FRAMES = "animations of which the first frame is taken"


@dataclass(frozen=True)
class Candidate:
    """A picture and its captions before it was read; `name` is its relative POSIX path."""

    name: str
    path: Path
    captions: tuple[str, ...]
    repeats: int = 1


@dataclass(frozen=True)
class Discovery:
    """What a folder holds; `found` counts pictures, `hidden` those that were passed over unseen."""

    candidates: tuple[Candidate, ...]
    problems: tuple[Problem, ...]
    drops: Mapping[str, tuple[str, ...]]
    found: int
    captions_from: Mapping[str, int]
    hidden: int
    notes: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Read:
    """A picture that was read: the digest of its bytes, and what decoding told."""

    image_key: str
    facts: Facts


@dataclass(frozen=True)
class Refusal:
    """A picture that cannot be used; without a `kind` it is never merely left out."""

    name: str
    problem: Problem
    kind: str = ""


@dataclass(frozen=True)
class Sample:
    """A picture that can be trained on; the size is in pixels, upright.

    A transparent one is laid over its background, an opaque one has none.
    """

    name: str
    image_key: str
    height: int
    width: int
    captions: tuple[str, ...]
    repeats: int = 1
    background: str | None = None


@dataclass(frozen=True)
class Sorted:
    """What became of all candidates: `problems` stop the stage, `drops` go by kind."""

    samples: tuple[Sample, ...]
    problems: tuple[Problem, ...]
    drops: Mapping[str, tuple[str, ...]]
    notes: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Report:
    """Every picture found was kept, or dropped by name under a kind."""

    found: int
    kept: int
    dropped: Mapping[str, tuple[str, ...]]
    captions_from: Mapping[str, int]
    hidden: int = 0
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.found == self.kept + sum(map(len, self.dropped.values()))


def discover(root: Path, *, options: DatasetConfig) -> Discovery:
    """Every picture below a folder with its captions; what is wrong is named, nothing raised."""
    tree = survey(root)
    folders = repeat_folders(tree.pictures)
    problems = set(tree.problems)
    if options.folder_repeats:
        problems |= folder_problems(folders)
    found = captions_of(tree, options=options, problems=problems)
    dropped = tuple(name for name in tree.pictures if name not in found)
    hints = _hints(root, tree=tree, dropped=dropped, folders=folders, options=options)
    return Discovery(
        candidates=tuple(
            Candidate(name, tree.files[name], captions.texts, _repeats(name, folders, options))
            for name, captions in found.items()
        ),
        problems=tuple(sorted(problems or hints)),
        drops={NO_CAPTION: dropped} if dropped else {},
        found=len(tree.pictures),
        captions_from=dict(sorted(Counter(one.source for one in found.values()).items())),
        hidden=tree.hidden,
        notes=_notes(tree, folders=folders, options=options),
    )


def inspect(candidate: Candidate) -> Read | Refusal:
    """Read a picture once: the bytes that are hashed are the bytes that are decoded."""
    name = candidate.name
    if suffix(name) in FOREIGN:
        problem = Problem(name, f"is a {suffix(name)}", ", ".join(EXTENSIONS), "save it as PNG")
        return Refusal(name, problem, FORMAT)
    try:
        data = read_regular(candidate.path, max_bytes=MAX_PICTURE_BYTES)
        facts = facts_of(data)
    except OSError as error:
        return unreadable(candidate, error)
    except ImageError as error:
        return Refusal(name, Problem(name, str(error)), error.kind)
    return Read(hashlib.sha256(data).hexdigest(), facts)


def unreadable(candidate: Candidate, error: OSError) -> Refusal:
    """A file that could not be read: no fault of the picture, so it stops the stage always."""
    name = candidate.name
    return Refusal(name, Problem(name, f"cannot be read ({error.strerror})"))


def sort_out(
    inspected: Iterable[tuple[Candidate, Read | Refusal]], *, options: DatasetConfig
) -> Sorted:
    """What trains, what is dropped as the options say, and what stops the stage."""
    samples: list[Sample] = []
    problems: list[Problem] = []
    drops: dict[str, list[str]] = {}
    first_frames: list[str] = []
    for candidate, read in inspected:
        judged = _judged(candidate, read, options)
        if isinstance(judged, Sample):
            samples.append(judged)
            if isinstance(read, Read) and read.facts.animated:
                first_frames.append(candidate.name)
        elif judged.kind == BELOW_MIN_SIDE or (judged.kind and options.damaged == "drop"):
            drops.setdefault(judged.kind, []).append(judged.name)
        else:
            problems.append(judged.problem)
    return Sorted(
        samples=tuple(samples),
        problems=tuple(problems),
        drops={kind: tuple(drops[kind]) for kind in sorted(drops)},
        notes=_filled({COPIES: _copies(samples), FIRST_FRAMES: first_frames}),
    )


def as_record(sample: Sample) -> dict[str, Any]:
    """A sample as the manifest lists it; `caption` stands for the picture where one has to."""
    return {**asdict(sample), "captions": list(sample.captions), "caption": sample.captions[0]}


def _judged(candidate: Candidate, read: Read | Refusal, options: DatasetConfig) -> Sample | Refusal:
    name = candidate.name
    if isinstance(read, Refusal):
        small = read.kind == TOO_SMALL and options.min_side > 0
        return Refusal(name, read.problem, BELOW_MIN_SIDE) if small else read
    facts = read.facts
    if min(facts.height, facts.width) < options.min_side:
        size = f"{facts.height}x{facts.width} (height x width)"
        return Refusal(name, Problem(name, f"is {size}"), BELOW_MIN_SIDE)
    if facts.animated and options.animated == "refuse":
        remedy = "save the frame you want, or dataset.animated=first_frame"
        return Refusal(name, Problem(name, "is animated", remedy=remedy), ANIMATED)
    return Sample(
        name=name,
        image_key=read.image_key,
        height=facts.height,
        width=facts.width,
        captions=candidate.captions,
        repeats=candidate.repeats,
        background=options.background.lower() if facts.transparent else None,
    )


def _repeats(name: str, folders: Mapping[str, Folder], options: DatasetConfig) -> int:
    return folders[name].repeats if options.folder_repeats and name in folders else 1


def _filled(notes: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    return {kind: tuple(names) for kind, names in notes.items() if names}


def _copies(samples: Sequence[Sample]) -> list[str]:
    """Pictures whose files are the same bytes, as `a.png = b.png`."""
    names: dict[str, list[str]] = {}
    for sample in samples:
        names.setdefault(sample.image_key, []).append(sample.name)
    return [" = ".join(same) for same in names.values() if len(same) > 1]


def _notes(
    tree: Tree, *, folders: Mapping[str, Folder], options: DatasetConfig
) -> dict[str, tuple[str, ...]]:
    unread = [shown(name) for name in tree.files if is_near(name)]
    named = sorted({shown(folder.name) for folder in folders.values()})
    return _filled(
        {
            LINKS: tree.links,
            SHARED: shared_sidecars(tree),
            ORPHANS: orphans(tree),
            UNREAD: unread,
            REPEATS: [] if options.folder_repeats else named,
        }
    )


def _hints(
    root: Path,
    *,
    tree: Tree,
    dropped: Sequence[str],
    folders: Mapping[str, Folder],
    options: DatasetConfig,
) -> Iterator[Problem]:
    """No pictures, no captions, a metadata file nearly named right, repeats that are nowhere."""
    for name in tree.files if dropped else ():
        if is_near(name):
            why = f"is not read, and {len(dropped)} pictures have no caption"
            allowed = "metadata.jsonl, metadata.csv"
            yield Problem(shown(name), why, allowed, "rename or remove it")
    if options.folder_repeats and not folders:
        why = "would have no effect: no folder with pictures is named like 10_subject"
        yield Problem("dataset.folder_repeats=True", why, remedy="rename the folders or drop it")
    if not tree.pictures:
        yield _no_pictures(root, tree)
    elif len(dropped) == len(tree.pictures):
        ways = ".txt or .caption sidecars, metadata.jsonl or .csv, dataset.instance_prompt"
        yield Problem(f"dataset.root={root}", "no picture has a caption", ways)


def _no_pictures(root: Path, tree: Tree) -> Problem:
    counts = Counter(suffix(posixpath.basename(name)) or "no suffix" for name in tree.files)
    seen = ", ".join(f"{number} {shown(ending)}" for ending, number in sorted(counts.items()))
    why = f"holds no pictures; seen: {seen or 'no files'}, {tree.hidden} hidden pictures"
    return Problem(f"dataset.root={root}", why, ", ".join(EXTENSIONS))
