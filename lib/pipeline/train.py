"""Stage `train`: one denoiser's adapter on the cached records; resumes where it stopped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib import runs, stopping
from lib.buckets import PLAN_VERSION, steps_per_epoch
from lib.errors import InputRefused, Problem, Stopped
from lib.events import Events
from lib.extending import SETTING, check, extended, in_its_precision, setting_problems
from lib.family import process_of
from lib.files import user_path
from lib.keys import Key, digest
from lib.leases import lease
from lib.pipeline.budget import needs_of
from lib.pipeline.contract import BASE, Inputs, StagePlan, chosen, entry_keys, grid_entries
from lib.recipes import train_key
from lib.schema import AUTO, Config
from lib.store import Manifest, Store
from lib.team import Team, gathered, this_process
from lib.tracking import following, send_pending
from lib.verify import verify_entries

if TYPE_CHECKING:
    from lib.training.loop import Finished

STAGE = "train"
MAX_STEPS = 100_000
HELD_OUT = {"held out": "held_out_loss", "held out, EMA": "held_out_loss_ema"}


def plan(config: Config, inputs: Inputs, store: Store) -> StagePlan:
    """Whether this very run is complete, and how many steps are left."""
    steps = total_steps(config, inputs)
    settings = {"total_steps": steps, **_settings(config)}
    if not identified(inputs) or config.precision.mode == AUTO:
        return StagePlan(STAGE, None, False, steps, steps, 0, settings)
    goes_on = extended(config)
    key = _key(config, inputs, steps, extends=goes_on.digest if goes_on else None)
    if goes_on:
        check(config, key, goes_on, total_steps=steps)
    manifest = Manifest(STAGE, key.digest, key.inputs, {}, {"settings": settings})
    done = runs.completed(store.root, key.digest) is not None and not config.rerun
    before = runs.steps_done(store.root, key.digest, rerun=config.rerun)
    left = 0 if done else steps - max(before, goes_on.step if goes_on else 0)
    return StagePlan(STAGE, manifest, done, steps, left, 0, settings)


def problems(config: Config) -> Iterator[Problem]:
    """What is wrong with the run that is to be extended."""
    yield from setting_problems(config, _settings(in_its_precision(config)))


def run(config: Config, inputs: Inputs, store: Store, events: Events) -> Manifest:
    """Train what is left of the run that has this key, in that run's folder."""
    planned = plan(config, inputs, store)
    manifest = planned.known()
    if planned.hit:
        folder = runs.completed(store.root, manifest.key)
        assert folder is not None
        events.phase(STAGE, "hit", key=manifest.key, folder=str(folder), steps=planned.total)
        if this_process().leads:
            send_pending(folder, config, events=events)
        return store.publish(manifest)
    events.stage = STAGE  # verifying is its work too
    records = [made for made in inputs.upstream.values() if made.entries]
    team = this_process()
    with lease(store, [ref.key for made in records for ref in made.refs()]):
        verify_entries(store, records, events)
        with gathered(team):
            claim = _claim(planned, config, inputs, store, team=team)
            with _meeting(team), stopping.watching(*_stop_files(claim, team)):
                if not team.leads:
                    _train_run(claim, planned, config, inputs, store, events)
                    return manifest
                with runs.held(store.root, claim):
                    _train(claim, planned, config, inputs, store, events)
                    return store.publish(manifest)


@contextmanager
def _meeting(team: Team) -> Iterator[None]:
    """Leave the block together, when all is in order: torchrun ends all where one ends."""
    try:
        yield
    except Stopped as stopped:
        if stopped.of_all:
            team.meet()
        raise
    team.meet()


def _stop_files(claim: runs.Claim, team: Team) -> list[Path]:
    """The run's own, which the first process looks for, for all."""
    return [claim.folder / stopping.STOP_FILE] if team.leads else []


def _claim(
    planned: StagePlan, config: Config, inputs: Inputs, store: Store, *, team: Team
) -> runs.Claim:
    """The run's folder: the first process takes it, for all."""
    manifest = planned.known()

    def take() -> dict[str, Any]:
        claim = runs.claim(
            store.root,
            manifest.key,
            outputs=user_path(config.paths.outputs),
            name=config.name or f"{config.family.name}-{manifest.key[:8]}",
            manifests=[(made.stage, made.key) for made in (*inputs.upstream.values(), manifest)],
            rerun=config.rerun,
        )
        return {"folder": str(claim.folder), "resumed": claim.resumed}

    taken = team.told(take)
    return runs.Claim(manifest.key, Path(taken["folder"]), taken["resumed"])


def key_settings(config: Config) -> dict[str, Any]:
    """The settings that enter the key; the two lengths by the steps that they make."""
    lengths = ("trainer.max_steps", "trainer.num_epochs", SETTING)
    return {**chosen(config, *BASE, *lengths), **_settings(config)}


def _train(
    claim: runs.Claim,
    planned: StagePlan,
    config: Config,
    inputs: Inputs,
    store: Store,
    events: Events,
) -> None:
    from lib.device import release

    keys = {made.stage: made.key for made in (*inputs.upstream.values(), planned.known())}
    identity = planned.known().inputs
    runs.describe(claim, config, keys=keys, identity=identity, events=events)
    events.phase(STAGE, "start", folder=str(claim.folder), total=planned.total)
    if (warmup := config.lr_schedule.warmup_steps) > planned.total:
        share = f"{planned.total} of {warmup}"
        events.warning(f"the run ends within its warm-up: {share} of lr_schedule.warmup_steps")
    _show_data(claim, config, inputs)
    tracker = config.tracker
    with following(claim.folder, config, events=events, parent=tracker.parent), runs.ending(claim):
        finished = _train_run(claim, planned, config, inputs, store, events)
        release()  # now that no name holds the denoiser
        speed = finished.samples_per_second
        rate = {"samples_per_second": round(speed, 2)} if speed else {}
        events.phase(
            STAGE, "done", folder=str(claim.folder), key=claim.key, **rate, **finished.held_out
        )
        _show_losses(claim)


def _train_run(
    claim: runs.Claim,
    planned: StagePlan,
    config: Config,
    inputs: Inputs,
    store: Store,
    events: Events,
) -> Finished:
    """What every process of the run does."""
    from lib import compiling
    from lib.drawing import GridRequest
    from lib.training.session import train_run

    with compiling.kept(store.root):
        return train_run(
            claim,
            config,
            inputs.family,
            inputs.base,
            upstream=inputs.upstream,
            store=store,
            events=events,
            total_steps=planned.total,
            request=GridRequest(**grid_entries(config, inputs.upstream)),
            extends=extended(config),
            team=this_process(),
            needs=needs_of(config, inputs, store),
        )


def _show_data(claim: runs.Claim, config: Config, inputs: Inputs) -> None:
    """The contact sheet, once."""
    from lib import pictures, sheets
    from lib.training.session import make_plan

    path = claim.folder / "contact_sheet.png"
    if not path.exists():
        prepared, root = inputs.upstream["prepare_dataset"].payload, user_path(config.dataset.root)
        drawn = make_plan(config, inputs.upstream).first_captions()
        pictures.save(sheets.data_sheet(prepared, root, drawn=drawn), path)


def _show_losses(claim: runs.Claim) -> None:
    from lib import pictures

    curves = {"train": runs.recorded_metric(claim.folder, "loss")}
    looks = {
        title: points
        for title, name in HELD_OUT.items()
        if (points := runs.recorded_metric(claim.folder, name))
    }
    plot = pictures.loss_plot(curves, looks=looks, title=claim.folder.name)
    pictures.save(plot, claim.folder / "loss.png")


def identified(inputs: Inputs) -> bool:
    """Whether all that the key is made of is known."""
    return {"encode_captions", "build_latent_cache"} <= inputs.upstream.keys()


def total_steps(config: Config, inputs: Inputs) -> int:
    """Optimizer steps; epochs count the real batch plan."""
    if config.trainer.max_steps is not None:
        return config.trainer.max_steps
    samples = inputs.upstream["prepare_dataset"].payload["samples"]
    slots = sum(sample["repeats"] for sample in samples)
    epochs = config.trainer.num_epochs or 0
    steps = epochs * steps_per_epoch(slots, batch_size=config.trainer.batch_size)
    if steps > MAX_STEPS:
        why = f"makes {steps} steps"
        raise InputRefused(Problem(f"trainer.num_epochs={epochs}", why, f"at most {MAX_STEPS}"))
    return steps


def _settings(config: Config) -> dict[str, Any]:
    """The options that enter the key, by their public names, so that a plan can compare."""
    groups = {
        "adapter": config.adapter,
        "timesteps": config.timesteps,
        "objective": config.objective,
        "optimizer": config.optimizer,
        "lr_schedule": config.lr_schedule,
    }
    flat = {f"{g}.{name}": v for g, values in groups.items() for name, v in asdict(values).items()}
    trainer = ("batch_size", "max_grad_norm", "ema_decay", "caption_dropout")
    return {
        **flat,
        **{f"trainer.{name}": getattr(config.trainer, name) for name in trainer},
        "seed": config.seed,
        "precision.mode": config.precision.mode,
    }


def request_of(config: Config, inputs: Inputs) -> str:
    """The key with `precision=auto` left in, for which that is decided once."""
    return _key(config, inputs, total_steps(config, inputs), extends=None).digest


def _key(config: Config, inputs: Inputs, steps: int, *, extends: str | None) -> Key:
    """Everything that moves the weights; levers such as the micro-batch stay out (design 3)."""
    facts, process = inputs.family.FACTS, process_of(inputs.family, inputs.base)
    roles = ("train", "unconditional") if config.trainer.caption_dropout > 0 else ("train",)
    return train_key(
        manifest=inputs.upstream["prepare_dataset"].payload["keys"]["manifest"],
        captions=digest(entry_keys(inputs.upstream["encode_captions"], *roles)),
        latents=digest(entry_keys(inputs.upstream["build_latent_cache"], "train")),
        denoiser=inputs.base.identity(facts.denoiser),
        objective=process.identity,
        settings=_settings(config),
        plan_version=PLAN_VERSION,
        total_steps=steps,
        extends=extends,
        **({"shift_points": points} if (points := process.points(config.timesteps)) else {}),
    )
