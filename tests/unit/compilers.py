"""Compilers that are quick: they run a graph as it is."""

from functools import partial

from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func


def compiling_by(backend, made, monkeypatch):
    """Have another compiler stand in for a denoiser's blocks."""
    compiled = partial(type(made.denoiser).compile_repeated_blocks, made.denoiser, backend=backend)
    monkeypatch.setattr(made.denoiser, "compile_repeated_blocks", compiled, raising=False)


def showing(look):
    """One that shows the graph of each backward."""

    def forward(module, _inputs):
        return make_boxed_func(module)

    def backward(module, _inputs):
        look(module.graph)
        return make_boxed_func(module)

    return aot_autograd(fw_compiler=forward, bw_compiler=backward)
