"""Data sets of noise, for benchmarks: the slowest pictures to decode, captions of many lengths."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from lib import tiny

FEWEST_WORDS, MOST_WORDS = 8, 90
# Of the tiny tokenizers' own words each is one token, as most are to a real one.
WORDS = sorted({word for text in tiny.CORPUS for word in text.lower().split() if word.isalpha()})


def draw_pictures(folder: Path, *, count: int, side: int) -> None:
    """Noise, every other one a JPEG; each with a caption of its own."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**32, count)

    def draw(number: int) -> None:
        pixels = np.random.default_rng(seeds[number]).integers(0, 256, (side, side, 3), np.uint8)
        jpeg = number % 2 == 1
        path = folder / f"{number:06}.{'jpg' if jpeg else 'png'}"
        options = {"quality": 92} if jpeg else {"compress_level": 1}
        Image.fromarray(pixels).save(path, **options)

    with ThreadPoolExecutor() as threads:
        list(threads.map(draw, range(count)))
    for number in range(count):
        words = rng.choice(WORDS, rng.integers(FEWEST_WORDS, MOST_WORDS))
        caption = f"{' '.join(words)}, picture {number}"
        (folder / f"{number:06}.txt").write_text(caption, encoding="utf-8")
