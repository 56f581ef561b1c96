"""What summing an adapter's gradients over the processes costs; `bench.two_gpus` starts it.

The adapter is FLUX.1's at rank 16: 532 float32 tensors, 26 M numbers.
"""

import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from lib.device import pick_device
from lib.team import gathered, this_process

PAIRS, WIDTH, RANK = 266, 3072, 16
WARM, TIMES, CPU_TIMES = 2, 50, 2


def seconds_of(action: Callable[[], object], device: torch.device) -> float:
    """Median wall time of an action, with nothing before it on the device."""
    taken = []
    for number in range(WARM + (TIMES if device.type == "cuda" else CPU_TIMES)):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken += [time.perf_counter() - began] if number >= WARM else []
    return statistics.median(taken)


def main() -> None:
    team, device = this_process(), pick_device()
    with gathered(team):
        gradients = [
            torch.ones(shape, device=device)
            for _ in range(PAIRS)
            for shape in ((RANK, WIDTH), (WIDTH, RANK))
        ]
        right = all(bool((total == team.size).all()) for total in team.summed(gradients))
        flat = torch.zeros(sum(g.numel() for g in gradients), device=device)
        alone = seconds_of(lambda: dist.all_reduce(flat), device)
        whole = seconds_of(lambda: team.summed(gradients), device)
    if team.leads:
        found = {
            "megabytes": flat.numel() * 4 / 1e6,
            "all_reduce_ms": 1000 * alone,
            "summed_ms": 1000 * whole,
            "right": right,
        }
        print("SUM " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
