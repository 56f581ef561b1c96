"""Grids drawn while training, by a thread with a denoiser that shares the frozen base's weights.

The step never waits for a picture: it copies the adapter, and goes on.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import torch

from lib import adapter, pictures
from lib.compiling import run_as_written
from lib.drawing import Sampler
from lib.events import Events
from lib.training.step import Trainer

MOST_WAITING = 4  # copies of the adapter held; a fifth makes the step wait, and says so

POLL_SECONDS = 0.1

Weights = dict[str, dict[str, torch.Tensor]]  # by column


class _Cancelled(Exception):
    """The run ends without the pictures that are still to draw."""


def twin_of(denoiser: Any) -> Any:
    """A denoiser with an adapter of its own over the same frozen weights, not compiled."""
    shared = [*denoiser.parameters(), *denoiser.buffers()]
    memo = {id(tensor): tensor for tensor in shared if not tensor.requires_grad}
    twin = copy.deepcopy(denoiser, memo).eval()
    run_as_written(twin)
    return twin


class Previews:
    """Draws a grid of the adapter, and of its average, as they are after a step."""

    def __init__(self, trainer: Trainer, sampler: Sampler, *, folder: Path, events: Events):
        self._trainer = trainer
        self._sampler = sampler
        self._folder = folder
        self._events = events
        self._twin = twin_of(trainer.denoiser)
        self._parameters = adapter.parameters_of(self._twin)
        self._autoencoder: Any = None
        self._cancelled = Event()
        self._drawn: list[Future[None]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="previews")

    def ask(self, step: int) -> None:
        """Have the adapter of this step drawn; a fault of an earlier drawing is raised here."""
        waiting = [future for future in self._drawn if not future.done()]
        if len(waiting) >= MOST_WAITING:
            self._events.warning(f"step {step} waits: {len(waiting)} grids are still to be drawn")
            waiting[0].result()
        self._raise_faults()
        weights = {"adapter": _copied(self._trainer.parameters)}
        if self._trainer.ema:
            weights["ema"] = _copied(self._trainer.ema)
        self._drawn.append(self._thread.submit(self._draw, step, weights))

    def finish(self) -> None:
        """Wait for what was asked for, or until a stop is."""
        for number, future in enumerate(self._drawn, start=1):
            while not future.done() and not self._trainer.asked():
                wait([future], timeout=POLL_SECONDS)
            if not future.done():
                return
            future.result()
            self._events.progress(number, len(self._drawn), unit="grids")

    def close(self) -> None:
        """Give up what is not drawn yet; returns within one call of the denoiser."""
        self._cancelled.set()
        self._thread.shutdown(cancel_futures=True)

    def path_of(self, step: int) -> Path:
        """Where the grid of a step lies."""
        return self._folder / f"step-{step:06d}.png"

    def _raise_faults(self) -> None:
        for future in self._drawn:
            if future.done():
                future.result()

    def _draw(self, step: int, weights: Weights) -> None:
        try:
            with self._stream(), self._trainer.autocast():
                columns = {name: self._column(one) for name, one in weights.items()}
        except _Cancelled:
            return
        path = self.path_of(step)
        pictures.save(self._sampler.grid(columns), path)
        self._events.picture(step, str(path))

    def _column(self, weights: Mapping[str, torch.Tensor]) -> list[Any]:
        adapter.copy_into(self._parameters, weights)
        if self._autoencoder is None:
            self._autoencoder = self._sampler.load_autoencoder()
        drawn = self._sampler.column(self._twin, each_step=self._check)
        return [self._sampler.decode(self._autoencoder, latents) for latents in drawn]

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise _Cancelled

    @contextmanager
    def _stream(self) -> Iterator[None]:
        """A stream beside the step's own, on a GPU."""
        if self._trainer.device.type != "cuda":
            yield
            return
        stream = torch.cuda.Stream(self._trainer.device)
        stream.wait_stream(torch.cuda.default_stream(self._trainer.device))
        with torch.cuda.stream(stream):
            yield


def _copied(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """On the CPU, so that the copy is whole when the next step moves the weights."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in parameters.items()}
