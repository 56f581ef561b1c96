"""Aspect-ratio buckets and the batch plan; integers only (design 6)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count

from lib.errors import InputRefused, Problem
from lib.random import permutation

PLAN_VERSION = 1

Size = tuple[int, int]


@dataclass(frozen=True, order=True)
class Bucket:
    """A class of pictures that share one shape, in pixels."""

    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.height}x{self.width}"

    @property
    def size(self) -> Size:
        """(height, width)."""
        return self.height, self.width

    def tokens(self, divisor: int) -> int:
        """The image tokens of its pictures for a denoiser that sees squares of such a side."""
        return (self.height // divisor) * (self.width // divisor)


@dataclass(frozen=True)
class Row:
    """One row of a micro-batch; `position` is its place in the group, weight 0 marks a filler."""

    slot: int
    position: int
    weight: int


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one bucket, always as many as the micro-batch size."""

    bucket: Bucket
    rows: tuple[Row, ...]


def _refusals(*, resolution: int, step: int, max_aspect: float) -> Iterator[Problem]:
    if step < 1:
        yield Problem(f"buckets.step={step}", "sides are multiples of it", ">= 1")
    if resolution < max(step, 1):
        why = f"no side fits in steps of {step}"
        yield Problem(f"buckets.resolution={resolution}", why, f">= buckets.step ({step})")
    if not max_aspect >= 1:
        yield Problem(f"buckets.max_aspect={max_aspect}", "it is long side over short side", ">= 1")


def _nearest(numerator: int, denominator: int) -> int:
    """The integer nearest to a fraction, halves up."""
    return (2 * numerator + denominator) // (2 * denominator)


def _oblongs(*, area: int, base: int, step: int, max_aspect: float) -> Iterator[Bucket]:
    """Both orientations for each step of the long side; the short one is nearest in area."""
    for long_side in count(base + step, step):
        short_side = _nearest(area, long_side * step) * step
        if short_side == 0 or long_side > max_aspect * short_side:
            return
        yield Bucket(height=short_side, width=long_side)
        yield Bucket(height=long_side, width=short_side)


def make_buckets(*, resolution: int, step: int, max_aspect: float) -> tuple[Bucket, ...]:
    """A square and oblongs of about `resolution`^2 pixels, sides multiples of `step`, sorted."""
    refused = list(_refusals(resolution=resolution, step=step, max_aspect=max_aspect))
    if refused:
        raise InputRefused(refused)
    base = _nearest(resolution, step) * step
    oblongs = _oblongs(area=resolution**2, base=base, step=step, max_aspect=max_aspect)
    return tuple(sorted((Bucket(height=base, width=base), *oblongs)))


def kept_fraction(size: Size, *, bucket: Bucket) -> Fraction:
    """Share of a picture's pixels, (height, width), left by a cover-resize and crop."""
    across, down = size[0] * bucket.width, size[1] * bucket.height
    return Fraction(min(across, down), max(across, down))


def assign(size: Size, *, buckets: Iterable[Bucket]) -> Bucket:
    """The bucket that keeps most of a picture; among equals the least elongated, then the first."""

    def preference(bucket: Bucket) -> tuple[Fraction, Fraction, Bucket]:
        elongation = Fraction(max(bucket.size), min(bucket.size))
        return -kept_fraction(size, bucket=bucket), elongation, bucket

    return min(buckets, key=preference)


def enlargement(size: Size, *, bucket: Bucket) -> Fraction:
    """By how much a picture's sides are multiplied to cover a bucket; above 1 it gets soft."""
    return max(Fraction(bucket.height, size[0]), Fraction(bucket.width, size[1]))


def assign_without_enlarging(
    size: Size, *, buckets: Iterable[Bucket], step: int, max_aspect: float
) -> Bucket | None:
    """As `assign`, among the buckets that a picture covers as it is.

    A picture too small for all of them has a bucket of its own, the largest inside it; None when
    a side is below one step.
    """
    covered = [bucket for bucket in buckets if enlargement(size, bucket=bucket) <= 1]
    return assign(size, buckets=covered) if covered else _inside(size, step, max_aspect)


def _inside(size: Size, step: int, max_aspect: float) -> Bucket | None:
    short_side, long_side = (side // step * step for side in sorted(size))
    if not short_side:
        return None
    long_side = min(long_side, int(max_aspect * short_side) // step * step)
    tall = size[0] > size[1]
    return Bucket(long_side, short_side) if tall else Bucket(short_side, long_side)


def _cut(slots: Sequence[int], *, length: int) -> list[tuple[int, ...]]:
    return [tuple(slots[start : start + length]) for start in range(0, len(slots), length)]


def steps_per_epoch(num_slots: int, *, batch_size: int) -> int:
    """Groups, thus optimizer steps, in one epoch."""
    return -(-num_slots // batch_size)


def epoch_groups(
    members: Mapping[Bucket, Sequence[int]], *, seed: int, epoch: int, batch_size: int
) -> tuple[tuple[int, ...], ...]:
    """One epoch's groups of slots, one optimizer step each; every slot comes once.

    Only groups made of the buckets' remainders mix buckets, and only the last of these is short.
    """
    groups: list[tuple[int, ...]] = []
    remainders: list[int] = []
    for bucket in sorted(members):
        slots = members[bucket]
        order = permutation(len(slots), seed=seed, epoch=epoch, name=str(bucket))
        whole = len(slots) - len(slots) % batch_size
        groups += _cut([slots[place] for place in order[:whole]], length=batch_size)
        remainders += [slots[place] for place in order[whole:]]
    groups += _cut(remainders, length=batch_size)
    order = permutation(len(groups), seed=seed, epoch=epoch, name="groups")
    return tuple(groups[place] for place in order)


def slot_weights(counts: Mapping[Bucket, int], *, batch_size: int) -> dict[Bucket, Fraction]:
    """What a slot of each bucket weighs in an epoch beside one of a whole group, on average.

    A group's loss is a mean, so that the slots of the short one weigh more: here it is the last
    of the remainders that is short, the same every epoch.
    """
    short = sum(counts.values()) % batch_size
    extra = Fraction(batch_size, short) - 1 if short else Fraction(0)
    weights: dict[Bucket, Fraction] = {}
    left = short
    for bucket in sorted(counts, reverse=True):
        inside = min(left, counts[bucket] % batch_size)
        left -= inside
        weights[bucket] = 1 + extra * Fraction(inside, counts[bucket])
    return {bucket: weights[bucket] for bucket in sorted(weights)}


def micro_batches(
    group: Sequence[int],
    *,
    bucket_of: Sequence[Bucket] | Mapping[int, Bucket],
    micro_batch: int,
) -> tuple[MicroBatch, ...]:
    """A group cut into micro-batches of one bucket each, buckets in order of first appearance."""
    by_bucket: dict[Bucket, list[Row]] = {}
    for position, slot in enumerate(group):
        row = Row(slot=slot, position=position, weight=1)
        by_bucket.setdefault(bucket_of[slot], []).append(row)
    return tuple(
        MicroBatch(bucket=bucket, rows=_filled(rows[start : start + micro_batch], micro_batch))
        for bucket, rows in by_bucket.items()
        for start in range(0, len(rows), micro_batch)
    )


def _filled(rows: Sequence[Row], length: int) -> tuple[Row, ...]:
    """Rows brought to `length` by repeating the first at weight 0, so that shapes stay static."""
    filler = Row(slot=rows[0].slot, position=rows[0].position, weight=0)
    return (*rows, *[filler] * (length - len(rows)))
