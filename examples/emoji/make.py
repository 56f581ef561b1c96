"""Make this folder's pictures and captions from two packages.

Fetch them by name, `npm pack @lobehub/fluent-emoji-3d@1.1.0` (unpack the archive) and
`pip install emoji==2.16.0`, then run `python examples/emoji/make.py <unpacked folder>/package`.
"""

import argparse
import json
from pathlib import Path

import emoji
from PIL import Image

SIDE = 192
HERE = Path(__file__).parent

SINGLES = """
    1f98a 1f34e 1f989 1f419 1f34c 1f355 1f354 1fad6 1f3b8 1f680 1f388 1f335 1f33b 1f344 1f427
    1f422 1f41d 1f98b 1f418 1f353 1f951 1f34d 1f369 1f9c1 1f511 2693 1f6b2 1f4f7 1f40c 1f980
"""
WIDE = """
    1f98a+1f34e 1f427+1f388 1f34b+1f955 1f422+1f344 1f40b+1f511 1f419+1f34c 1f989+1f451
    1f418+1f353 1f392+1f33b
"""
TALL = """
    1f980+1f34b+1f511 1f33b+1f41d+1f34d 1f388+1f98a+1f941 1f451+1f427+1f369 1f98b+1f335+1f40c
    1f680+1f951+2693 1f989+1f4f7 1f9c1+1fad6 1f354+1f3bb
"""


def noun(code: str) -> str:
    """An emoji's English name in words."""
    return emoji.EMOJI_DATA[chr(int(code, 16))]["en"].strip(":").replace("_", " ").lower()


def phrase(code: str) -> str:
    """What one emoji adds to a caption."""
    name = noun(code)
    return f"a 3D emoji of {'an' if name[0] in 'aeiou' else 'a'} {name}"


def cell(code: str, *, package: Path) -> Image.Image:
    """One emoji on white, SIDE x SIDE."""
    with Image.open(package / "assets" / f"{code}.webp") as image:
        rgba = image.convert("RGBA")
    white = Image.new("RGBA", rgba.size, "white")
    flat = Image.alpha_composite(white, rgba).convert("RGB")
    return flat.resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def picture(codes: list[str], *, package: Path, step: tuple[int, int]) -> Image.Image:
    """Emoji in a row, `step` = (1, 0), or in a column, (0, 1)."""
    steps = len(codes) - 1
    size = (SIDE * (1 + steps * step[0]), SIDE * (1 + steps * step[1]))
    canvas = Image.new("RGB", size)
    for place, code in enumerate(codes):
        canvas.paste(cell(code, package=package), (SIDE * place * step[0], SIDE * place * step[1]))
    return canvas


def main() -> None:
    """Write every picture, half of the captions as sidecars, the others as rows of metadata."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("package", type=Path, help="unpacked folder that holds assets/")
    package = parser.parse_args().package
    layouts = [(SINGLES, "", (0, 0)), (WIDE, " beside ", (1, 0)), (TALL, " above ", (0, 1))]
    todo = [(group, word, step) for text, word, step in layouts for group in text.split()]
    rows = []
    for number, (group, word, step) in enumerate(todo):
        codes = group.split("+")
        name = "-".join(noun(code).replace(" ", "_") for code in codes)
        path = HERE / f"{name}.png"
        picture(codes, package=package, step=step).save(path, optimize=True)
        caption = word.join(map(phrase, codes))
        if number % 2:
            rows.append(json.dumps({"file_name": path.name, "text": caption}))
        else:
            path.with_suffix(".txt").write_text(caption + "\n", encoding="utf-8")
    text = "\n".join(sorted(rows)) + "\n"
    (HERE / "metadata.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
