"""Stage `export`: one file per format from a trained adapter, proven by reading it back."""

from pathlib import Path

from lib import files, runs
from lib.events import Events
from lib.keys import file_digest
from lib.pipeline.contract import Inputs, StagePlan
from lib.recipes import export_key
from lib.schema import Config
from lib.store import Manifest, Store

STAGE = "export"


def plan(config: Config, inputs: Inputs, store: Store) -> StagePlan:
    """Whether the file of this run in this format and dtype is there, unchanged."""
    settings = {"export.format": config.export.format, "export.dtype": config.export.dtype}
    trained = inputs.upstream.get("train")
    if trained is None:
        return StagePlan(STAGE, None, False, 1, 1, 0, settings)
    key = export_key(
        train=trained.key,
        adapter="adapter",
        format=config.export.format,
        dtype=config.export.dtype,
    )
    manifest = Manifest(STAGE, key.digest, key.inputs, {}, {"settings": settings})
    found = exported_file(store, manifest) is not None
    return StagePlan(STAGE, manifest, found, 1, 0 if found else 1, 0, settings)


def run(config: Config, inputs: Inputs, store: Store, events: Events) -> Manifest:
    """Write the file beside its run, never over another one, and publish its digest."""
    planned = plan(config, inputs, store).known()
    if path := exported_file(store, planned):
        events.phase(STAGE, "hit", key=planned.key, file=str(path))
        found = store.manifest(STAGE, planned.key)
        assert found is not None
        return found
    events.phase(STAGE, "start")
    from lib.exporting import export_adapter

    folder = runs.completed(store.root, inputs.upstream["train"].key)
    assert folder is not None
    name = f"{config.export.format}-{config.export.dtype}"
    target = files.claim_folder(folder / "exports" / name)
    done = export_adapter(
        folder / runs.ADAPTER_FILE,
        target,
        config=config,
        family=inputs.family,
        provenance={"train_key": inputs.upstream["train"].key},
    )
    if done.num_flushed:
        events.warning(f"{done.num_flushed} values became 0 in export.dtype={config.export.dtype}")
    payload = {**planned.payload, "file": str(done.path), "sha256": file_digest(done.path)}
    published = store.publish(
        Manifest(STAGE, planned.key, planned.inputs, planned.entries, payload)
    )
    events.phase(STAGE, "done", key=planned.key, file=str(done.path))
    return published


def exported_file(store: Store, planned: Manifest) -> Path | None:
    """The file an earlier export left, if it is still what it was."""
    found = store.manifest(planned.stage, planned.key)
    if found is None:
        return None
    path = Path(found.payload["file"])
    return path if path.is_file() and file_digest(path) == found.payload["sha256"] else None
