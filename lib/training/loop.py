"""The training loop: batches in, metrics and checkpoints out; it stops at the first bad number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from lib import adapter, stopping
from lib.batches import StepBatches
from lib.errors import DarkroomError, Problem
from lib.events import Events
from lib.optimizers import learning_rate
from lib.schema import Config
from lib.training import checkpoint
from lib.training.checkpoint import Checkpoint
from lib.training.step import Launched, StepResult, Trainer


class Diverged(DarkroomError):
    """A loss or gradient norm was not finite; the weights are those of the step before."""

    exit_code = 1
    of_all = True


@dataclass(frozen=True)
class Finished:
    """What a loop reports at its end; the first step, which warms up, is outside the rate."""

    steps: int
    last_loss: float
    samples_per_second: float | None
    held_out: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Progress:
    """Counts over the run, and the clock since the first step of this process."""

    num_samples_seen: int
    clock: float | None = None
    samples_timed: int = 0

    def add(self, num_samples: int) -> None:
        self.num_samples_seen += num_samples
        if self.clock is None:
            self.clock = perf_counter()
        else:
            self.samples_timed += num_samples

    def aside(self, action: Callable[[int], None], step: int) -> None:
        """Do something that is no training, whose time the rate does not count."""
        begun = perf_counter()
        action(step)
        if self.clock is not None:
            self.clock += perf_counter() - begun

    @property
    def samples_per_second(self) -> float | None:
        if self.clock is None or not self.samples_timed:
            return None
        return self.samples_timed / (perf_counter() - self.clock)


@dataclass(frozen=True)
class _Launched:
    """A step whose numbers have not been read yet."""

    group: StepBatches
    rate: float
    step: Launched

    @property
    def done(self) -> int:
        """Steps of the run with this one."""
        return self.group.step + 1


@dataclass
class _Reader:
    """Reads the numbers of one step after the other, and tells them."""

    progress: Progress
    total_steps: int
    events: Events
    steps: int = 0
    loss: float = float("nan")

    def read(self, launched: _Launched) -> StepResult:
        result, done = launched.step.result(), launched.done
        if not result.finite:
            raise _diverged(launched.group, result)
        self.progress.add(launched.group.num_samples)
        self.loss, self.steps = result.loss, self.steps + 1
        _report(self.events, done, result, rate=launched.rate, progress=self.progress)
        self.events.progress(done, self.total_steps, unit="steps")
        return result

    def finished(self) -> Finished:
        speed = self.progress.samples_per_second
        return Finished(self.steps, last_loss=self.loss, samples_per_second=speed)


def train(
    trainer: Trainer,
    groups: Iterable[StepBatches],
    *,
    config: Config,
    total_steps: int,
    num_samples_seen: int,
    folder: Path,
    train_key: str,
    events: Events,
    after_step: Callable[[int], None] = lambda _step: None,
    looks_at: Callable[[int], bool] = lambda _step: True,
) -> Finished:
    """Run all groups; a checkpoint every `trainer.save_every` steps and at the end.

    `after_step` is called with the number of steps done, once their checkpoint is written, where
    `looks_at` says that it has something to do. A request to stop ends the loop after the step,
    with a checkpoint. Where nothing is to be done after a step, the next is handed to the device
    before its numbers are read.
    """
    reader = _Reader(Progress(num_samples_seen), total_steps, events)

    def save(step: int) -> None:
        if trainer.team.leads:
            _save(trainer, step, reader.progress, folder=folder, train_key=train_key)

    def due(step: int) -> bool:
        return step % config.trainer.save_every == 0 or step == total_steps

    def waits(step: int) -> bool:
        """Whether the next step is to begin after this one's numbers are read."""
        first = reader.progress.clock is None  # the clock starts between the first and the next
        together = trainer.team.size > 1  # who else is asked to stop is known from the numbers
        return first or together or due(step) or looks_at(step) or bool(trainer.asked())

    unread: _Launched | None = None
    for launched in _launched(trainer, groups, config=config, total_steps=total_steps):
        if unread is not None:
            reader.read(unread)
        unread = launched
        if waits(launched.done):
            result, unread = reader.read(launched), None
            if due(launched.done):
                save(launched.done)
            _look(trainer, result, launched.done, reader.progress, after_step, save=save)
    return reader.finished()


def _launched(
    trainer: Trainer, groups: Iterable[StepBatches], *, config: Config, total_steps: int
) -> Iterator[_Launched]:
    """Each group handed to the device, at the rate of its step."""
    for group in groups:
        rate = learning_rate(
            config.lr_schedule,
            base=config.optimizer.lr,
            step=group.step,
            total_steps=total_steps,
        )
        yield _Launched(group, rate, trainer.launch(group, rate=rate))


def _look(
    trainer: Trainer,
    result: StepResult,
    done: int,
    progress: Progress,
    after_step: Callable[[int], None],
    *,
    save: Callable[[int], None],
) -> None:
    """What comes after a step whose numbers are known; the end, if the run is to stop."""
    stops = result.asked
    if not stops:
        progress.aside(after_step, done)
        stops = trainer.team.size == 1 and bool(trainer.asked())
    if stops:
        _stop(save, done)


def _stop(save: Callable[[int], None], done: int) -> None:
    if saves := not stopping.discards():
        save(done)
    kept = "saved" if saves else "not saved"
    raise stopping.stopped(f"after step {done}, {kept}", of_all=True)


def _report(
    events: Events, step: int, result: StepResult, *, rate: float, progress: Progress
) -> None:
    values = {
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": rate,
        "num_samples_seen": progress.num_samples_seen,
    }
    speed = progress.samples_per_second
    events.metric(step, **values, **({"samples_per_second": round(speed, 3)} if speed else {}))


def _save(trainer: Trainer, step: int, progress: Progress, *, folder: Path, train_key: str) -> None:
    state = Checkpoint(
        step=step,
        num_samples_seen=progress.num_samples_seen,
        adapter=adapter.state_dict(trainer.denoiser),
        optimizer=checkpoint.optimizer_state(trainer.optimizer, trainer.parameters),
        ema=adapter.renamed(trainer.ema),
    )
    checkpoint.save(folder, state, train_key=train_key)


def _diverged(group: StepBatches, result: StepResult) -> Diverged:
    names = sorted({name for batch in group.batches for name in batch.names})
    sigmas = [round(float(level), 4) for batch in group.batches for level in batch.level]
    return Diverged(
        Problem(
            f"step {group.step + 1}",
            f"loss {result.loss} and gradient norm {result.grad_norm} are not finite; "
            f"sigmas {sigmas}; samples {', '.join(names)}",
            remedy="lower optimizer.lr or look at these samples; the last checkpoint is good",
        )
    )
