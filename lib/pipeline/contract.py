"""What stages hand to each other: their inputs, and the plan with which every `run` begins."""

import math
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lib.errors import InputRefused, Problem
from lib.events import Events
from lib.family import Family
from lib.files import make_folder
from lib.hub import Base
from lib.keys import digest, file_digest
from lib.schema import TINY, Config, value_of
from lib.store import Damaged, EntryRef, Manifest, Store
from lib.verify import EntriesDamaged, verify_entries

BASE = ("family.name", "family.base", "family.revision")

NUM_PROMPTS = 4
ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
OVERHEAD_BYTES = 4096  # of an entry: its header, and the last block, which it does not fill


@dataclass(frozen=True)
class Inputs:
    """The family, its base, and the upstream stages' manifests (planned or made) by stage."""

    family: Family
    base: Base
    upstream: Mapping[str, Manifest]
    canvas: Base  # what samples are drawn on: `sample.base`, or the base itself


@dataclass(frozen=True)
class StagePlan:
    """What a stage would do. `manifest` is None while an identity upstream is not known."""

    stage: str
    manifest: Manifest | None
    hit: bool
    total: int = 0
    missing: int = 0
    missing_bytes: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)

    def known(self) -> Manifest:
        """The manifest, where the base is built and so every identity is known."""
        assert self.manifest is not None
        return self.manifest

    def keys_to_hold(self) -> list[str]:
        """The keys of the manifest and of all entries that the stage makes."""
        return [self.known().key, *(ref.key for ref in self.known().refs())]


def chosen(config: Config, *names: str) -> dict[str, Any]:
    """Some settings, by their public names."""
    return {name: value_of(config, name) for name in names}


def prompts_of(config: Config, prepared: Mapping[str, Any]) -> list[str]:
    """`sample.prompts`, else a few captions: of held-out pictures, or spread over the data set."""
    if config.sample.prompts:
        return list(dict.fromkeys(config.sample.prompts))
    held_out = [sample["caption"] for sample in prepared["held_out"]]
    captions = list(dict.fromkeys(held_out)) or prepared["captions"]
    count = min(NUM_PROMPTS, len(captions))
    return [captions[place * len(captions) // count] for place in range(count)]


def record_bytes(config: Config, inputs: Inputs) -> int:
    """Tensor bytes of a caption's longest record."""
    components = inputs.family.FACTS.text_components
    configs = {name: inputs.base.component(name).config for name in components}
    configs["pipeline"] = inputs.base.settings
    shapes = inputs.family.caption_shapes(configs, max_length=config.captions.max_length)
    return sum(math.prod(shape) for shape in shapes.values()) * ITEM_BYTES[captions_dtype(config)]


def captions_dtype(config: Config) -> str:
    """`captions.dtype` as resolved: bf16, and fp32 for the tiny base."""
    if config.captions.dtype != "auto":
        return config.captions.dtype
    return "fp32" if config.family.base == TINY else "bf16"


def grid_entries(config: Config, upstream: Mapping[str, Manifest]) -> dict[str, Any]:
    """What a grid is drawn with: prompts, their entry keys, that of the other branch's text.

    Of a latent cache that is only planned the constants are not known.
    """
    prompts = prompts_of(config, upstream["prepare_dataset"].payload)
    texts = upstream["encode_captions"].payload
    negative = config.sample.negative_prompt
    return {
        "prompts": tuple(prompts),
        "captions": tuple(texts["texts"][digest(prompt)] for prompt in prompts),
        "unconditional": texts["unconditional"]
        if negative is None
        else texts["texts"][digest(negative)],
        "constants": upstream["build_latent_cache"].payload.get("constants", {}),
    }


def lookup(store: Store, planned: Manifest) -> Manifest | None:
    """The published manifest when it and all its entries are there; a damaged one is set aside."""
    try:
        found = store.manifest(planned.stage, planned.key)
    except Damaged as damage:
        store.quarantine(damage.kind, damage.key)
        return None
    return found if found and not store.complete(found) else None


def plan_cache(
    store: Store, planned: Manifest, *, bytes_of: Mapping[str, int], settings: Mapping[str, Any]
) -> StagePlan:
    """A cache stage's plan: `bytes_of` gives the tensor bytes of each entry key."""
    missing = [key for ref, key in _unique(planned) if not store.size_bytes(ref.kind, key)]
    return StagePlan(
        stage=planned.stage,
        manifest=planned,
        hit=lookup(store, planned) is not None,
        total=len(bytes_of),
        missing=len(missing),
        missing_bytes=sum(bytes_of[key] for key in missing),
        settings=settings,
    )


def planned_refs(kind: str, keys: Mapping[str, list[str]]) -> dict[str, tuple[EntryRef, ...]]:
    """Entries by role before they are made; their sizes come later."""
    return {role: tuple(EntryRef(kind, k, 0) for k in sorted(set(ks))) for role, ks in keys.items()}


def entry_keys(manifest: Manifest, *roles: str) -> list[str]:
    """The sorted unique entry keys of some roles."""
    return sorted({ref.key for role in roles for ref in manifest.entries.get(role, ())})


def hit(store: Store, planned: Manifest, events: Events) -> Manifest | None:
    """The published manifest of a stage that need not run, marked as used."""
    found = lookup(store, planned)
    if found is None or not store.touch(found.stage, found.key):
        return None
    events.phase(found.stage, "hit", key=found.key, entries=len(set(found.refs())))
    return found


def file_record(path: Path) -> dict[str, str]:
    """A file in a run's folder, as a manifest's payload lists it under `files`."""
    return {"file": str(path), "sha256": file_digest(path)}


def files_of(store: Store, planned: Manifest) -> Mapping[str, Path] | None:
    """The files that an earlier run of the stage left, if all are still what they were."""
    found = lookup(store, planned)
    if found is None:
        return None
    records = found.payload["files"]
    paths = {name: Path(record["file"]) for name, record in records.items()}
    sound = all(path.is_file() and file_record(path) == records[n] for n, path in paths.items())
    return paths if sound else None


def check_disk(planned: StagePlan, store: Store, *, remedy: str) -> None:
    """Refuse before the first encode what cannot fit."""
    make_folder(store.root)
    free = shutil.disk_usage(store.root).free
    needed = planned.missing_bytes + planned.missing * OVERHEAD_BYTES
    if needed > free:
        why = f"{planned.stage} needs {needed} bytes for {planned.missing} entries, {free} are free"
        remedy = f"{remedy}, or another disk"
        raise InputRefused(Problem(f"paths.store={store.root}", why, remedy=remedy))


def publish(
    store: Store,
    planned: Manifest,
    events: Events,
    *,
    made: int,
    opened: Collection[EntryRef] | None = None,
) -> Manifest:
    """Publish a cache stage's manifest with the sizes its entries have now.

    Those not `opened` since they were made are read; an entry found here from before and damaged
    is an EntriesDamaged, as for train.
    """
    entries = {
        role: tuple(replace(r, size_bytes=store.size_bytes(r.kind, r.key) or 0) for r in refs)
        for role, refs in planned.entries.items()
    }
    manifest = replace(planned, entries=entries)
    try:
        published = store.publish(manifest, opened=opened or ())
    except Damaged as damage:
        verify_entries(store, [manifest], events)  # names all of them
        raise EntriesDamaged([damage]) from damage
    events.phase(planned.stage, "done", key=planned.key, made=made)
    return published


def _unique(manifest: Manifest) -> list[tuple[EntryRef, str]]:
    return [(ref, ref.key) for ref in sorted(set(manifest.refs()))]
