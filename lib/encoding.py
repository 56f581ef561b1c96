"""Captions and pictures through the frozen encoders, one record at a time out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lib.errors import Problem
from lib.family import Family, Posterior, Record
from lib.images import Geometry, ImageError, decode, render
from lib.keys import Key
from lib.records import to_stored
from lib.store import Store

THREADS = 2


@dataclass(frozen=True)
class Picture:
    """One picture in one geometry, and where its bytes lie."""

    image_key: str
    geometry: Geometry
    path: Path


def caption_records(
    family: Family,
    encoders: Any,
    texts: Sequence[str | None],
    *,
    max_length: int,
    batch_size: int,
) -> Iterator[tuple[str | None, Record]]:
    """Each text with its record; None stands for the unconditional one."""
    captions = [text for text in texts if text is not None]
    for start in range(0, len(captions), batch_size):
        batch = captions[start : start + batch_size]
        yield from zip(
            batch, family.encode_captions(encoders, batch, max_length=max_length), strict=True
        )
    if None in texts:
        yield None, family.encode_unconditional(encoders, max_length=max_length)


def picture_records(
    family: Family, autoencoder: Any, pictures: Sequence[Picture], *, batch_size: int
) -> Iterator[tuple[Picture, Record | Problem]]:
    """Each picture with its posterior, or with what is wrong; one bucket at a time.

    Decoding and resizing run in threads, one batch ahead of the autoencoder.
    """
    with ThreadPoolExecutor(THREADS) as threads:
        pending = None
        for batch in _batches(pictures, batch_size):
            following = (batch, [threads.submit(_pixels, picture) for picture in batch])
            if pending:
                yield from _encoded(family, autoencoder, *pending)
            pending = following
        if pending:
            yield from _encoded(family, autoencoder, *pending)


def put_record(
    store: Store, kind: str, key: Key, record: Record, *, subject: str
) -> Problem | None:
    """Store a record under its key; one that is not finite is a problem of its subject."""
    try:
        store.put(kind, key.digest, to_stored(record), metadata={}, inputs=key.inputs)
    except ValueError as error:
        return Problem(subject, f"its encoding cannot be stored: {error}")
    return None


def _batches(pictures: Sequence[Picture], size: int) -> Iterator[list[Picture]]:
    def bucket(picture: Picture) -> tuple[int, int]:
        return picture.geometry.height, picture.geometry.width

    for _, group in groupby(sorted(pictures, key=bucket), key=bucket):
        same = list(group)
        yield from (same[start : start + size] for start in range(0, len(same), size))


def _pixels(picture: Picture) -> np.ndarray | Problem:
    """The pixels the denoiser will learn; the bytes must be those that were hashed before."""
    try:
        data = picture.path.read_bytes()
        if hashlib.sha256(data).hexdigest() != picture.image_key:
            return Problem(str(picture.path), "changed while it was being used", remedy="run again")
        return render(decode(data), picture.geometry)
    except OSError as error:
        return Problem(str(picture.path), f"cannot be read ({error.strerror})")
    except ImageError as error:
        return Problem(str(picture.path), str(error))


def _encoded(
    family: Family, autoencoder: Any, batch: Sequence[Picture], pending: Sequence[Any]
) -> Iterator[tuple[Picture, Record | Problem]]:
    found = {p: future.result() for p, future in zip(batch, pending, strict=True)}
    yield from ((p, pixels) for p, pixels in found.items() if isinstance(pixels, Problem))
    readable = {p: pixels for p, pixels in found.items() if not isinstance(pixels, Problem)}
    if readable:
        stacked = torch.from_numpy(np.stack(list(readable.values())))
        posterior = family.encode_images(autoencoder, stacked)
        for row, picture in enumerate(readable):
            yield picture, posterior_record(posterior, row=row)


def posterior_record(posterior: Posterior, *, row: int) -> dict[str, torch.Tensor]:
    """One picture's mean and std: c h w."""
    return {"mean": posterior.mean[row], "std": posterior.std[row]}


def paths_of(samples: Sequence[Mapping[str, Any]], root: Path) -> dict[str, Path]:
    """One file for each image key."""
    return {sample["image_key"]: root / sample["name"] for sample in samples}
