"""Plan + records + draws -> weighted batches of static shape (design 6)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar

import torch

from lib import random, shapes
from lib.buckets import Bucket, MicroBatch, Row, epoch_groups, micro_batches, steps_per_epoch
from lib.family import Conditioning, Family, Frame, Record
from lib.keys import digest
from lib.noise import NoiseProcess
from lib.parcels import Parcel, pack
from lib.records import from_stored
from lib.schema import ObjectiveConfig, TimestepsConfig
from lib.store import Store
from lib.team import ALONE, Team


@dataclass(frozen=True)
class Slot:
    """One picture's place in an epoch: a sample with three repeats has three slots."""

    name: str
    bucket: Bucket
    latents: tuple[str, ...]  # entry key of each variant
    captions: tuple[str, ...]  # entry key of each; one is drawn
    frames: tuple[Frame, ...]  # how each variant was cut

    @property
    def caption(self) -> str:
        """The first: what stands for the sample where nothing is drawn."""
        return self.captions[0]


@dataclass(frozen=True)
class Group:
    """One optimizer step's slots; the first draw's counter is the samples drawn before it."""

    step: int
    slots: tuple[int, ...]
    first_counter: int


@dataclass(frozen=True)
class Plan:
    """Which slots each step takes: a function of (seed, epoch, batch_size) alone."""

    slots: tuple[Slot, ...]
    seed: int
    batch_size: int

    @property
    def steps_per_epoch(self) -> int:
        return steps_per_epoch(len(self.slots), batch_size=self.batch_size)

    def first_captions(self) -> dict[str, int]:
        """For each sample the place of the caption that its first draw takes."""
        found: dict[str, int] = {}
        for group in self.groups(0, self.steps_per_epoch):
            for counter, index in enumerate(group.slots, start=group.first_counter):
                slot = self.slots[index]
                where = _Draw(seed=self.seed, counter=counter, sample_id=slot.name)
                found.setdefault(slot.name, where.caption(slot))
        return found

    def groups(self, start: int, stop: int) -> Iterator[Group]:
        """The groups of steps `start` to `stop`."""
        for epoch in range(start // self.steps_per_epoch, -(-stop // self.steps_per_epoch)):
            counter = epoch * len(self.slots)
            for place, slots in enumerate(self._epoch(epoch)):
                step = epoch * self.steps_per_epoch + place
                if start <= step < stop:
                    yield Group(step=step, slots=slots, first_counter=counter)
                counter += len(slots)

    def _epoch(self, epoch: int) -> tuple[tuple[int, ...], ...]:
        members: dict[Bucket, list[int]] = {}
        for index, slot in enumerate(self.slots):
            members.setdefault(slot.bucket, []).append(index)
        return epoch_groups(members, seed=self.seed, epoch=epoch, batch_size=self.batch_size)


@dataclass(frozen=True)
class Batch:
    """One micro-batch: float32 mixture and target, levels, conditioning, and row weights."""

    noisy: shapes.Latents
    target: shapes.Target
    level: shapes.Sigma
    weights: shapes.Weights  # 0 for a row that only fills
    loss_weights: shapes.Weights  # the objective's, by level
    conditioning: Conditioning
    names: tuple[str, ...]
    TENSORS: ClassVar = ("noisy", "target", "level", "weights", "loss_weights")

    def to(self, device: torch.device) -> Batch:
        return self.with_tensors([t.to(device, non_blocking=True) for t in self.tensors()])

    def tensors(self) -> list[torch.Tensor]:
        """All of them, in an order that `with_tensors` knows."""
        return [*(getattr(self, name) for name in self.TENSORS), *self.conditioning.values()]

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Batch:
        """The same batch of tensors that lie elsewhere."""
        own, others = tensors[: len(self.TENSORS)], tensors[len(self.TENSORS) :]
        named = dict(zip(self.conditioning, others, strict=True))
        conditioning = replace(self.conditioning, tensors=named)
        return replace(self, conditioning=conditioning, **dict(zip(self.TENSORS, own, strict=True)))


@dataclass(frozen=True)
class StepBatches:
    """All micro-batches of one optimizer step."""

    step: int
    batches: tuple[Batch, ...]  # of several processes this one's share
    numbers: tuple[int, ...]  # of each among those of the whole group
    num_samples: int  # of the whole group
    parcel: Parcel | None = None  # of all their tensors

    def packed(self) -> StepBatches:
        """With a copy of all tensors in pinned memory, which a GPU takes in one go."""
        tensors = [tensor for batch in self.batches for tensor in batch.tensors()]
        return replace(self, parcel=pack(tensors, pinned=True))

    def on(self, device: torch.device) -> Iterator[Batch]:
        """The batches on a device: of a parcel in one copy, and before the first is used."""
        moved = iter(self.parcel.opened(device) if self.parcel else ())
        for batch in self.batches:
            there = list(islice(moved, len(batch.tensors())))
            yield batch.with_tensors(there) if self.parcel else batch.to(device)


class Records:
    """Stored records by key; the first `max_bytes` of them stay in memory."""

    def __init__(self, store: Store, *, max_bytes: int):
        self._store = store
        self._left_bytes = max_bytes
        self._held: dict[tuple[str, str], Record] = {}

    def __call__(self, kind: str, key: str) -> Record:
        held = self._held.get((kind, key))
        if held is not None:
            return held
        entry = self._store.get(kind, key)
        record = from_stored(entry.tensors)
        size = sum(len(tensor.data) for tensor in entry.tensors.values())
        if size <= self._left_bytes:
            self._left_bytes -= size
            self._held[kind, key] = record
        return record


@dataclass(frozen=True)
class Assembler:
    """Turns groups into batches; every draw of a row depends on its sample and counter alone."""

    plan: Plan
    family: Family
    records: Records
    constants: Mapping[str, Any]
    process: NoiseProcess
    timesteps: TimestepsConfig
    objective: ObjectiveConfig
    micro_batch: int
    caption_dropout: float
    unconditional: str
    team: Team = ALONE

    def step(self, group: Group) -> StepBatches:
        """This process's micro-batches: those of one group go round among all processes."""
        bucket_of = [slot.bucket for slot in self.plan.slots]
        cut = micro_batches(group.slots, bucket_of=bucket_of, micro_batch=self.micro_batch)
        numbers = tuple(range(self.team.rank, len(cut), self.team.size))
        return StepBatches(
            step=group.step,
            batches=tuple(self._batch(cut[number], group.first_counter) for number in numbers),
            numbers=numbers,
            num_samples=len(group.slots),
        )

    def _batch(self, micro: MicroBatch, first_counter: int) -> Batch:
        rows = [self._row(row, first_counter + row.position) for row in micro.rows]
        latents = torch.cat([row.latents for row in rows])
        noise = torch.cat([row.noise for row in rows])
        level = torch.tensor([row.level for row in rows], dtype=torch.float32)
        captions, frames = [row.caption for row in rows], [row.frame for row in rows]
        return Batch(
            noisy=self.process.add_noise(latents, noise, level),
            target=self.process.target(latents, noise, level),
            level=level,
            weights=torch.tensor([float(row.weight) for row in micro.rows]),
            loss_weights=self.process.loss_weight(level, self.objective),
            conditioning=self.family.conditioning(captions, frames).in_few_lengths(),
            names=tuple(self.plan.slots[row.slot].name for row in micro.rows),
        )

    def _row(self, row: Row, counter: int) -> _DrawnRow:
        slot = self.plan.slots[row.slot]
        where = _Draw(seed=self.plan.seed, counter=counter, sample_id=slot.name)
        variant = where.integer(len(slot.latents), "variant")
        latents = self._latents(slot.latents[variant], where)
        tokens = slot.bucket.tokens(self.family.FACTS.divisor)
        return _DrawnRow(
            latents=latents,
            noise=where.normal(tuple(latents.shape), "noise"),
            level=self.process.draw_level(self.timesteps, tokens=tokens, **vars(where)),
            caption=self._caption(slot, where),
            frame=slot.frames[variant],
        )

    def _latents(self, key: str, where: _Draw) -> torch.Tensor:
        """Posterior sample (or mode) in float32, normalised: 1 c h w."""
        record = self.records("latents", key)
        raw = record["mean"][None]
        if not self.family.FACTS.draws_mode:
            raw = raw + record["std"][None] * where.normal(tuple(raw.shape), "posterior")
        return self.family.normalise(raw, self.constants)

    def _caption(self, slot: Slot, where: _Draw) -> Record:
        share = self.caption_dropout
        dropped = share > 0 and where.uniform("caption_dropout") < share
        key = self.unconditional if dropped else slot.captions[where.caption(slot)]
        return self.records("captions", key)


@dataclass(frozen=True)
class _DrawnRow:
    latents: torch.Tensor
    noise: torch.Tensor
    level: float
    caption: Record
    frame: Frame


@dataclass(frozen=True)
class _Draw:
    """One draw's place: what every stream is asked with."""

    seed: int
    counter: int
    sample_id: str

    def normal(self, shape: tuple[int, ...], stream: random.Stream) -> torch.Tensor:
        numbers = random.normal(shape, stream=stream, **vars(self))
        return torch.from_numpy(numbers)

    def integer(self, below: int, stream: random.Stream) -> int:
        return random.integer(below, stream=stream, **vars(self))

    def caption(self, slot: Slot) -> int:
        """The place of the caption drawn; of one caption nothing is drawn."""
        return self.integer(len(slot.captions), "caption") if len(slot.captions) > 1 else 0

    def uniform(self, stream: random.Stream) -> float:
        return random.uniform(stream=stream, **vars(self))


def slots_of(
    samples: Sequence[Mapping[str, Any]],
    *,
    images: Sequence[Mapping[str, Any]],
    latents: Mapping[str, Sequence[str]],
    texts: Mapping[str, str],
) -> tuple[Slot, ...]:
    """Slots in manifest order, repeats expanded.

    `latents` are entry keys by image key, `texts` entry keys by the digest of a caption.
    """
    known = {image["image_key"]: image for image in images}
    slots = []
    for sample in samples:
        image, keys = known[sample["image_key"]], tuple(latents[sample["image_key"]])
        slot = Slot(
            name=sample["name"],
            bucket=Bucket(*image["bucket"]),
            latents=keys,
            captions=tuple(texts[digest(text)] for text in sample["captions"]),
            frames=tuple(_frame(image, cut) for cut in image["variants"][: len(keys)]),
        )
        slots += [slot] * sample["repeats"]
    return tuple(slots)


def _frame(image: Mapping[str, Any], cut: Mapping[str, Any]) -> Frame:
    """A crop is told as it lies after the flip."""
    left = cut["resized_width"] - cut["left"] - cut["width"] if cut["flip"] else cut["left"]
    return Frame(
        original=(image["height"], image["width"]),
        crop=(cut["top"], left),
        size=(cut["height"], cut["width"]),
    )
