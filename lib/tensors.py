"""Named tensors as the bytes of one safetensors file that carries its own digest (design 4)."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize

from lib.keys import canonical_json

HEADER_CAP_BYTES = 8 << 20
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
# A number is not finite exactly when all these bits are set: the exponent's (E4M3 has a NaN only).
_NOT_FINITE = {
    "F64": 0x7FF0 << 48,
    "F32": 0x7F80 << 16,
    "F16": 0x7C00,
    "BF16": 0x7F80,
    "F8_E5M2": 0x7C,
    "F8_E4M3": 0x7F,
}


@dataclass(frozen=True)
class Tensor:
    """Little-endian row-major bytes; `dtype` by safetensors' names ("F32", "BF16", "I64", ...)."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True)
class Decoded:
    """What a file holds; the digest is among the metadata."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


def encode(tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str]) -> bytes:
    """A safetensors file whose header also holds the digest of all else."""
    _check(tensors, metadata)
    # Wide items first, as safetensors does, so that every tensor is aligned.
    order = sorted(tensors, key=lambda name: (-ITEM_BYTES[tensors[name].dtype], name))
    header: dict[str, Any] = {
        "__metadata__": {**metadata, "digest": entry_digest(tensors, metadata=metadata)}
    }
    end = 0
    for name in order:
        tensor, start = tensors[name], end
        end += len(tensor.data)
        header[name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [start, end],
        }
    text = canonical_json(header)
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_CAP_BYTES:
        raise ValueError(f"a header of {len(text)} bytes; at most {HEADER_CAP_BYTES}")
    return b"".join([len(text).to_bytes(8, "little"), text, *(tensors[n].data for n in order)])


def decode(data: bytes) -> Decoded:
    """What `encode` put into a file; ValueError when any of it has changed."""
    header_bytes = int.from_bytes(data[:8], "little")
    if len(data) < 8 or header_bytes > min(HEADER_CAP_BYTES, len(data) - 8):
        raise ValueError(f"a header of {header_bytes} bytes in a file of {len(data)}")
    header = json.loads(data[8 : 8 + header_bytes], object_pairs_hook=_without_twins)
    try:
        found = deserialize(data)
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    tensors = {
        name: Tensor(item["dtype"], tuple(item["shape"]), bytes(item["data"]))
        for name, item in found
    }
    metadata = header.get("__metadata__") or {}
    if metadata.get("digest") != entry_digest(tensors, metadata=metadata):
        raise ValueError("its digest does not match")
    return Decoded(tensors, metadata)


def entry_digest(tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str]) -> str:
    """SHA-256 over names, dtypes, shapes, metadata and data, whatever their order in the file."""
    names = sorted(tensors)
    layout = [[name, tensors[name].dtype, tensors[name].shape] for name in names]
    rest = {name: value for name, value in metadata.items() if name != "digest"}
    total = hashlib.sha256(canonical_json({"tensors": layout, "metadata": rest}))
    for name in names:
        total.update(tensors[name].data)
    return total.hexdigest()


def is_finite(dtype: str, data: bytes) -> bool:
    """Whether all numbers of a tensor of a known dtype are finite."""
    if (mask := _NOT_FINITE.get(dtype)) is None:
        return True
    bits = np.frombuffer(data, dtype=f"<u{ITEM_BYTES[dtype]}")
    return not np.any((bits & bits.dtype.type(mask)) == mask)


def _check(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Raise a ValueError for what could not be read back as it is."""
    if "__metadata__" in tensors or "digest" in metadata:
        raise ValueError("the names __metadata__ and digest are the file's own")
    if wrong := [name for name, text in metadata.items() if not isinstance(text, str)]:
        raise ValueError(f"metadata {wrong} is not text")
    for name, tensor in tensors.items():
        _check_tensor(name, tensor)


def _check_tensor(name: str, tensor: Tensor) -> None:
    """Raise a ValueError naming a tensor of unknown dtype, wrong length, or not finite."""
    if tensor.dtype not in ITEM_BYTES:
        raise ValueError(f"tensor {name!r}: unknown dtype {tensor.dtype}")
    item_bytes = ITEM_BYTES[tensor.dtype]
    if len(tensor.data) != item_bytes * prod(tensor.shape):
        raise ValueError(f"tensor {name!r}: {len(tensor.data)} bytes for shape {tensor.shape}")
    if not is_finite(tensor.dtype, tensor.data):
        raise ValueError(f"tensor {name!r} is not finite")


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; readers disagree on which of two equal names counts, so it has none."""
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError("a name occurs twice in the header")
    return found
