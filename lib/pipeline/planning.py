"""Plans as text: hits, misses with the reason, the bucket table, steps and bytes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lib.buckets import Bucket, slot_weights, steps_per_epoch
from lib.few_bits import MODES
from lib.footprint import Way, compiles, in_gib
from lib.pipeline.budget import needs_of, work_of
from lib.pipeline.contract import Inputs, StagePlan
from lib.pipeline.deciding import choice_of
from lib.schema import AUTO, Config
from lib.store import Store

UNDECIDED = "precision=auto is decided when it trains (see modes=true)"
UNITS = {
    "prepare_dataset": "pictures",
    "encode_captions": "captions",
    "build_latent_cache": "latents",
    "train": "steps",
    "export": "files",
    "sample": "rows",
}


def plan_lines(plans: Sequence[StagePlan], store: Store) -> Iterator[str]:
    """One line for each stage, the bucket table after the data set's."""
    (batch_size,) = (p.settings["trainer.batch_size"] for p in plans if p.stage == "train")
    for planned in plans:
        yield f"{planned.stage:<20} {_verdict(planned, store)}"
        if planned.stage == "prepare_dataset" and planned.manifest:
            yield from _bucket_lines(planned.manifest.payload, batch_size=batch_size)
    total = sum(planned.missing_bytes for planned in plans)
    yield f"{'to write':<20} {total} tensor bytes ({total / 2**20:.1f} MiB)"


def memory_lines(
    config: Config, inputs: Inputs, store: Store, *, total_steps: int
) -> Iterator[str]:
    """The peak of a step on a GPU in each precision, the run's own marked."""
    if not _is_measurable(inputs):
        return
    compiled = compiles(config.trainer.compile, total_steps=total_steps)
    work, needed = (
        work_of(config, inputs, store),
        needs_of(config, inputs, store)(compiled=compiled),
    )
    size = f"{work.height}x{work.width}, {work.batch} at once, {work.text_tokens} text tokens"
    how = "compiled" if compiled else "not compiled"
    yield f"{'GPU memory':<20} of a step at {size}, {how}; and with gradient checkpointing"
    for mode in dict.fromkeys(way.mode for way in needed):
        plain, again = (in_gib(needed[Way(mode, c)].peak) for c in (False, True))
        own = "   this run" if mode == config.precision.mode else ""
        yield f"  {mode:<18} {plain:>10} {again:>10}{own}"


def mode_lines(config: Config, inputs: Inputs, store: Store) -> Iterator[str]:
    """Which precisions this machine can compute, why not the others, and what `auto` would take."""
    from lib import choosing
    from lib.device import name_of, pick_device

    device = pick_device()
    yield f"{'this machine':<20} {name_of(device)}"
    for mode in ("fp32", "bf16", *MODES):
        yield f"  {mode:<18} {choosing.fault_of(mode, device) or 'can be computed'}"
    if not _is_measurable(inputs):
        return
    chosen = choice_of(config, inputs, store)
    yield f"  {'auto':<18} {'nothing' if chosen.refused else chosen.way}: {chosen.reason}"


def _is_measurable(inputs: Inputs) -> bool:
    """Whether the base is there and it is known what is trained on it."""
    return inputs.base.built and "prepare_dataset" in inputs.upstream


def reason(planned: StagePlan, store: Store) -> str:
    """Why a stage misses: which settings or inputs differ from the last time it was made."""
    earlier = list(store.manifests(planned.stage))
    if not earlier:
        return "never made in this store"
    before = earlier[-1]
    changes = list(_differences(before.payload.get("settings", {}), planned.settings))
    if planned.manifest and planned.stage == "train":
        names = {"manifest": "the data set", "captions": "the caption records"}
        names |= {"latents": "the latents", "denoiser": "the denoiser"}
        new = planned.manifest.inputs
        changes += [
            f"{text} changed" for name, text in names.items() if before.inputs[name] != new[name]
        ]
    return ", ".join(changes) or "its inputs changed"


def _verdict(planned: StagePlan, store: Store) -> str:
    unit = UNITS[planned.stage]
    if planned.hit:
        return f"hit   {planned.total} {unit}"
    if planned.settings.get("precision.mode") == AUTO:
        return f"miss  {planned.missing} of {planned.total} {unit} missing: {UNDECIDED}"
    if planned.manifest is None:
        return f"miss  {planned.missing} of {planned.total} {unit} missing: not built yet upstream"
    why = reason(planned, store)
    size = f", {planned.missing_bytes} bytes" if planned.missing_bytes else ""
    return f"miss  {planned.missing} of {planned.total} {unit} missing{size}: {why}"


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            yield f"{name} {before.get(name)} -> {now.get(name)}"


def _bucket_lines(prepared: Mapping[str, Any], *, batch_size: int) -> Iterator[str]:
    """The bucket table, and the steps of an epoch.

    A picture's weight is its share of an epoch's gradients beside one drawn once in a whole group.
    """
    table = {Bucket(one["height"], one["width"]): one for one in prepared["buckets"]}
    draws = {bucket: one["draws"] for bucket, one in table.items()}
    weights, total = slot_weights(draws, batch_size=batch_size), sum(draws.values())
    yield f"{'  bucket (h x w)':<20} pictures  draws  share  weight of a picture"
    for bucket, one in table.items():
        pictures, drawn = one["pictures"], one["draws"]
        weight = float(weights[bucket]) * drawn / pictures
        counts = f"{pictures:>8}  {drawn:>5}  {drawn / total:>5.0%}"
        yield f"  {bucket!s:<18} {counts}  {weight:.2f}"
    steps, short = steps_per_epoch(total, batch_size=batch_size), total % batch_size
    last = f", the last of {short}" if short else ""
    yield f"  an epoch: {total} draws, {steps} steps of {batch_size}{last}"
