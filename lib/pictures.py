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
Curve = Sequence[tuple[int, float]]  # step, loss

SMALLEST = 96  # pixels: a lower picture of a grid is enlarged
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
    rows: Sequence[Sequence[Image.Image | None]],
    *,
    columns: Sequence[str],
    captions: Sequence[str],
) -> Image.Image:
    """Pictures of one height in a table: column titles on top, a caption under each row.

    Small pictures are enlarged by whole numbers; None leaves a cell empty.
    """
    rows = [[_enlarged(image) for image in row] for row in rows]
    height = max(image.height for row in rows for image in row if image)
    widths = [
        max(image.width if image else 0 for image in column) for column in zip(*rows, strict=True)
    ]
    lefts = [MARGIN + sum(widths[:place]) + MARGIN * place for place in range(len(widths))]
    down = height + LINE + 2 * MARGIN
    sheet = Image.new(
        "RGB", (lefts[-1] + widths[-1] + MARGIN, LINE + MARGIN + down * len(rows)), PAPER
    )
    draw = ImageDraw.Draw(sheet)
    for left, width, title in zip(lefts, widths, columns, strict=True):
        _write(draw, (left, 2), title, width=width, ink=FAINT)
    for row, (images, caption) in enumerate(zip(rows, captions, strict=True)):
        top = LINE + MARGIN + down * row
        for left, image in zip(lefts, images, strict=True):
            if image:
                sheet.paste(image, (left, top))
        _write(draw, (MARGIN, top + height + 2), caption, width=sheet.width - 2 * MARGIN)
    return sheet


def _enlarged(image: Image.Image | None) -> Image.Image | None:
    """At least SMALLEST high, each pixel a square of pixels."""
    if image is None or image.height >= SMALLEST:
        return image
    factor = -(-SMALLEST // image.height)
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


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


def loss_plot(
    curves: Mapping[str, Curve], *, title: str, looks: Mapping[str, Curve] | None = None
) -> Any:
    """Loss over steps, a figure: of each curve the running mean over faint points, of each of
    `looks` (a few values without noise) the points joined.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss", title=title)
    for name, points in curves.items():
        steps, losses = [step for step, _ in points], [loss for _, loss in points]
        (line,) = axes.plot(steps, running_mean(losses), label=name)
        axes.plot(steps, losses, ".", markersize=4, alpha=0.3, color=line.get_color())
    for name, points in (looks or {}).items():
        axes.plot(*zip(*points, strict=True), "o--", markersize=4, label=name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(curves) + len(looks or {}) > 1:
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
