"""One optimizer step: forward, backward, clip, gate, update (design 6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from lib import ema, shapes
from lib.batches import Batch, StepBatches
from lib.family import Family
from lib.objectives import group_loss, per_sample_loss
from lib.optimizers import update
from lib.random import seed64
from lib.team import ALONE, Team


@dataclass(frozen=True)
class StepResult:
    """What a step reports; `finite` False means that the update was skipped.

    `asked`: some process of the run is to stop, and all know it.
    """

    loss: float
    grad_norm: float
    finite: bool
    asked: bool = False


@dataclass
class Trainer:
    """The denoiser with its adapter, the optimizer, and how a step computes."""

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
    _learning: tuple[bool, ...] = ()  # of several processes: which parameters have a gradient

    def step(self, group: StepBatches, *, rate: float) -> StepResult:
        """Gradients over all micro-batches, one update; raises nothing on a non-finite loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self.device)
        for number, batch in zip(group.numbers, group.on(self.device), strict=True):
            self._seed_dropout(group.step, number)
            # A group's weight is its samples: fillers, on whatever process, weigh nothing.
            share = self._loss(batch, float(group.num_samples))
            share.backward()
            loss += share.detach()
        loss, asked = self._shared(loss, asked=bool(self.asked()))
        norm = self._clip()
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        update(self.optimizer, rate=rate, finite=finite)
        self.team.settle(self.device)
        result = StepResult(
            loss=float(loss), grad_norm=float(norm), finite=bool(finite), asked=bool(asked)
        )
        if result.finite and self.ema:
            ema.update(self.ema, self.parameters, number=group.step + 1, decay=self.ema_decay)
        return result

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

    def _loss(self, batch: Batch, total_weight: float) -> shapes.Scalar:
        losses = per_sample_loss(self.predict(batch), batch.target) * batch.loss_weights
        return group_loss(losses, batch.weights, total_weight=total_weight)

    def _shared(self, loss: torch.Tensor, *, asked: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums over all processes, of gradients, loss, and who is asked to stop.

        Each process has a part of the group's mean.
        """
        asks = torch.tensor([float(asked)])
        if self.team.size == 1:
            return loss, asks
        asks = asks.to(self.device, non_blocking=True)
        parameters = list(self.parameters.values())
        if not self._learning:
            self._learning = self._learning_anywhere(parameters)
        for parameter in parameters:
            if parameter.grad is None:  # this process had no part in the group
                parameter.grad = torch.zeros_like(parameter)
        *gradients, loss, asks = self.team.summed([*(p.grad for p in parameters), loss, asks])
        # What never has a gradient must have none, not zeros: it would still decay.
        for parameter, gradient, learns in zip(parameters, gradients, self._learning, strict=True):
            parameter.grad = gradient if learns else None
        return loss, asks

    def _learning_anywhere(self, parameters: Sequence[torch.nn.Parameter]) -> tuple[bool, ...]:
        """Which parameters have a gradient in any process; asked once, since it waits."""
        here = torch.tensor([float(p.grad is not None) for p in parameters], device=self.device)
        (anywhere,) = self.team.summed([here])
        self.team.settle(self.device)
        return tuple(map(bool, anywhere.tolist()))

    def _clip(self) -> shapes.Scalar:
        """The norm before clipping; `max_grad_norm` 0 only measures."""
        limit = self.max_grad_norm or float("inf")
        return torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), limit)

    def autocast(self) -> Any:
        """The run's precision for a block; of this thread alone."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast_dtype)

    def _seed_dropout(self, step: int, micro: int) -> None:
        """Dropout uses torch's own generator: seeded per micro-batch, so a resume repeats it."""
        if self.dropout > 0:
            name = f"micro-batch {micro}"
            torch.manual_seed(
                seed64(seed=self.seed, stream="adapter_dropout", counter=step, sample_id=name)
            )
