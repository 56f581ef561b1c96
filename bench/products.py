"""Frozen products with an adapter on the GPU against the CPU: every kind, as written and compiled.

    python -m bench.products

Relative distances of the answer and of the gradients of x, A and each B, in bfloat16; then the
kernels of `lib/kernels.py` against torch's own operators, and the bytes a second that they move.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lib import frozen, kernels, products
from lib.products import Up

KINDS = {**frozen.KINDS, "dense": frozen.DenseLinear}
FEATURES, ROWS, TOKENS, RANK = 1024, 3072, (2, 96), 16
WIDE = (1536, 21504)  # tokens and columns of FLUX's widest gradient at 512 px
PARTS = ("answer", "x", "A", "first B", "second B")


def drawn(*shape: int, seed: int, device: torch.device) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=source).to(device, torch.bfloat16)


def computed(kind: str, device: torch.device, *, compiled: bool) -> list[torch.Tensor]:
    """The answer and all gradients of a layer whose last two thirds have an adapter."""
    linear = nn.Linear(FEATURES, ROWS, dtype=torch.bfloat16, device=device).requires_grad_(False)
    linear.weight.copy_(drawn(ROWS, FEATURES, seed=1, device=device) / FEATURES**0.5)
    linear.bias.copy_(drawn(ROWS, seed=2, device=device))
    layer, third = KINDS[kind](linear), ROWS // 3
    down = (drawn(2 * RANK, FEATURES, seed=3, device=device) / FEATURES**0.5).requires_grad_()
    ups = [
        Up(
            drawn(third, RANK, seed=4 + n, device=device).requires_grad_(),
            (third * (1 + n), third * (2 + n)),
            (RANK * n, RANK * (n + 1)),
        )
        for n in range(2)
    ]
    x = drawn(*TOKENS, FEATURES, seed=6, device=device).requires_grad_()

    def answer_of(x: torch.Tensor) -> torch.Tensor:
        return layer.adapted(x * 1.5, down=down, ups=ups) * 0.5

    function = torch.compile(answer_of, fullgraph=True, dynamic=False) if compiled else answer_of
    answer = function(x)
    (answer * drawn(*TOKENS, ROWS, seed=7, device=device)).sum().backward()
    found = (answer, x.grad, down.grad, *(up.weight.grad for up in ups))
    return [tensor.detach().float().cpu() for tensor in found if tensor is not None]


def compared(kind: str) -> None:
    expected = computed(kind, torch.device("cpu"), compiled=False)
    for compiled in (False, True):
        found = computed(kind, torch.device("cuda"), compiled=compiled)
        apart = [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
        cells = " | ".join(f"{distance:.1e}" for distance in apart)
        print(f"| {kind} | {'compiled' if compiled else 'as written'} | {cells} |", flush=True)


def seconds(work: Callable[[], Any], *, times: int = 50) -> float:
    """The mean of many launches, after some."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(5):
        work()
    start.record()
    for _ in range(times):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000 / times


def rate(name: str, work: Callable[[], Any], moved: Sequence[torch.Tensor], differ: float) -> None:
    took = seconds(work)
    speed = sum(tensor.nbytes for tensor in moved) / took / 1e12
    print(f"| {name} | {differ:.1e} | {1e6 * took:.0f} | {speed:.2f} |", flush=True)


def main() -> None:
    print(f"| kind | | {' | '.join(PARTS)} |\n|{'---|' * (2 + len(PARTS))}")
    for kind in KINDS:
        compared(kind)
    print("\n| kernel | share of numbers that differ | us | TB/s |\n|---|---|---|---|")
    device = torch.device("cuda")
    matrix = drawn(*WIDE, seed=8, device=device)
    (stored, scale), most = kernels.rows_in_fp8(matrix, most=products.FP8_MAX), products.FP8_MAX
    by_torch = (matrix.abs().amax(-1, keepdim=True).float() / most).clamp_min(1e-12)
    expected = (matrix.float() / by_torch).clamp(-most, most).to(products.FP8)
    differ = float((stored.float() != expected.float()).float().mean())
    moved = (matrix, stored, scale)
    rate("rows_in_fp8", lambda: kernels.rows_in_fp8(matrix, most=most), moved, differ)
    whole = torch.randint(-127, 128, WIDE, dtype=torch.int8, device=device)
    scales = drawn(WIDE[0], seed=9, device=device)
    wide = kernels.widened(whole, scales)
    differ = float((wide != whole.to(scales.dtype) * scales[:, None]).float().mean())
    rate("widened", lambda: kernels.widened(whole, scales), (whole, scales, wide), differ)


if __name__ == "__main__":
    main()
