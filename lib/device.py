"""The device a process works on, and giving its memory back between models."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from lib.team import local_rank

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def pick_device() -> torch.device:
    """This process's GPU, else the CPU; CUDA_VISIBLE_DEVICES chooses among GPUs."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank())


def name_of(device: torch.device) -> str:
    """A device in words."""
    if device.type != "cuda":
        return "no GPU; the CPU computes"
    return f"{torch.cuda.get_device_name(device)}, {device}"


def arriving(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
    """A tensor on its way to the CPU, and what waits until it is there."""
    if tensor.device.type != "cuda":
        return tensor, lambda: None
    there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    there.copy_(tensor, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    return there, done.synchronize


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Flash or memory-efficient attention for the block: cuDNN's backward reads illegal memory.

    Seen on an H200 with torch 2.11 in FLUX's backward; the flag is put back afterwards.
    """
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_enabled)


@contextmanager
def float32_products(*, tf32: bool) -> Iterator[None]:
    """Whether float32 products may be rounded to TF32 for the block; what was set comes back."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


@contextmanager
def repeatable(asked: bool) -> Iterator[None]:
    """Only kernels that repeat their bits for the block; what was set comes back."""
    was, only_warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    if not asked:
        yield
        return
    # torch refuses cuBLAS's products without a fixed workspace (its notes on reproducibility).
    before = os.environ.get(WORKSPACE)
    os.environ.setdefault(WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=only_warns)
        if before is None:
            del os.environ[WORKSPACE]


@contextmanager
def timed_convolutions(asked: bool) -> Iterator[None]:
    """cuDNN times its convolutions for the block, each shape once; what was set comes back."""
    was = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = asked
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = was


def release() -> None:
    """Return what no one refers to."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
