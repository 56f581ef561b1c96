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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")

import torch

from bench.full_size import (
    DTYPE,
    TEXTS,
    WORDS,
    Texts,
    make_adapter,
    make_batch,
    make_denoiser,
    preset_of,
)
from bench.full_size_bases import FULL
from lib import attention, ema, families, texts
from lib.batches import Batch, StepBatches
from lib.binding import bind
from lib.compiling import compile_blocks, run_as_written
from lib.device import pick_device, release
from lib.families import qwen_image
from lib.family import Conditioning, Family
from lib.objectives import per_sample_loss
from lib.optimizers import make_optimizer
from lib.recomputing import recompute
from lib.records import compute_dtype
from lib.replays import Replays
from lib.schema import OptimizerConfig
from lib.training.step import Trainer

WARM, TIMED = 5, 15
RATE = 1e-4


@dataclass(frozen=True)
class Case:
    """What is measured, as `precision:pixels:batch[:option...]` names it."""

    mode: str
    side: int
    batch: int
    options: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str) -> "Case":
        mode, side, batch, *options = text.split(":")
        return cls(mode, int(side), int(batch), tuple(options))

    def __str__(self) -> str:
        return ":".join([self.mode, str(self.side), str(self.batch), *self.options])


@dataclass
class Bench:
    """One family's denoiser and its adapter; quantised ones are made anew."""

    family: Family
    recipe: Mapping[str, Any]
    preset: Mapping[str, Any]
    device: torch.device
    ceiling: float  # measured FLOP/s of a large bf16 product
    texts: Texts = TEXTS  # where captions are stored at their own length
    denoiser: Any = None
    injected: Any = None
    mode: str = ""

    def fresh(self) -> None:
        """A new dense denoiser with a new adapter."""
        self.denoiser = self.injected = None
        gc.collect()
        release()
        began = time.perf_counter()
        self.denoiser = make_denoiser(self.family, self.recipe, device=self.device)
        if self.family is qwen_image:
            qwen_image.make_recordable()  # as loading a base does
        self.injected = make_adapter(self.denoiser, self.preset)
        self.mode = "plain"
        print(f"  made in {time.perf_counter() - began:.0f} s", flush=True)

    def batch(self, case: Case) -> Batch:
        one = make_batch(self.family, self.recipe, self.preset, side=case.side, texts=self.texts)
        conditioning = Conditioning(
            {n: t.expand(case.batch, *t.shape[1:]).clone() for n, t in one.conditioning.items()},
            one.conditioning.lengths * case.batch,
        )
        tensors = [torch.cat([getattr(one, n)] * case.batch) for n in Batch.TENSORS]
        fields = dict(zip(Batch.TENSORS, tensors, strict=True))
        return Batch(**fields, conditioning=conditioning, names=("random",) * case.batch)

    def trainer(self, case: Case) -> Trainer:
        """Ours, bound in the case's precision, compiled and captured unless it says eager."""
        torch._dynamo.reset()
        if self.mode not in ("plain", "bf16"):
            self.fresh()
        dtype = compute_dtype(case.mode)
        if dtype != DTYPE:
            self.denoiser.to(dtype)
        weights = bind(
            self.denoiser,
            self.injected.parameters,
            shared=self.family.FACTS.shared_inputs,
            mode=case.mode,
            device=self.device,
            dtype=dtype,
            scale=1.0,
        )
        self.mode = case.mode
        self._as_written()
        for option in case.options:
            name, _, blocks = option.partition("=")
            if name == "checkpointing":
                recompute(self.denoiser, blocks=int(blocks) if blocks else None)
        on_gpu = self.device.type == "cuda"
        if on_gpu and not {"eager", "graph"} & set(case.options):
            compile_blocks(self.denoiser, fixed_text=True)  # one shape a case
        optimizer = make_optimizer(self.injected.parameters.values(), OptimizerConfig(lr=RATE))
        captures = on_gpu and not {"eager", "compiled"} & set(case.options)
        return Trainer(
            family=self.family,
            denoiser=self.denoiser,
            parameters=self.injected.parameters,
            optimizer=optimizer,
            device=self.device,
            autocast_dtype=None if case.mode == "fp32" else dtype,
            max_grad_norm=1.0,
            seed=0,
            dropout=0.0,
            ema_decay=0.99,
            ema=ema.start(self.injected.parameters),
            weights=weights,
            replays=Replays(self.device, enabled=captures, refused=print),
        )

    def group(self, batch: Batch, number: int = 0) -> StepBatches:
        """A step's only batch, as training hands it over."""
        made = StepBatches(number, (batch,), (0,), num_samples=len(batch.noisy))
        return made.packed() if self.device.type == "cuda" else made

    def _as_written(self) -> None:
        run_as_written(self.denoiser)
        self.denoiser.disable_gradient_checkpointing()

    def ours(self, case: Case) -> Callable[[], Any]:
        trainer, batch = self.trainer(case), self.batch(case)
        group = self.group(batch)
        unread: list[Any] = []

        def step() -> None:
            """As the training loop does: a step's numbers are read when the next is on its way."""
            unread.append(trainer.launch(group, rate=RATE))
            if len(unread) > 1:
                unread.pop(0).result()

        return step

    def common(self, case: Case, *, compiled: bool) -> Callable[[], Any]:
        """The loop of the public scripts: PEFT's layers under autocast, AdamW, one `item`."""
        torch._dynamo.reset()
        if self.mode != "plain":
            self.fresh()
        self._as_written()
        if "free" not in case.options:
            self.denoiser.enable_gradient_checkpointing()
        if compiled:
            self.denoiser.compile_repeated_blocks(dynamic=True)
        parameters = list(self.injected.parameters.values())
        optimizer = make_optimizer(parameters, OptimizerConfig(lr=RATE))
        batch = self.batch(case).to(self.device)

        return lambda: plain_step(self.family, self.denoiser, parameters, optimizer, batch)

    def flops(self, case: Case) -> float:
        """Of one plain step without recomputation, by torch's counter."""
        from torch.utils.flop_counter import FlopCounterMode

        step = self.common(Case("bf16", case.side, case.batch, ("free",)), compiled=False)
        with FlopCounterMode(display=False) as counter:
            step()
        return counter.get_total_flops()

    def measure(self, name: str, case: Case, step: Callable[[], Any], flops: float) -> str:
        gc.collect()
        release()
        gpu = self.device.type == "cuda"
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
            f"{peak:.1f} | {rate / 1e12:.0f} | {100 * rate / self.ceiling:.0f} % | {first:.0f} |"
        )


def predicted(family: Family, denoiser: Any, batch: Batch) -> torch.Tensor:
    """Under autocast, for a batch on the device."""
    with torch.autocast(batch.noisy.device.type, DTYPE):
        return family.predict(
            denoiser, batch.noisy, batch.level, conditioning=batch.conditioning, guidance=1.0
        )


def plain_step(
    family: Family,
    denoiser: Any,
    parameters: Sequence[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    batch: Batch,
) -> float:
    """A step of the public scripts, over a batch on the device; its loss."""
    loss = per_sample_loss(predicted(family, denoiser, batch), batch.target).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


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
    parser.add_argument("--words", type=int, help=f"text tokens of a caption, padded ({WORDS})")
    parser.add_argument("--spoken", type=int, help="how many of them are its own (all)")
    parser.add_argument("--targets", nargs="*", help="of the adapter (the preset's)")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--flash4", action="store_true", help="FlashAttention-4's kernels")
    asked = parser.parse_args(words)
    for fault in faults_of_texts(families.get(asked.family), asked.words, asked.spoken):
        parser.error(fault)
    return asked


def faults_of_texts(family: Family, words: int | None, spoken: int | None) -> Iterator[str]:
    """What is wrong with lengths of text; an option that would have no effect is refused."""
    facts, longest = family.FACTS, words if words is not None else WORDS
    if words is None and spoken is None:
        return
    if facts.caption_rule["positions"] == "all":
        yield f"--words, --spoken: the captions of {facts.name} have one length"
    if not facts.min_text_tokens <= longest <= facts.max_text_tokens:
        yield f"--words {longest}: {facts.min_text_tokens} to {facts.max_text_tokens} are allowed"
    if spoken is not None and facts.caption_rule["mask"] is None:
        yield f"--spoken: no padding reaches the denoiser of {facts.name}"
    if spoken is not None and not 1 <= spoken <= longest:
        yield f"--spoken {spoken}: 1 to {longest} are allowed"
    if spoken not in (None, longest) and longest % texts.MULTIPLE:
        yield f"--words {longest}: training pads to multiples of {texts.MULTIPLE}"


def measured(bench: Bench, cases: Sequence[Case], *, plain: bool, profile: bool) -> list[str]:
    """A row of each case; of the common loops too, if they are asked for."""
    rows: list[str] = []
    counted: dict[tuple[int, int], float] = {}

    def row(name: str, case: Case, step: Callable[[], Any]) -> None:
        flops = counted.get((case.side, case.batch), 0.0)
        rows.append(bench.measure(name, case, step, flops))
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
        ceiling,
        Texts(asked.words or WORDS, asked.spoken),
    )
    if family.FACTS.caption_rule["positions"] != "all":
        words, spoken = bench.texts
        print(f"{words} text tokens, its own: {spoken or words}", flush=True)
    print(f"adapter on {', '.join(preset['targets'])}", flush=True)
    with attention.engaged(flash4=asked.flash4):
        rows = measured(
            bench,
            [Case.of(text) for text in asked.cases],
            plain=asked.plain,
            profile=asked.profile,
        )
    print("\n" + "\n".join([HEADER, *rows]), flush=True)


if __name__ == "__main__":
    main()
