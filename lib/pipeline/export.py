"""Stage `export`: the adapter and its average in a format others read, proven by reading."""

from typing import Any

from lib import files, runs
from lib.events import Events
from lib.pipeline.contract import Inputs, StagePlan, chosen, file_record, files_of
from lib.recipes import export_key
from lib.schema import Config
from lib.store import Manifest, Store

STAGE = "export"
ADAPTERS = {"adapter": runs.ADAPTER_FILE, "ema": runs.EMA_FILE}


def plan(config: Config, inputs: Inputs, store: Store) -> StagePlan:
    """Whether the files of this run in this format and dtype are there, unchanged."""
    settings = key_settings(config)
    names = _adapters(config)
    trained = inputs.upstream.get("train")
    if trained is None:
        return StagePlan(STAGE, None, False, len(names), len(names), 0, settings)
    key = export_key(
        train=trained.key,
        adapters=names,
        format=config.export.format,
        dtype=config.export.dtype,
        prompts=config.export.prompts,
    )
    manifest = Manifest(STAGE, key.digest, key.inputs, {}, {"settings": settings})
    found = files_of(store, manifest) is not None
    missing = 0 if found else len(names)
    return StagePlan(STAGE, manifest, found, len(names), missing, 0, settings)


def run(config: Config, inputs: Inputs, store: Store, events: Events) -> Manifest:
    """Write the files into a folder of their own beside their run, and publish their digests."""
    planned = plan(config, inputs, store).known()
    if there := files_of(store, planned):
        events.phase(STAGE, "hit", key=planned.key, file=str(there["adapter"]))
        found = store.manifest(STAGE, planned.key)
        assert found is not None
        return found
    events.phase(STAGE, "start")
    from lib import cards
    from lib.exporting import export_adapter, stem_of

    folder = runs.completed(store.root, inputs.upstream["train"].key)
    assert folder is not None
    target = files.claim_folder(
        folder / "exports" / f"{config.export.format}-{config.export.dtype}"
    )
    told = cards.about(
        folder.name,
        config,
        facts=inputs.family.FACTS,
        base=inputs.base,
        train=inputs.upstream["train"],
    )
    made, names = {}, {}
    for name in _adapters(config):
        done = export_adapter(
            folder / ADAPTERS[name],
            target if name == "adapter" else target / name,
            config=config,
            family=inputs.family,
            denoiser=inputs.base.component(inputs.family.FACTS.denoiser),
            provenance=cards.header(told, adapter=name),
            stem=stem_of(folder.name, adapter=name),
        )
        cards.write_sidecar(told, done.path, adapter=name)
        made[name] = file_record(done.path)
        names[name] = done.path.relative_to(target).as_posix()
        for note in done.notes(config.export.dtype):
            events.warning(f"{name}: {note}")
    cards.write_card(told, target, made=names)
    payload = {**planned.payload, "files": made}
    published = store.publish(Manifest(STAGE, planned.key, planned.inputs, {}, payload))
    events.phase(STAGE, "done", key=planned.key, file=made["adapter"]["file"])
    return published


def key_settings(config: Config) -> dict[str, Any]:
    """The settings that enter the key; those of the stages upstream are in theirs."""
    return chosen(config, "export.format", "export.dtype", "export.prompts")


def _adapters(config: Config) -> list[str]:
    return ["adapter", "ema"] if config.trainer.ema_decay > 0 else ["adapter"]
