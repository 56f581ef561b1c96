"""Stage `prepare_dataset`: a folder of pictures -> samples, texts, geometries, report."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from lib import buckets
from lib.errors import InputRefused, Problem, SamplesFailed
from lib.events import Events
from lib.files import user_path
from lib.images import RECIPE, variants
from lib.keys import digest, make_key
from lib.manifest import Candidate, Report, Sample, discover, inspect
from lib.memory import Item, Memory, stat_of
from lib.pipeline.contract import Inputs, StagePlan, chosen, lookup
from lib.recipes import captions_key, images_key, manifest_key
from lib.schema import Config
from lib.splits import Split, split_by_content
from lib.store import Manifest, Store

STAGE = "prepare_dataset"
THREADS = 4
SETTINGS = (
    *("buckets.resolution", "buckets.step", "buckets.max_aspect"),
    *("latents.variants", "latents.crop_seed", "latents.random_flip"),
    "validation.fraction",
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
    for kind, names in report["dropped"].items():
        events.warning(f"{len(names)} pictures dropped, {kind}: {', '.join(names)}")
    return published


def key_settings(config: Config) -> dict[str, Any]:
    """The settings that enter the key; the folder itself enters by what is in it."""
    return chosen(config, "family.name", "dataset.instance_prompt", *SETTINGS)


def problems(config: Config, store: Store) -> Iterator[Problem]:
    """What is wrong with the folder; if anything is, with its pictures too, in one report."""
    root = user_path(config.dataset.root)
    found = discover(root, instance_prompt=config.dataset.instance_prompt)
    if found.problems:
        yield from found.problems
        yield from _unusable(_inspect_all(found.candidates, Memory(store.root), Events()))


def _prepare(config: Config, inputs: Inputs, store: Store, events: Events) -> Manifest:
    root = user_path(config.dataset.root)
    found = discover(root, instance_prompt=config.dataset.instance_prompt)
    if found.problems:
        raise InputRefused(found.problems)
    inspected = _inspect_all(found.candidates, Memory(store.root), events)
    if refused := _unusable(inspected):
        raise SamplesFailed(refused)
    samples = [picture for picture in inspected if isinstance(picture, Sample)]
    split = split_by_content(samples, fraction=config.validation.fraction)
    report = asdict(Report(found.found, len(samples), dict(found.drops), found.captions_from))
    return _manifest(
        split,
        report={**report, "held_out": len(split.held_out)},
        config=config,
        divisor=inputs.family.FACTS.divisor,
    )


def _unusable(inspected: Sequence[Sample | Problem]) -> list[Problem]:
    return [picture for picture in inspected if isinstance(picture, Problem)]


def _inspect_all(
    candidates: Sequence[Candidate], memory: Memory, events: Events
) -> list[Sample | Problem]:
    """Every picture is read before any is refused; what is remembered is not read again."""
    results: list[Sample | Problem] = []
    learnt: list[Item | None] = []
    with ThreadPoolExecutor(THREADS) as threads:
        for result, item in threads.map(lambda c: _inspect(c, memory), candidates):
            results.append(result)
            learnt.append(item)
            events.progress(len(results), len(candidates), unit="pictures")
    memory.remember_all(item for item in learnt if item)
    return results


def _inspect(candidate: Candidate, memory: Memory) -> tuple[Sample | Problem, Item | None]:
    """The picture, and what there is to remember of it."""
    name, before = _memory_name(candidate), stat_of(candidate.path)
    known = memory.recall(name, candidate.path)
    if known is not None:
        return Sample(candidate.name, **known, caption=candidate.caption), None
    found = inspect(candidate)
    if isinstance(found, Problem):
        return found, None
    facts = {"image_key": found.image_key, "height": found.height, "width": found.width}
    return found, Item(name, before, facts)


def _memory_name(candidate: Candidate) -> str:
    """A picture's facts hold for one decode recipe."""
    return f"picture:{digest(RECIPE)}:{candidate.path.resolve()}"


def _manifest(split: Split, *, report: Mapping[str, Any], config: Config, divisor: int) -> Manifest:
    samples = [*split.train, *split.held_out]
    settings = {
        "resolution": config.buckets.resolution,
        "step": config.buckets.step,
        "max_aspect": config.buckets.max_aspect,
        "variants": config.latents.variants,
        "crop_seed": config.latents.crop_seed,
        "random_flip": config.latents.random_flip,
        "divisor": divisor,
    }
    plain = [asdict(sample) for sample in sorted(samples, key=lambda sample: sample.name)]
    texts = sorted({sample.caption for sample in samples})
    images = _images(samples, config=config, divisor=divisor)
    sizes = [{k: i[k] for k in ("image_key", "height", "width")} for i in images]
    keys = {
        "manifest": manifest_key(plain, split=split.rule).digest,
        "captions": captions_key(texts).digest,
        "images": images_key(sizes, settings=settings).digest,
    }
    key = make_key("prepared", **keys, report=report)
    payload = {
        "keys": keys,
        "samples": [asdict(sample) for sample in split.train],
        "held_out": [asdict(sample) for sample in split.held_out],
        "captions": sorted({sample.caption for sample in split.train}),
        "images": images,
        "buckets": _bucket_table(split.train, images),
        "report": report,
        "settings": chosen(config, *SETTINGS),
    }
    return Manifest(STAGE, key.digest, key.inputs, {}, payload)


def _images(samples: Sequence[Sample], *, config: Config, divisor: int) -> list[dict[str, Any]]:
    """Each different picture once: its size, bucket, and the geometry of each variant."""
    table = buckets.make_buckets(
        resolution=config.buckets.resolution,
        step=math.lcm(config.buckets.step, divisor),
        max_aspect=config.buckets.max_aspect,
    )
    images = {}
    for sample in samples:
        size = (sample.height, sample.width)
        bucket = buckets.assign(size, buckets=table)
        cuts = variants(
            size,
            bucket=bucket.size,
            count=config.latents.variants,
            crop_seed=config.latents.crop_seed,
            image_key=sample.image_key,
            random_flip=config.latents.random_flip,
        )
        images[sample.image_key] = {
            "image_key": sample.image_key,
            "height": sample.height,
            "width": sample.width,
            "bucket": list(bucket.size),
            "variants": [asdict(cut) for cut in cuts],
        }
    return [images[key] for key in sorted(images)]


def _bucket_table(samples: Sequence[Sample], images: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Pictures (repeats counted) per bucket, height x width."""
    bucket_of = {image["image_key"]: "x".join(map(str, image["bucket"])) for image in images}
    counts: Counter[str] = Counter()
    for sample in samples:
        counts[bucket_of[sample.image_key]] += sample.repeats
    return dict(sorted(counts.items()))
