"""Regional compilation: each kind of block once for each shape, by diffusers' list of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._functorch import config as functorch
from torch.autograd import Function

from lib import activations, float8, kernels, parallel, processors
from lib.compiled import compiled_in
from lib.recomputing import repeated

# A block is compiled anew for each bucket, and for an input with and without a gradient.
MOST_KINDS = 256
OURS = (processors, activations, float8)  # what each puts into blocks it takes out again


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
    for block in list(repeated(denoiser)):
        assert not hasattr(block, "as_written"), "compiled twice"
        block.__class__ = _answering_apart(type(block))
    if kernels.runs_on(next(denoiser.parameters())):
        for ours in OURS:
            ours.engage(denoiser)
        _reduce_whole_rows()
    denoiser.compile_repeated_blocks(fullgraph=True, dynamic=False if fixed_text else None)


def _reduce_whole_rows() -> None:
    from torch._inductor import config  # seconds, which a plain run saves

    from lib.reductions import WholeRows

    config.inductor_choices_class = WholeRows


@cache
def _answering_apart(kind: type[Any]) -> type[Any]:
    """The same block, whose answers are tensors of their own, and its inputs' gradients too.

    Parts of one tensor would be cut outside the compiled block, and their gradients put together
    there by tensors of zeros; inside, each is written where it is to be. A hook is not inside:
    torch compiles it by itself. A block that has a forward of ours takes it where that answers.
    """

    own, ours = kind.forward, parallel.BLOCKS.get(kind.__name__)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(_taken_apart(arg) for arg in args)
        kwargs = {name: _taken_apart(arg) for name, arg in kwargs.items()}
        answer = None if ours is None else ours(self, *args, **kwargs)
        if answer is None:
            answer = own(self, *args, **kwargs)
        return tuple(part.clone() for part in answer) if isinstance(answer, tuple) else answer

    return type(kind.__name__, (kind,), {"forward": forward, "as_written": kind})


def _taken_apart(given: Any) -> Any:
    """A block's argument; the gradient of a tensor is dense, as the block before it expects it."""
    needs = isinstance(given, torch.Tensor) and given.requires_grad
    return _DenseGradient.apply(given) if needs else given


class _DenseGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].contiguous()


def run_as_written(denoiser: Any) -> None:
    """Take compilation back."""
    for ours in OURS:
        ours.disengage(denoiser)
    for module in denoiser.modules():
        module._compiled_call_impl = None
        module.__class__ = getattr(module, "as_written", type(module))
