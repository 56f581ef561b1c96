"""Attention with q and k normed and turned at once, beside diffusers' own on the same weights."""

from dataclasses import replace

import pytest
import torch

from lib import processors
from lib.family import Conditioning
from lib.processors import Processor
from tests.unit.bound import learnt, scattered, tiny

OURS = {"flux": 2, "flux2_klein": 3, "krea2": 4, "qwen_image": 2, "sdxl": 0, "z_image": 4}


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
@pytest.mark.parametrize(
    "family",
    [
        "krea2",
        "qwen_image",
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("flux", "flux2_klein", "z_image")
        ),
    ],
)
def test_blocks_compile_whole_with_them(family):
    made = tiny(family)
    processors.engage(made.denoiser)
    loss, gradients = learnt(made)
    made.denoiser.compile_repeated_blocks(fullgraph=True, dynamic=False, backend="aot_eager")
    again, others = learnt(made)
    torch.testing.assert_close(again, loss)
    torch.testing.assert_close(others, gradients)


def test_they_are_taken_back():
    made = tiny("qwen_image")
    own = [m.processor for m in made.denoiser.modules() if hasattr(m, "processor")]
    processors.engage(made.denoiser)
    processors.disengage(made.denoiser)
    assert [m.processor for m in made.denoiser.modules() if hasattr(m, "processor")] == own


def test_a_norm_that_is_none_of_ours_keeps_its_processor():
    made = tiny("flux")
    block = made.denoiser.single_transformer_blocks[0]
    block.attn.norm_q.weight = None
    processors.engage(made.denoiser)
    assert block.attn not in ours(made.denoiser)
    assert len(ours(made.denoiser)) == OURS["flux"] - 1


def test_a_padded_text_is_masked():
    """Of two captions in a batch the shorter one's padding changes nothing."""
    made = tiny("qwen_image")
    processors.engage(made.denoiser)
    conditioning = made.batch.conditioning
    texts = conditioning["text_embeds"]
    short = made.predict()
    padded = torch.cat([texts, torch.full_like(texts, 7.0)], dim=1)
    mask = torch.arange(padded.shape[1])[None] < texts.shape[1]
    tensors = {"text_embeds": padded, "text_mask": mask.expand(len(padded), -1)}
    made.batch = replace(made.batch, conditioning=Conditioning(tensors))
    torch.testing.assert_close(made.predict(), short, rtol=1e-4, atol=1e-5)
