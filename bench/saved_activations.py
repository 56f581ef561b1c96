"""What a block keeps for its backward, in hidden states: the `kept` of each family's Costs.

    python -m bench.saved_activations [flux sdxl ...] [--side 512] [--quarter]

Denoisers at full width with one and two blocks of a kind: the difference is a block's. Compiled
means torch's partition of forward and backward, with the kernels left out. A U-Net is measured
whole, at two sizes of the picture. Prints what torch's autograd holds, weights aside. `--quarter`
takes a quarter of width and rank, which a CPU has time for and whose numbers are the same but for
what attention's kernels keep.
"""

import argparse
import gc
import os
import traceback
from collections.abc import Mapping
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")

import torch
from torch.autograd.graph import saved_tensors_hooks

from bench.full_size import DTYPE, RANK, make_adapter, make_batch, make_denoiser, preset_of
from bench.full_size_bases import FULL, QUARTER
from lib import families
from lib.binding import bind
from lib.device import pick_device, release
from lib.family import Family
from lib.footprint import Work, hidden_bytes
from lib.recomputing import recompute

BACKEND = "aot_eager_decomp_partition"
WAYS = ("eager", "compiled", "checkpointed")

Recipe = Mapping[str, Any]


def kept_bytes(family: Family, recipe: Recipe, *, way: str, side: int, rank: int) -> int:
    """Bytes of the storages that a forward leaves for the backward."""
    torch._dynamo.reset()
    device, facts = pick_device(), family.FACTS
    preset = preset_of(facts.name)
    denoiser = make_denoiser(family, recipe, device=device)
    injected = make_adapter(denoiser, preset, rank=rank)
    weights = bind(
        denoiser,
        injected.parameters,
        shared=facts.shared_inputs,
        mode="bf16",
        device=device,
        dtype=DTYPE,
        scale=1.0,
    )
    if way == "compiled":
        denoiser.compile_repeated_blocks(fullgraph=True, dynamic=False, backend=BACKEND)
    if way == "checkpointed":
        recompute(denoiser)
    batch = make_batch(family, recipe, preset, side=side).to(device)
    still = {t.untyped_storage().data_ptr() for t in (*denoiser.parameters(), *denoiser.buffers())}
    still |= {leaf.untyped_storage().data_ptr() for leaf in weights.leaves}
    found: dict[int, torch.Tensor] = {}  # held, so that no address is used twice

    def hold(tensor: torch.Tensor) -> torch.Tensor:
        found.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with (
        saved_tensors_hooks(hold, lambda tensor: tensor),
        torch.autocast(device.type, DTYPE, cache_enabled=False),
    ):
        answer = family.predict(
            denoiser, batch.noisy, batch.level, conditioning=batch.conditioning, guidance=1.0
        )
    total = sum(t.untyped_storage().nbytes() for at, t in found.items() if at not in still)
    del answer
    return total


def differing(family: Family, recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """A recipe whose denoiser has other values."""
    name = family.FACTS.denoiser
    return {**recipe, name: {**recipe[name], **values}}


def measured(family: Family, recipe: Recipe, *, way: str, side: int, rank: int) -> float:
    """Hidden states of a block, over the kinds of blocks as often as the full size has them."""
    costs = family.FACTS.costs
    layers = costs.layers
    full = full_config(family, recipe)

    def kept(values: Mapping[str, int], side: int = side) -> int:
        other = differing(family, recipe, values)
        return kept_bytes(family, other, way=way, side=side, rank=rank)

    words = 77 if not layers else text_tokens(family, side)
    state = hidden_bytes(costs, full, Work(side, side, words, 1))
    if not layers:
        half = Work(side // 2, side // 2, words, 1)
        return (kept({}) - kept({}, side // 2)) / (state - hidden_bytes(costs, full, half))
    one = dict.fromkeys(layers, 1)
    least = kept(one)
    each = {name: kept({**one, name: 2}) - least for name in layers}
    depth = sum(full[name] for name in layers)
    return sum(full[name] * each[name] for name in layers) / depth / state


def full_config(family: Family, recipe: Recipe) -> Mapping[str, Any]:
    """The full size's configuration, its class's defaults included."""
    import diffusers
    from accelerate import init_empty_weights

    facts = family.FACTS
    with init_empty_weights():
        own = recipe[facts.denoiser]
        return dict(getattr(diffusers, facts.classes[facts.denoiser])(**own).config)


def text_tokens(family: Family, side: int) -> int:
    """Of the random caption that a batch here has."""
    preset = preset_of(family.FACTS.name)
    batch = make_batch(family, FULL[family.FACTS.name], preset, side=side)
    return batch.conditioning["text_embeds"].shape[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*", default=list(FULL))
    parser.add_argument("--side", type=int, default=512)
    parser.add_argument("--quarter", action="store_true")
    arguments = parser.parse_args()
    rank = RANK // 4 if arguments.quarter else RANK
    lines = ["| family | " + " | ".join(WAYS) + " |", "|" + "---|" * (1 + len(WAYS))]
    for name in arguments.families:
        family, recipe, cells = families.get(name), FULL[name], []
        if arguments.quarter:
            recipe = differing(family, recipe, QUARTER[name])
        for way in WAYS:
            try:
                found = measured(family, recipe, way=way, side=arguments.side, rank=rank)
                cells.append(f"{found:.2f}")
            except Exception:  # noqa: BLE001  # one family must not end the others
                traceback.print_exc()
                cells.append("failed")
            gc.collect()
            release()
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
