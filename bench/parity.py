"""Whether a fast step learns what the plain one does: the same draws, loss curves side by side.

    python -m bench.parity flux [--modes bf16 fp8 int8 nf4] [--steps 200] [--seeds 5] [--blocks 2]
    python -m bench.parity krea2 --words 128 --spoken 72

The denoiser has its full width and random weights; `--blocks 0` keeps its full depth. The plain
loop is PEFT's layers under bfloat16 autocast, not compiled. Beside each mode's largest relative
difference of 20-step means stands the plain loop's spread over seeds: over the adapter's first
weights alone, and over the draws too. A mode is allowed three times the latter.
"""

import argparse
import gc
import inspect
import os
import statistics
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")

import torch

from bench.full_size import adapter_config, make_batch, make_denoiser, preset_of
from bench.full_size_bases import FULL
from bench.stepping import RATE, Bench, Case, add_lengths, plain_step, texts_of
from lib import adapter, attention, families
from lib.batches import Batch
from lib.device import pick_device, release
from lib.family import Family
from lib.optimizers import make_optimizer
from lib.schema import OptimizerConfig
from lib.training.step import Trainer

WINDOW, PICTURES = 20, 8
DEPTHS = ("num_layers", "num_single_layers", "n_layers", "n_refiner_layers")

Curve = list[float]


def shallow(family: Family, recipe: Mapping[str, Any], blocks: int) -> dict[str, Any]:
    """The recipe with a few blocks of each kind."""
    import diffusers

    facts = family.FACTS
    own = dict(recipe[facts.denoiser])
    init = getattr(diffusers, facts.classes[facts.denoiser]).__init__
    few = {name: blocks for name in DEPTHS if name in inspect.signature(init).parameters}
    return {**recipe, facts.denoiser: {**own, **few}} if blocks else dict(recipe)


def batches(first: Batch, *, steps: int, seed: int) -> Iterator[Batch]:
    """A batch a step: one of a few pictures, at a level and with a noise of its own."""
    draws = torch.Generator().manual_seed(1000 + seed)
    pictures = torch.randn(
        PICTURES, *first.noisy.shape[1:], generator=torch.Generator().manual_seed(7)
    )
    rows = len(first.noisy)
    for _ in range(steps):
        latents = pictures[torch.randint(PICTURES, (rows,), generator=draws)]
        noise = torch.randn(first.noisy.shape, generator=draws)
        level = torch.rand(rows, generator=draws).clamp(0.02, 0.98)
        sigma = level.view(-1, *[1] * (noise.ndim - 1))
        yield replace(
            first,
            noisy=(1 - sigma) * latents + sigma * noise,
            target=noise - latents,
            level=level,
        )


def plain(bench: Bench, given: Sequence[Batch], *, seed: int) -> Curve:
    """The loop of the public scripts."""
    denoiser = make_denoiser(bench.family, bench.recipe, device=bench.device)
    injected = adapter.inject(denoiser, adapter_config(bench.preset), seed=seed)
    parameters = list(injected.parameters.values())
    optimizer = make_optimizer(parameters, OptimizerConfig(lr=RATE))
    return [
        plain_step(bench.family, denoiser, parameters, optimizer, batch.to(bench.device))
        for batch in given
    ]


def ours(bench: Bench, given: Sequence[Batch], case: Case) -> Curve:
    """The project's step."""
    return taken(bench, given, case)[1]


def taken(bench: Bench, given: Sequence[Batch], case: Case) -> tuple[Trainer, Curve]:
    """Steps of a new denoiser with a new adapter: who took them, and their losses."""
    bench.fresh()
    trainer = bench.trainer(case)
    groups = (bench.group(batch, number) for number, batch in enumerate(given))
    return trainer, [trainer.launch(group, rate=RATE).result().loss for group in groups]


def means(curve: Curve) -> list[float]:
    width = min(WINDOW, len(curve))
    return [statistics.fmean(curve[i : i + width]) for i in range(0, len(curve) - width + 1, width)]


def apart(curve: Curve, other: Curve) -> float:
    """The largest relative difference of two curves' means."""
    return max(abs(a - b) / abs(b) for a, b in zip(means(curve), means(other), strict=True))


def spread(curves: Sequence[Curve]) -> float:
    """The largest of the first curve's differences from the others."""
    return max((apart(curve, curves[0]) for curve in curves[1:]), default=float("nan"))


def tried(what: str, work: Callable[[], Curve]) -> Curve | None:
    try:
        found = work()
    except Exception:  # noqa: BLE001  # one curve must not end the others
        traceback.print_exc()
        found = None
    gc.collect()
    release()
    shown = " ".join(f"{value:.4f}" for value in means(found)) if found else "failed"
    print(f"  {what}: {shown}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("family")
    parser.add_argument("--modes", nargs="*", default=["bf16", "fp8", "int8", "nf4"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--side", type=int, default=512)
    add_lengths(parser)
    parser.add_argument("--flash4", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    family = families.get(arguments.family)
    texts = texts_of(parser, arguments, family)
    preset = preset_of(arguments.family)
    recipe = family.TINY if arguments.tiny else FULL[arguments.family]
    recipe = recipe if arguments.tiny else shallow(family, recipe, arguments.blocks)
    bench = Bench(family, recipe, preset, pick_device())
    side = 64 if arguments.tiny else arguments.side
    first = make_batch(family, recipe, preset, side=side, texts=texts)
    depth = f"{arguments.blocks} blocks of a kind" if arguments.blocks else "full depth"
    print(f"{arguments.family}, {depth}, {arguments.steps} steps; means of {WINDOW} losses")

    def draws(seed: int) -> list[Batch]:
        return list(batches(first, steps=arguments.steps, seed=seed))

    given = draws(0)
    print("| what | largest relative difference of 20-step means |\n|---|---|", flush=True)
    with attention.engaged(flash4=False):
        reference = tried("plain, seed 0", lambda: plain(bench, given, seed=0))
    if not reference:
        return
    with attention.engaged(flash4=arguments.flash4):
        for mode in arguments.modes:
            case = Case.of(f"{mode}:{arguments.side}:1")
            curve = tried(f"ours, {mode}", lambda case=case: ours(bench, given, case))
            if curve:
                print(f"| ours, {mode} | {apart(curve, reference):.2e} |", flush=True)
    others = range(1, arguments.seeds)
    with attention.engaged(flash4=False):
        for name, drawn in (("adapters", False), ("seeds", True)):
            curves = [
                tried(
                    f"plain, {name} {seed}",
                    lambda s=seed, d=drawn: plain(bench, draws(s) if d else given, seed=s),
                )
                for seed in others
            ]
            print(f"| spread over {name} | {spread([reference, *filter(None, curves)]):.2e} |")


if __name__ == "__main__":
    main()
