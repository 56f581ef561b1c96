"""Where pictures are cut: resize, crop and flip of each variant, drawn from the picture's key."""

from collections.abc import Iterator
from dataclasses import replace

from lib.images import Geometry, Size
from lib.random import generator


def _cover(length: int, *, target: int, numerator: int, denominator: int) -> int:
    """A scaled length, rounded half up and never below the bucket's side."""
    return max(target, (2 * length * numerator + denominator) // (2 * denominator))


def _offset(slack: int, fraction: float | None) -> int:
    """A unit fraction on the inclusive range 0..slack; None is the centre."""
    return slack // 2 if fraction is None else min(int(fraction * (slack + 1)), slack)


def geometry(
    size: Size,
    *,
    bucket: Size,
    crop: tuple[float, float] | None = None,
    flip: bool = False,
) -> Geometry:
    """Cover the bucket, then crop; sizes are (height, width), `crop` unit fractions (top, left)."""
    (height, width), (rows, columns) = size, bucket
    tall = rows * width >= columns * height
    numerator, denominator = (rows, height) if tall else (columns, width)
    resized_height = _cover(height, target=rows, numerator=numerator, denominator=denominator)
    resized_width = _cover(width, target=columns, numerator=numerator, denominator=denominator)
    down, across = (None, None) if crop is None else crop
    return Geometry(
        resized_height=resized_height,
        resized_width=resized_width,
        top=_offset(resized_height - rows, down),
        left=_offset(resized_width - columns, across),
        height=rows,
        width=columns,
        flip=flip,
    )


def _drawn(
    size: Size, *, bucket: Size, count: int, crop_seed: int, image_key: str, random_flip: bool
) -> Iterator[Geometry]:
    yield geometry(size, bucket=bucket)
    for variant in range(1, count):
        draw = generator(seed=crop_seed, stream="geometry", counter=variant, sample_id=image_key)
        down, across, coin = draw.random(3).tolist()
        yield geometry(size, bucket=bucket, crop=(down, across), flip=random_flip and coin < 0.5)


def variants(
    size: Size,
    *,
    bucket: Size,
    count: int,
    crop_seed: int,
    image_key: str,
    random_flip: bool,
    background: str | None = None,
) -> tuple[Geometry, ...]:
    """Up to `count` different geometries of a picture; the first is its plain centre crop."""
    drawn = _drawn(
        size,
        bucket=bucket,
        count=count,
        crop_seed=crop_seed,
        image_key=image_key,
        random_flip=random_flip,
    )
    return tuple(replace(cut, background=background) for cut in dict.fromkeys(drawn))
