"""Frozen products with an adapter on the GPU against the CPU: every kind, as written and compiled.

    python -m bench.products

Relative distances of the answer and of the gradients of x, A and each B, in bfloat16; then the
kernels of our own against torch's own operators, that of nf4 against bitsandbytes' bit for
bit in each precision, and the bytes a second that they move.
"""

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from lib import float8_kernels, frozen, kernels, products, rotary
from lib.products import Up
from lib.rotary import Stream

KINDS = {**frozen.KINDS, "dense": frozen.DenseLinear}
FEATURES, ROWS, TOKENS, RANK = 1024, 3072, (2, 96), 16
WIDE = (1536, 21504)  # tokens and columns of FLUX's widest gradient at 512 px
NF4 = ((3072, 12288), (9216, 3072), (21504, 3072))  # rows and features of FLUX's widest weights
STREAMS, HEADS, HEAD = (512, 1024), 24, 128
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


def widened_from_nf4(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    """By our kernel and by bitsandbytes'; the bytes of both are those that one launch moves."""
    weight = drawn(*shape, seed=10, device=device)
    stored = list(frozen.in_nf4(weight).values())

    def work() -> torch.Tensor:
        return products.from_nf4(stored, shape, dtype)

    name, wide = f"{shape} {str(dtype).removeprefix('torch.')}", work()
    with patch.object(kernels, "HERE", False):
        expected = work()
        rate(f"bitsandbytes' nf4 {name}", work, (*stored, wide), 0.0)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    differ = float((wide.view(bits) != expected.view(bits)).float().mean())
    rate(f"widened_nf4 {name}", work, (*stored, wide), differ)


def streams_of(device: torch.device) -> list[Stream]:
    """q of FLUX's double blocks at 512 px, as its products answer: texts, then pictures."""
    found = []
    for seed, tokens in enumerate(STREAMS):
        whole = drawn(1, tokens, 3 * HEADS * HEAD, seed=20 + seed, device=device)
        angles = drawn(1, tokens, HEAD // 2, seed=30 + seed, device=device).float()
        x = whole[..., : HEADS * HEAD].unflatten(-1, (HEADS, HEAD)).requires_grad_()
        found.append(Stream(x, drawn(HEAD, seed=40, device=device), angles.cos(), angles.sin()))
    return found


def rotated_heads(device: torch.device) -> None:
    """Norm and rotation of heads against the CPU, and how fast they are."""
    answers = []
    for place in (torch.device("cpu"), device):
        streams = streams_of(place)
        answer = rotary.rotated(streams, eps=1e-6)
        seed = drawn(*answer.shape, seed=50, device=place)
        gradients = torch.autograd.grad(answer, [stream.x for stream in streams], seed)
        answers.append([t.detach().float().cpu() for t in (answer, *gradients)])
    apart = [float((a - b).norm() / a.norm()) for a, b in zip(*answers, strict=True)]
    lists = [list(kind) for kind in zip(*streams_of(device), strict=True)]
    whole = rotary.rotate(*lists, 1e-6, 0.0)
    moved = (whole, whole)
    rate("rotate", lambda: rotary.rotate(*lists, 1e-6, 0.0), moved, apart[0])
    moved = (whole, whole, whole)
    rate("rotate_back", lambda: rotary.rotate_back(whole, *lists, 1e-6, 0.0), moved, max(apart[1:]))


def main() -> None:
    print(f"| kind | | {' | '.join(PARTS)} |\n|{'---|' * (2 + len(PARTS))}")
    for kind in KINDS:
        compared(kind)
    print("\n| kernel | share of numbers that differ, or distance | us | TB/s |\n|---|---|---|---|")
    device = torch.device("cuda")
    matrix = drawn(*WIDE, seed=8, device=device)
    most = products.FP8_MAX
    stored, scale = float8_kernels.rows_in_fp8(matrix, most=most)
    by_torch = (matrix.abs().amax(-1, keepdim=True).float() / most).clamp_min(1e-12)
    expected = (matrix.float() / by_torch).clamp(-most, most).to(products.FP8)
    differ = float((stored.float() != expected.float()).float().mean())
    moved = (matrix, stored, scale)
    rate("rows_in_fp8", lambda: float8_kernels.rows_in_fp8(matrix, most=most), moved, differ)
    whole = torch.randint(-127, 128, WIDE, dtype=torch.int8, device=device)
    scales = drawn(WIDE[0], seed=9, device=device)
    wide = kernels.widened(whole, scales)
    differ = float((wide != whole.to(scales.dtype) * scales[:, None]).float().mean())
    rate("widened", lambda: kernels.widened(whole, scales), (whole, scales, wide), differ)
    for shape in NF4:
        widened_from_nf4(shape, torch.bfloat16, device)
    for dtype in (torch.float16, torch.float32):
        widened_from_nf4(NF4[0], dtype, device)
    rotated_heads(device)


if __name__ == "__main__":
    main()
