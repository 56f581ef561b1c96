"""A safetensors file from anywhere: a header with limits, then one tensor at a time.

A pickle is told by its name or first bytes and never opened. What a careful reader would refuse
within a safetensors file is collected as faults, so that all of it can be said at once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from lib.errors import InputRefused, Problem
from lib.fitting import PICKLES
from lib.tensors import ITEM_BYTES

HEADER_CAP_BYTES = 100_000_000  # safetensors' own
MOST_AXES = 8
SAFETENSORS = "a safetensors file"
_PICKLE = "is a pickle, which can run code when it is opened"
_OTHERS = {
    b"PK\x03\x04": f"{_PICKLE} (a zip of torch.save)",
    **{b"\x80" + bytes([protocol]): _PICKLE for protocol in range(2, 6)},
    b"GGUF": "is a GGUF file",
    b"version https://git-lfs": "is a pointer of Git LFS, not the file itself",
}
_TORCH = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
}
assert _TORCH.keys() == ITEM_BYTES.keys()


@dataclass(frozen=True, order=True)
class Fault:
    """One thing that is wrong, and the keys or modules that it is wrong with."""

    what: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """A tensor by the header: where its bytes lie after it."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Foreign:
    """A file whose header was read: all names in it, and the places of tensors without fault."""

    path: Path
    size: int
    data_start: int = 0
    names: tuple[str, ...] = ()
    places: Mapping[str, Place] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()

    def data(self, name: str) -> bytes:
        place = self.places[name]
        with self.path.open("rb") as file:
            file.seek(self.data_start + place.start)
            data = file.read(place.end - place.start)
        if len(data) != place.end - place.start:
            raise InputRefused(Problem(str(self.path), "changed while it was read"))
        return data

    def tensor(self, name: str) -> torch.Tensor:
        place, data = self.places[name], self.data(name)
        dtype = _TORCH[place.dtype]
        if not data:
            return torch.empty(0, dtype=dtype)  # whose shape may be beyond what torch can count
        return torch.frombuffer(bytearray(data), dtype=dtype).reshape(place.shape)


def open_foreign(path: Path) -> Foreign:
    """Read a file's header; refused where there is none that could be one."""
    _refuse_by_name(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(32)
            length = int.from_bytes(first[:8], "little")
            if first[8:9] != b"{" or (length > size - 8 and _other_kind(first)):
                raise InputRefused(_no_header(path, first))
            if length > HEADER_CAP_BYTES:
                why = f"has a header of {length} bytes"
                raise InputRefused(Problem(str(path), why, f"at most {HEADER_CAP_BYTES}"))
            file.seek(8)
            text = file.read(length)
    except OSError as error:
        raise InputRefused(Problem(str(path), error.strerror or "cannot be read")) from error
    if length > size - 8:
        fault = Fault(f"cut short within its header: {size} bytes of at least {length + 8}")
        return Foreign(path, size, faults=(fault,))
    return _read(path, size, text)


def _refuse_by_name(path: Path) -> None:
    if path.suffix.lower() in PICKLES:
        remedy = "it was not opened"
        raise InputRefused(Problem(str(path), f"{_PICKLE}, by its name", SAFETENSORS, remedy))
    if not path.is_file():
        why = "is a folder" if path.is_dir() else "is no file" if path.exists() else "is not there"
        raise InputRefused(Problem(str(path), why, SAFETENSORS))


def _no_header(path: Path, first: bytes) -> Problem:
    return Problem(str(path), _other_kind(first) or "is no safetensors file", SAFETENSORS)


def _other_kind(first: bytes) -> str:
    return next((why for magic, why in _OTHERS.items() if first.startswith(magic)), "")


def _read(path: Path, size: int, text: bytes) -> Foreign:
    """The header's JSON, and what is wrong with what it says."""
    twins: list[str] = []

    def plain(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            counts = Counter(name for name, _ in pairs)
            twins.extend(name for name, count in counts.items() if count > 1)
        return found

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=plain)
    except (ValueError, RecursionError) as error:
        raise InputRefused(
            Problem(str(path), f"has a header that is no JSON ({_short(error)})", SAFETENSORS)
        ) from error
    faults = [Fault("a name occurs twice in the header", tuple(sorted(twins)))] if twins else []
    metadata = header.pop("__metadata__", None)
    if metadata is None:
        metadata = {}
    texts = metadata if isinstance(metadata, dict) else {}
    wrong = sorted(name for name, value in texts.items() if not isinstance(value, str))
    if wrong or not isinstance(metadata, dict):
        faults.append(Fault("metadata is not all text", tuple(wrong)))
    places, more = _places(header, size - 8 - len(text))
    return Foreign(
        path,
        size,
        data_start=8 + len(text),
        names=tuple(header),
        places=places,
        metadata={name: value for name, value in texts.items() if isinstance(value, str)},
        faults=(*faults, *more),
    )


def _places(header: Mapping[str, Any], room: int) -> tuple[dict[str, Place], list[Fault]]:
    """Tensors that can be read, and the faults of the others and of their order."""
    found = {name: _place(item) for name, item in header.items()}
    whole = {name: place for name, place in found.items() if place is not None}
    beyond = {name for name, place in whole.items() if place.end > room}
    strange = {n for n, p in whole.items() if p.dtype not in ITEM_BYTES}
    lengths = {
        name
        for name, place in whole.items()
        if name not in strange
        and prod(place.shape) * ITEM_BYTES[place.dtype] != place.end - place.start
    }
    described = max((place.end for place in whole.values()), default=0)
    named = {
        "entries of the header that describe no tensor": found.keys() - whole.keys(),
        f"cut short: {room} bytes of {described} after the header; beyond the end": beyond,
        "of a dtype that is not read here": strange,
        "not as long as shape and dtype say": lengths,
        "overlap with the tensor before, or leave a hole": set(_out_of_line(whole)),
    }
    faults = [Fault(what, tuple(sorted(names))) for what, names in named.items() if names]
    if room > described:
        faults.append(Fault(f"{room - described} bytes after the last tensor"))
    bad = beyond | strange | lengths
    return {name: place for name, place in whole.items() if name not in bad}, faults


def _place(item: Any) -> Place | None:
    if not isinstance(item, dict) or item.keys() != {"dtype", "shape", "data_offsets"}:
        return None
    dtype, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
    if not (isinstance(dtype, str) and _are_counts(shape) and _are_counts(offsets)):
        return None
    if len(shape) > MOST_AXES or len(offsets) != 2 or offsets[0] > offsets[1]:
        return None
    return Place(dtype, tuple(shape), *offsets)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


def _out_of_line(places: Mapping[str, Place]) -> Iterator[str]:
    """Tensors that do not begin where the one before ends."""
    end = 0
    for name, place in sorted(places.items(), key=lambda item: (item[1].start, item[1].end)):
        if place.start != end:
            yield name
        end = max(end, place.end)


def _short(error: Exception) -> str:
    return str(error)[:80] or type(error).__name__
