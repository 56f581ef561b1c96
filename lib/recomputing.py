"""Gradient checkpointing: blocks whose activations are computed again in the backward."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.checkpoint import checkpoint


def recompute(denoiser: Any, *, blocks: int | None = None, dropout: bool = False) -> None:
    """Keep the input alone of the first `blocks` repeated blocks (None: of all that can be).

    The first, since their backward is the last: what the others keep is free again by then.
    """
    chosen = None if blocks is None else set(islice(repeated(denoiser), blocks))

    def call(module: Any, *given: Any) -> Any:
        if chosen is not None and module not in chosen:
            return module(*given)
        return checkpoint(module, *given, use_reentrant=False, preserve_rng_state=dropout)

    denoiser.enable_gradient_checkpointing(call)


def repeated(denoiser: Any) -> Iterator[Any]:
    """The blocks that a denoiser is made of, by diffusers' list of their classes."""
    kinds = denoiser._repeated_blocks or ()
    return (module for module in denoiser.modules() if type(module).__name__ in kinds)
