"""What looks at a run beside its steps: the held-out loss, and grids drawn while it trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from lib.batches import Records, slots_of
from lib.drawing import GridRequest, Sampler
from lib.events import Events
from lib.family import Family, process_of
from lib.hub import Base
from lib.noise import NoiseProcess
from lib.runs import Claim
from lib.schema import Config
from lib.store import Manifest, Store
from lib.team import ALONE, Team
from lib.training.previews import Previews
from lib.training.step import Trainer
from lib.training.validation import HeldOut, Validator, fixed_draws

Upstream = Mapping[str, Manifest]


@dataclass(frozen=True)
class Watch:
    """Called after every step; what is switched off is None."""

    config: Config
    total_steps: int
    validator: Validator | None
    previews: Previews | None

    def begin(self, step: int) -> None:
        """Before the first step, or where a run goes on: what an earlier attempt did not get to."""
        if self.previews and step and not self.previews.path_of(step).exists():
            self._ask(step)
        self._measure(step)

    def __call__(self, step: int) -> None:
        self._measure(step)
        self._ask(step)

    def looks_at(self, step: int) -> bool:
        """Whether something is to be done after this step."""
        return self._measures(step) or self._draws(step)

    def _measures(self, step: int) -> bool:
        every = self.config.validation.every
        return self.validator is not None and (step % every == 0 or step == self.total_steps)

    def _draws(self, step: int) -> bool:
        return self.previews is not None and step > 0 and step % self.config.sample.every == 0

    def _measure(self, step: int) -> None:
        if self.validator and self._measures(step):
            self.validator.measure(step)

    def _ask(self, step: int) -> None:
        if self.previews and self._draws(step):
            self.previews.ask(step)

    def held_out(self) -> dict[str, str]:
        """How the held-out loss changed over the run."""
        return self.validator.summary() if self.validator else {}


@contextmanager
def watching(
    trainer: Trainer,
    claim: Claim,
    config: Config,
    base: Base,
    *,
    request: GridRequest,
    upstream: Upstream,
    store: Store,
    events: Events,
    total_steps: int,
) -> Iterator[Watch]:
    """A watch for the block; leaving it waits for the grids, unless the run failed."""
    validator = previews = None
    if config.validation.fraction:
        process = process_of(trainer.family, base)
        held_out = make_held_out(config, trainer.family, process, upstream, store, trainer.team)
        validator = Validator(trainer, held_out, claim.folder, events)
    if config.sample.every:
        sampler = Sampler(config, trainer.family, base, base, request, store)
        previews = Previews(trainer, sampler, folder=claim.folder / "samples", events=events)
    try:
        yield Watch(config, total_steps, validator, previews)
        if previews:
            previews.finish()
    finally:
        if previews:
            previews.close()


def make_held_out(
    config: Config,
    family: Family,
    process: NoiseProcess,
    upstream: Upstream,
    store: Store,
    team: Team = ALONE,
) -> HeldOut:
    """The fixed draws over the held-out pictures, each once whatever its repeats."""
    prepared = upstream["prepare_dataset"].payload
    captions, latents = upstream["encode_captions"].payload, upstream["build_latent_cache"].payload
    samples = [
        {**sample, "repeats": 1, "captions": [sample["caption"]]} for sample in prepared["held_out"]
    ]
    slots = slots_of(
        samples,
        images=prepared["images"],
        latents=latents["variants"],
        texts=captions["texts"],
    )
    draws = fixed_draws(
        slots,
        num_draws=config.validation.num_draws,
        process=process,
        timesteps=config.timesteps,
        divisor=family.FACTS.divisor,
    )
    return HeldOut(
        draws=tuple(draws),
        family=family,
        process=process,
        records=Records(store, max_bytes=config.latents.max_bytes),
        constants=latents["constants"],
        batch_size=micro_batch_of(config, team),
    )


def micro_batch_of(config: Config, team: Team) -> int:
    """Rows of one forward: what is set, else all that a process has of a group."""
    return config.trainer.micro_batch or config.trainer.batch_size // team.size
