"""From the command to the first steps, with nothing compiled yet and with all of it kept.

    python -m bench.startup flux [--precision bf16] [--runs 2] [--loop 80] [--tiny] [setting=value]

A full-size denoiser with random weights, saved as a base; captions, latents and the digests of
files are made before. Each run is a process of its own, timed by its events; the first finds no
compiled block in the store, the others what it left there. TMPDIR says where all of it lies.

`--loop N` adds a run of N steps, with metrics and events for each, the moving average and no
checkpoint before its end: how long a step takes in its last half, beside `bench.train_step` of the
same work in a process of its own. Both have batch 1, the preset's targets at that bench's rank, one
length of text, and what the run's events say of attention, compiling, graphs and checkpointing
(never, unless it is given). No tracker, unless `tracker=mlflow` is given.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")

import torch

from bench.full_size import RANK, make_denoiser
from bench.full_size_encoders import make_base, with_denoiser
from bench.noise_pictures import draw_pictures
from lib import families
from lib.compiled import FOLDER, VARIABLES, builds_of
from lib.device import pick_device, release
from lib.family import Family
from lib.keys import digest
from lib.store import Store

PICTURES, STEPS = 4, 4
SHARD, WRITERS = "4GB", 4  # files of a denoiser that are written at a time
WEIGHTS = "diffusion_pytorch_model{suffix}.safetensors"
FEWEST = 8  # steps of a loop whose last half says something
# How `bench.train_step` names what a run decided of compiling and of graphs.
LEVERS = {(True, False): ["compiled"], (False, True): ["graph"], (False, False): ["eager"]}
PARTS = (
    "imports, settings, keys",
    "caches found and verified",
    "weights, adapter",
    "binding, first step",
    "second step",
    "to the first step",
    "without the weights",
)
CHECKOUT = Path(__file__).resolve().parent.parent


def done(words: Sequence[str]) -> str:
    """What a module of this checkout said, run in a process of its own."""
    environment = {n: v for n, v in os.environ.items() if n not in VARIABLES}
    line = [sys.executable, "-m", *words]
    ended = subprocess.run(line, cwd=CHECKOUT, env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"{' '.join(line)} ended with {ended.returncode}\n{ended.stderr[-3000:]}")
    return ended.stdout


def command(stage: str, settings: Sequence[str]) -> float:
    """Run a stage; when it began, by the clock of the events."""
    began = time.time()
    done([f"stages.{stage}", *settings])
    return began


@contextmanager
def told(what: str) -> Iterator[None]:
    """How long the block took."""
    began = time.perf_counter()
    yield
    print(f"  {what}: {time.perf_counter() - began:.1f} s", flush=True)


def events_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def moments(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """When what a run tells of itself happened, each kind of it the first time."""
    found: dict[str, float] = {}
    for event in events:
        if event["kind"] == "decision":
            found.setdefault(event["name"], event["time"])
        elif event["kind"] == "metric" and "loss" in event:
            found.setdefault(f"step {event['step']}", event["time"])
    return {"first": events[0]["time"], **found}


def parts(folder: Path, *, began: float) -> dict[str, float]:
    """Seconds of each part of a run's start."""
    at = moments(events_of(folder))
    loaded = at["adapter.targets"]
    seconds = (
        at["first"] - began,
        at["device"] - at["first"],
        loaded - at["device"],
        at["step 1"] - loaded,
        at["step 2"] - at["step 1"],
        at["step 1"] - began,
        at["step 1"] - began - (loaded - at["device"]),
    )
    return dict(zip(PARTS, seconds, strict=True))


def settings_of(asked: argparse.Namespace, folder: Path, *pinned: str) -> list[str]:
    """The bench's own, then those asked for, then what the bench cannot do without."""
    settings = [
        *(f"family={asked.family}", f"family.base={folder}/base", f"dataset.root={folder}/data"),
        *(f"paths.store={folder}/store", f"paths.outputs={folder}/outputs", "tracker=none"),
        *(f"precision={asked.precision}", f"buckets.resolution={side_of(asked)}"),
        f"captions.dtype={'fp32' if asked.tiny else 'bf16'}",
        *("validation.fraction=0", "sample.every=0", "trainer.compile=always"),
        *(f"trainer.max_steps={STEPS}", f"trainer.save_every={STEPS}", "rerun=true"),
        *asked.overrides,
        *pinned,
    ]
    return list({setting.partition("=")[0]: setting for setting in settings}.values())


def side_of(asked: argparse.Namespace) -> int:
    return 64 if asked.tiny else 512


def prepared(asked: argparse.Namespace, folder: Path) -> list[str]:
    """The settings, when the base, the caches and the digests of all files are there."""
    family, device = families.get(asked.family), pick_device()
    recipe = family.TINY if asked.tiny else with_denoiser(family)
    name = family.FACTS.denoiser
    with told("encoders and autoencoder made and written"):
        make_base(family, {**recipe, name: family.TINY[name]}, folder / "base", device=device)
    write_denoiser(family, recipe, folder / "base" / name, device=device)
    release()
    with told("pictures drawn"):
        draw_pictures(folder / "data", count=PICTURES, side=side_of(asked))
        one_caption(folder / "data")
    settings = settings_of(asked, folder)
    for stage in ("encode_captions", "build_latent_cache", "plan"):
        with told(f"stages.{stage}"):
            command(stage, settings)
    shutil.rmtree(folder / "store" / FOLDER, ignore_errors=True)
    return settings


def write_denoiser(
    family: Family,
    recipe: Mapping[str, Any],
    folder: Path,
    *,
    device: torch.device,
    shard: str = SHARD,
) -> None:
    """In the place of another: random weights, from the device to several files at once."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    with told("denoiser made"):
        denoiser = make_denoiser(family, recipe, device=device)
        if device.type == "cuda":
            torch.cuda.synchronize()
    shutil.rmtree(folder, ignore_errors=True)
    denoiser.save_config(folder)
    tensors = {name: tensor.contiguous() for name, tensor in denoiser.state_dict().items()}
    split = split_torch_state_dict_into_shards(
        tensors, filename_pattern=WEIGHTS, max_shard_size=shard
    )

    def write(file: str) -> None:
        part = {name: tensors[name] for name in split.filename_to_tensors[file]}
        save_file(part, folder / file, metadata={"format": "pt"})

    gigabytes = sum(tensor.nbytes for tensor in tensors.values()) / 1e9
    with told(f"denoiser written, {gigabytes:.1f} GB"), ThreadPoolExecutor(WRITERS) as threads:
        list(threads.map(write, split.filename_to_tensors))
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        name = f"{WEIGHTS.format(suffix='')}.index.json"
        (folder / name).write_text(json.dumps(index), encoding="utf-8")


def one_caption(data: Path) -> None:
    """Give all pictures the first one's: one length of text."""
    first, *others = sorted(data.glob("*.txt"))
    for file in others:
        shutil.copy(first, file)


def words_of(store: Path, caption: str) -> int:
    """How many text tokens the store's record of a caption has."""
    for path in (store / "manifests" / "encode_captions").glob("*.json"):
        keys = json.loads(path.read_text(encoding="utf-8"))["payload"]["texts"]
        if key := keys.get(digest(caption)):
            return Store(store).get("captions", key).tensors["text_embeds"].shape[0]
    raise SystemExit(f"no record of the caption in {store}")


def pace(events: Sequence[Mapping[str, Any]]) -> float:
    """Mean milliseconds of a step over the last half.

    The very last step is left out: its numbers are read at once, those of the others when the next
    step is on its way.
    """
    at = {e["step"]: e["time"] for e in events if e["kind"] == "metric" and "loss" in e}
    first, last = max(at) // 2, max(at) - 1
    return 1000 * (at[last] - at[first]) / (last - first)


def case_of(decided: Mapping[str, Any], *, precision: str, side: int) -> str:
    """A run's work, as `bench.train_step` names it."""
    options = list(LEVERS.get((decided["compile"], decided["cuda_graphs"]), []))
    if decided["gradient_checkpointing"]:
        options.append("checkpointing")
    mode = decided.get("precision.mode", precision)
    return ":".join([mode, str(side), "1", *options])


def bare(family: str, case: str, *options: str) -> float:
    """Milliseconds of a step alone."""
    said = done(["bench.train_step", family, "--cases", case, *options])
    found = re.search(r"^\| ours \| \S+ \| ([\d.]+) \|", said, re.M)
    if found is None:
        raise SystemExit(f"bench.train_step {family} --cases {case} told no row\n{said[-3000:]}")
    return float(found[1])


def loop(asked: argparse.Namespace, folder: Path) -> str:
    """A step in a whole run beside the step alone."""
    compiles = pick_device().type == "cuda"
    levers = f"trainer.compile={'always' if compiles else 'never'}"
    overrides = [levers, "trainer.gradient_checkpointing=never", *asked.overrides]
    given = argparse.Namespace(**{**vars(asked), "overrides": overrides})
    pinned = (
        *(f"trainer.max_steps={asked.loop}", f"trainer.save_every={asked.loop}", "name=loop"),
        *(f"adapter.rank={RANK}", "trainer.batch_size=1"),
    )
    with told("the whole run"):
        command("train", settings_of(given, folder, *pinned))
    events = events_of(folder / "outputs" / "loop")
    decided = {e["name"]: e["value"] for e in events if e["kind"] == "decision"}
    case = case_of(decided, precision=asked.precision, side=side_of(asked))
    options = ["--tiny"] * asked.tiny + ["--flash4"] * (decided["attention"] == "flash 4")
    if not families.get(asked.family).FACTS.fixed_texts:
        caption = next((folder / "data").glob("*.txt")).read_text(encoding="utf-8")
        options += ["--words", str(words_of(folder / "store", caption))]
    with told("the step alone"):
        whole, alone = pace(events), bare(asked.family, case, *options)
    what = " ".join([asked.family, case, *options, f"({decided['attention']})"])
    return (
        f"{what}, {asked.loop} steps\n\n| whole loop, ms a step | the step alone | excess |\n"
        f"|---|---|---|\n| {whole:.1f} | {alone:.1f} | {100 * (whole / alone - 1):.1f} % |"
    )


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("family")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--loop", type=int, default=0, help="steps of a whole run; 0: none")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("overrides", nargs="*")
    asked = parser.parse_intermixed_args(words)
    if asked.loop and asked.loop < FEWEST:
        parser.error(f"--loop {asked.loop}: 0, or {FEWEST} and more")
    return asked


def main(words: Sequence[str] | None = None) -> None:
    asked, rows = parsed(words), []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        settings = prepared(asked, folder)
        for number in range(asked.runs):
            began = command("train", [*settings, f"name=run{number}"])
            rows.append(parts(folder / "outputs" / f"run{number}", began=began))
            print(f"run {number + 1}: {rows[-1]}", flush=True)
        builds = builds_of(folder / "store")
        if not builds:
            print("nothing that was compiled is kept in the store", flush=True)
        for build in builds:
            megabytes = build.size_bytes / 1e6
            print(f"{build.path.name}: {build.count} files, {megabytes:.1f} MB", flush=True)
        looped = loop(asked, folder) if asked.loop else ""
    if rows:
        names = ["nothing compiled", *["compiled before"] * (asked.runs - 1)]
        print(f"\n{asked.family}, {asked.precision}: seconds\n\n| part | {' | '.join(names)} |")
        print("|" + "---|" * (1 + asked.runs))
    for part in PARTS if rows else ():
        print(f"| {part} | {' | '.join(f'{row[part]:.1f}' for row in rows)} |")
    if looped:
        print(f"\n{looped}")


if __name__ == "__main__":
    main()
