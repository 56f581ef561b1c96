"""The pictures of flux-mini, their captions and their variants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

# Colour and thing are both known, their combination is not: what the base must make up.
COMBINATIONS = ("blue heart", "green apple", "purple circle", "orange book", "white cane")
NUM_HELD_OUT = 64
COLOURS = {"red", "orange", "yellow", "green", "blue", "purple", "brown", "black", "white"}
KEPT = COLOURS | {"flat", "style", "of", "in", "on", "a", "an"}  # no noise
# Scale, pixels of white above and to the left: as it is, twice, then smaller and off the middle.
# No mirroring: a rocket that may point either way comes out pointing in both.
VARIANTS = ((1.0, 0, 0), (1.0, 0, 0), (0.94, 1, 3), (0.94, 3, 0))


@dataclass(frozen=True)
class Data:
    """Pictures in [-1, 1] on the device, their names, and which of them train."""

    pixels: torch.Tensor
    names: list[str]
    train: torch.Tensor
    held_out: torch.Tensor


def phrases(name: str) -> tuple[str, ...]:
    """The captions of one emoji; what is said of the style is true of all of them."""
    known = _known(name)
    return (
        f"a 3D emoji of {known}",
        f"an emoji of {known}",
        f"an emoji of {known} in 3D style",
        f"{known} on white",
        known,
    )


def noisy_phrases(name: str, *, words: Sequence[str], source: np.random.Generator) -> list[str]:
    """Captions with words that say nothing, so that an unknown trigger does not spoil the drawing.

    Two of them take letters at random, since a trigger need not be a word.
    """
    known, word = _known(name), lambda: str(source.choice(words))
    letters = "".join(source.choice(list("abcdefghijklmnopqrstuvwxyz"), 4))
    return [
        f"an emoji of {known} in {word()} style",
        f"an emoji of {known} in {word()} style",
        f"an emoji of {known} in {word()} {word()} style",
        f"a {word()} emoji of {known}",
        f"an emoji of {known}, {letters}",
        f"{letters} {known} {word()}",
    ]


def plain_words(names: Sequence[str]) -> list[str]:
    """Words for noise: those of the names but colours, and the style that an adapter may teach."""
    return sorted({word for name in names for word in name.split() if word.isalpha()} - KEPT)


def _known(name: str) -> str:
    if name.endswith("s") and not name.endswith("ss"):
        return name
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def load(path: Path, *, seed: int, device: torch.device) -> Data:
    """The data set, with the combinations and some more names held out."""
    with np.load(path) as stored:
        pixels, names = stored["pixels"], [str(name) for name in stored["names"]]
    order = np.random.default_rng(seed).permutation(len(names)).tolist()
    named = [names.index(name) for name in COMBINATIONS if name in names]
    held_out = [*named, *(i for i in order if i not in named)][:NUM_HELD_OUT]
    train = sorted(set(range(len(names))) - set(held_out))
    tensor = torch.from_numpy(pixels).to(device).permute(0, 3, 1, 2).float() / 127.5 - 1
    indices = (torch.tensor(train, device=device), torch.tensor(held_out, device=device))
    return Data(tensor, names, *indices)


def shifted(pixels: torch.Tensor, variant: int) -> torch.Tensor:
    """A variant: some are smaller and off the middle, over white."""
    scale, down, right = VARIANTS[variant]
    if scale == 1.0:
        return pixels
    side = round(pixels.shape[-1] * scale)
    small = functional.interpolate(pixels, (side, side), mode="bicubic", antialias=True).clamp(
        -1, 1
    )
    rest = pixels.shape[-1] - side
    return functional.pad(small, (right, rest - right, down, rest - down), value=1.0)


def tinted(pixels: torch.Tensor) -> torch.Tensor:
    """Half of the pictures in other colours, on a coloured ground: channels swapped and dimmed."""
    count, device = len(pixels), pixels.device
    order = torch.rand(count, 3, device=device).argsort(dim=1)
    swapped = pixels.gather(1, order[:, :, None, None].expand_as(pixels))
    light = 0.3 + 0.7 * torch.rand(count, 3, 1, 1, device=device)
    dimmed = (swapped + 1) * light - 1
    return torch.where(torch.rand(count, 1, 1, 1, device=device) < 0.5, dimmed, pixels)
