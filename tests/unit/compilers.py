"""Compilers that are quick: they run a graph as it is."""

from collections import Counter
from functools import partial

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils._python_dispatch import TorchDispatchMode

from lib import compiling


def compiling_by(backend, made, monkeypatch):
    """Have another compiler stand in for a denoiser's blocks."""
    compiled = partial(type(made.denoiser).compile_repeated_blocks, made.denoiser, backend=backend)
    monkeypatch.setattr(made.denoiser, "compile_repeated_blocks", compiled, raising=False)


def engage(made, monkeypatch, backend="aot_eager"):
    """Compiled as on a GPU with Triton, by a compiler that is quick."""
    compiling_by(backend, made, monkeypatch)
    for ours in compiling.OURS:
        ours.engage(made.denoiser)
    compiling.compile_blocks(made.denoiser, fixed_text=True)


class Counting(TorchDispatchMode):
    """How often each operator of ours is called."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "darkroom":
            self.calls[func] += 1
        return func(*args, **(kwargs or {}))


def as_written(made):
    """The loss and the gradients, and the operators that were called."""
    torch.manual_seed(0)  # for what drops
    with torch.compiler.set_stance("force_eager"), Counting() as counting:
        found = made.gradients()
    return found, counting.calls


def showing(look):
    """One that shows the graph of each backward."""

    def forward(module, _inputs):
        return make_boxed_func(module)

    def backward(module, _inputs):
        look(module.graph)
        return make_boxed_func(module)

    return aot_autograd(fw_compiler=forward, bw_compiler=backward)
