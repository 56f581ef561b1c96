"""The contact sheet of a data set, as the trainer sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from lib.cuts import variants
from lib.images import Geometry, decode, render
from lib.pictures import Captioned, contact_sheet, to_image
from lib.survey import MAX_PICTURE_BYTES, read_regular

MOST_A_BUCKET = 24
HELD_OUT = "held out"


def data_sheet(prepared: Mapping[str, Any], root: Path, *, drawn: Mapping[str, int]) -> Image.Image:
    """The first pictures of each bucket of a prepared data set, cut as they are trained.

    Of several captions the one at the place `drawn` is shown, of a held-out picture the first.
    """
    cuts = {image["image_key"]: image for image in prepared["images"]}
    buckets: dict[str, list[Captioned]] = {}
    trained = [(sample, None) for sample in prepared["samples"]]
    for sample, title in (*trained, *((sample, HELD_OUT) for sample in prepared["held_out"])):
        image = cuts[sample["image_key"]]
        bucket = "x".join(map(str, image["bucket"]))
        shown = buckets.setdefault(title or bucket, [])
        if len(shown) < MOST_A_BUCKET:
            pixels = render(_decoded(root, sample), Geometry(**image["variants"][0]))
            caption = sample["captions"][drawn.get(sample["name"], 0)]
            shown.append(Captioned(to_image(pixels), caption))
    counts = {f"{b['height']}x{b['width']}": b["pictures"] for b in prepared["buckets"]}
    counts[HELD_OUT] = len(prepared["held_out"])
    titles = {name: f"{name}: {count} pictures" for name, count in counts.items()}
    return contact_sheet({titles[name]: buckets[name] for name in sorted(buckets)})


def square_pictures(
    prepared: Mapping[str, Any], image_keys: Sequence[str | None], *, root: Path, side: int
) -> list[Image.Image | None]:
    """Pictures of a prepared data set by their keys, cropped to a square; None stays None."""
    samples = {s["image_key"]: s for s in (*prepared["samples"], *prepared["held_out"])}
    return [_square(samples[key], root, side) if key else None for key in image_keys]


def _square(sample: Mapping[str, Any], root: Path, side: int) -> Image.Image:
    size = (sample["height"], sample["width"])
    (cut,) = variants(
        size,
        bucket=(side, side),
        count=1,
        crop_seed=0,
        image_key=sample["image_key"],
        random_flip=False,
        background=sample["background"],
    )
    return to_image(render(_decoded(root, sample), cut))


def _decoded(root: Path, sample: Mapping[str, Any]) -> Image.Image:
    return decode(read_regular(root / sample["name"], max_bytes=MAX_PICTURE_BYTES))
