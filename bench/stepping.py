"""A full-size denoiser with random weights that takes steps, ours or a public script's.

What `bench.train_step` times, `bench.parity` compares and `bench.reloaded` exports.
"""

import argparse
import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")

import torch

from bench.full_size import DTYPE, TEXTS, WORDS, Texts, make_adapter, make_batch, make_denoiser
from lib import ema, texts
from lib.batches import Batch, StepBatches
from lib.binding import bind
from lib.compiling import compile_blocks, run_as_written
from lib.device import release
from lib.families import qwen_image
from lib.family import Conditioning, Family
from lib.objectives import per_sample_loss
from lib.optimizers import make_optimizer
from lib.recomputing import recompute
from lib.records import compute_dtype
from lib.replays import Replays
from lib.schema import OptimizerConfig
from lib.training.step import Trainer

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
        return several(one, case.batch)

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


def several(batch: Batch, count: int) -> Batch:
    """A batch, a number of times."""
    conditioning = Conditioning(
        {name: torch.cat([tensor] * count) for name, tensor in batch.conditioning.items()},
        batch.conditioning.lengths * count,
    )
    tensors = {name: torch.cat([getattr(batch, name)] * count) for name in Batch.TENSORS}
    return replace(batch, conditioning=conditioning, names=batch.names * count, **tensors)


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


def add_lengths(parser: argparse.ArgumentParser) -> None:
    """Options of a caption's length."""
    parser.add_argument("--words", type=int, help=f"text tokens of a caption, padded ({WORDS})")
    parser.add_argument("--spoken", type=int, help="how many of them are its own (all)")


def texts_of(parser: argparse.ArgumentParser, asked: argparse.Namespace, family: Family) -> Texts:
    """As the options ask; what is wrong with them ends the program."""
    for fault in faults_of_texts(family, asked.words, asked.spoken):
        parser.error(fault)
    return Texts(asked.words or WORDS, asked.spoken)


def faults_of_texts(family: Family, words: int | None, spoken: int | None) -> Iterator[str]:
    """What is wrong with lengths of text; an option that would have no effect is refused."""
    facts, longest = family.FACTS, words if words is not None else WORDS
    if words is None and spoken is None:
        return
    if facts.fixed_texts:
        yield f"--words, --spoken: the captions of {facts.name} have one length"
    if not facts.min_text_tokens <= longest <= facts.max_text_tokens:
        yield f"--words {longest}: {facts.min_text_tokens} to {facts.max_text_tokens} are allowed"
    if spoken is not None and not facts.masked_texts:
        yield f"--spoken: no padding reaches the denoiser of {facts.name}"
    if spoken is not None and not 1 <= spoken <= longest:
        yield f"--spoken {spoken}: 1 to {longest} are allowed"
    if spoken not in (None, longest) and longest % texts.MULTIPLE:
        yield f"--words {longest}: training pads to multiples of {texts.MULTIPLE}"
