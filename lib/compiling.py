"""Regional compilation: each kind of block once for each shape, by diffusers' list of blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import InductorError

# A block is compiled anew for each bucket, and for an input with and without a gradient.
MOST_KINDS = 256

FAILURES = (TorchDynamoException, InductorError)


def compile_blocks(denoiser: Any) -> None:
    """Compile the repeated blocks, shapes static; it happens when they are first called."""
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, MOST_KINDS)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, MOST_KINDS)
    denoiser.compile_repeated_blocks(fullgraph=True, dynamic=False)


def run_as_written(denoiser: Any) -> None:
    """Take compilation back."""
    for module in denoiser.modules():
        module._compiled_call_impl = None
