"""Framing: the bucket that each picture goes to, how it is cut, and what that does to it."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lib.buckets import (
    Bucket,
    assign,
    assign_without_enlarging,
    enlargement,
    make_buckets,
)
from lib.cuts import variants
from lib.manifest import Sample
from lib.schema import BucketsConfig, LatentsConfig

BELOW_STEP = "a side is below one step of the buckets"
ENLARGED = "pictures that are enlarged to fill their bucket (buckets.policy=no_upscale avoids it)"


@dataclass(frozen=True)
class Framed:
    """Samples with their buckets by image key, and the names of those too small for any."""

    samples: tuple[Sample, ...]
    buckets: Mapping[str, Bucket]
    too_small: tuple[str, ...]


def frame(samples: Sequence[Sample], *, config: BucketsConfig, divisor: int) -> Framed:
    """The bucket of every picture; sides are multiples of the step and of the family's divisor."""
    step = math.lcm(config.step, divisor)
    table = make_buckets(resolution=config.resolution, step=step, max_aspect=config.max_aspect)
    found: dict[str, Bucket] = {}
    for sample in samples:
        size = (sample.height, sample.width)
        if config.policy == "area":
            bucket = assign(size, buckets=table)
        else:
            bucket = assign_without_enlarging(
                size, buckets=table, step=step, max_aspect=config.max_aspect
            )
        if bucket:
            found[sample.image_key] = bucket
    return Framed(
        samples=tuple(sample for sample in samples if sample.image_key in found),
        buckets=found,
        too_small=tuple(sample.name for sample in samples if sample.image_key not in found),
    )


def enlarged(framed: Framed) -> tuple[str, ...]:
    """The pictures that are enlarged to cover their bucket, by how much, the most first."""
    factors = {
        sample.name: enlargement(
            (sample.height, sample.width), bucket=framed.buckets[sample.image_key]
        )
        for sample in framed.samples
    }
    names = sorted((name for name in factors if factors[name] > 1), key=lambda n: (-factors[n], n))
    return tuple(f"{name} x{float(factors[name]):.2f}" for name in names)


def cut(framed: Framed, *, latents: LatentsConfig) -> list[dict[str, Any]]:
    """Each different picture once, as the manifest lists it: size, bucket, and its variants."""
    images = {}
    for sample in framed.samples:
        bucket = framed.buckets[sample.image_key]
        cuts = variants(
            (sample.height, sample.width),
            bucket=bucket.size,
            count=latents.variants,
            crop_seed=latents.crop_seed,
            image_key=sample.image_key,
            random_flip=latents.random_flip,
            background=sample.background,
        )
        images[sample.image_key] = {
            "image_key": sample.image_key,
            "height": sample.height,
            "width": sample.width,
            "background": sample.background,
            "bucket": list(bucket.size),
            "variants": [asdict(one) for one in cuts],
        }
    return [images[key] for key in sorted(images)]


def bucket_table(samples: Sequence[Sample], framed: Framed) -> list[dict[str, Any]]:
    """Buckets in order: height, width, pictures, and draws an epoch (repeats counted)."""
    pictures, draws = Counter[Bucket](), Counter[Bucket]()
    for sample in samples:
        bucket = framed.buckets[sample.image_key]
        pictures[bucket] += 1
        draws[bucket] += sample.repeats
    return [
        {"height": b.height, "width": b.width, "pictures": pictures[b], "draws": draws[b]}
        for b in sorted(pictures)
    ]
