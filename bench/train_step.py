"""One training step of a full-size denoiser with random weights: ours beside two common loops.

    python -m bench.train_step flux --cases bf16:512:1 fp8:512:4 [--plain] [--profile] [--tiny]
    python -m bench.train_step krea2 --words 512 --spoken 72 --targets to_q to_k to_v to_out.0

A case is precision:pixels:batch with options after it, as in `nf4:512:1:checkpointing`,
`nf4:512:1:checkpointing=40` (blocks), `bf16:512:1:eager` (neither compiled nor captured), or one
alone of `compiled` and `graph`. A family that stores captions at their own length has one of
`--words` tokens, of which `--spoken` are its own and the rest is masked padding, as a caption has
beside a longer one in its micro-batch. An adapter is on the preset's targets or on `--targets`.
`--plain` adds (a) the plain eager loop with checkpointing and (b) regional compile with dynamic
shapes and checkpointing, at each size in bf16. What a step learns: `bench.parity`.
Prints steps/s, samples/s, peak memory, TFLOP/s and the share of the measured matmul ceiling.
"""

import argparse
import gc
import os
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")

import torch

from bench.full_size import DTYPE, preset_of
from bench.full_size_bases import FULL
from bench.stepping import Bench, Case, add_lengths, texts_of
from lib import attention, families
from lib.device import pick_device, release

WARM, TIMED = 5, 15


def measure(name: str, case: Case, step: Callable[[], Any], *, flops: float, ceiling: float) -> str:
    """A row of a case; `ceiling` is the measured FLOP/s of a large bf16 product."""
    gc.collect()
    release()
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    step()
    first = time.perf_counter() - began
    for _ in range(WARM):
        step()
    if gpu:
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(TIMED):
        step()
    if gpu:
        torch.cuda.synchronize()
    took = (time.perf_counter() - began) / TIMED
    peak = torch.cuda.max_memory_allocated() / 2**30 if gpu else 0.0
    rate = flops / took
    return (
        f"| {name} | {case} | {1000 * took:.1f} | {1 / took:.2f} | {case.batch / took:.2f} | "
        f"{peak:.1f} | {rate / 1e12:.0f} | {100 * rate / ceiling:.0f} % | {first:.0f} |"
    )


HEADER = (
    "| loop | case | ms a step | steps/s | samples/s | peak GiB | TFLOP/s | of the ceiling "
    "| first step, s |\n"
    "|" + "---|" * 9
)


def ceiling_of(device: torch.device) -> float:
    """FLOP/s of a bf16 product of 8192 cubed (of 512 on a CPU)."""
    side = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(side, side, device=device, dtype=DTYPE) for _ in range(2))
    times = []
    for _ in range(30):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return 2 * side**3 / statistics.median(times)


def profiled(step: Callable[[], Any]) -> None:
    """Where a step's time on the device goes."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        step()
        torch.cuda.synchronize()
    print(
        found.key_averages().table(
            sort_by="self_cuda_time_total", row_limit=80, max_name_column_width=110
        )
    )


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("family", choices=sorted(FULL))
    parser.add_argument("--cases", nargs="*", default=["bf16:512:1"])
    add_lengths(parser)
    parser.add_argument("--targets", nargs="*", help="of the adapter (the preset's)")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--flash4", action="store_true", help="FlashAttention-4's kernels")
    asked = parser.parse_args(words)
    asked.texts = texts_of(parser, asked, families.get(asked.family))
    return asked


def measured(
    bench: Bench, cases: Sequence[Case], *, ceiling: float, plain: bool, profile: bool
) -> list[str]:
    """A row of each case; of the common loops too, if they are asked for."""
    rows: list[str] = []
    counted: dict[tuple[int, int], float] = {}

    def row(name: str, case: Case, step: Callable[[], Any]) -> None:
        flops = counted.get((case.side, case.batch), 0.0)
        rows.append(measure(name, case, step, flops=flops, ceiling=ceiling))
        print(rows[-1], flush=True)

    bench.fresh()
    for size in dict.fromkeys((case.side, case.batch) for case in cases):
        case = Case("bf16", *size)
        try:
            counted[size] = bench.flops(case)
            for name, compiled in (("eager", False), ("compiled, dynamic", True)) * plain:
                row(name, case, bench.common(case, compiled=compiled))
        except Exception:  # noqa: BLE001  # one case must not end the others
            traceback.print_exc()
    for case in cases:
        try:
            step = bench.ours(case)
            row("ours", case, step)
            if profile:
                profiled(step)
            del step
        except Exception:  # noqa: BLE001  # one case must not end the others
            traceback.print_exc()
    return rows


def main(words: Sequence[str] | None = None) -> None:
    asked = parsed(words)
    family, device = families.get(asked.family), pick_device()
    preset = preset_of(asked.family)
    preset = {**preset, "targets": asked.targets or preset["targets"]}
    ceiling = ceiling_of(device)
    print(f"torch {torch.__version__}, matmul ceiling {ceiling / 1e12:.0f} TFLOP/s", flush=True)
    bench = Bench(
        family,
        family.TINY if asked.tiny else FULL[asked.family],
        preset,
        device,
        asked.texts,
    )
    if not family.FACTS.fixed_texts:
        words, spoken = bench.texts
        print(f"{words} text tokens, its own: {spoken or words}", flush=True)
    print(f"adapter on {', '.join(preset['targets'])}", flush=True)
    with attention.engaged(flash4=asked.flash4):
        rows = measured(
            bench,
            [Case.of(text) for text in asked.cases],
            ceiling=ceiling,
            plain=asked.plain,
            profile=asked.profile,
        )
    print("\n" + "\n".join([HEADER, *rows]), flush=True)


if __name__ == "__main__":
    main()
