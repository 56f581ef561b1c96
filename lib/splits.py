"""The held-out split: which pictures never train, chosen by what is in them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lib.errors import InputRefused, Problem
from lib.manifest import Sample

RULE = "content-hash/1"


@dataclass(frozen=True)
class Split:
    """Samples that train and samples that are only looked at; `rule` enters the data set's key."""

    train: tuple[Sample, ...]
    held_out: tuple[Sample, ...]
    rule: Mapping[str, Any] | None


def split_by_content(samples: Sequence[Sample], *, fraction: float) -> Split:
    """Hold out the pictures whose key, read as a number in [0, 1), lies below `fraction`.

    Copies of a picture fall on one side, and a picture that is added moves no other.
    """
    if fraction == 0:
        return Split(train=tuple(samples), held_out=(), rule=None)
    held_out = tuple(sample for sample in samples if _place(sample.image_key) < fraction)
    train = tuple(sample for sample in samples if _place(sample.image_key) >= fraction)
    if samples and not (train and held_out):
        side = "none" if not held_out else "all"
        raise InputRefused(
            Problem(
                f"validation.fraction={fraction}",
                f"holds out {side} of the {len(samples)} pictures",
                "a share that leaves pictures on both sides",
                "raise it" if not held_out else "lower it",
            )
        )
    return Split(train, held_out, rule={"rule": RULE, "fraction": fraction})


def _place(image_key: str) -> float:
    """The first 52 bits of a SHA-256, uniform over [0, 1)."""
    return int(image_key[:13], 16) / 16**13
