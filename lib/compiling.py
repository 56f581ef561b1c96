"""Regional compilation: each kind of block once for each shape, by diffusers' list of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._functorch import config as functorch

from lib.compiled import compiled_in

# A block is compiled anew for each bucket, and for an input with and without a gradient.
MOST_KINDS = 256


@contextmanager
def kept(root: Path) -> Iterator[None]:
    """Blocks compiled meanwhile are kept in a store, with the layers in few bits among them.

    Those are autograd functions, which torch keeps on request alone: it knows their graphs, but not
    what else a function might remember. Ours remember tensors.
    """
    allowed = functorch.autograd_cache_allow_custom_autograd_functions
    functorch.autograd_cache_allow_custom_autograd_functions = True
    try:
        with compiled_in(root, build=f"torch-{torch.__version__}"):
            yield
    finally:
        functorch.autograd_cache_allow_custom_autograd_functions = allowed


def failures() -> tuple[type[BaseException], ...]:
    """What a block raises that cannot be compiled."""
    from torch._dynamo.exc import TorchDynamoException  # two seconds, which a plain run saves
    from torch._inductor.exc import InductorError

    return (TorchDynamoException, InductorError)


def compile_blocks(denoiser: Any, *, fixed_text: bool) -> None:
    """Compile the repeated blocks; it happens when they are first called.

    Static shapes are a tenth faster. Buckets make few of them, but captions of their own length
    each make many: from the second on, what varies is compiled once as variable.
    """
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, MOST_KINDS)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, MOST_KINDS)
    for module in denoiser.modules():
        if type(module).__name__ in (denoiser._repeated_blocks or ()):
            module.register_forward_hook(_apart)
    denoiser.compile_repeated_blocks(fullgraph=True, dynamic=False if fixed_text else None)


def _apart(_module: Any, _inputs: Any, answer: Any) -> Any:
    """A block's answers as tensors of their own.

    Parts of one tensor would be cut outside the compiled block, and their gradients put together
    there by tensors of zeros; inside, each is written where it is to be.
    """
    return tuple(part.clone() for part in answer) if isinstance(answer, tuple) else answer


def run_as_written(denoiser: Any) -> None:
    """Take compilation back."""
    for module in denoiser.modules():
        module._compiled_call_impl = None
        for key, hook in list(module._forward_hooks.items()):
            if hook is _apart:
                del module._forward_hooks[key]
