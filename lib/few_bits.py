"""Which of a denoiser's layers a precision of few bits holds so: a rule on names and sizes."""

import re
from collections.abc import Collection, Iterable, Mapping

MODES = ("fp8", "int8", "nf4")

# Parts of names in a block whose layers stay dense: they see one row a sample, not one a token.
DENSE = frozenset(
    {"norm", "norm1", "norm1_context", "norm2", "norm2_context", "img_mod", "txt_mod"}
    | {"adaLN_modulation", "modulation"}
)
LEAST_SIDE = 512  # smaller layers gain nothing from few bits
MULTIPLE = 16  # of a side: what float8 products ask for

# Bytes of a weight. NF4: half a byte, a block of 64 has its maximum in 8 bits, 256 blocks one more
# number in 32 (arXiv:2305.14314); float8 is held in both orders.
BYTES: Mapping[str, float] = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp8": 2.0,
    "int8": 1.0,
    "nf4": 0.5 + 1 / 64 + 4 / (64 * 256),
}


def in_few_bits(layers: Mapping[str, tuple[int, int]], *, blocks: Collection[str]) -> list[str]:
    """The layers (name: sides) inside the blocks, but for modulations and odd or small shapes."""
    found = {
        name: min(sides)
        for name, sides in layers.items()
        if (block := _block_of(name, blocks)) is not None
        and not DENSE & set(name.removeprefix(f"{block}.").split("."))
        and not any(side % MULTIPLE for side in sides)
    }
    large = [name for name, side in found.items() if side >= LEAST_SIDE]
    return large or list(found)  # of a base with no layer so large, all


def blocks_in(names: Iterable[str], *, lists: Collection[str]) -> set[str]:
    """The blocks that names lie in, where a denoiser keeps them in lists of these names."""
    pattern = re.compile(rf"((?:.*\.)?(?:{'|'.join(map(re.escape, lists))})\.\d+)\.")
    return {match[1] for name in names if (match := pattern.match(name))}


def _block_of(name: str, blocks: Collection[str]) -> str | None:
    """The block that a layer lies in: one of its name's beginnings."""
    parts = name.split(".")
    beginnings = (".".join(parts[:count]) for count in range(1, len(parts)))
    return next((one for one in beginnings if one in blocks), None)
