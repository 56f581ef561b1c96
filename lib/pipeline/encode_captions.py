"""Stage `encode_captions`: each unique text, encoded once, into the store."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lib.components import QUANTISED
from lib.events import Events
from lib.keys import Key, digest
from lib.leases import lease
from lib.pipeline.contract import (
    BASE,
    Inputs,
    StagePlan,
    captions_dtype,
    check_disk,
    chosen,
    hit,
    plan_cache,
    planned_refs,
    prompts_of,
    publish,
    record_bytes,
)
from lib.recipes import FEW_BITS_VERSION, cache_key, caption_key
from lib.schema import Config
from lib.store import EntryRef, Manifest, Store

STAGE, KIND = "encode_captions", "captions"
TRAIN, HELD_OUT, UNCONDITIONAL, SAMPLE = "train", "held_out", "unconditional", "sample"


def plan(config: Config, inputs: Inputs, store: Store) -> StagePlan:
    """Which texts have no entry yet; `None` stands for the family's unconditional record."""
    settings = _settings(config)
    num_bytes = record_bytes(config, inputs)
    if not inputs.base.built:
        count = len(_texts(config, inputs)) + 1
        return StagePlan(STAGE, None, False, count, count, count * num_bytes, settings)
    keys = _keys(config, inputs)
    by_role = {
        TRAIN: [keys[text].digest for text in _prepared(inputs)["captions"]],
        HELD_OUT: [keys[text].digest for text in _held_out(inputs)],
        SAMPLE: [keys[text].digest for text in _prompts(config, inputs)],
        UNCONDITIONAL: [keys[None].digest],
    }
    key = cache_key(STAGE, by_role)
    payload = {
        "texts": {digest(text): k.digest for text, k in keys.items() if text is not None},
        "unconditional": keys[None].digest,
        "settings": settings,
    }
    planned = Manifest(STAGE, key.digest, key.inputs, planned_refs(KIND, by_role), payload)
    bytes_of = {key.digest: num_bytes for key in keys.values()}
    return plan_cache(store, planned, bytes_of=bytes_of, settings=settings)


def run(config: Config, inputs: Inputs, store: Store, events: Events) -> Manifest:
    """Encode what is missing, name every text that failed, publish the list of entries."""
    planned = plan(config, inputs, store)
    with lease(store, planned.keys_to_hold()):
        found = hit(store, planned.known(), events)
        return found or _build(planned, config, inputs, store, events)


def key_settings(config: Config) -> dict[str, Any]:
    """The settings that enter the key; those of the stages upstream are in theirs."""
    prompts = ("sample.prompts", "sample.negative_prompt")
    return {**chosen(config, *BASE, *prompts), **_settings(config)}


def _settings(config: Config) -> dict[str, Any]:
    length, dtype = config.captions.max_length, captions_dtype(config)
    return {"captions.max_length": length, "captions.dtype": dtype}


def _build(
    planned: StagePlan, config: Config, inputs: Inputs, store: Store, events: Events
) -> Manifest:
    from lib.device import release

    events.phase(STAGE, "start", total=planned.total, missing=planned.missing)
    todo = {t: k for t, k in _keys(config, inputs).items() if not store.size_bytes(KIND, k.digest)}
    opened: frozenset[EntryRef] | None = None
    if todo:
        check_disk(planned, store, remedy="a smaller captions.max_length")
        opened = _encode(todo, config, inputs, store, events)
        release()  # now that no name holds the model
    return publish(store, planned.known(), events, made=len(todo), opened=opened)


def _encode(
    todo: Mapping[str | None, Key], config: Config, inputs: Inputs, store: Store, events: Events
) -> frozenset[EntryRef]:
    from lib.device import pick_device
    from lib.encoding import caption_order, caption_records
    from lib.keeping import TOKENS_TOGETHER, Pace, put_all
    from lib.quiet import without_library_bars
    from lib.records import DTYPES

    dtype, device = DTYPES[captions_dtype(config)], pick_device()
    with without_library_bars():
        encoders = inputs.family.load_text_encoders(inputs.base, dtype=dtype, device=device)
    fitting = TOKENS_TOGETHER // config.captions.max_length
    pace = Pace.of(device, asked=config.encode.batch_size, fitting=fitting)
    subjects = {None: "the unconditional record", **_subjects(inputs)}

    def encode(texts: Iterable[str | None]) -> Iterator[tuple[str | None, Any]]:
        return caption_records(
            inputs.family,
            encoders,
            texts,
            max_length=config.captions.max_length,
            batch_size=pace.batch_size,
            late=pace.late,
        )

    return put_all(
        caption_order(inputs.family, todo),
        encode,
        keys=todo,
        kind=KIND,
        store=store,
        subject_of=lambda text: subjects.get(text, "a prompt of sample.prompts"),
        events=events,
        writers=pace.writers,
    )


def _subjects(inputs: Inputs) -> dict[str, str]:
    """A text by the first picture that has it, since captions stay out of logs."""
    samples = [*_prepared(inputs)["samples"], *_prepared(inputs)["held_out"]]
    return {t: f"caption of {s['name']}" for s in reversed(samples) for t in s["captions"]}


def _prepared(inputs: Inputs) -> Mapping[str, Any]:
    return inputs.upstream["prepare_dataset"].payload


def _held_out(inputs: Inputs) -> list[str]:
    return [sample["caption"] for sample in _prepared(inputs)["held_out"]]


def _prompts(config: Config, inputs: Inputs) -> list[str]:
    negative = config.sample.negative_prompt
    return prompts_of(config, _prepared(inputs)) + ([] if negative is None else [negative])


def _texts(config: Config, inputs: Inputs) -> list[str]:
    """Captions and prompts, each once."""
    captions = [*_prepared(inputs)["captions"], *_held_out(inputs)]
    return list(dict.fromkeys([*captions, *_prompts(config, inputs)]))


def _keys(config: Config, inputs: Inputs) -> dict[str | None, Key]:
    """The key of each text, and of the unconditional record under None."""
    facts = inputs.family.FACTS
    encoders = {name: inputs.base.identity(name) for name in facts.text_components}
    settings: dict[str, Any] = {n: inputs.base.settings.get(n) for n in facts.caption_settings}
    if any(QUANTISED in inputs.base.component(name).config for name in facts.text_components):
        settings["few_bits"] = FEW_BITS_VERSION
    return {
        text: caption_key(
            text,
            encoders=encoders,
            rule=facts.caption_rule,
            settings=settings,
            max_length=config.captions.max_length,
            dtype=captions_dtype(config),
        )
        for text in (*_texts(config, inputs), None)
    }
