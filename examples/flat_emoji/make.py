"""Make this folder's pictures and captions from two packages.

Fetch them by name, `npm pack @lobehub/fluent-emoji-flat@1.1.0` (unpack the archive) and
`pip install emoji==2.16.0 cairosvg`, then run
`python examples/flat_emoji/make.py <unpacked folder>/package`.
"""

import argparse
import io
import json
from pathlib import Path

import cairosvg
import emoji
from PIL import Image

SIDE = 64
GROUND = (176, 216, 255)  # pale blue: part of the style, so that one sees at once who learned it
HERE = Path(__file__).parent
CODES = """
    1f98a 1f34e 1f989 1f419 1f34c 1f355 1f354 1f680 1f388 1f335 1f33b 1f344 1f427 1f422 1f41d 1f98b
    1f418 1f353 1f951 1f34d 1f369 1f9c1 1f511 2693 1f4f7 1f40c 1f980 1f349 1f34b 1f955 1f438 1f981
    1f337 1f436 1f43c 1f352 1f514 1f994 1f42f 1f345
"""


def caption(code: str) -> str:
    """An emoji's English name in words, and the style."""
    name = emoji.EMOJI_DATA[chr(int(code, 16))]["en"].strip(":").replace("_", " ").lower()
    article = "" if name == "cherries" else "an " if name[0] in "aeiou" else "a "
    return f"an emoji of {article}{name} in flat style"


def picture(path: Path) -> Image.Image:
    """One emoji on the ground, SIDE x SIDE, drawn at four times that size."""
    drawn = cairosvg.svg2png(url=str(path), output_width=4 * SIDE, output_height=4 * SIDE)
    with Image.open(io.BytesIO(drawn)) as image:
        rgba = image.convert("RGBA")
    ground = Image.new("RGBA", rgba.size, GROUND)
    flat = Image.alpha_composite(ground, rgba).convert("RGB")
    return flat.resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def main() -> None:
    """Write every picture, and the captions as rows of metadata."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("package", type=Path, help="unpacked folder that holds assets/")
    package = parser.parse_args().package
    rows = []
    for code in dict.fromkeys(CODES.split()):
        text = caption(code)
        name = text.removeprefix("an emoji of ").removesuffix(" in flat style")
        path = HERE / f"{name.split(' ', 1)[-1].replace(' ', '_')}.png"
        picture(package / "assets" / f"{code}.svg").save(path, optimize=True)
        rows.append(json.dumps({"file_name": path.name, "text": text}))
    text = "\n".join(sorted(rows)) + "\n"
    (HERE / "metadata.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
