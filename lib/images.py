"""Decode, orientation, colour, resize, crop: file bytes -> pixels in [-1, 1]."""

import io
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import PIL
from jaxtyping import Float32
from PIL import Image, ImageCms, ImageOps

from lib.random import generator

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_PIXELS = 1 << 26
MIN_SIDE = 8
MAX_ASPECT = 64
BACKGROUND = (255, 255, 255)
resize_filter = "lanczos"

RECIPE: dict[str, object] = {
    "version": 1,
    "library": "Pillow",
    "library_version": PIL.__version__,
    "orientation": "exif-transpose",
    "colour": "icc-to-srgb/perceptual",
    "background": BACKGROUND,
    "depth": "grey-16: round(value/257); colour-16: high byte",
    "frames": "animation refused; first picture of a multi-picture jpeg",
}

# What Pillow's parsers raise on damaged files; anything else is a fault of ours and must be seen.
_DAMAGE = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    OverflowError,
    EOFError,
    struct.error,
    zlib.error,
)
_TOO_LARGE = (Image.DecompressionBombError, Image.DecompressionBombWarning)
_GREY = ("1", "L", "LA")

Size = tuple[int, int]


class ImageError(ValueError):
    """A picture that cannot be used; the message is the reason, in the user's words."""


@dataclass(frozen=True)
class Geometry:
    """How a picture becomes a bucket's pixels: resize, then crop, then flip left to right."""

    resized_height: int
    resized_width: int
    top: int
    left: int
    height: int
    width: int
    flip: bool


def _too_large() -> ImageError:
    return ImageError(f"has more than {MAX_PIXELS} pixels; save it smaller")


def _open(data: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except _TOO_LARGE as error:
        raise _too_large() from error
    except _DAMAGE as error:
        allowed = ", ".join(FORMATS)
        raise ImageError(f"is empty, damaged or none of {allowed}") from error


def _check_header(image: Image.Image) -> None:
    """Refuse before a pixel is decoded what would cost too much memory or mean nothing."""
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise _too_large()
    if min(width, height) < MIN_SIDE:
        raise ImageError(f"is {height}x{width} (height x width); a side needs {MIN_SIDE} pixels")
    if max(width, height) > MAX_ASPECT * min(width, height):
        why = f"is {height}x{width} (height x width); one side is over {MAX_ASPECT} times the other"
        raise ImageError(why)
    if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
        raise ImageError("is animated; save the frame you want as a still picture")


def _upright(data: bytes) -> Image.Image:
    """Fully decoded and turned as EXIF says; checksums are checked where the format has them."""
    _check_header(_open(data))
    try:
        _open(data).verify()
        image = _open(data)
        image.load()
        return ImageOps.exif_transpose(image)
    except _DAMAGE as error:
        raise ImageError(f"is damaged or cut off ({error})") from error


def _grey_16_to_8(image: Image.Image) -> Image.Image:
    """65535 / 257 = 255, so both ends of the range are kept; a transparent grey becomes white."""
    values = np.asarray(image).astype(np.int64)
    levels = (np.clip(values, 0, 65535) + 128) // 257
    transparent = image.info.get("transparency")
    if transparent is not None:
        levels = np.where(values == transparent, 255, levels)
    grey = Image.fromarray(levels.astype(np.uint8))
    grey.info["icc_profile"] = image.info.get("icc_profile")
    return grey


def _colour_and_alpha(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Grey, RGB or CMYK without its alpha, and the alpha."""
    if not image.has_transparency_data:
        keep = image.mode in ("L", "CMYK")
        return (image if keep else image.convert("L" if image.mode == "1" else "RGB")), None
    rgba = image.convert("RGBA")
    return rgba.convert("L" if image.mode in _GREY else "RGB"), rgba.getchannel("A")


def _from_profile(colour: Image.Image, *, profile_bytes: bytes) -> Image.Image:
    """Colours of an embedded ICC profile as sRGB."""
    try:
        profile = ImageCms.core.profile_frombytes(profile_bytes)
        if profile.xcolor_space.strip() == "RGB" and colour.mode == "L":
            colour = colour.convert("RGB")
        source = ImageCms.ImageCmsProfile(profile)
        srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))
        return ImageCms.ImageCmsTransform(source, srgb, colour.mode, "RGB").apply(colour)
    except (ImageCms.PyCMSError, *_DAMAGE) as error:
        why = f"has a colour profile that cannot be used ({error}); save it as sRGB"
        raise ImageError(why) from error


def decode(data: bytes) -> Image.Image:
    """A file's bytes as an upright 8-bit sRGB picture on white; ImageError says why not."""
    image = _upright(data)
    if image.mode == "I" or image.mode.startswith("I;16"):
        image = _grey_16_to_8(image)
    colour, alpha = _colour_and_alpha(image)
    profile_bytes = image.info.get("icc_profile")
    if profile_bytes:
        colour = _from_profile(colour, profile_bytes=profile_bytes)
    colour = colour.convert("RGB")
    if alpha is None:
        return colour
    return Image.composite(colour, Image.new("RGB", colour.size, BACKGROUND), alpha)


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
    size: Size, *, bucket: Size, count: int, crop_seed: int, image_key: str, random_flip: bool
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
    return tuple(dict.fromkeys(drawn))


def render(image: Image.Image, geometry: Geometry) -> Float32[np.ndarray, "3 height width"]:
    """Pixels in [-1, 1] of an RGB picture, in the operations of diffusers' VaeImageProcessor."""
    resized = (geometry.resized_width, geometry.resized_height)
    if image.size != resized:
        image = image.resize(resized, Image.Resampling.LANCZOS)
    box = (geometry.left, geometry.top)
    image = image.crop((*box, box[0] + geometry.width, box[1] + geometry.height))
    if geometry.flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    levels = np.asarray(image).astype(np.float32) / np.float32(255.0)
    return np.ascontiguousarray(np.float32(2.0) * levels.transpose(2, 0, 1) - np.float32(1.0))
