"""Make the training set of flux-mini from two packages: 64-pixel emoji and their names.

Fetch them by name, `npm pack @lobehub/fluent-emoji-3d@1.1.0` (unpack the archive) and
`pip install emoji==2.16.0`, then, at the root of the checkout,
`python -m examples.flux_mini.pictures <unpacked folder>/package <output>.npz`.
"""

import argparse
from pathlib import Path

import emoji
import numpy as np
from PIL import Image

SIDE = 64
SKIN_TONES = {chr(code) for code in range(0x1F3FB, 0x1F400)}
FLAG_LETTERS = {chr(code) for code in range(0x1F1E6, 0x1F200)}
SELECTOR = "\ufe0f"


def name_of(code: str) -> str | None:
    """An emoji's English name; None for one without a name, or with a skin tone."""
    text = "".join(chr(int(part, 16)) for part in code.replace("_", "-").split("-"))
    if SKIN_TONES & set(text):
        return None
    entry = emoji.EMOJI_DATA.get(text) or emoji.EMOJI_DATA.get(text.replace(SELECTOR, ""))
    if entry is None:
        return None
    name = entry["en"].strip(":").replace("_", " ").replace("\u2019", "'")
    return f"flag of {name}" if set(text) <= FLAG_LETTERS else name


def picture(path: Path) -> np.ndarray:
    """One emoji over white, SIDE x SIDE x 3."""
    with Image.open(path) as image:
        rgba = image.convert("RGBA")
    white = Image.new("RGBA", rgba.size, "white")
    flat = Image.alpha_composite(white, rgba).convert("RGB")
    return np.asarray(flat.resize((SIDE, SIDE), Image.Resampling.LANCZOS))


def main() -> None:
    """Write one array of pictures and one of names, each name once."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("package", type=Path, help="unpacked folder that holds assets/")
    parser.add_argument("output", type=Path, help="the .npz file to write")
    arguments = parser.parse_args()
    found: dict[str, np.ndarray] = {}
    for path in sorted((arguments.package / "assets").glob("*.webp")):
        name = name_of(path.stem)
        if name and name not in found:
            found[name] = picture(path)
    pixels = np.stack(list(found.values()))
    np.savez_compressed(arguments.output, pixels=pixels, names=np.array(list(found)))
    print(f"{len(found)} pictures, {arguments.output.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
