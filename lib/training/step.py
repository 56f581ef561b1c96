"""One optimizer step: forward, backward, clip, gate, update (design 6)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from lib import compiling, ema, shapes
from lib.batches import Batch, StepBatches
from lib.copies import Weights
from lib.device import arriving
from lib.family import Family
from lib.objectives import group_loss, per_sample_loss
from lib.optimizers import moves_on_device, set_rate, update
from lib.random import seed64
from lib.replays import Replays
from lib.team import ALONE, Team


@dataclass(frozen=True)
class StepResult:
    """What a step reports; `finite` False means that the update was skipped.

    Also where an earlier one was not finite whose numbers had not been read yet.

    `asked`: some process of the run is to stop, and all know it.
    """

    loss: float
    grad_norm: float
    finite: bool
    asked: bool = False


@dataclass(frozen=True)
class Launched:
    """A step that was handed to the device, and where its numbers arrive."""

    trainer: Trainer
    numbers: torch.Tensor
    arrived: Callable[[], None]

    def result(self) -> StepResult:
        """The step's numbers, waited for."""
        self.arrived()
        loss, norm, asked, sound = self.numbers.tolist()
        if not sound:
            self.trainer.forgive()
        return StepResult(loss=loss, grad_norm=norm, finite=bool(sound), asked=bool(asked))


@dataclass
class Trainer:
    """The denoiser with its adapter, the optimizer, and how a step computes.

    A step is device work in two pieces, gradients for each micro-batch and the update; both can
    be replayed (`Replays`), so what changes from step to step reaches them in tensors.
    """

    family: Family
    denoiser: Any
    parameters: Mapping[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    device: torch.device
    autocast_dtype: torch.dtype | None
    max_grad_norm: float
    seed: int
    dropout: float
    ema_decay: float = 0.0
    ema: dict[str, torch.Tensor] = field(default_factory=dict)
    guidance: float = 1.0
    team: Team = ALONE
    asked: Callable[[], str] = lambda: ""  # whether this process is to stop
    weights: Weights = None  # type: ignore[assignment]  # of the parameters alone unless bound
    replays: Replays = None  # type: ignore[assignment]  # none unless asked for
    flash4: bool = False  # whose attention kernels
    uncompile: Callable[[str], None] | None = None  # told why, where blocks are compiled
    _learning: tuple[bool, ...] = ()  # of several processes: which parameters have a gradient

    def __post_init__(self) -> None:
        self.weights = self.weights or Weights(self.parameters)
        self.replays = self.replays or Replays(self.device)
        self._averages = self.weights.adopt(self.ema)
        scalar = partial(torch.zeros, (), dtype=torch.float32, device=self.device)
        self._loss_sum, self._norm, self._num_samples, self._ema_weight, self._sound = (
            scalar() for _ in range(5)
        )
        self._sound.fill_(1.0)

    def step(self, group: StepBatches, *, rate: float) -> StepResult:
        """One step, whose numbers are waited for."""
        return self.launch(group, rate=rate).result()

    def launch(self, group: StepBatches, *, rate: float) -> Launched:
        """Gradients over all micro-batches, one update; a GPU may still be at them.

        Raises nothing on a non-finite loss: from there on nothing moves until it has been read.
        """
        asked = bool(self.asked())
        with self.replays.stream():
            if self.uncompile is None:
                return self._launched(group, rate, asked=asked)
            try:
                return self._launched(group, rate, asked=asked)
            except compiling.failures() as error:
                self.uncompile(f"{type(error).__name__}: {str(error).splitlines()[0]}")
                self.uncompile = None
                return self._launched(group, rate, asked=asked)

    def _launched(self, group: StepBatches, rate: float, *, asked: bool) -> Launched:
        self._begin(group, rate)
        for number, batch in zip(group.numbers, group.on(self.device), strict=True):
            self._seed_dropout(group.step, number)
            work = partial(self._gradients, batch)
            self.replays.run(_kind(batch), work, batch.tensors())
        asks = self._shared(asked=asked)
        if moves_on_device(self.optimizer):
            self.replays.run(("update", self.weights.learning), self._update)
        else:
            self._update()
        self.team.settle(self.device)
        report = torch.stack([self._loss_sum, self._norm, asks, self._sound])
        return Launched(self, *arriving(report))

    @torch.no_grad()
    def _begin(self, group: StepBatches, rate: float) -> None:
        """What differs from step to step, put where the device work looks for it."""
        self.weights.clear()
        set_rate(self.optimizer, rate)
        self._loss_sum.zero_()
        # A group's weight is its samples: fillers, on whatever process, weigh nothing.
        self._num_samples.fill_(float(group.num_samples))
        self._ema_weight.fill_(1.0 - ema.decay_at(group.step + 1, decay=self.ema_decay))

    def _gradients(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> None:
        """One micro-batch's part of the gradients and of the loss."""
        share = self._loss(batch.with_tensors(tensors))
        share.backward()
        self._loss_sum += share.detach()
        self.weights.gather()

    def _update(self, _: Sequence[torch.Tensor] = ()) -> None:
        """Clip, gate, move the weights and their average."""
        self._norm.copy_(self._clip())
        finite = torch.isfinite(self._loss_sum) & torch.isfinite(self._norm) & (self._sound > 0)
        self._sound.copy_(finite)
        update(self.optimizer, finite=finite)
        if self._averages:
            weight = torch.where(finite, self._ema_weight, torch.zeros_like(self._ema_weight))
            ema.move(self._averages, self.weights.values(), weight=weight)
        self.weights.refresh()

    def forgive(self) -> None:
        """Let steps move weights again after one that was not finite."""
        self._sound.fill_(1.0)

    def predict(self, batch: Batch) -> shapes.Prediction:
        """The denoiser's answer to a batch on the device, in the run's precision."""
        with self.autocast():
            return self.family.predict(
                self.denoiser,
                batch.noisy,
                batch.level,
                conditioning=batch.conditioning,
                guidance=self.guidance,
            )

    @torch.no_grad()
    def look(self, batch: Batch) -> shapes.Prediction:
        """A prediction beside training: uncompiled, since without gradients it is another graph."""
        with torch.compiler.set_stance("force_eager") if self.uncompile else nullcontext():
            return self.predict(batch)

    def _loss(self, batch: Batch) -> shapes.Scalar:
        losses = per_sample_loss(self.predict(batch), batch.target) * batch.loss_weights
        return group_loss(losses, batch.weights, total_weight=self._num_samples)

    def _shared(self, *, asked: bool) -> torch.Tensor:
        """Sums over all processes, of gradients, loss, and who is asked to stop.

        Each process has a part of the group's mean.
        """
        asks = torch.full((), float(asked), device=self.device)
        if self.team.size == 1:
            return asks
        if not self._learning:
            self._learning = self._learning_anywhere()
        self.weights.complete()  # this process may have had no part in the group
        own = [*self.weights.gradients(), self._loss_sum, asks]
        for tensor, total in zip(own, self.team.summed(own), strict=True):
            tensor.copy_(total)
        self.weights.keep(self._learning)
        return asks

    def _learning_anywhere(self) -> tuple[bool, ...]:
        """Which parameters have a gradient in any process; asked once, since it waits."""
        here = torch.tensor([float(one) for one in self.weights.learning], device=self.device)
        (anywhere,) = self.team.summed([here])
        self.team.settle(self.device)
        return tuple(map(bool, anywhere.tolist()))

    @torch.no_grad()
    def _clip(self) -> shapes.Scalar:
        """The norm before clipping, as `torch.nn.utils.clip_grad_norm_`; limit 0 only measures."""
        gradients = self.weights.gradients()
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.max_grad_norm > 0:
            torch._foreach_mul_(gradients, (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def autocast(self) -> Any:
        """The run's precision for a block; of this thread alone."""
        if self.autocast_dtype is None:
            return nullcontext()
        # Its cache of cast weights would be of one recording, and a base in bfloat16 needs none.
        return torch.autocast(self.device.type, dtype=self.autocast_dtype, cache_enabled=False)

    def _seed_dropout(self, step: int, micro: int) -> None:
        """Dropout uses torch's own generator: seeded per micro-batch, so a resume repeats it."""
        if self.dropout > 0:
            name = f"micro-batch {micro}"
            torch.manual_seed(
                seed64(seed=self.seed, stream="adapter_dropout", counter=step, sample_id=name)
            )


def _kind(batch: Batch) -> Hashable:
    """What two batches share for which the device does the same work."""
    sizes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in batch.tensors())
    return sizes, batch.conditioning.lengths
