"""Every draw: a pure function of (seed, stream, counter, sample id), on the CPU (design 5).

Bits come from Philox (Salmon et al. 2011), keyed by the first 128 bits of the SHA-256 of the
canonical tuple: torch's CPU generator keeps only 32 bits of a seed and collides.
"""

import hashlib
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float32

from lib.keys import canonical_json

Stream = Literal[
    "order",
    "variant",
    "geometry",
    "timestep",
    "noise",
    "posterior",
    "caption",
    "caption_dropout",
    "adapter_init",
    "adapter_dropout",
    "validation",
]
STREAMS: tuple[str, ...] = get_args(Stream)


def _key(seed: int, stream: str, counter: int, sample_id: str) -> int:
    if stream not in STREAMS:
        raise ValueError(f"unknown random stream {stream!r}")
    block = hashlib.sha256(canonical_json([seed, stream, counter, sample_id])).digest()
    return int.from_bytes(block[:16], "little")


def generator(*, seed: int, stream: Stream, counter: int, sample_id: str) -> np.random.Generator:
    """A fresh generator for one draw; nothing is shared between two draws."""
    return np.random.Generator(np.random.Philox(key=_key(seed, stream, counter, sample_id)))


def normal(
    shape: tuple[int, ...], *, seed: int, stream: Stream, counter: int, sample_id: str
) -> Float32[np.ndarray, "..."]:
    """Standard normal numbers in float32."""
    source = generator(seed=seed, stream=stream, counter=counter, sample_id=sample_id)
    return source.standard_normal(shape, dtype=np.float32)


def uniform(*, seed: int, stream: Stream, counter: int, sample_id: str) -> float:
    """One number in [0, 1)."""
    source = generator(seed=seed, stream=stream, counter=counter, sample_id=sample_id)
    return float(source.random(dtype=np.float32))


def integer(below: int, *, seed: int, stream: Stream, counter: int, sample_id: str) -> int:
    """One integer in [0, below)."""
    source = generator(seed=seed, stream=stream, counter=counter, sample_id=sample_id)
    return int(source.integers(below))


def permutation(count: int, *, seed: int, epoch: int, name: str) -> list[int]:
    """The order of `count` things in one epoch; `name` tells one order from another."""
    source = generator(seed=seed, stream="order", counter=epoch, sample_id=name)
    return [int(place) for place in source.permutation(count)]


def seed64(*, seed: int, stream: Stream, counter: int, sample_id: str) -> int:
    """A seed for code that draws by itself (PEFT's initialisation, torch's dropout)."""
    return _key(seed, stream, counter, sample_id) & ((1 << 63) - 1)
