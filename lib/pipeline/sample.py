"""Stage `sample`: a grid of pictures, base | adapter | EMA, from the same noise."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lib import files, runs
from lib.events import Events
from lib.files import user_path
from lib.leases import lease
from lib.pipeline.contract import (
    Inputs,
    StagePlan,
    chosen,
    file_record,
    files_of,
    grid_entries,
    prompts_of,
)
from lib.recipes import sample_key
from lib.schema import Config
from lib.store import Manifest, Store
from lib.tracking import send_pending

STAGE = "sample"


def plan(config: Config, inputs: Inputs, store: Store) -> StagePlan:
    """Whether this grid is there, unchanged."""
    settings = _settings(config)
    prompts = prompts_of(config, inputs.upstream["prepare_dataset"].payload)
    known = {"encode_captions", "build_latent_cache", "export"} <= inputs.upstream.keys()
    if not (known and inputs.canvas.built):
        return StagePlan(STAGE, None, False, len(prompts), len(prompts), 0, settings)
    entries = grid_entries(config, inputs.upstream)
    key = sample_key(
        export=inputs.upstream["export"].key,
        captions=entries["captions"],
        unconditional=entries["unconditional"],
        autoencoder=inputs.base.identity(inputs.family.FACTS.autoencoder),
        canvas=_canvas_identity(inputs),
        targets=_target_keys(prompts, inputs),
        settings=settings,
    )
    manifest = Manifest(STAGE, key.digest, key.inputs, {}, {"settings": settings})
    found = files_of(store, manifest) is not None
    missing = 0 if found else len(prompts)
    return StagePlan(STAGE, manifest, found, len(prompts), missing, 0, settings)


def run(config: Config, inputs: Inputs, store: Store, events: Events) -> Manifest:
    """Draw the grid into the run's folder and publish its digest."""
    planned = plan(config, inputs, store).known()
    if there := files_of(store, planned):
        events.phase(STAGE, "hit", key=planned.key, file=str(there["grid"]))
        found = store.manifest(STAGE, planned.key)
        assert found is not None
        return found
    events.phase(STAGE, "start")
    from lib import cards, pictures
    from lib.device import release

    with lease(store, [*planned.inputs["captions"], planned.inputs["unconditional"]]):
        grid, shown = _draw(config, inputs, planned, store=store, events=events)
        release()  # now that no name holds a model
    folder = runs.completed(store.root, inputs.upstream["train"].key)
    assert folder is not None
    path = files.free_name(folder / "samples" / f"grid-{planned.key[:8]}.png")
    pictures.save(grid, path)
    exported = Path(inputs.upstream["export"].payload["files"]["adapter"]["file"])
    prompts = prompts_of(config, inputs.upstream["prepare_dataset"].payload)
    cards.add_grid(exported.parent, shown, prompts=prompts if config.export.prompts else ())
    payload = {**planned.payload, "files": {"grid": file_record(path)}}
    published = store.publish(Manifest(STAGE, planned.key, planned.inputs, {}, payload))
    events.phase(STAGE, "done", key=planned.key, file=str(path))
    send_pending(folder, config, events=events)
    return published


def key_settings(config: Config) -> dict[str, Any]:
    """The settings that enter the key; those of the stages upstream are in theirs."""
    return {**chosen(config, "sample.base", "sample.revision"), **_settings(config)}


def _settings(config: Config) -> dict[str, Any]:
    apart = ("every", "base", "revision")  # a base enters by what it is
    own = {f"sample.{name}": v for name, v in asdict(config.sample).items() if name not in apart}
    return {**own, **chosen(config, "buckets.resolution", "precision.mode")}


def _canvas_identity(inputs: Inputs) -> dict[str, Any]:
    """What draws beside the adapter: a denoiser, and what its schedule and guidance go by."""
    canvas = inputs.canvas
    identities = {
        name: canvas.identity(name) for name in (inputs.family.FACTS.denoiser, "scheduler")
    }
    return {**identities, "settings": dict(canvas.settings)}


def _target_keys(prompts: Sequence[str], inputs: Inputs) -> list[str | None]:
    """For each prompt the held-out picture that has it as its caption, if there is one."""
    held_out = inputs.upstream["prepare_dataset"].payload["held_out"]
    found = {sample["caption"]: sample["image_key"] for sample in reversed(held_out)}
    return [found.get(prompt) for prompt in prompts]


def _draw(
    config: Config, inputs: Inputs, planned: Manifest, *, store: Store, events: Events
) -> tuple[Any, Any]:
    """The grid, and what may be shown to everyone: without held-out pictures, and prompts if so."""
    from lib.drawing import GridRequest, Sampler, draw_columns
    from lib.sheets import square_pictures

    prepared = inputs.upstream["prepare_dataset"].payload
    request = GridRequest(**grid_entries(config, inputs.upstream))
    exported = inputs.upstream["export"].payload["files"]
    root, side = user_path(config.dataset.root), config.buckets.resolution
    sampler = Sampler(config, inputs.family, inputs.base, inputs.canvas, request, store)
    adapters = {name: Path(made["file"]) for name, made in exported.items()}
    columns = draw_columns(sampler, adapters=adapters, events=events)
    targets = square_pictures(prepared, planned.inputs["targets"], root=root, side=side)
    grid = sampler.grid({**columns, "target": targets} if any(targets) else columns)
    return grid, sampler.grid(columns, with_prompts=config.export.prompts)
