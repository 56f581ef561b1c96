"""Whether diffusers, given the exported adapter, predicts what the fast step does: mode by mode.

    python -m bench.reloaded flux [--modes bf16 fp8 int8 nf4] [--blocks 2] [--steps 3]

A denoiser of full width and few blocks takes some steps in each mode, compiled and captured on a
GPU; then each B is drawn, so that the adapter changes much. Its file, as `stages.export` writes it,
goes onto a dense denoiser by diffusers' own loader. Beside the distance of the two predictions
stands what the adapter changes: the first is rounding, and what the mode does to the base.
"""

import argparse
import os
import traceback
from collections.abc import Sequence

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")

import torch
from safetensors.torch import load

from bench.full_size import adapter_config, make_batch, make_denoiser, preset_of
from bench.full_size_bases import FULL
from bench.parity import batches, shallow, taken
from bench.stepping import Bench, Case, predicted
from lib import adapter, attention, families
from lib.batches import Batch
from lib.changes import changes_of
from lib.device import pick_device, release
from lib.formats import Target, adapter_file
from lib.hollow import linear_sizes
from lib.naming import PEFT

STRENGTH, STRENGTH_TINY = 0.2, 0.5  # of each number of B: an adapter that changes much


def answer_of(bench: Bench, denoiser: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """With gradients, as in training: without, a compiled block is compiled once more."""
    return predicted(bench.family, denoiser, batch.to(bench.device)).detach().float()


def trained(bench: Bench, case: Case, given: Sequence[Batch], *, strength: float) -> torch.Tensor:
    """The prediction of a trained and then strengthened adapter, by the step's own products."""
    trainer, _ = taken(bench, given, case)
    source = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in bench.injected.parameters.items():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=source) * strength)
    trainer.weights.refresh()
    return answer_of(bench, bench.denoiser, given[0])


def exported(bench: Bench) -> bytes:
    """The adapter's file for diffusers."""
    description = adapter.peft_config(adapter_config(bench.preset))
    named = adapter.renamed(bench.injected.parameters)
    state = {name: tensor.detach().cpu() for name, tensor in named.items()}
    dense = make_denoiser(bench.family, bench.recipe, device=torch.device("meta"))
    target = Target(
        format=PEFT,
        dtype="fp32",
        names=bench.family.NAMES,
        component=bench.family.FACTS.denoiser,
        sizes=linear_sizes(dense),
    )
    changes = changes_of(state, description)
    return adapter_file(changes, target, description=description, provenance={}).data


def row(bench: Bench, case: Case, given: Sequence[Batch], *, strength: float) -> str:
    own = trained(bench, case, given, strength=strength)
    file = exported(bench)
    bench.denoiser = bench.injected = None
    release()
    dense = make_denoiser(bench.family, bench.recipe, device=bench.device)
    before = answer_of(bench, dense, given[0])
    dense.load_lora_adapter(load(file), prefix=bench.family.FACTS.denoiser)
    after = answer_of(bench, dense, given[0])
    apart, changed = ((x - after).norm() / after.norm() for x in (own, before))
    return f"| {case} | {float(apart):.1e} | {float(changed):.1e} |"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("family", choices=sorted(FULL))
    parser.add_argument("--modes", nargs="*", default=["bf16", "fp8", "int8", "nf4"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--side", type=int, default=512)
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args(words)
    family = families.get(asked.family)
    preset = preset_of(asked.family)
    recipe = family.TINY if asked.tiny else shallow(family, FULL[asked.family], asked.blocks)
    bench = Bench(family, recipe, preset, pick_device())
    side = 64 if asked.tiny else asked.side
    first = make_batch(family, recipe, preset, side=side)
    given = list(batches(first, steps=asked.steps, seed=0))
    rows = ["| case | distance of the predictions | what the adapter changes |", "|---|---|---|"]
    with attention.engaged(flash4=False):
        for mode in asked.modes:
            try:
                case = Case.of(f"{mode}:{side}:1")
                strength = STRENGTH_TINY if asked.tiny else STRENGTH
                rows.append(row(bench, case, given, strength=strength))
            except Exception:  # noqa: BLE001  # one mode must not end the others
                traceback.print_exc()
    print("\n".join(rows))


if __name__ == "__main__":
    main()
