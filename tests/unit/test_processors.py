"""Attention with q and k normed and turned at once, beside diffusers' own on the same weights."""

import pytest
import torch

from lib import processors
from lib.processors import Processor
from tests.unit.bound import tiny

OURS = {"flux": 2, "flux2_klein": 3, "krea2": 4, "qwen_image": 2, "sdxl": 0, "z_image": 4}


def scattered(made):
    """Weights of norms that are not all alike, as those of a new denoiser are."""
    source = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in made.denoiser.named_parameters():
            if "norm" in name and parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=source) / 4)
    return made


def learnt(made):
    """The loss and the gradient of each adapted weight."""
    loss = made.loss()
    names = list(made.parameters)
    found = torch.autograd.grad(loss, list(made.parameters.values()), allow_unused=True)
    zeros = (torch.zeros_like(made.parameters[name]) for name in names)
    filled = (zero if grad is None else grad for grad, zero in zip(found, zeros, strict=True))
    return loss.detach(), dict(zip(names, filled, strict=True))


def ours(denoiser):
    return [m for m in denoiser.modules() if isinstance(getattr(m, "processor", None), Processor)]


@pytest.mark.parametrize("family", OURS)
def test_losses_and_gradients_are_those_of_diffusers(family):
    made = scattered(tiny(family))
    loss, gradients = learnt(made)
    processors.engage(made.denoiser)
    assert len(ours(made.denoiser)) == OURS[family]
    again, others = learnt(made)
    torch.testing.assert_close(again, loss, rtol=1e-5, atol=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-3, atol=1e-6)


# torch's own: its compiler makes an instance of each Function, and looks at gradients of inputs.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")
@pytest.mark.parametrize("family", [name for name in OURS if OURS[name]])
def test_blocks_compile_whole_with_them(family):
    made = tiny(family)
    processors.engage(made.denoiser)
    loss, gradients = learnt(made)
    made.denoiser.compile_repeated_blocks(fullgraph=True, dynamic=False, backend="aot_eager")
    again, others = learnt(made)
    torch.testing.assert_close(again, loss)
    torch.testing.assert_close(others, gradients)
