"""The contact sheet of a data set, as the trainer sees it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from lib.images import Geometry, decode, render
from lib.pictures import Captioned, contact_sheet, to_image

MOST_A_BUCKET = 24


def data_sheet(prepared: Mapping[str, Any], root: Path) -> Image.Image:
    """The first pictures of each bucket of a prepared data set, cut as they are trained."""
    cuts = {image["image_key"]: image for image in prepared["images"]}
    buckets: dict[str, list[Captioned]] = {}
    for sample in prepared["samples"]:
        image = cuts[sample["image_key"]]
        shown = buckets.setdefault("x".join(map(str, image["bucket"])), [])
        if len(shown) < MOST_A_BUCKET:
            pixels = render(
                decode((root / sample["name"]).read_bytes()), Geometry(**image["variants"][0])
            )
            shown.append(Captioned(to_image(pixels), sample["caption"]))
    titles = {name: f"{name}: {count} pictures" for name, count in prepared["buckets"].items()}
    return contact_sheet({titles[name]: buckets[name] for name in sorted(buckets)})
