"""From the command to the first steps, with nothing compiled yet and with all of it kept.

    python -m bench.startup flux [--precision bf16] [--runs 2] [--tiny] [setting=value ...]

A full-size denoiser with random weights, saved as a base; captions, latents and the digests of
files are made before. Each run is a process of its own, timed by its events; the first finds no
compiled block in the store, the others what it left there.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")

from bench.full_size_encoders import make_base, with_denoiser
from bench.noise_pictures import draw_pictures
from lib import families
from lib.compiled import FOLDER, VARIABLES, builds_of
from lib.device import pick_device, release

PICTURES, STEPS = 4, 4
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


def command(stage: str, settings: Sequence[str]) -> float:
    """Run a stage in a process of its own; when it began, by the clock of the events."""
    began = time.time()
    environment = {n: v for n, v in os.environ.items() if n not in VARIABLES}
    words = [sys.executable, "-m", f"stages.{stage}", *settings]
    done = subprocess.run(words, cwd=CHECKOUT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}\n{done.stderr[-3000:]}")
    return began


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
    lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    at = moments([json.loads(line) for line in lines])
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


def settings_of(asked: argparse.Namespace, folder: Path) -> list[str]:
    return [
        *(f"family={asked.family}", f"family.base={folder}/base", f"dataset.root={folder}/data"),
        *(f"paths.store={folder}/store", f"paths.outputs={folder}/outputs", "tracker=none"),
        *(f"precision={asked.precision}", f"buckets.resolution={64 if asked.tiny else 512}"),
        f"captions.dtype={'fp32' if asked.tiny else 'bf16'}",
        *("validation.fraction=0", "sample.every=0", "trainer.compile=always"),
        *(f"trainer.max_steps={STEPS}", f"trainer.save_every={STEPS}", "rerun=true"),
        *asked.overrides,
    ]


def prepared(asked: argparse.Namespace, folder: Path) -> list[str]:
    """The settings, when the base, the caches and the digests of all files are there."""
    family, began = families.get(asked.family), time.perf_counter()
    recipe = family.TINY if asked.tiny else with_denoiser(family)
    make_base(family, recipe, folder / "base", device=pick_device())
    release()
    draw_pictures(folder / "data", count=PICTURES, side=64 if asked.tiny else 512)
    print(f"base made in {time.perf_counter() - began:.0f} s", flush=True)
    settings, began = settings_of(asked, folder), time.perf_counter()
    for stage in ("encode_captions", "build_latent_cache", "plan"):
        command(stage, settings)
    print(f"caches and digests made in {time.perf_counter() - began:.0f} s", flush=True)
    shutil.rmtree(folder / "store" / FOLDER, ignore_errors=True)
    return settings


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("family")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("overrides", nargs="*")
    asked = parser.parse_intermixed_args(words)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        settings = prepared(asked, folder)
        for number in range(asked.runs):
            began = command("train", [*settings, f"name=run{number}"])
            rows.append(parts(folder / "outputs" / f"run{number}", began=began))
            print(f"run {number + 1}: {rows[-1]}", flush=True)
        for build in builds_of(folder / "store"):
            megabytes = build.size_bytes / 1e6
            print(f"{build.path.name}: {build.count} files, {megabytes:.1f} MB", flush=True)
    names = ["nothing compiled", *["compiled before"] * (asked.runs - 1)]
    print(f"\n{asked.family}, {asked.precision}: seconds\n\n| part | {' | '.join(names)} |")
    print("|" + "---|" * (1 + asked.runs))
    for part in PARTS:
        print(f"| {part} | {' | '.join(f'{row[part]:.1f}' for row in rows)} |")


if __name__ == "__main__":
    main()
