"""Captions and pictures through the frozen encoders, one record at a time out.

A GPU is never waited for between two batches: pixels are decoded by threads and copied from pinned
memory, and a batch's records are taken up when the next batch is on its way.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from lib.device import arriving, release
from lib.family import Family, Posterior, Record
from lib.images import Geometry, ImageError, decode, render
from lib.survey import MAX_PICTURE_BYTES, read_regular

MOST_DECODERS = 16
MOST_CHARS = 200  # of an encoder's own words
CPU = torch.device("cpu")
# These very classes: a NotImplementedError is a fault of ours, and a broken device fails all.
OF_THE_ENCODER = (RuntimeError, torch.OutOfMemoryError)

Item = TypeVar("Item")


@dataclass(frozen=True)
class Failed:
    """Why an item has no record, in the words of a report; the others are tried."""

    why: str
    remedy: str = ""


@dataclass(frozen=True)
class Picture:
    """One picture in one geometry, and where its bytes lie."""

    image_key: str
    geometry: Geometry
    path: Path


def in_batches(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Lists of `size`; the last may be shorter."""
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def caption_order(family: Family, texts: Iterable[str | None]) -> list[str | None]:
    """Texts as they are best encoded: captions, then the unconditional record.

    Where a family masks, captions of a like length stand together: they pad each other least.
    """
    masked = family.FACTS.masked_texts
    return sorted(texts, key=lambda text: (text is None, len(text or "") if masked else 0))


def picture_order(pictures: Iterable[Picture]) -> list[Picture]:
    """Pictures as they are best encoded: one bucket after the other."""
    return sorted(pictures, key=_bucket)


def caption_records(
    family: Family,
    encoders: Any,
    texts: Iterable[str | None],
    *,
    max_length: int,
    batch_size: int,
    late: int = 0,
) -> Iterator[tuple[str | None, Record | Failed]]:
    """Each text, in order, with its record; None stands for the unconditional one.

    A text is taken from `texts` no sooner than its batch is to be encoded.
    """
    made = _caption_records(family, encoders, in_batches(texts, batch_size), max_length=max_length)
    return _fetched(made, late=late)


def _caption_records(
    family: Family, encoders: Any, batches: Iterable[list[str | None]], *, max_length: int
) -> Iterator[tuple[str | None, Record | Failed]]:

    def encode(batch: Sequence[str]) -> Sequence[Record]:
        return family.encode_captions(encoders, batch, max_length=max_length)

    def encode_unconditional() -> Record:
        return family.encode_unconditional(encoders, max_length=max_length)

    for batch in batches:
        yield from _encoded(encode, [text for text in batch if text is not None])
        if None in batch:
            yield from _encoded(lambda _: [encode_unconditional()], [None])


def picture_records(
    family: Family,
    autoencoder: Any,
    pictures: Iterable[Picture],
    *,
    batch_size: int,
    device: torch.device = CPU,
    late: int = 0,
) -> Iterator[tuple[Picture, Record | Failed]]:
    """Each picture, in order, with its posterior, or with what is wrong; a batch has one bucket.

    A picture is taken from `pictures` no sooner than it is to be decoded.
    """
    made = _picture_records(family, autoencoder, pictures, batch_size=batch_size, device=device)
    return _fetched(made, late=late)


def _picture_records(
    family: Family,
    autoencoder: Any,
    pictures: Iterable[Picture],
    *,
    batch_size: int,
    device: torch.device,
) -> Iterator[tuple[Picture, Record | Failed]]:
    def encode(batch: Sequence[tuple[Picture, np.ndarray]]) -> Sequence[Record]:
        stacked = _stacked([pixels for _, pixels in batch], device=device)
        posterior = family.encode_images(autoencoder, stacked)
        return [posterior_record(posterior, row=row) for row in range(len(batch))]

    for batch in _decoded(_batches(pictures, batch_size), batch_size=batch_size):
        yield from ((p, pixels) for p, pixels in batch if isinstance(pixels, Failed))
        readable = [(p, pixels) for p, pixels in batch if not isinstance(pixels, Failed)]
        yield from ((picture, record) for (picture, _), record in _encoded(encode, readable))
        readable.clear()  # as `_decoded` does with the batch


def _stacked(pixels: Sequence[np.ndarray], *, device: torch.device) -> torch.Tensor:
    """One tensor on the device; on its way to a GPU from memory that it copies from by itself."""
    if device.type != "cuda":
        return torch.from_numpy(np.stack(pixels))
    pinned = torch.empty((len(pixels), *pixels[0].shape), dtype=torch.float32, pin_memory=True)
    for row, picture in zip(pinned, pixels, strict=True):
        row.copy_(torch.from_numpy(picture))
    return pinned.to(device, non_blocking=True)


def _fetched(
    records: Iterator[tuple[Item, Record | Failed]], *, late: int
) -> Iterator[tuple[Item, Record | Failed]]:
    """Records on the CPU, so many items late: they come while the device has its next batch."""
    coming: deque[tuple[Item, Callable[[], Record | Failed]]] = deque()
    for item, record in records:
        coming.append((item, _coming(record)))
        if len(coming) > late:
            first, arrived = coming.popleft()
            yield first, arrived()
    while coming:
        first, arrived = coming.popleft()
        yield first, arrived()


def _coming(record: Record | Failed) -> Callable[[], Record | Failed]:
    """Sends a record's tensors to the CPU; what waits until they are there gives it."""
    if isinstance(record, Failed):
        return lambda: record
    sent = {name: arriving(tensor) for name, tensor in record.items()}

    def arrived() -> Record:
        for _, wait in sent.values():
            wait()
        return {name: tensor for name, (tensor, _) in sent.items()}

    return arrived


def look_ahead(batch_size: int) -> int:
    """How many pictures are decoded, or being decoded, before the encoder has their batch."""
    return max(batch_size, _decoders())


def _decoders() -> int:
    """A thread for each core that this process may use: Pillow lets go of the interpreter."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return min(MOST_DECODERS, cores)


def _encoded(
    encode: Callable[[Sequence[Item]], Sequence[Record]], items: Sequence[Item]
) -> Iterator[tuple[Item, Record | Failed]]:
    """Items encoded together; where that fails each alone, so that one costs no other its record.

    Together they may not have fitted in memory, or one of them is bad.
    """
    if not items:
        return
    found = _tried(encode, items)
    if not isinstance(found, Failed):
        yield from zip(items, found, strict=True)
        return
    release()  # now that no traceback holds what did not fit
    if len(items) == 1:
        yield items[0], found
        return
    for item in items:
        yield from _encoded(encode, [item])


def _tried(
    encode: Callable[[Sequence[Item]], Sequence[Record]], items: Sequence[Item]
) -> Sequence[Record] | Failed:
    try:
        return encode(items)
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and type(error) not in OF_THE_ENCODER:
            raise
        words = f"{type(error).__name__}: {error}".splitlines()[0][:MOST_CHARS]
        remedy = "the others are kept; free memory of the device, then run again"
        return Failed(f"could not be encoded ({words})", remedy)


def _decoded(
    batches: Iterator[list[Picture]], *, batch_size: int
) -> Iterator[list[tuple[Picture, np.ndarray | Failed]]]:
    """Batches of pixels; threads work on the next batches while the encoder has one."""
    pending: deque[list[tuple[Picture, Future[np.ndarray | Failed]]]] = deque()
    with ThreadPoolExecutor(_decoders()) as threads:

        def fill() -> None:
            while sum(map(len, pending)) + batch_size <= look_ahead(batch_size) and (
                batch := next(batches, None)
            ):
                pending.append([(picture, threads.submit(_pixels, picture)) for picture in batch])

        try:
            fill()
            while pending:
                ready = [(picture, pixels.result()) for picture, pixels in pending.popleft()]
                fill()
                yield ready
                ready.clear()  # before more is decoded: memory holds so many and no more
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def _bucket(picture: Picture) -> tuple[int, int]:
    return picture.geometry.height, picture.geometry.width


def _batches(pictures: Iterable[Picture], size: int) -> Iterator[list[Picture]]:
    for _, same in groupby(pictures, key=_bucket):
        yield from in_batches(same, size)


def _pixels(picture: Picture) -> np.ndarray | Failed:
    """The pixels the denoiser will learn; the bytes must be those that were hashed before."""
    try:
        data = read_regular(picture.path, max_bytes=MAX_PICTURE_BYTES)
        if hashlib.sha256(data).hexdigest() != picture.image_key:
            return Failed("changed while it was being used", remedy="run again")
        return render(decode(data), picture.geometry)
    except OSError as error:
        return Failed(f"cannot be read ({error.strerror})")
    except ImageError as error:
        return Failed(str(error))
    except MemoryError:
        return Failed("does not fit in memory when it is decoded", remedy="free some memory")


def posterior_record(posterior: Posterior, *, row: int) -> dict[str, torch.Tensor]:
    """One picture's mean and std: c h w."""
    return {"mean": posterior.mean[row], "std": posterior.std[row]}


def paths_of(samples: Sequence[Mapping[str, Any]], root: Path) -> dict[str, Path]:
    """One file for each image key."""
    return {sample["image_key"]: root / sample["name"] for sample in samples}
