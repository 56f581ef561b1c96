"""Many tensors as one buffer, so that a device gets them in one copy that nothing waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

ALIGN_BYTES = 16  # of each tensor's place: a view of any dtype may begin there


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in the buffer."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Parcel:
    """A buffer of bytes and what lies in it, in order."""

    buffer: torch.Tensor
    places: tuple[Place, ...]

    def opened(self, device: torch.device) -> list[torch.Tensor]:
        """The tensors on a device; views of one buffer, which came in one copy."""
        there = self.buffer.to(device, non_blocking=True)
        return [
            there[place.start : place.start + place.num_bytes].view(place.dtype).view(place.shape)
            for place in self.places
        ]


def pack(tensors: Sequence[torch.Tensor], *, pinned: bool) -> Parcel:
    """A parcel of CPU tensors, in pinned memory or not; a non-blocking copy needs it pinned."""
    places, end = [], 0
    for tensor in tensors:
        place = Place(end, tensor.dtype, tuple(tensor.shape))
        places.append(place)
        end += -(-place.num_bytes // ALIGN_BYTES) * ALIGN_BYTES
    parcel = Parcel(torch.empty(end, dtype=torch.uint8, pin_memory=pinned), tuple(places))
    for target, tensor in zip(parcel.opened(torch.device("cpu")), tensors, strict=True):
        target.copy_(tensor)
    return parcel
