"""Stage `prepare_dataset`: a folder of pictures -> samples, texts, geometries, report."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lib import stopping
from lib.errors import InputRefused, Problem, SamplesFailed
from lib.events import Events
from lib.files import user_path
from lib.framing import BELOW_STEP, ENLARGED, Framed, bucket_table, cut, enlarged, frame
from lib.images import RECIPE, Facts
from lib.keys import digest, make_key
from lib.manifest import (
    Candidate,
    Discovery,
    Read,
    Refusal,
    Report,
    Sorted,
    as_record,
    discover,
    inspect,
    sort_out,
    unreadable,
)
from lib.memory import Item, Memory, stat_of
from lib.pipeline.contract import Inputs, StagePlan, chosen, lookup
from lib.recipes import captions_key, images_key, manifest_key
from lib.schema import Config
from lib.splits import Split, split_by_content
from lib.store import Manifest, Store

STAGE = "prepare_dataset"
THREADS = 4
MOST_NAMES = 20  # of one kind in a line; the manifest holds all
SETTINGS = (
    *("buckets.resolution", "buckets.step", "buckets.max_aspect", "buckets.policy"),
    *("latents.variants", "latents.crop_seed", "latents.random_flip"),
    *("dataset.background", "validation.fraction"),
)
OPTIONS = (
    *("dataset.instance_prompt", "dataset.trigger", "dataset.prefix", "dataset.folder_repeats"),
    *("dataset.min_side", "dataset.animated", "dataset.damaged"),
)


def plan(config: Config, inputs: Inputs, store: Store) -> StagePlan:
    """The whole work, since it is cheap: hashes are remembered and nothing is encoded."""
    manifest = _prepare(config, inputs, store, Events())
    found = lookup(store, manifest) is not None
    total = len(manifest.payload["samples"])
    settings = manifest.payload["settings"]
    return StagePlan(STAGE, manifest, found, total, 0 if found else total, 0, settings)


def run(config: Config, inputs: Inputs, store: Store, events: Events) -> Manifest:
    """Check every picture and caption, name all that fails, and publish what is kept."""
    events.phase(STAGE, "start")
    manifest = _prepare(config, inputs, store, events)
    known = lookup(store, manifest) is not None
    report = manifest.payload["report"]
    published = store.publish(manifest)
    counts = {name: report[name] for name in ("found", "kept", "held_out") if report[name]}
    events.phase(STAGE, "hit" if known else "done", key=manifest.key, **counts)
    for line in report_lines(report):
        events.warning(line)
    return published


def report_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """What a report says beside its counts: the sum first, then the names of each kind."""
    dropped = {kind: len(names) for kind, names in report["dropped"].items()}
    if dropped:
        parts = [f"{count} {kind}" for kind, count in dropped.items()]
        yield f"{report['found']} pictures found = " + " + ".join(
            [f"{report['kept']} kept", *parts]
        )
    for kind, names in report["dropped"].items():
        yield f"{len(names)} pictures dropped, {kind}: {_listed(names)}"
    for kind, names in report["notes"].items():
        yield f"{len(names)} {kind}: {_listed(names)}"
    if report["hidden"]:
        yield f"{report['hidden']} hidden pictures passed over"


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def key_settings(config: Config) -> dict[str, Any]:
    """The settings that enter the key; the folder itself enters by what is in it."""
    return chosen(config, "family.name", *OPTIONS, *SETTINGS)


def problems(config: Config, store: Store) -> Iterator[Problem]:
    """What is wrong with the folder; if anything is, with its pictures too, in one report."""
    found = discover(user_path(config.dataset.root), options=config.dataset)
    if found.problems:
        yield from found.problems
        yield from _sorted_out(config, found, store, Events()).problems


def _prepare(config: Config, inputs: Inputs, store: Store, events: Events) -> Manifest:
    root = user_path(config.dataset.root)
    found = discover(root, options=config.dataset)
    sorted_out = _sorted_out(config, found, store, events)
    if found.problems:
        raise InputRefused((*found.problems, *sorted_out.problems))
    if sorted_out.problems:
        raise SamplesFailed(sorted_out.problems)
    divisor = inputs.family.FACTS.divisor
    framed = frame(sorted_out.samples, config=config.buckets, divisor=divisor)
    report = _report(found, sorted_out, framed)
    if not framed.samples:
        raise InputRefused(_none_left(root, report))
    split = split_by_content(framed.samples, fraction=config.validation.fraction)
    return _manifest(
        split,
        framed,
        report={**asdict(report), "held_out": len(split.held_out)},
        config=config,
        divisor=divisor,
    )


def _report(found: Discovery, sorted_out: Sorted, framed: Framed) -> Report:
    """All parts as one: what the names told, what the pictures did, what the buckets do."""
    too_small = {BELOW_STEP: framed.too_small} if framed.too_small else {}
    soft = enlarged(framed)
    return Report(
        found=found.found,
        kept=len(framed.samples),
        dropped={**found.drops, **sorted_out.drops, **too_small},
        captions_from=found.captions_from,
        hidden=found.hidden,
        notes={**found.notes, **sorted_out.notes, **({ENLARGED: soft} if soft else {})},
    )


def _none_left(root: Path, report: Report) -> Problem:
    why = ", ".join(f"{len(names)} {kind}" for kind, names in report.dropped.items())
    return Problem(f"dataset.root={root}", f"no picture is left of {report.found}: {why}")


def _sorted_out(config: Config, found: Discovery, store: Store, events: Events) -> Sorted:
    """Every picture is read before any is refused; what is remembered is not read again."""
    memory, learnt = Memory(store.root), []
    inspected: list[tuple[Candidate, Read | Refusal]] = []
    with ThreadPoolExecutor(THREADS) as threads:
        for candidate, (read, item) in zip(
            found.candidates,
            threads.map(lambda c: _inspect(c, memory), found.candidates),
            strict=True,
        ):
            inspected.append((candidate, read))
            learnt.append(item)
            stopping.check()
            events.progress(len(inspected), len(found.candidates), unit="pictures")
    memory.remember_all(item for item in learnt if item)
    return sort_out(inspected, options=config.dataset)


def _inspect(candidate: Candidate, memory: Memory) -> tuple[Read | Refusal, Item | None]:
    """The picture, and what there is to remember of it."""
    name = _memory_name(candidate)
    try:
        before = stat_of(candidate.path)
        known = memory.recall(name, candidate.path)
    except OSError as error:
        return unreadable(candidate, error), None
    if known is not None:
        return Read(known["image_key"], Facts(**known["facts"])), None
    read = inspect(candidate)
    if isinstance(read, Refusal):
        return read, None
    return read, Item(name, before, asdict(read))


def _memory_name(candidate: Candidate) -> str:
    """A picture's facts hold for one decode recipe."""
    return f"picture:{digest(RECIPE)}:{candidate.path.resolve()}"


def _manifest(
    split: Split, framed: Framed, *, report: Mapping[str, Any], config: Config, divisor: int
) -> Manifest:
    samples = [*split.train, *split.held_out]
    settings = {
        **asdict(config.buckets),
        "variants": config.latents.variants,
        "crop_seed": config.latents.crop_seed,
        "random_flip": config.latents.random_flip,
        "divisor": divisor,
    }
    plain = [asdict(sample) for sample in sorted(samples, key=lambda sample: sample.name)]
    texts = sorted({text for sample in samples for text in sample.captions})
    images = cut(framed, latents=config.latents)
    sizes = [{k: i[k] for k in ("image_key", "height", "width", "background")} for i in images]
    keys = {
        "manifest": manifest_key(plain, split=split.rule).digest,
        "captions": captions_key(texts).digest,
        "images": images_key(sizes, settings=settings).digest,
    }
    key = make_key("prepared", **keys, report=report)
    payload = {
        "keys": keys,
        "samples": [as_record(sample) for sample in split.train],
        "held_out": [as_record(sample) for sample in split.held_out],
        "captions": sorted({text for sample in split.train for text in sample.captions}),
        "images": images,
        "buckets": bucket_table(split.train, framed),
        "report": report,
        "settings": chosen(config, *SETTINGS),
    }
    return Manifest(STAGE, key.digest, key.inputs, {}, payload)
