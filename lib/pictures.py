"""Pictures people look at: the grid of samples, the contact sheet, the loss plot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32
from PIL import Image, ImageDraw, ImageFont

from lib.files import write_bytes

MARGIN, LINE, CAPTION_LINES = 8, 15, 3
FONT = ImageFont.load_default(11)
INK, PAPER, FAINT = (20, 20, 20), (255, 255, 255), (110, 110, 110)


@dataclass(frozen=True)
class Captioned:
    """A picture and the text below it."""

    image: Image.Image
    text: str


def to_image(pixels: Float32[np.ndarray, "3 height width"]) -> Image.Image:
    """Pixels in [-1, 1] as an 8-bit picture."""
    levels = np.clip(pixels.transpose(1, 2, 0) * 0.5 + 0.5, 0, 1)
    return Image.fromarray((levels * 255).round().astype(np.uint8))


def grid(
    rows: Sequence[Sequence[Image.Image]], *, columns: Sequence[str], captions: Sequence[str]
) -> Image.Image:
    """Pictures of one size in a table: column titles on top, a caption under each row."""
    width, height = rows[0][0].size
    down = height + LINE + 2 * MARGIN
    sheet = Image.new(
        "RGB", (MARGIN + (width + MARGIN) * len(columns), LINE + MARGIN + down * len(rows)), PAPER
    )
    draw = ImageDraw.Draw(sheet)
    for column, title in enumerate(columns):
        _write(draw, (MARGIN + (width + MARGIN) * column, 2), title, width=width, ink=FAINT)
    for row, (images, caption) in enumerate(zip(rows, captions, strict=True)):
        top = LINE + MARGIN + down * row
        for column, image in enumerate(images):
            sheet.paste(image, (MARGIN + (width + MARGIN) * column, top))
        _write(draw, (MARGIN, top + height + 2), caption, width=sheet.width - 2 * MARGIN)
    return sheet


def contact_sheet(
    buckets: Mapping[str, Sequence[Captioned]], *, height: int = 112, width: int = 1200
) -> Image.Image:
    """Pictures under the title of their bucket, each with its caption."""
    sheet = Image.new("RGB", (width, _sheet_height(buckets, height=height, width=width)), PAPER)
    draw, top = ImageDraw.Draw(sheet), MARGIN
    for name, pictures in buckets.items():
        _write(draw, (MARGIN, top), name, width=width, ink=FAINT)
        top += LINE
        for line in _lines(pictures, height=height, width=width):
            left = MARGIN
            for picture in line:
                thumb = _thumb(picture.image, height)
                sheet.paste(thumb, (left, top))
                text = wrapped(picture.text, lambda t: draw.textlength(t, font=FONT), thumb.width)
                for number, words in enumerate(text):
                    place = (left, top + height + LINE * number)
                    _write(draw, place, words, width=thumb.width)
                left += thumb.width + MARGIN
            top += height + LINE * CAPTION_LINES + MARGIN
    return sheet


def loss_plot(curves: Mapping[str, Sequence[tuple[int, float]]], *, title: str) -> Any:
    """Loss over steps, one line a curve, faint points and their running mean; a figure."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss", title=title)
    for name, points in curves.items():
        steps, losses = [step for step, _ in points], [loss for _, loss in points]
        (line,) = axes.plot(steps, running_mean(losses), label=name)
        axes.plot(steps, losses, ".", markersize=4, alpha=0.3, color=line.get_color())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(curves) > 1:
        figure.legend(loc="outside lower center", fontsize="small")
    return figure


def running_mean(values: Sequence[float], *, window: int = 20) -> list[float]:
    """The mean of each value and up to `window` - 1 before it."""
    sums = np.cumsum([0.0, *values])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return ((sums[ends] - sums[starts]) / (ends - starts)).tolist()


def save(picture: Any, path: Path) -> None:
    """Write a picture or a figure as PNG, atomically."""
    import io

    data = io.BytesIO()
    if isinstance(picture, Image.Image):
        picture.save(data, format="PNG")
    else:
        picture.savefig(data, format="png", dpi=110)
    write_bytes(path, data.getvalue())


def _thumb(image: Image.Image, height: int) -> Image.Image:
    width = max(1, round(image.width * height / image.height))
    return image.resize((width, height), Image.Resampling.LANCZOS)


def _lines(pictures: Sequence[Captioned], *, height: int, width: int) -> list[list[Captioned]]:
    """Pictures of one bucket, as many to a line as fit."""
    across = _thumb(pictures[0].image, height).width + MARGIN
    count = max(1, (width - MARGIN) // across)
    return [list(pictures[start : start + count]) for start in range(0, len(pictures), count)]


def _sheet_height(buckets: Mapping[str, Sequence[Captioned]], *, height: int, width: int) -> int:
    lines = sum(len(_lines(p, height=height, width=width)) for p in buckets.values())
    return MARGIN + LINE * len(buckets) + (height + LINE * CAPTION_LINES + MARGIN) * lines


def _write(
    draw: ImageDraw.ImageDraw,
    place: tuple[int, int],
    text: str,
    *,
    width: int,
    ink: tuple[int, int, int] = INK,
) -> None:
    """One line of text, cut with dots where it is too long."""
    plain = " ".join(text.split())
    if draw.textlength(plain, font=FONT) > width:
        while plain and draw.textlength(f"{plain}...", font=FONT) > width:
            plain = plain[:-1]
        plain = f"{plain}..."
    draw.text(place, plain, fill=ink, font=FONT)


def wrapped(text: str, length: Callable[[str], float], width: float) -> list[str]:
    """Words broken into at most CAPTION_LINES lines; what is left over stands in the last."""
    lines: list[str] = []
    for word in text.split():
        joined = f"{lines[-1]} {word}" if lines else word
        if lines and (len(lines) == CAPTION_LINES or length(joined) <= width):
            lines[-1] = joined
        else:
            lines.append(word)
    return lines
