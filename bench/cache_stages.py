"""The two cache stages as users run them, beside the bare encoders on the same batches.

    python -m bench.cache_stages flux [--pictures 512 --captions 2000] [--only latents] [--tiny]

Full-size encoders with random weights, pictures of noise. `bare` replays the encoder's own calls
on inputs that are on the device; `stage` counts from the end of loading to the last record, and in
brackets to the published manifest. `--tiny` takes the tiny base and a handful of samples.
"""

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")

import torch

from bench.full_size_encoders import make_base, with_encoders
from bench.noise_pictures import draw_pictures
from lib import encoding, families
from lib.cuts import geometry
from lib.device import pick_device, release
from lib.encoding import Picture, caption_order, in_batches
from lib.events import Event, Events
from lib.family import Family
from lib.files import user_path
from lib.keeping import PIXELS_TOGETHER, TOKENS_TOGETHER, Pace
from lib.keys import file_digest
from lib.pipeline import graph
from lib.records import DTYPES
from lib.schema import Config
from stages.composing import compose

BARE_SECONDS = 10.0


@dataclass
class Watch:
    """When a stage had loaded its models, gave its last record, and was done."""

    loaded: float = 0.0
    last: float = 0.0
    done: float = 0.0
    records: int = 0
    events: Events = field(init=False)

    def __post_init__(self) -> None:
        self.events = Events(sinks=(self._hear,))

    def _hear(self, event: Event) -> None:
        now = time.perf_counter()
        if event.kind == "progress" and event.data["unit"] in ("captions", "latents"):
            self.last, self.records = now, event.data["done"]
        elif event.kind == "phase" and event.data["status"] == "done":
            self.done = now

    @contextmanager
    def loading(self, family: Any, name: str) -> Iterator[None]:
        """Notes when the family's loader of this name returns."""
        load = getattr(family, name)

        def noting(*args: Any, **named: Any) -> Any:
            model = load(*args, **named)
            self.loaded = time.perf_counter()
            return model

        setattr(family, name, noting)
        try:
            yield
        finally:
            setattr(family, name, load)


def decoding(data: Path, *, size: int, side: int, most: int) -> None:
    """Pictures a second that threads decode, resize and turn into numbers."""
    paths = sorted(path for path in data.iterdir() if path.suffix != ".txt")[:most]
    cut = geometry((size, size), bucket=(side, side))
    pictures = [Picture(file_digest(path), cut, path) for path in paths]
    threads = [1, *(n for n in (2, 4, 8, 16) if n <= encoding._decoders())]
    print(f"\ndecode and resize to {side}x{side}, {len(paths)} pictures")
    print("\n| threads | pictures/s |\n|---|---|")
    for count in threads:
        with ThreadPoolExecutor(count) as pool:
            began = time.perf_counter()
            list(pool.map(encoding._pixels, pictures))
            print(f"| {count} | {len(pictures) / (time.perf_counter() - began):.1f} |", flush=True)


def calls_of(encoders: Any, encode: Callable[[], Any]) -> list[partial[Any]]:
    """The calls of modules that an encode makes, to be made again with the same tensors."""
    models = [part for part in vars(encoders).values() if isinstance(part, torch.nn.Module)]
    inner = [child for model in models for child in model.children()]
    calls: list[partial[Any]] = []
    inside: list[Any] = []

    def enter(module: Any, args: Any, named: Any) -> None:
        if not inside:
            calls.append(partial(module, *args, **named))
        inside.append(module)

    def leave(_module: Any, _args: Any, _output: Any) -> None:
        inside.pop()

    handles = [m.register_forward_pre_hook(enter, with_kwargs=True) for m in (*models, *inner)]
    handles += [m.register_forward_hook(leave, always_call=True) for m in (*models, *inner)]
    encode()
    for handle in handles:
        handle.remove()
    return calls


def _ids(call: partial[Any]) -> torch.Tensor:
    return call.args[0] if call.args else call.keywords["input_ids"]


def per_second(work: Sequence[tuple[int, Callable[[], Any]]], device: torch.device) -> float:
    """Items a second of (items, call) one after the other, round and round."""
    with torch.no_grad():
        for _, call in work[:3]:
            call()
        _wait(device)
        items, began = 0, time.perf_counter()
        while time.perf_counter() - began < BARE_SECONDS:
            for count, call in work:
                call()
                items += count
            _wait(device)
        return items / (time.perf_counter() - began)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def bare_captions(
    config: Config, family: Family, pace: Pace, texts: Sequence[str]
) -> tuple[float, float]:
    """Captions a second of the encoders' own calls, on batches from everywhere in the list.

    And how many tokens a caption is to the last encoder, padding among them.
    """
    device, base = pick_device(), graph.open_inputs(config).base
    dtype = DTYPES["fp32" if config.captions.dtype == "auto" else config.captions.dtype]
    encoders = family.load_text_encoders(base, dtype=dtype, device=device)
    batches = list(in_batches(caption_order(family, texts), pace.batch_size))
    work, tokens = [], 0
    for batch in batches[:: max(1, len(batches) // 16)]:
        length = config.captions.max_length
        encode = partial(family.encode_captions, encoders, batch, max_length=length)
        calls = calls_of(encoders, encode)
        work.append((len(batch), lambda calls=calls: [call() for call in calls]))
        tokens += _ids(calls[-1]).numel()
    return per_second(work, device), tokens / sum(count for count, _ in work)


def bare_latents(config: Config, family: Family, pace: Pace, side: int) -> float:
    """Pictures a second of the autoencoder on pixels that are on the device."""
    device, base = pick_device(), graph.open_inputs(config).base
    dtype = DTYPES[config.latents.dtype]
    autoencoder = family.load_autoencoder(base, dtype=dtype, device=device)
    pixels = torch.randn(pace.batch_size, 3, side, side, device=device, dtype=dtype)
    return per_second(
        [(pace.batch_size, lambda: family.encode_images(autoencoder, pixels))], device
    )


def staged(stage: str, config: Config, family: Family) -> Watch:
    """The stage with all that is missing upstream of it, as a command runs it."""
    watch = Watch()
    loader = "load_text_encoders" if stage == "encode_captions" else "load_autoencoder"
    with watch.loading(family, loader):
        graph.ensure(stage, config, watch.events)
    return watch


def row(stage: str, bare: float, watch: Watch, pace: Pace) -> str:
    """One line of the table."""
    rate = watch.records / (watch.last - watch.loaded)
    whole = watch.records / (watch.done - watch.loaded)
    gpu = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return (
        f"| {stage} | {pace.batch_size} | {bare:.1f} | {rate:.1f} ({whole:.1f}) | "
        f"{rate / bare:.1%} ({whole / bare:.1%}) | {watch.records} | {gpu:.1f} | {resident:.1f} |"
    )


HEADER = (
    "| stage | batch | bare, items/s | stage, items/s (published) | share | items | GPU peak, GiB "
    "| process peak, GiB |\n" + "|" + "---|" * 8
)


def measured(asked: argparse.Namespace, folder: Path) -> Iterator[str]:
    """The rows of the table."""
    family, device = families.get(asked.family), pick_device()
    began = time.perf_counter()
    recipe = family.TINY if asked.tiny else with_encoders(family)
    make_base(family, recipe, folder / "base", device=device)
    release()
    print(f"base made in {time.perf_counter() - began:.0f} s", flush=True)
    for stage in asked.only:
        count = asked.captions if stage == "captions" else asked.pictures
        side = 64 if stage == "captions" else asked.side
        draw_pictures(folder / stage, count=count, side=side)
        config = compose(_settings(asked, folder, stage))
        run = _captions if stage == "captions" else _latents
        yield run(config, family, asked)
        release()


def _settings(asked: argparse.Namespace, folder: Path, stage: str) -> list[str]:
    side = 64 if stage == "captions" else asked.resolution
    return [
        *(f"family={asked.family}", f"family.base={folder}/base", f"dataset.root={folder}/{stage}"),
        *(f"paths.store={folder}/store", f"paths.outputs={folder}/outputs", "tracker=none"),
        *(f"buckets.resolution={side}", "validation.fraction=0"),
        f"captions.dtype={'fp32' if asked.tiny else 'bf16'}",
        *([f"encode.batch_size={asked.batch}"] if asked.batch else ()),
        *asked.overrides,
    ]


def _captions(config: Config, family: Family, asked: argparse.Namespace) -> str:
    root = user_path(config.dataset.root)
    texts = [path.read_text(encoding="utf-8") for path in sorted(root.glob("*.txt"))]
    fitting = TOKENS_TOGETHER // config.captions.max_length
    pace = Pace.of(pick_device(), asked=config.encode.batch_size, fitting=fitting)
    bare, tokens = bare_captions(config, family, pace, texts)
    release()
    return row(
        f"captions of {tokens:.0f} tokens", bare, staged("encode_captions", config, family), pace
    )


def _latents(config: Config, family: Family, asked: argparse.Namespace) -> str:
    side = config.buckets.resolution
    root, most = user_path(config.dataset.root), min(128, asked.pictures)
    decoding(root, size=asked.side, side=side, most=most)
    fitting = PIXELS_TOGETHER // side**2
    pace = Pace.of(pick_device(), asked=config.encode.batch_size, fitting=fitting)
    bare = bare_latents(config, family, pace, side)
    release()
    return row("latents", bare, staged("build_latent_cache", config, family), pace)


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("family")
    parser.add_argument("--only", nargs="+", choices=("captions", "latents"))
    parser.add_argument("--pictures", type=int, default=512)
    parser.add_argument("--captions", type=int, default=2000)
    parser.add_argument("--side", type=int, default=1280, help="pixels of a picture's file")
    parser.add_argument("--resolution", type=int, default=1024)
    parser.add_argument("--batch", type=int, help="encode.batch_size")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("overrides", nargs="*", help="for instance latents.dtype=bf16")
    asked = parser.parse_intermixed_args(words)
    asked.only = asked.only or ["latents", "captions"]
    if asked.tiny:  # enough to see it run
        asked.pictures, asked.captions = min(asked.pictures, 12), min(asked.captions, 24)
        asked.side, asked.resolution = 80, 64
    return asked


def main(words: Sequence[str] | None = None) -> None:
    asked = parsed(words)
    with tempfile.TemporaryDirectory() as scratch:
        rows = list(measured(asked, Path(scratch)))
    print("\n".join(["", asked.family, "", HEADER, *rows]), flush=True)


if __name__ == "__main__":
    main()
