"""What the steps of a run need of a GPU's memory, in each way that it could run."""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from lib.few_bits import BYTES, MODES
from lib.fitting import stored_kind
from lib.footprint import (
    PREVIEW_BYTES,
    Costs,
    Footprint,
    Needs,
    Way,
    Weights,
    Work,
    count,
    footprint,
    reference,
)
from lib.hub import Component
from lib.pipeline.contract import Inputs, record_bytes
from lib.schema import AdapterConfig, Config
from lib.store import Store
from lib.team import this_process

WAYS = [Way(mode, again) for again in (False, True) for mode in ("fp32", "bf16", *MODES)]


def needs_of(config: Config, inputs: Inputs, store: Store) -> Needs:
    """The peak of each way, told once it is known whether blocks are compiled."""
    return partial(_needs, config, inputs, store)


def work_of(config: Config, inputs: Inputs, store: Store) -> Work:
    """The largest bucket with the longest caption."""
    buckets = inputs.upstream["prepare_dataset"].payload["buckets"]
    largest = max(buckets, key=lambda bucket: bucket["height"] * bucket["width"])
    return Work(
        height=largest["height"],
        width=largest["width"],
        text_tokens=_text_tokens(config, inputs, store),
        batch=config.trainer.micro_batch or config.trainer.batch_size // this_process().size,
    )


def _needs(
    config: Config, inputs: Inputs, store: Store, *, compiled: bool
) -> Mapping[Way, Footprint]:
    facts = inputs.family.FACTS
    own = _complete(inputs.base.component(facts.denoiser), facts.costs)
    weights, work = _weights(config, inputs), work_of(config, inputs, store)
    previews = PREVIEW_BYTES * work.height * work.width if config.sample.every else 0
    return {
        way: footprint(weights, facts.costs, own, work, way, compiled=compiled, previews=previews)
        for way in WAYS
    }


def _complete(denoiser: Component, costs: Costs) -> Mapping[str, Any]:
    """Its configuration; what that leaves out, by the class's defaults, which takes an import."""
    if not {*costs.layers, *costs.width} - denoiser.config.keys():
        return denoiser.config
    import diffusers

    parameters = inspect.signature(getattr(diffusers, denoiser.class_name).__init__).parameters
    return {**{name: one.default for name, one in parameters.items()}, **denoiser.config}


def _weights(config: Config, inputs: Inputs) -> Weights:
    """By the headers of the denoiser's files, or the reference's where they are not here."""
    facts, adapter = inputs.family.FACTS, config.adapter
    shapes = inputs.base.tensor_shapes(facts.denoiser)
    published = reference(facts.costs, rank=adapter.rank)
    if not shapes:
        return published
    if stored_kind(inputs.base, inputs.family):  # whose tensors are packed; their bytes count
        dense = inputs.base.weight_bytes(facts.denoiser) / BYTES["bf16"]
        return replace(published, dense=int(dense), few=0)
    return count(shapes, facts.costs, ranks=ranks_of(adapter))


def ranks_of(adapter: AdapterConfig) -> dict[str, int]:
    """By module name, a pattern's before the target's that it may be a part of."""
    own = adapter.rank_pattern
    return {**own, **{name: adapter.rank for name in adapter.targets if name not in own}}


def _text_tokens(config: Config, inputs: Inputs, store: Store) -> int:
    """Of the longest caption; of captions stored with their pads all that they may have."""
    most, captions = config.captions.max_length, inputs.upstream.get("encode_captions")
    if inputs.family.FACTS.fixed_texts or captions is None:
        return most
    sizes = [store.size_bytes(ref.kind, ref.key) or 0 for ref in set(captions.refs())]
    longest = -(-max(sizes, default=0) * most // record_bytes(config, inputs))
    return min(most, longest) or most
