"""How much GPU memory a training run needs, told without loading anything.

    peak = weights + adapter + what the forward keeps for the backward + what lives for a moment

The forward keeps tensors of tokens x hidden width; how many a block keeps was measured for each
family (`bench/saved_activations.py`) and is in its FACTS. Graphs of all shapes share one pool, so
the largest shape counts. bench/results has the predictions beside measured peaks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol

from lib.few_bits import BYTES, MODES, blocks_in, in_few_bits
from lib.naming import is_named

Shapes = Mapping[str, Sequence[int]]

# Float32 masters, gradients, those that arrive, two moments, the average. The compute copy and its
# gradient: of q, k and v each B is a third of a matrix, which also arrives in the run's precision.
ADAPTER_BYTES = 4 * 6 + 10
PASSING = 16  # hidden states of all tokens that live within a block, or within the update
GIB = 2**30
WORTH_COMPILING = 100  # steps that earn back the seconds which compiling takes
WIDE_COPIES = {"int8": 1, "nf4": 1}  # of the largest layer, for the time of its product
PREVIEW_BYTES = 4096  # for each pixel of a picture that an autoencoder decodes in float32


@dataclass(frozen=True)
class Costs:
    """How a family's denoiser is built, as far as memory goes; names of its configuration.

    `kept` are the hidden states (tokens x width, two bytes) that a block keeps for the backward,
    eager and compiled. A denoiser with no `layers` counts as one block over its whole depth.
    """

    kept: tuple[float, float]
    weights: tuple[int, int]  # of the reference base: all, and those that few bits hold
    lists: tuple[str, ...] = ("transformer_blocks",)  # where the blocks are
    layers: tuple[str, ...] = ("num_layers",)  # how many there are, over text and picture
    # Factors of the hidden width; of a list its first.
    width: tuple[str, ...] = ("num_attention_heads", "attention_head_dim")
    checkpointed: float = 1.0
    token_side: int = 16  # pixels


class Way(NamedTuple):
    """A precision, and whether a block's activations are computed again in the backward."""

    mode: str
    checkpointing: bool

    def __str__(self) -> str:
        return f"{self.mode} with checkpointing" if self.checkpointing else self.mode


@dataclass(frozen=True)
class Work:
    """The largest forward of a run."""

    height: int  # pixels
    width: int
    text_tokens: int
    batch: int  # pictures at once


@dataclass(frozen=True)
class Weights:
    """Numbers of weights of a denoiser, and what an adapter adds."""

    dense: int
    few: int  # that a precision of few bits holds so
    largest: int  # of one layer
    adapter: int


@dataclass(frozen=True)
class Footprint:
    """Bytes at the peak of a step."""

    weights: int
    adapter: int
    kept: int
    passing: int
    previews: int = 0
    blocks: int = 0  # that can be computed again, one by one
    saving: int = 0  # of each

    @property
    def peak(self) -> int:
        return self.weights + self.adapter + self.kept + self.passing + self.previews


class Needs(Protocol):
    """What each way to run needs, once it is known whether blocks are compiled."""

    def __call__(self, *, compiled: bool) -> Mapping[Way, Footprint]: ...


def count(shapes: Shapes, costs: Costs, *, ranks: Mapping[str, int]) -> Weights:
    """Weights by the tensors of a denoiser's files; `ranks` by adapter target."""
    layers = {
        name.removesuffix(".weight"): (shape[1], shape[0])
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 2
    }
    few = in_few_bits(layers, blocks=blocks_in(layers, lists=costs.lists))
    in_few = sum(prod(layers[name]) for name in few)
    return Weights(
        dense=sum(map(prod, shapes.values())) - in_few,
        few=in_few,
        largest=max((prod(layers[name]) for name in few), default=0),
        adapter=sum(_rank(name, ranks) * sum(sides) for name, sides in layers.items()),
    )


def reference(costs: Costs, *, rank: int) -> Weights:
    """Those of the family's reference, where a base's files are not here yet."""
    total, few = costs.weights
    # An adapter by the presets is few x rank / 3500 to 5800, and in SDXL / 1500.
    return Weights(total - few, few=few, largest=few // 400, adapter=few * rank // 3700)


def footprint(
    weights: Weights,
    costs: Costs,
    config: Mapping[str, Any],
    work: Work,
    way: Way,
    *,
    compiled: bool,
    previews: int = 0,
) -> Footprint:
    """The peak of a run's steps; `config` is the denoiser's own."""
    mode = way.mode
    dense_bytes = BYTES["fp32" if mode == "fp32" else "bf16"]
    hidden = int(hidden_bytes(costs, config, work) * dense_bytes / BYTES["bf16"])
    blocks = sum(int(config[name]) for name in costs.layers)
    each = costs.kept[compiled]
    kept = max(blocks, 1) * each
    if way.checkpointing:
        kept = max(blocks, 1) * costs.checkpointed + (each if blocks else 0)
    wide = WIDE_COPIES.get(mode, 0) * weights.largest * BYTES["bf16"]
    return Footprint(
        weights=int(
            weights.dense * dense_bytes
            + weights.few * (BYTES[mode] if mode in MODES else dense_bytes)
        ),
        adapter=weights.adapter * ADAPTER_BYTES,
        kept=int(hidden * kept),
        passing=int(hidden * PASSING + wide),
        previews=previews,
        blocks=blocks,
        saving=int(hidden * (each - costs.checkpointed)),
    )


def hidden_bytes(costs: Costs, config: Mapping[str, Any], work: Work) -> int:
    """One hidden state of all tokens, two bytes a number."""
    return _tokens(work, costs) * _width(config, costs) * work.batch * 2


def compiles(asked: str, *, total_steps: int) -> bool:
    """Whether a GPU's steps are compiled, by `trainer.compile`."""
    return asked == "always" or (asked == "auto" and total_steps >= WORTH_COMPILING)


def in_gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.0f} MiB"


def _rank(layer: str, ranks: Mapping[str, int]) -> int:
    return next((rank for target, rank in ranks.items() if is_named(layer, target=target)), 0)


def _tokens(work: Work, costs: Costs) -> int:
    picture = (work.height // costs.token_side) * (work.width // costs.token_side)
    return picture + (work.text_tokens if costs.layers else 0)


def _width(config: Mapping[str, Any], costs: Costs) -> int:
    values = [config[name] for name in costs.width]
    return prod(int(value[0] if isinstance(value, list | tuple) else value) for value in values)
