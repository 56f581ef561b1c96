"""Folders of pictures made for a test, and what discovery says of them."""

import io
import json

from PIL import Image

from lib.manifest import discover
from lib.schema import DatasetConfig


def png(colour="red", size=(32, 24), **options):
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG", **options)
    return file.getvalue()


def build(root, files):
    """Write files; a picture's content may be left out, text and rows are given as they are."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content)
        if isinstance(content, str):
            content = content.encode()
        path.write_bytes(png() if content is None else content)
    return root


def found(root, prompt=None, **options):
    return discover(root, options=DatasetConfig(str(root), prompt, **options))


def captions(root, prompt=None, **options):
    """The caption of each picture, or the list of its captions."""
    discovery = found(root, prompt, **options)
    assert discovery.problems == ()
    texts = {candidate.name: list(candidate.captions) for candidate in discovery.candidates}
    return {name: some if len(some) > 1 else some[0] for name, some in texts.items()}


def complaints(root, prompt=None, **options):
    return [str(problem) for problem in found(root, prompt, **options).problems]


def row(name, caption):
    return {"file_name": name, "text": caption}
