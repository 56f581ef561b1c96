"""Stage `build_latent_cache`: each picture's variants, encoded once, as posteriors."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lib.events import Events
from lib.files import user_path
from lib.images import Geometry
from lib.keys import Key
from lib.leases import lease
from lib.pipeline.contract import (
    BASE,
    Inputs,
    StagePlan,
    check_disk,
    chosen,
    hit,
    plan_cache,
    planned_refs,
    publish,
)
from lib.recipes import cache_key, latent_key
from lib.schema import Config
from lib.store import EntryRef, Manifest, Store

STAGE, KIND = "build_latent_cache", "latents"
TRAIN, HELD_OUT = "train", "held_out"
REMEDY = "fewer latents.variants, a smaller buckets.resolution"
ITEM_BYTES = 4  # posteriors are stored in float32 whatever the autoencoder computes in


@dataclass(frozen=True)
class Work:
    """One picture in one geometry."""

    image_key: str
    geometry: Geometry


def plan(config: Config, inputs: Inputs, store: Store) -> StagePlan:
    """Which variants have no entry yet."""
    prepared = inputs.upstream["prepare_dataset"].payload
    settings = {**prepared["settings"], "latents.dtype": config.latents.dtype}
    autoencoder = inputs.base.component(inputs.family.FACTS.autoencoder)
    works = _works(inputs)
    sizes = [_entry_bytes(work, inputs, autoencoder.config) for work in works]
    if not inputs.base.built:
        return StagePlan(STAGE, None, False, len(works), len(works), sum(sizes), settings)
    keys = _keys(config, inputs, works)
    held_out = _held_out(inputs)
    by_role = {
        TRAIN: [key.digest for work, key in keys.items() if work.image_key not in held_out],
        HELD_OUT: [key.digest for work, key in keys.items() if work.image_key in held_out],
    }
    variants: dict[str, list[str]] = {}
    for work, key in keys.items():
        variants.setdefault(work.image_key, []).append(key.digest)
    key = cache_key(STAGE, by_role)
    payload = {"variants": variants, "settings": settings}
    planned = Manifest(STAGE, key.digest, key.inputs, planned_refs(KIND, by_role), payload)
    bytes_of = {keys[work].digest: size for work, size in zip(works, sizes, strict=True)}
    return plan_cache(store, planned, bytes_of=bytes_of, settings=settings)


def run(config: Config, inputs: Inputs, store: Store, events: Events) -> Manifest:
    """Encode what is missing, name every picture that failed, publish the list of entries."""
    planned = plan(config, inputs, store)
    with lease(store, planned.keys_to_hold()):
        found = hit(store, planned.known(), events)
        return found or _build(planned, config, inputs, store, events)


def key_settings(config: Config) -> dict[str, Any]:
    """The settings that enter the key; those of the stages upstream are in theirs."""
    return chosen(config, *BASE, "latents.dtype")


def _build(
    planned: StagePlan, config: Config, inputs: Inputs, store: Store, events: Events
) -> Manifest:
    from lib.device import release

    events.phase(STAGE, "start", total=planned.total, missing=planned.missing)
    keys = _keys(config, inputs, _works(inputs))
    todo = {w: k for w, k in keys.items() if not store.size_bytes(KIND, k.digest)}
    opened: frozenset[EntryRef] | None = None
    if todo:
        check_disk(planned, store, remedy=REMEDY)
        opened = _encode(todo, config, inputs, store, events)
        release()  # now that no name holds the model
    # Not known before: a family may keep them beside the weights.
    constants = {"constants": inputs.family.latent_constants(inputs.base)}
    known = planned.known()
    known = replace(known, payload={**known.payload, **constants})
    return publish(store, known, events, made=len(todo), opened=opened)


def _encode(
    todo: Mapping[Work, Key], config: Config, inputs: Inputs, store: Store, events: Events
) -> frozenset[EntryRef]:
    from lib.device import pick_device
    from lib.encoding import Picture, paths_of, picture_order, picture_records
    from lib.keeping import PIXELS_TOGETHER, Pace, put_all
    from lib.records import DTYPES

    prepared = inputs.upstream["prepare_dataset"].payload
    samples = [*prepared["samples"], *prepared["held_out"]]
    paths = paths_of(samples, user_path(config.dataset.root))
    pictures = {
        Picture(w.image_key, w.geometry, paths[w.image_key]): key for w, key in todo.items()
    }
    dtype, device = DTYPES[config.latents.dtype], pick_device()
    autoencoder = inputs.family.load_autoencoder(inputs.base, dtype=dtype, device=device)
    fitting = PIXELS_TOGETHER // config.buckets.resolution**2
    pace = Pace.of(device, asked=config.encode.batch_size, fitting=fitting)

    def encode(some: Iterable[Picture]) -> Iterator[tuple[Picture, Any]]:
        return picture_records(
            inputs.family,
            autoencoder,
            some,
            batch_size=pace.batch_size,
            device=device,
            late=pace.late,
        )

    return put_all(
        picture_order(pictures),
        encode,
        keys=pictures,
        kind=KIND,
        store=store,
        subject_of=lambda picture: str(picture.path),
        events=events,
        writers=pace.writers,
    )


def _works(inputs: Inputs) -> list[Work]:
    """Every variant of what trains, the plain one of what is held out."""
    held_out = _held_out(inputs)
    return [
        Work(image["image_key"], Geometry(**cut))
        for image in inputs.upstream["prepare_dataset"].payload["images"]
        for cut in image["variants"][: 1 if image["image_key"] in held_out else None]
    ]


def _held_out(inputs: Inputs) -> set[str]:
    prepared = inputs.upstream["prepare_dataset"].payload
    return {sample["image_key"] for sample in prepared["held_out"]}


def _keys(config: Config, inputs: Inputs, works: list[Work]) -> dict[Work, Key]:
    facts = inputs.family.FACTS
    autoencoder = inputs.base.identity(facts.autoencoder)
    return {
        work: latent_key(
            work.image_key,
            work.geometry,
            autoencoder=autoencoder,
            dtype=config.latents.dtype,
            routine=facts.encode_routine,
        )
        for work in works
    }


def _entry_bytes(work: Work, inputs: Inputs, autoencoder: Mapping[str, Any]) -> int:
    """Tensor bytes of a mean and a std."""
    height, width = work.geometry.height, work.geometry.width
    shape = inputs.family.latent_shape(autoencoder, height=height, width=width)
    return 2 * ITEM_BYTES * math.prod(shape)
