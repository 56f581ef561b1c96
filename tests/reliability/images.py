"""Pictures of every kind, damaged at random, decoded by a process with little memory and time."""

import io
import json
import random
import resource
import signal
import subprocess
import sys
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageCms
from PIL.PngImagePlugin import PngInfo

from lib.images import ImageError, decode

CHECKOUT = Path(__file__).resolve().parents[2]
MEMORY_BYTES = 2 << 30
SECONDS = 10
ACCEPTED = "accepted"


@dataclass
class Outcome:
    """How many mutants ended how; `failures` says of each bad one its number and what happened."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def photo(width: int = 40, height: int = 24) -> Image.Image:
    down, across = np.mgrid[0:height, 0:width]
    levels = np.stack([down * 7, across * 5, down * across], axis=-1) % 256
    return Image.fromarray(levels.astype(np.uint8))


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def _turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def chunk(kind: bytes, data: bytes) -> bytes:
    """One chunk of a PNG with its checksum."""
    checksum = zlib.crc32(kind + data)
    return len(data).to_bytes(4, "big") + kind + data + checksum.to_bytes(4, "big")


def png_of(width: int, height: int, *chunks: bytes, depth: int = 8, colour: int = 0) -> bytes:
    """A PNG of chunks, whatever they hold."""
    sides = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    header = chunk(b"IHDR", sides + bytes((depth, colour, 0, 0, 0)))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IEND", b"")


@cache
def corpus() -> tuple[bytes, ...]:
    """Some sixty files: what is taken, what is refused, what lies between."""
    plain, grey16 = photo(), Image.fromarray(np.arange(960, dtype=np.uint16).reshape(24, 40) * 68)
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    frames = {"save_all": True, "append_images": [photo().rotate(90), photo().rotate(180)]}
    text = PngInfo()
    text.add_text("a", "b" * 5000, zip=True)
    text.add_itxt("c", "d" * 5000, zip=True)
    modes = {mode: plain.convert(mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")}
    clear = plain.convert("RGBA")
    clear.putalpha(plain.convert("L"))
    found = [saved(image, "PNG") for image in modes.values()]
    found += [saved(plain, "JPEG", exif=_turned(number)) for number in range(1, 9)]
    found += [saved(plain, "PNG", exif=_turned(number)) for number in (3, 6)]
    found += [saved(plain, "WEBP", exif=_turned(number)) for number in (3, 6)]
    found += [saved(plain, kind, icc_profile=profile) for kind in ("PNG", "JPEG", "WEBP")]
    found += [saved(plain, kind, icc_profile=lab) for kind in ("PNG", "JPEG", "WEBP")]
    found += [saved(plain, kind, icc_profile=b"0123456789") for kind in ("PNG", "JPEG", "WEBP")]
    found += [saved(plain, kind, **frames) for kind in ("PNG", "WEBP", "GIF", "MPO")]
    found += [saved(plain, "JPEG", **o) for o in ({"progressive": True}, {"subsampling": 0})]
    found += [saved(plain.convert(mode), "JPEG") for mode in ("L", "CMYK")]
    found += [saved(clear, "WEBP", lossless=lossless) for lossless in (True, False)]
    found += [saved(clear, "PNG"), saved(grey16, "PNG"), saved(grey16, "PNG", transparency=68)]
    found += [saved(modes["P"], "PNG", transparency=3), saved(modes["L"], "PNG", transparency=5)]
    found += [saved(plain, "PNG", pnginfo=text), saved(Image.new("1", (20_000, 8)), "PNG")]
    found += [saved(Image.new("RGB", size), "PNG") for size in ((1, 1), (1, 20_000), (8, 512))]
    found += [saved(plain, kind) for kind in ("BMP", "TIFF", "GIF", "AVIF", "ICO", "PPM")]
    found += [saved(photo(96, 96), kind)[:150] for kind in ("PNG", "JPEG", "WEBP")]
    found += [png_of(40_000, 40_000, chunk(b"IDAT", zlib.compress(bytes(99)))), b"", b"\x80\x04]."]
    found += [bytes(200), saved(photo(96, 96), "JPEG", quality=95), saved(photo(96, 96), "WEBP")]
    found += [saved(photo(64, 8), "WEBP", lossless=True), saved(plain, "PNG", compress_level=0)]
    return tuple(found)


def _with_checksums(data: bytes) -> bytes:
    """A damaged PNG whose chunks all have the right checksum, so that damage gets further."""
    out, place = [data[:8]], 8
    while place + 12 <= len(data):
        length = int.from_bytes(data[place : place + 4], "big")
        body = data[place + 4 : place + 8 + length]
        if len(body) < 4 + length:
            break
        out.append(chunk(body[:4], body[4:]))
        place += 12 + length
    return b"".join(out) + data[place:]


def mutant(number: int) -> bytes:
    """One of the files with a few changes; the same for the same number."""
    rng = random.Random(number)
    data = bytearray(rng.choice(corpus()))
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        place = rng.randrange(len(data) + 1)
        end = min(len(data), place + rng.choice((1, 2, 4, 32)))
        match rng.randrange(7):
            case 0 if place < len(data):
                data[place] ^= 1 << rng.randrange(8)
            case 1:
                data[place:end] = rng.randbytes(end - place)
            case 2:
                del data[place:end]
            case 3:
                data[place:place] = data[place : place + rng.randrange(64)]
            case 4:
                data[place:end] = rng.choice((b"\0", b"\xff", b"\x7f")) * (end - place)
            case 5:
                other = rng.choice(corpus())
                data[place:] = other[min(place, len(other)) :]
            case _:
                data = data[: max(place, len(data) // 2)]
    whole = bytes(data)
    is_png = whole.startswith(b"\x89PNG\r\n\x1a\n")
    return _with_checksums(whole) if is_png and rng.random() < 0.7 else whole


def ends(data: bytes) -> str:
    """How the decoding of a file ends: accepted, or the kind of the refusal, which has a reason."""
    try:
        image = decode(data)
    except ImageError as error:
        return error.kind if str(error).strip() else "a refusal without a reason"
    assert image.mode in ("RGB", "RGBA"), image.mode
    return ACCEPTED


def fuzz(start: int, stop: int) -> Outcome:
    """Mutants `start` to `stop`, each in a limited process; one that dies costs its mutant alone."""
    outcome = Outcome()
    while start < stop:
        command = [sys.executable, "-m", "tests.reliability.images", str(start), str(stop)]
        child = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
        for line in child.stdout.splitlines():
            number, ended = json.loads(line)
            outcome.counts[ended] += 1
            start = number + 1
        if start < stop:
            said = child.stderr.strip()[-200:]
            outcome.counts["death"] += 1
            outcome.failures.append(f"mutant {start}: process ended with {child.returncode} {said}")
            start += 1
    return outcome


def _results(start: int, stop: int) -> Iterator[tuple[int, str]]:
    """How each mutant ends; anything but a picture or a refusal ends the process."""
    for number in range(start, stop):
        data = mutant(number)
        signal.alarm(SECONDS)  # its default is death, which no decoder can put off
        yield number, ends(data)


def main() -> None:
    """Decode a range of mutants under the limits, a line of JSON for each."""
    start, stop = map(int, sys.argv[1:])
    corpus()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    warnings.simplefilter("ignore")
    for result in _results(start, stop):
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
