"""Captions and pictures through the frozen encoders, one record at a time out."""

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

from lib import stopping
from lib.claims import claims
from lib.device import release
from lib.errors import Problem, SamplesFailed
from lib.events import Events
from lib.family import Family, Posterior, Record
from lib.images import Geometry, ImageError, decode, render
from lib.keys import Key
from lib.records import to_stored
from lib.store import Store
from lib.survey import MAX_PICTURE_BYTES, read_regular

MOST_DECODERS = 16
MOST_CHARS = 200  # of an encoder's own words
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
    masked = family.FACTS.caption_rule["mask"] is not None
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
) -> Iterator[tuple[str | None, Record | Failed]]:
    """Each text, in order, with its record; None stands for the unconditional one.

    A text is taken from `texts` no sooner than its batch is to be encoded.
    """

    def encode(batch: Sequence[str]) -> Sequence[Record]:
        return family.encode_captions(encoders, batch, max_length=max_length)

    def encode_unconditional() -> Record:
        return family.encode_unconditional(encoders, max_length=max_length)

    for batch in in_batches(texts, batch_size):
        yield from _encoded(encode, [text for text in batch if text is not None])
        if None in batch:
            yield from _encoded(lambda _: [encode_unconditional()], [None])


def picture_records(
    family: Family, autoencoder: Any, pictures: Iterable[Picture], *, batch_size: int
) -> Iterator[tuple[Picture, Record | Failed]]:
    """Each picture, in order, with its posterior, or with what is wrong; a batch has one bucket.

    A picture is taken from `pictures` no sooner than it is to be decoded.
    """

    def encode(batch: Sequence[tuple[Picture, np.ndarray]]) -> Sequence[Record]:
        stacked = torch.from_numpy(np.stack([pixels for _, pixels in batch]))
        posterior = family.encode_images(autoencoder, stacked)
        return [posterior_record(posterior, row=row) for row in range(len(batch))]

    for batch in _decoded(_batches(pictures, batch_size), batch_size=batch_size):
        yield from ((p, pixels) for p, pixels in batch if isinstance(pixels, Failed))
        readable = [(p, pixels) for p, pixels in batch if not isinstance(pixels, Failed)]
        yield from ((picture, record) for (picture, _), record in _encoded(encode, readable))
        readable.clear()  # as `_decoded` does with the batch


def put_all(
    items: Iterable[Item],
    encode: Callable[[Iterable[Item]], Iterator[tuple[Item, Record | Failed]]],
    *,
    keys: Mapping[Item, Key],
    kind: str,
    store: Store,
    subject_of: Callable[[Item], str],
    events: Events,
) -> None:
    """Encode items into the store, shared with any process that is at the same ones.

    Those that fail are told apart, after all others are kept: SamplesFailed.
    """
    problems: list[Problem] = []
    done = 0
    with claims(store, kind, keys) as claimed:

        def put(records: Iterator[tuple[Item, Record | Failed]]) -> None:
            nonlocal done
            for item, record in records:
                problem = _put(store, kind, keys[item], record, subject=subject_of(item))
                claimed.free(item)
                problems.extend([problem] if problem else [])
                done += 1
                stopping.check()
                events.progress(done + claimed.found, len(keys), unit=kind)

        put(encode(claimed.mine(items)))
        for item in claimed.left():
            put(encode([item]))
    if problems:
        raise SamplesFailed(problems)


def _put(
    store: Store, kind: str, key: Key, record: Record | Failed, *, subject: str
) -> Problem | None:
    """Store a record under its key; one that failed or is not finite is its subject's problem."""
    if isinstance(record, Failed):
        return Problem(subject, record.why, remedy=record.remedy)
    try:
        store.put(kind, key.digest, to_stored(record), metadata={}, inputs=key.inputs)
    except ValueError as error:
        return Problem(subject, f"its encoding cannot be stored: {error}")
    return None


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
