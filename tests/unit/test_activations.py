"""GELU by a sigmoid beside torch's own by a tanh."""

import operator

import torch
from torch.nn import functional

from lib import activations
from tests.unit.bound import tiny


def learnt(gelu, x):
    x = x.clone().requires_grad_()
    answer = gelu(x)
    return answer.detach(), torch.autograd.grad(answer.sum(), x)[0]


def test_it_is_the_same_function_with_the_same_slope():
    x = torch.cat([torch.linspace(-20, 20, 4001), torch.tensor([0.0, -1e4, 1e4])])
    own = learnt(lambda x: functional.gelu(x, approximate="tanh"), x)
    torch.testing.assert_close(learnt(activations.gelu, x), own, rtol=1e-5, atol=4e-6)


def test_it_answers_in_the_precision_that_it_is_given():
    x = torch.linspace(-5, 5, 101, dtype=torch.bfloat16)
    expected = functional.gelu(x.double(), approximate="tanh").to(torch.bfloat16)
    torch.testing.assert_close(activations.gelu(x), expected, rtol=2**-8, atol=1e-6)


def swapped(denoiser):
    """Layers whose own function is another's."""
    return [m for m in denoiser.modules() if activations.gelu in m.__dict__.values()]


def test_every_layer_of_this_kind_takes_it_and_gives_it_back():
    made = tiny("flux")
    as_written = made.loss().detach()
    kinds = [m for m in made.denoiser.modules() if getattr(m, "approximate", None) == "tanh"]
    activations.engage(made.denoiser)
    assert swapped(made.denoiser) == kinds
    assert len(kinds) == 3
    torch.testing.assert_close(made.loss().detach(), as_written)
    activations.disengage(made.denoiser)
    assert swapped(made.denoiser) == []


def test_other_kinds_keep_their_own():
    made = tiny("sdxl")  # by the error function
    activations.engage(made.denoiser)
    assert swapped(made.denoiser) == []


def test_in_float32_gelu_ends_in_its_product():
    """A cast that hands a Function's answer on loses its gradient in torch 2.11's compiler."""
    graphs = []
    torch.compile(activations.gelu, backend=lambda graph, _: graphs.append(graph) or graph.forward)(
        torch.randn(3, 4)
    )
    answer = graphs[0].graph.output_node().args[0][0]
    assert answer.target is operator.mul
