"""Setting up a training run from its records, its base and its last checkpoint, and running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from lib import adapter, files, levers, stopping, tensors
from lib.ahead import ahead
from lib.batches import Assembler, Group, Plan, Records, StepBatches, slots_of
from lib.drawing import GridRequest
from lib.errors import Problem, StateRefused
from lib.events import Events
from lib.extending import Extended
from lib.family import Family, process_of
from lib.footprint import Needs
from lib.hub import Base
from lib.records import to_stored
from lib.runs import ADAPTER_FILE, EMA_FILE, Claim
from lib.schema import Config
from lib.store import Manifest, Store
from lib.team import ALONE, Team
from lib.training import checkpoint
from lib.training.loop import Finished, train
from lib.training.making import make_trainer
from lib.training.step import Trainer
from lib.training.watching import Watch, micro_batch_of, watching

Upstream = Mapping[str, Manifest]
CHECKPOINTS = "checkpoints"
WHY = {"resume": "an earlier attempt stopped", "extend": "trainer.extend"}


def train_run(
    claim: Claim,
    config: Config,
    family: Family,
    base: Base,
    *,
    upstream: Upstream,
    store: Store,
    events: Events,
    total_steps: int,
    request: GridRequest,
    extends: Extended | None = None,
    team: Team = ALONE,
    needs: Needs | None = None,
) -> Finished:
    """Train to `total_steps` and leave the adapter in the run's folder.

    It goes on from its own last checkpoint, else from that of the run that it extends.
    Of a team every process does, on its share of each group; the first alone looks and writes.
    """
    trainer = make_trainer(
        config, family, base, events, total_steps=total_steps, team=team, needs=needs
    )
    start, seen = _restore_together(trainer, claim, extends=extends, events=events)
    assembler = make_assembler(config, family, base, upstream=upstream, store=store, team=team)
    groups = assembler.plan.groups(start, total_steps)
    watched = (
        watching(
            trainer,
            claim,
            config,
            base,
            request=request,
            upstream=upstream,
            store=store,
            events=events,
            total_steps=total_steps,
        )
        if team.leads
        else nullcontext(Watch(config, total_steps, None, None))
    )
    with stopping.deferring(), levers.kernels(config, flash4=trainer.flash4), watched as watch:
        watch.begin(start)
        finished = train(
            trainer,
            ahead(_maker(assembler, trainer), groups),
            config=config,
            total_steps=total_steps,
            num_samples_seen=seen,
            folder=claim.folder / CHECKPOINTS,
            train_key=claim.key,
            events=events,
            after_step=watch,
            looks_at=watch.looks_at,
        )
        if team.leads:
            if stopping.asked():  # while the last step was looked at
                raise stopping.stopped(f"after step {total_steps}, saved", of_all=True)
            _write_adapter(trainer, claim)
    return replace(finished, held_out=watch.held_out())


def make_plan(config: Config, upstream: Upstream) -> Plan:
    """The batch plan over the prepared samples."""
    prepared = upstream["prepare_dataset"].payload
    slots = slots_of(
        prepared["samples"],
        images=prepared["images"],
        latents=upstream["build_latent_cache"].payload["variants"],
        texts=upstream["encode_captions"].payload["texts"],
    )
    return Plan(slots, seed=config.seed, batch_size=config.trainer.batch_size)


def make_assembler(
    config: Config,
    family: Family,
    base: Base,
    *,
    upstream: Upstream,
    store: Store,
    team: Team = ALONE,
) -> Assembler:
    """The batch plan, and the records behind it."""
    captions, latents = upstream["encode_captions"], upstream["build_latent_cache"]
    return Assembler(
        plan=make_plan(config, upstream),
        family=family,
        records=Records(store, max_bytes=config.latents.max_bytes),
        constants=latents.payload["constants"],
        process=process_of(family, base),
        timesteps=config.timesteps,
        objective=config.objective,
        micro_batch=micro_batch_of(config, team),
        caption_dropout=config.trainer.caption_dropout,
        unconditional=captions.payload["unconditional"],
        team=team,
    )


def _maker(assembler: Assembler, trainer: Trainer) -> Callable[[Group], StepBatches]:
    """How a thread puts a group together; for a GPU in memory that it copies from by itself."""
    if trainer.device.type != "cuda":
        return assembler.step
    return lambda group: assembler.step(group).packed()


def _restore_together(
    trainer: Trainer, claim: Claim, *, extends: Extended | None, events: Events
) -> tuple[int, int]:
    """Steps done and samples seen of the checkpoint that every process has put back, 0 if none."""
    folder, key = claim.folder / CHECKPOINTS, claim.key

    def first() -> dict[str, Any]:
        source, latest = _newest(folder, key, extends=extends, events=events)
        found = latest.checkpoint
        if found is None:
            return {"step": 0, "seen": 0}
        _put_back(trainer, found)
        events.decision(source, found.step, source="checkpoint", reason=WHY[source])
        return {"step": found.step, "seen": found.num_samples_seen, "path": str(latest.path)}

    told = trainer.team.told(first)
    if told["step"] and not trainer.team.leads:
        path = Path(told["path"])
        owner = extends.train_key if extends and path == extends.path else key
        _put_back(trainer, checkpoint.load(path, train_key=owner))
    return told["step"], told["seen"]


def _newest(
    folder: Path, key: str, *, extends: Extended | None, events: Events
) -> tuple[str, checkpoint.Latest]:
    """Where to go on: the run's own newest sound checkpoint, else that of the run it extends."""
    latest = checkpoint.latest(folder, train_key=key)
    for damage in latest.damaged:
        events.warning(f"checkpoint skipped, {damage}")
    if latest.checkpoint is not None or extends is None:
        return "resume", latest
    found = checkpoint.load(extends.path, train_key=extends.train_key)
    return "extend", checkpoint.Latest(found, (), extends.path)


def _put_back(trainer: Trainer, found: checkpoint.Checkpoint) -> None:
    adapter.load_state_dict(trainer.parameters, found.adapter)
    if trainer.ema:
        adapter.load_state_dict(trainer.ema, found.ema)
    trainer.weights.refresh()
    checkpoint.restore_optimizer(trainer.optimizer, trainer.parameters, found.optimizer)


def _write_adapter(trainer: Trainer, claim: Claim) -> None:
    """The adapter and its average, float32, under PEFT's keys; an untouched one is refused."""
    state = adapter.state_dict(trainer.denoiser)
    if adapter.is_untrained(state):
        why = "every B is zero after training: the adapter would change nothing"
        raise StateRefused(Problem(f"run {claim.folder.name}", why, remedy="raise optimizer.lr"))
    written = {ADAPTER_FILE: state, EMA_FILE: adapter.renamed(trainer.ema)}
    for name, content in written.items():
        if content:
            data = tensors.encode(to_stored(content), metadata={"train_key": claim.key})
            files.write_bytes(claim.folder / name, data)
