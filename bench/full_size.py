"""Every family's denoiser at its full size with random weights: a few LoRA steps, time and memory.

    python -m bench.full_size [--only flux sdxl ...] [--tiny] [--steps 10]

Speed and memory are true, predictions are not. Denoisers are made in memory in bfloat16, without
text encoders and autoencoder; captions and latents are random, in the shapes that the family
stores. The step is training's own, over one batch again and again, so that the loss should fall.
`--tiny` takes the families' tiny denoisers instead, on a CPU too.
"""

import argparse
import os
import platform
import statistics
import subprocess
import time
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

# Before the libraries are there: their notices are noise.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")

import torch
import yaml

from bench.full_size_bases import FULL
from lib import adapter, families
from lib.batches import Batch, StepBatches
from lib.device import pick_device, release, without_cudnn_attention
from lib.family import Conditioning, Family, Frame
from lib.optimizers import make_optimizer
from lib.schema import AdapterConfig, ObjectiveConfig, OptimizerConfig, TimestepsConfig
from lib.training.step import Trainer

CONF = Path(__file__).resolve().parent.parent / "conf" / "family"
RANK = 16
SIDE, TINY_SIDE = 512, 64  # pixels
WORDS = 64  # text tokens of a caption where only its own are stored
WARM_STEPS = 2
DTYPE = torch.bfloat16
NEUTRAL = {"shift": 0.0, "scale": 1.0, "mean": [0.0], "std": [1.0], "variance": [1.0], "eps": 0.0}


class Texts(NamedTuple):
    """Tokens of a caption, and how many are its own if not all: the rest is padding.

    Padded as beside a longer one in its micro-batch.
    """

    words: int = WORDS
    spoken: int | None = None


TEXTS = Texts()


@dataclass(frozen=True)
class Found:
    """One row of the table."""

    family: str
    parameters: int
    adapter_parameters: int
    modules: int
    losses: tuple[float, ...]
    milliseconds: float  # of a step
    peak_gigabytes: float
    checkpointing: bool
    waits: tuple[int, int]  # places where `predict` waits for the GPU: first call, later calls

    def line(self) -> str:
        size = f"{self.parameters / 1e9:.2f} | {self.adapter_parameters / 1e6:.1f}"
        losses = f"{self.losses[0]:.4f} | {self.losses[-1]:.4f}"
        speed = f"{self.milliseconds:.0f} | {1000 / self.milliseconds:.2f}"
        checkpointing = "on" if self.checkpointing else "off"
        waits = f"{self.waits[0]}, {self.waits[1]}"
        return (
            f"| {self.family} | {size} | {self.modules} | {losses} | {speed} | "
            f"{self.peak_gigabytes:.1f} | {checkpointing} | {waits} |"
        )


HEADER = (
    "| family | parameters, B | adapter, M | modules | loss, first step | last step | ms a step "
    "| samples/s | peak memory, GB | checkpointing | waits in predict: first call, later |\n"
    "|" + "---|" * 11
)


def make_denoiser(family: Family, recipe: Mapping[str, Any], *, device: torch.device) -> Any:
    """As a loaded one is: frozen, in bfloat16 but for what its class keeps in float32."""
    import diffusers
    from accelerate import init_on_device

    facts = family.FACTS
    torch.manual_seed(0)
    torch.set_default_dtype(DTYPE)
    try:
        # Parameters alone: tables that a class makes for itself lie on the CPU in a loaded one too.
        with init_on_device(device, include_buffers=False):
            model_class = getattr(diffusers, facts.classes[facts.denoiser])
            denoiser = model_class(**recipe[facts.denoiser])
    finally:
        torch.set_default_dtype(torch.float32)
    kept = set(denoiser._keep_in_fp32_modules or ())
    for name, parameter in denoiser.named_parameters():
        if kept & set(name.split(".")):
            parameter.data = parameter.data.float()
        elif name.endswith("pad_token"):
            parameter.data.normal_(std=0.02)  # learnt in a real one; made as zeros
    return denoiser.requires_grad_(False).eval()


def preset_of(name: str) -> dict[str, Any]:
    """What a family's preset sets."""
    return yaml.safe_load((CONF / f"{name}.yaml").read_text(encoding="utf-8"))["preset"]


def adapter_config(preset: Mapping[str, Any], *, rank: int = RANK) -> AdapterConfig:
    """An adapter on the preset's targets, at a scale of one."""
    return AdapterConfig(rank=rank, alpha=float(rank), targets=list(preset["targets"]))


def make_adapter(denoiser: Any, preset: Mapping[str, Any], *, rank: int = RANK) -> adapter.Injected:
    """A fresh one."""
    return adapter.inject(denoiser, adapter_config(preset, rank=rank), seed=0)


def make_trainer(
    family: Family, denoiser: Any, preset: Mapping[str, Any], *, device: torch.device
) -> tuple[Trainer, adapter.Injected]:
    """Training's own step over a fresh adapter on the preset's targets."""
    injected = make_adapter(denoiser, preset)
    trainer = Trainer(
        family=family,
        denoiser=denoiser,
        parameters=injected.parameters,
        optimizer=make_optimizer(
            injected.parameters.values(), OptimizerConfig(lr=float(preset["lr"]))
        ),
        device=device,
        autocast_dtype=DTYPE,
        max_grad_norm=1.0,
        seed=0,
        dropout=0.0,
    )
    return trainer, injected


def make_batch(
    family: Family,
    recipe: Mapping[str, Any],
    preset: Mapping[str, Any],
    *,
    side: int,
    texts: Texts = TEXTS,
) -> Batch:
    """One random picture with a random caption, at the level of a seed's first draw."""
    torch.manual_seed(1)
    process = family.FACTS.noise.of(family.TINY["scheduler"])
    timesteps = TimestepsConfig(density=preset["density"], shift=float(preset["shift"]))
    level = process.draw_level(timesteps, tokens=0, seed=0, counter=0, sample_id="random")
    levels = torch.tensor([level], dtype=torch.float32)
    raw = torch.randn(1, *family.latent_shape(recipe["vae"], height=side, width=side))
    latents = family.normalise(raw, NEUTRAL)
    noise = torch.randn_like(latents)
    return Batch(
        noisy=process.add_noise(latents, noise, levels),
        target=process.target(latents, noise, levels),
        level=levels,
        weights=torch.ones(1),
        loss_weights=process.loss_weight(levels, ObjectiveConfig()),
        conditioning=make_conditioning(family, recipe, preset, side=side, texts=texts),
        names=("random",),
    )


def make_conditioning(
    family: Family,
    recipe: Mapping[str, Any],
    preset: Mapping[str, Any],
    *,
    side: int,
    texts: Texts = TEXTS,
) -> Conditioning:
    """All positions where the family keeps them; else a caption of these lengths."""
    every = family.FACTS.fixed_texts
    longest = preset["max_length"] if every else texts.words
    lengths = [longest] if texts.spoken in (None, longest) else [texts.spoken, longest]
    parts = {name: part for name, part in recipe.items() if isinstance(part, Mapping)}
    records = []
    for length in lengths:
        shapes = family.caption_shapes(parts, max_length=length)
        records.append({name: torch.randn(shape).to(DTYPE) for name, shape in shapes.items()})
    frame = Frame(original=(side, side), crop=(0, 0), size=(side, side))
    found = family.conditioning(records, [frame] * len(records)).in_few_lengths()
    return Conditioning({name: t[:1] for name, t in found.items()}, found.lengths[:1])


def waits_in_predict(trainer: Trainer, batch: Batch) -> tuple[int, int]:
    """In how many places a prediction waits for the GPU: in the first call, and in a later one."""
    if trainer.device.type != "cuda":
        return 0, 0
    on_device = batch.to(trainer.device)
    places = []
    for call in ("first", "later"):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught, torch.no_grad():
                warnings.simplefilter("always")
                trainer.predict(on_device)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found = [f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
        for place in dict.fromkeys(found):
            print(f"  waits in the {call} call, {found.count(place)} times: {place}", flush=True)
        places.append(len(set(found)))
    return places[0], places[1]


def timed_steps(
    trainer: Trainer, batch: Batch, *, steps: int, rate: float
) -> tuple[list[float], list[float]]:
    """Losses and seconds of each step; a step whose loss or gradient is not finite is refused."""
    losses, seconds = [], []
    for step in range(steps):
        began = time.perf_counter()
        group = StepBatches(step=step, batches=(batch,), numbers=(0,), num_samples=1)
        result = trainer.step(group, rate=rate)
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        print(f"  step {step + 1}: loss {result.loss:.5f}, norm {result.grad_norm:.4g}", flush=True)
        if not result.finite:
            raise ValueError(f"step {step + 1}: loss or gradient norm is not finite")
        losses.append(result.loss)
    return losses, seconds


def measured(name: str, *, tiny: bool, steps: int, checkpointing: bool) -> Found:
    """One family from making its denoiser to the last step."""
    family, device = families.get(name), pick_device()
    preset = preset_of(name)
    recipe = family.TINY if tiny else FULL[name]
    began = time.perf_counter()
    denoiser = make_denoiser(family, recipe, device=device)
    parameters = sum(parameter.numel() for parameter in denoiser.parameters())
    trainer, injected = make_trainer(family, denoiser, preset, device=device)
    if checkpointing:
        denoiser.enable_gradient_checkpointing()
    print(f"  made in {time.perf_counter() - began:.1f} s; matches {dict(injected.matches)}")
    batch = make_batch(family, recipe, preset, side=TINY_SIDE if tiny else SIDE)
    waits = waits_in_predict(trainer, batch)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, seconds = timed_steps(trainer, batch, steps=steps, rate=float(preset["lr"]))
    return Found(
        family=name,
        parameters=parameters,
        adapter_parameters=sum(p.numel() for p in injected.parameters.values()),
        modules=len(injected.parameters) // 2,
        losses=tuple(losses),
        milliseconds=statistics.median(seconds[WARM_STEPS:]) * 1000,
        peak_gigabytes=torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0,
        checkpointing=checkpointing,
        waits=waits,
    )


def tried(name: str, *, tiny: bool, steps: int) -> Found | None:
    """A family's row; one that does not fit is measured again with gradient checkpointing."""
    for checkpointing in (False, True):
        print(f"{name}, gradient checkpointing {'on' if checkpointing else 'off'}", flush=True)
        try:
            return measured(name, tiny=tiny, steps=steps, checkpointing=checkpointing)
        except torch.cuda.OutOfMemoryError as error:
            print(f"  does not fit: {error}", flush=True)
        except Exception:  # noqa: BLE001  # one family's failure leaves the others measured
            traceback.print_exc()
            return None
        finally:
            release()
    return None


def machine() -> str:
    """What the figures depend on, in one line."""
    import diffusers
    import peft
    import transformers

    hardware = "a CPU"
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 2**20
        hardware = f"{torch.cuda.get_device_name(0)} ({memory:,.0f} MiB)"
    command = ["git", "rev-parse", "--short", "HEAD"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    libraries = (torch, diffusers, transformers, peft)
    versions = ", ".join(f"{library.__name__} {library.__version__}" for library in libraries)
    commit = asked.stdout.strip() or "unknown"
    return f"{hardware}, Python {platform.python_version()}, {versions}; {date.today()}; {commit}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=sorted(FULL), default=list(FULL))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    if arguments.steps <= WARM_STEPS:
        parser.error(f"--steps must be more than {WARM_STEPS}, which are not timed")
    with without_cudnn_attention():
        rows = [tried(n, tiny=arguments.tiny, steps=arguments.steps) for n in arguments.only]
    found = [row for row in rows if row is not None]
    print("\n".join(["", machine(), "", HEADER, *(row.line() for row in found)]))
    if len(found) < len(rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
