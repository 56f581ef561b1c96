"""Canonical JSON, digests, and the one way a key is made (design 3)."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Key:
    """A digest and its inputs, which lie beside the artifact so that plan can explain."""

    digest: str
    inputs: Mapping[str, Any]

    def __str__(self) -> str:
        return self.digest


def _canonical(value: Any) -> Any:
    """Plain JSON values; an integral float becomes an int, since 1 and 1.0 are one value."""
    if isinstance(value, Key):
        return value.digest
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"a key cannot hold {value}")
        return int(value) if value.is_integer() else value
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise TypeError("a key's mapping must have string names")
        return {name: _canonical(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_canonical(item) for item in value]
    raise TypeError(f"a key cannot hold a {type(value).__name__}")


def canonical_json(value: Any) -> bytes:
    """UTF-8 JSON with sorted names, no spaces, finite numbers only."""
    text = json.dumps(
        _canonical(value),
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
        allow_nan=False,
    )
    return text.encode("utf-8")


def digest(value: Any) -> str:
    """SHA-256 of the canonical JSON, 64 hex digits."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def make_key(kind: str, **inputs: Any) -> Key:
    """The key of one `kind` of artifact; field names take part: no two boundaries collide."""
    plain = _canonical(inputs)
    return Key(digest=digest({"kind": kind, "inputs": plain}), inputs=plain)


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
