"""Tensors <-> stored bytes: caption and posterior records as entries, adapters as files."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from lib.tensors import Tensor

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def compute_dtype(mode: str) -> torch.dtype:
    """What a run of this `precision.mode` computes in; layers in few bits are for training."""
    return torch.float32 if mode == "fp32" else torch.bfloat16


_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.uint8: "U8",
}
_TORCH = {name: dtype for dtype, name in _NAMES.items()}


def to_stored(tensors: Mapping[str, torch.Tensor]) -> dict[str, Tensor]:
    """Compact little-endian bytes of each tensor."""
    return {name: _stored(tensor) for name, tensor in tensors.items()}


def from_stored(tensors: Mapping[str, Tensor]) -> dict[str, torch.Tensor]:
    """The tensors again, each owning its memory."""
    return {name: _loaded(tensor) for name, tensor in tensors.items()}


def num_bytes(shapes: Mapping[str, tuple[int, ...]], *, dtype: str) -> int:
    """Tensor bytes of a record of these shapes."""
    width = DTYPES[dtype].itemsize
    return sum(int(np.prod(shape)) * width for shape in shapes.values())


def _stored(tensor: torch.Tensor) -> Tensor:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes()
    return Tensor(_NAMES[tensor.dtype], tuple(tensor.shape), data)


def _loaded(tensor: Tensor) -> torch.Tensor:
    loaded = torch.empty(tensor.shape, dtype=_TORCH[tensor.dtype])
    loaded.reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(tensor.data, dtype=np.uint8)
    return loaded
