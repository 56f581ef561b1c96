"""The data and cache stages on a small data set, made again and again in folders of their own."""

import hashlib
import mmap
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lib import files
from lib.events import Events
from lib.schema import Config
from lib.store import RESERVED, Damaged, Store

EMOJI = Path(__file__).resolve().parents[2] / "examples" / "emoji"
PICTURES = ("fox", "pizza", "rocket", "owl-crown", "sunflower-honeybee-pineapple")
AN_HOUR = 3600
STAGES = ("prepare_dataset", "encode_captions", "build_latent_cache")
SETTINGS = (
    *("precision=fp32", "tracker=none", "buckets.resolution=64", "buckets.step=16"),
    *("buckets.max_aspect=3", "captions.max_length=24", "captions.dtype=fp32"),
    *("adapter.rank=4", "trainer.max_steps=2", "validation.fraction=0"),
)


@dataclass(frozen=True)
class Rig:
    """A composed configuration over a base and a data set that nothing changes."""

    config: Config

    def at(self, root: Path) -> Config:
        """The same with the store and the outputs of one trial."""
        paths = replace(self.config.paths, store=str(root / "store"), outputs=str(root / "out"))
        return replace(self.config, paths=paths)

    def make(self, stage: str, root: Path) -> None:
        """Ensure a stage."""
        from lib.pipeline import graph

        graph.ensure(stage, self.at(root), Events())


def build(folder: Path) -> Rig:
    """A rig whose base and data set lie in a folder; imports all that a stage does."""
    import diffusers  # noqa: F401
    import transformers  # noqa: F401

    from lib.families import flux
    from lib.quiet import without_library_bars
    from stages.composing import compose

    with without_library_bars():
        flux.build_tiny(folder / "base")
    data = folder / "data"
    data.mkdir()
    for name in PICTURES:
        shutil.copy(EMOJI / f"{name}.png", data / f"{name}.png")
        (data / f"{name}.txt").write_text(f"a 3D emoji of {name}", encoding="utf-8")
    # What was just written is not remembered, and runs would differ in what they hash again.
    then = time.time() - AN_HOUR
    for path in folder.rglob("*"):
        os.utime(path, (then, then))
    places = (f"family.base={folder}/base", f"dataset.root={data}", f"paths.store={folder}/unused")
    return Rig(compose([*SETTINGS, *places]))


def artifacts(root: Path) -> dict[str, str]:
    """Every entry and manifest of a store with the digest of its bytes."""
    store = root / "store"
    inside = store.iterdir() if store.exists() else ()
    kinds = [path for path in inside if path.name not in RESERVED - {"manifests"}]
    found = [path for kind in kinds for path in kind.rglob("*") if path.is_file()]
    named = ((str(path.relative_to(store)), path.read_bytes()) for path in sorted(found))
    return {name: hashlib.sha256(data).hexdigest() for name, data in named}


def leftovers(root: Path) -> list[str]:
    """Temporary files and leases that somebody should have removed."""
    paths = [*root.rglob(f"{files.TEMP_PREFIX}*"), *root.glob("store/leases/*.json")]
    return sorted(str(path.relative_to(root)) for path in paths)


def lies(root: Path, *, whole: dict[str, str]) -> list[str]:
    """What of a store reads as sound and is not: other bytes, or a manifest without its entries."""
    store, found = Store(root / "store"), []
    for path in sorted(store.root.rglob("*.safetensors")):
        name = str(path.relative_to(store.root))
        kind, key = path.parent.parent.name, path.parent.name + path.stem
        same = hashlib.sha256(path.read_bytes()).hexdigest() == whole.get(name)
        if kind not in RESERVED and not same and _reads(store.get, kind, key):
            found.append(f"{name} reads as sound")
    for path in sorted(store.root.glob("manifests/*/*.json")):
        manifest = _reads(store.manifest, path.parent.name, path.stem)
        for ref in manifest.refs() if manifest else ():
            if store.size_bytes(ref.kind, ref.key) != ref.size_bytes:
                found.append(f"{path.name} names {ref.kind}/{ref.key}")
            elif not _reads(store.get, ref.kind, ref.key):
                found.append(f"{path.name} names the damaged {ref.kind}/{ref.key}")
    return found


def _reads(read: Any, *names: str) -> Any:
    try:
        return read(*names)
    except Damaged:
        return None


class Counter:
    """A number that a child's work can raise and its parent read."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8)

    def add(self, number: int) -> None:
        self._memory[:8] = (self.value + number).to_bytes(8, "little")

    @property
    def value(self) -> int:
        return int.from_bytes(self._memory[:8], "little")


@contextmanager
def counting(rows: Counter) -> Iterator[None]:
    """Count the rows that reach the encoders' own classes, in children too."""
    from diffusers import AutoencoderKL
    from transformers import T5EncoderModel

    encode, forward = AutoencoderKL.encode, T5EncoderModel.forward

    def counting_encode(self: Any, x: Any, *args: Any, **named: Any) -> Any:
        rows.add(x.shape[0])
        return encode(self, x, *args, **named)

    def counting_forward(self: Any, input_ids: Any = None, *args: Any, **named: Any) -> Any:
        rows.add(input_ids.shape[0])
        return forward(self, input_ids, *args, **named)

    AutoencoderKL.encode, T5EncoderModel.forward = counting_encode, counting_forward
    try:
        yield
    finally:
        AutoencoderKL.encode, T5EncoderModel.forward = encode, forward


def fresh(folder: Path, *, like: Path | None = None) -> Path:
    """An empty folder for a trial, or a copy of another; what was there is gone."""
    shutil.rmtree(folder, ignore_errors=True)
    if like is None:
        os.makedirs(folder)
    else:
        shutil.copytree(like, folder)
    return folder
