"""The held-out loss: fixed draws on pictures that never train, by band of sigma, raw and EMA."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lib import adapter, files, random
from lib.batches import Batch, Records, Slot
from lib.events import Events
from lib.family import Family
from lib.intervals import change
from lib.noise import NoiseProcess
from lib.objectives import per_sample_loss
from lib.schema import TimestepsConfig
from lib.training.step import Trainer

FILE = "validation.json"
NUM_BANDS = 4  # equal parts of (0, 1]
SEED = 0  # the same draws in every run, whatever its seed, so that runs compare
RAW, AVERAGE = "held_out_loss", "held_out_loss_ema"


@dataclass(frozen=True)
class Draw:
    """One fixed draw of a held-out picture; draw k of n lies in the k-th n-th of (0, 1]."""

    slot: Slot
    number: int
    level: float


def fixed_draws(
    slots: Sequence[Slot],
    *,
    num_draws: int,
    process: NoiseProcess,
    timesteps: TimestepsConfig,
    divisor: int,
) -> list[Draw]:
    """`num_draws` levels for each picture, stratified, then shifted as in training."""
    found = []
    for slot in slots:
        tokens = slot.bucket.tokens(divisor)
        for number in range(num_draws):
            place = _place(slot.name, number, num_draws)
            level = process.level_at(place, settings=timesteps, tokens=tokens)
            found.append(Draw(slot, number, level))
    return found


def _place(name: str, number: int, num_draws: int) -> float:
    inside = random.uniform(
        seed=SEED, stream="validation", counter=number, sample_id=f"sigma {name}"
    )
    return (number + 1 - inside) / num_draws


@dataclass(frozen=True)
class HeldOut:
    """The held-out draws, and how a batch of them is put together."""

    draws: tuple[Draw, ...]
    family: Family
    process: NoiseProcess
    records: Records
    constants: Mapping[str, Any]
    batch_size: int

    def batches(self) -> Iterator[Batch]:
        """Batches of one bucket; a short one is filled with its last draw at weight 0."""
        for draws in _by_bucket(self.draws).values():
            for start in range(0, len(draws), self.batch_size):
                yield self._batch(draws[start : start + self.batch_size])

    def _batch(self, draws: Sequence[Draw]) -> Batch:
        rows = [*draws, *[draws[-1]] * (self.batch_size - len(draws))]
        latents = torch.cat([self._latents(draw.slot) for draw in rows])
        noise = torch.cat([self.noise(draw, tuple(latents.shape[1:])) for draw in rows])
        level = torch.tensor([draw.level for draw in rows], dtype=torch.float32)
        captions = [self.records("captions", draw.slot.caption) for draw in rows]
        return Batch(
            noisy=self.process.add_noise(latents, noise, level),
            target=self.process.target(latents, noise, level),
            level=level,
            weights=torch.tensor([1.0] * len(draws) + [0.0] * (len(rows) - len(draws))),
            loss_weights=torch.ones(len(rows)),  # so that runs with other objectives compare
            conditioning=self.family.conditioning(captions, [d.slot.frames[0] for d in rows]),
            names=tuple(draw.slot.name for draw in rows),
        )

    @staticmethod
    def noise(draw: Draw, shape: tuple[int, ...]) -> torch.Tensor:
        """The draw's own noise: 1 c h w."""
        numbers = random.normal(
            (1, *shape),
            seed=SEED,
            stream="validation",
            counter=draw.number,
            sample_id=f"noise {draw.slot.name}",
        )
        return torch.from_numpy(numbers)

    def _latents(self, slot: Slot) -> torch.Tensor:
        """The posterior's mode: what is measured is the denoiser, not the draw of the latents."""
        mean = self.records("latents", slot.latents[0])["mean"][None]
        return self.family.normalise(mean, self.constants)


def _by_bucket(draws: Sequence[Draw]) -> dict[Any, list[Draw]]:
    found: dict[Any, list[Draw]] = {}
    for draw in draws:
        found.setdefault(draw.slot.bucket, []).append(draw)
    return found


@dataclass
class Validator:
    """Measures a trainer on the held-out draws; each picture's loss is kept in the run's folder."""

    trainer: Trainer
    held_out: HeldOut
    folder: Path
    events: Events
    _losses: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        path = self.folder / FILE
        if path.exists():
            self._losses = json.loads(path.read_text(encoding="utf-8"))

    def measure(self, step: int) -> None:
        """The loss now, as a metric of `step`; a step that was measured before is not again."""
        if str(step) in self._losses:
            return
        measured = {RAW: self._measured()}
        if self.trainer.ema:
            with averaged(self.trainer):
                measured[AVERAGE] = self._measured()
        if self.trainer.asked():  # it was cut short: it is measured where the run goes on
            if self.trainer.team.size > 1:  # which is a step later, since the others are at it
                self.events.warning(f"the held-out loss of step {step} is not measured: stopping")
            return
        self._losses[str(step)] = {name: _per_picture(losses) for name, losses in measured.items()}
        files.write_json(self.folder / FILE, self._losses)
        self.events.metric(step, **_shown(measured))

    def summary(self) -> dict[str, str]:
        """How the loss changed from the first step measured to the last, raw and EMA."""
        first, last = (self._losses[str(step)] for step in self._ends())
        found = {
            name: change(list(first[name].values()), list(last[name].values())) for name in last
        }
        return {name: str(value) for name, value in found.items() if value}

    def _ends(self) -> tuple[int, int]:
        steps = sorted(map(int, self._losses))
        return steps[0], steps[-1]

    def _measured(self) -> list[tuple[str, float, float]]:
        """Picture, noisiness and loss of every draw, without the adapter's dropout."""
        denoiser = self.trainer.denoiser
        training, found = denoiser.training, []
        denoiser.eval()
        for batch in self.held_out.batches():
            if self.trainer.asked():
                break
            losses = self._losses_of(batch.to(self.trainer.device))
            rows = zip(batch.names, batch.level.tolist(), losses, batch.weights, strict=True)
            noisiness = self.held_out.process.noisiness
            found += [(name, noisiness(lvl), loss) for name, lvl, loss, weight in rows if weight]
        denoiser.train(training)
        return found

    def _losses_of(self, batch: Batch) -> list[float]:
        return per_sample_loss(self.trainer.look(batch), batch.target).tolist()


@contextmanager
def averaged(trainer: Trainer) -> Iterator[None]:
    """The moving average in place of the adapter for the block; the very bits come back."""
    kept = {name: tensor.detach().clone() for name, tensor in trainer.parameters.items()}
    try:
        adapter.copy_into(trainer.parameters, trainer.ema)
        trainer.weights.refresh()
        yield
    finally:
        adapter.copy_into(trainer.parameters, kept)
        trainer.weights.refresh()


def _per_picture(losses: Sequence[tuple[str, float, float]]) -> dict[str, float]:
    """The mean over a picture's draws."""
    found: dict[str, list[float]] = {}
    for name, _, loss in losses:
        found.setdefault(name, []).append(loss)
    return {name: math.fsum(values) / len(values) for name, values in sorted(found.items())}


def _shown(measured: Mapping[str, Sequence[tuple[str, float, float]]]) -> dict[str, float]:
    """The mean over all draws, and over those of each band of sigma."""
    shown: dict[str, float] = {}
    for name, losses in measured.items():
        shown[name] = _mean([loss for _, _, loss in losses])
        for band in range(NUM_BANDS):
            low, high = band / NUM_BANDS, (band + 1) / NUM_BANDS
            inside = [loss for _, sigma, loss in losses if low < sigma <= high]
            if inside:
                shown[f"{name}_sigma_{low:.2f}_{high:.2f}"] = _mean(inside)
    return shown


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
