"""Decode, orientation, colour, resize, crop: file bytes -> pixels in [-1, 1]."""

import io
import math
import re
import struct
import zlib
from dataclasses import dataclass

import numpy as np
import PIL
from jaxtyping import Float32
from PIL import Image, ImageChops, ImageCms, ImageColor, ImageOps

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_PIXELS = 1 << 26
MAX_SCANS = 1000  # each scan of a progressive JPEG is a pass over all of it
MIN_SIDE = 8
MAX_ASPECT = 64
BACKGROUND = "#ffffff"
resize_filter = "lanczos"

RECIPE: dict[str, object] = {
    "version": 2,
    "library": "Pillow",
    "library_version": PIL.__version__,
    "orientation": "exif-transpose",
    "colour": "icc-to-srgb/perceptual; cmyk inverted as its adobe marker says",
    "alpha": "laid over the background of the geometry, before the resize",
    "depth": "grey-16: round(value/257); colour-16: high byte",
    "frames": "the first",
}

# Why a picture is refused, as a report counts it.
FORMAT, DAMAGED, PROFILE = "not a format that is read", "damaged", "unusable colour profile"
TOO_LARGE, TOO_SMALL, TOO_NARROW = "too many pixels", "too small", "too narrow"

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
_BOMB = (Image.DecompressionBombError, Image.DecompressionBombWarning)
_GREY = ("1", "L", "LA")
_SCAN = b"\xff\xda"

Size = tuple[int, int]


class ImageError(ValueError):
    """A picture that cannot be used: the reason in the user's words, and its kind."""

    def __init__(self, kind: str, why: str):
        super().__init__(why)
        self.kind = kind


@dataclass(frozen=True)
class Facts:
    """What is known of a picture once it was decoded; the size is upright."""

    height: int
    width: int
    transparent: bool
    animated: bool


@dataclass(frozen=True)
class Geometry:
    """How a picture becomes a bucket's pixels: resize, then crop, then flip left to right.

    Before that a transparent one is laid over its background; an opaque one has none.
    """

    resized_height: int
    resized_width: int
    top: int
    left: int
    height: int
    width: int
    flip: bool
    background: str | None = None


def _too_large() -> ImageError:
    return ImageError(TOO_LARGE, f"has more than {MAX_PIXELS} pixels; save it smaller")


def _webp_canvas(data: bytes) -> int:
    """Pixels of a WebP's canvas by its header, since opening one already makes room for them."""
    if data[:4] != b"RIFF" or data[8:16] != b"WEBPVP8X":
        return 0
    return math.prod(int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))


def _open(data: bytes) -> Image.Image:
    if _webp_canvas(data) > MAX_PIXELS:
        raise _too_large()
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except _BOMB as error:
        raise _too_large() from error
    except _DAMAGE as error:
        allowed = ", ".join(FORMATS)
        raise ImageError(FORMAT, f"is empty, damaged or none of {allowed}") from error


def _check_header(image: Image.Image, *, data: bytes) -> None:
    """Refuse before a pixel is decoded what would cost too much or mean nothing."""
    width, height = image.size
    shown = f"is {height}x{width} (height x width)"
    if width * height > MAX_PIXELS:
        raise _too_large()
    if min(width, height) < MIN_SIDE:
        raise ImageError(TOO_SMALL, f"{shown}; a side needs {MIN_SIDE} pixels")
    if max(width, height) > MAX_ASPECT * min(width, height):
        why = f"{shown}; one side is over {MAX_ASPECT} times the other"
        raise ImageError(TOO_NARROW, why)
    if image.format in ("JPEG", "MPO") and data.count(_SCAN) > MAX_SCANS:
        raise ImageError(DAMAGED, f"is a JPEG of over {MAX_SCANS} scans; save it again")


def _upright(data: bytes) -> tuple[Image.Image, bool]:
    """Fully decoded and turned as EXIF says, and whether it was the first frame of several.

    Checksums are checked where the format has them. A camera's JPEG with a preview is no animation.
    """
    image = _open(data)
    _check_header(image, data=data)
    try:
        animated = image.format != "MPO" and getattr(image, "n_frames", 1) > 1
        _open(data).verify()
        image = _open(data)
        image.load()
        return ImageOps.exif_transpose(image), animated
    except ImageError:
        raise
    except _DAMAGE as error:
        raise ImageError(DAMAGED, f"is damaged or cut off ({_said(error)})") from error


def _said(error: Exception) -> str:
    """A library's words on one line, without addresses of objects: the same in every run."""
    return re.sub(r" ?<[^>]* at 0x[0-9a-f]+>", "", " ".join(str(error).split()))


def _grey_16_to_8(image: Image.Image) -> Image.Image:
    """65535 / 257 = 255, so both ends of the range are kept; one level may be transparent."""
    values = np.asarray(image)
    if values.dtype != np.uint16:
        values = np.clip(values, 0, 65535).astype(np.uint16)
    levels = ((np.arange(1 << 16) + 128) // 257).astype(np.uint8)
    grey = Image.fromarray(levels[values])
    transparent = image.info.get("transparency")
    if transparent is not None:
        grey.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
    grey.info["icc_profile"] = image.info.get("icc_profile")
    return grey


def _colour_and_alpha(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Grey, RGB or CMYK without its alpha, and the alpha if it hides anything."""
    if image.mode == "CMYK" and "adobe" not in image.info:
        return ImageChops.invert(image), None  # Pillow reads every one as Adobe writes it
    if not image.has_transparency_data:
        keep = image.mode in ("L", "CMYK")
        return (image if keep else image.convert("L" if image.mode == "1" else "RGB")), None
    rgba = image.convert("RGBA")
    colour, alpha = rgba.convert("L" if image.mode in _GREY else "RGB"), rgba.getchannel("A")
    return colour, None if alpha.getextrema() == (255, 255) else alpha


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
        why = f"has a colour profile that cannot be used ({_said(error)}); save it as sRGB"
        raise ImageError(PROFILE, why) from error


def _decode(data: bytes) -> tuple[Image.Image, bool]:
    image, animated = _upright(data)
    if image.mode == "I" or image.mode.startswith("I;16"):
        image = _grey_16_to_8(image)
    colour, alpha = _colour_and_alpha(image)
    profile_bytes = image.info.get("icc_profile")
    if profile_bytes:
        colour = _from_profile(colour, profile_bytes=profile_bytes)
    colour = colour.convert("RGB")
    if alpha is not None:
        colour.putalpha(alpha)
    return colour, animated


def _read(data: bytes) -> tuple[Image.Image, bool]:
    try:
        return _decode(data)
    except MemoryError as error:
        why = "needs more memory than there is; save it smaller"
        raise ImageError(TOO_LARGE, why) from error


def decode(data: bytes) -> Image.Image:
    """A file's bytes as an upright 8-bit sRGB picture; RGBA if it is transparent somewhere.

    Of an animation the first frame; ImageError says why a file cannot be used.
    """
    return _read(data)[0]


def facts_of(data: bytes) -> Facts:
    """What decoding a file's bytes tells of it."""
    image, animated = _read(data)
    return Facts(image.height, image.width, image.mode == "RGBA", animated)


def flatten(image: Image.Image, background: str) -> Image.Image:
    """A picture without its alpha, laid over a colour such as #ffffff."""
    if image.mode != "RGBA":
        return image
    paper = Image.new("RGB", image.size, ImageColor.getrgb(background))
    return Image.composite(image.convert("RGB"), paper, image.getchannel("A"))


def render(image: Image.Image, geometry: Geometry) -> Float32[np.ndarray, "3 height width"]:
    """Pixels in [-1, 1] of a decoded picture, in the operations of diffusers' VaeImageProcessor."""
    image = flatten(image, geometry.background or BACKGROUND)
    resized = (geometry.resized_width, geometry.resized_height)
    if image.size != resized:
        image = image.resize(resized, Image.Resampling.LANCZOS)
    box = (geometry.left, geometry.top)
    image = image.crop((*box, box[0] + geometry.width, box[1] + geometry.height))
    if geometry.flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = np.asarray(image).transpose(2, 0, 1).astype(np.float32, order="C")
    # In place: several times faster than the same numbers by way of new arrays.
    pixels /= np.float32(255.0)
    pixels *= np.float32(2.0)
    pixels -= np.float32(1.0)
    return pixels
