"""Gradient checkpointing: the same gradients from fewer kept activations, in every family."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from lib import families
from tests.unit.families import reference

CAPTION_TOKENS = 32
LEVEL = {"flow": torch.tensor([0.25, 0.8]), "ddpm": torch.tensor([250.0, 800.0])}


@pytest.fixture(params=families.names())
def losing(request, tmp_path):
    """A family's denoiser with an adapter, and a function of its loss on one batch."""
    from lib.family import Frame
    from lib.noise import DDPM

    family = families.get(request.param)
    base = reference.make_base(family, tmp_path)
    config = reference.adapter_config(family, rank=2)
    denoiser, injected = reference.adapted(family, base, config, strength=0.5)
    encoders = reference.encoders_of(family, base)
    records = family.encode_captions(encoders, reference.PROMPTS, max_length=CAPTION_TOKENS)
    frame = Frame(original=(64, 96), crop=(0, 0), size=(64, 96))
    raw = family.latent_shape(base.component(family.FACTS.autoencoder).config, height=64, width=96)
    latents = family.normalise(reference.drawn(2, *raw), family.latent_constants(base))
    level = LEVEL["ddpm" if family.FACTS.noise is DDPM else "flow"]

    def loss():
        return reference.loss_of(
            family,
            base,
            denoiser,
            latents=latents,
            noise=reference.drawn(*latents.shape, name="noise"),
            level=level,
            conditioning=family.conditioning(records, [frame, frame]),
        )

    return denoiser, injected.parameters, loss


def kept_bytes(loss):
    """What autograd holds on to between forward and backward."""
    kept = []
    with saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        loss()
    return sum(kept)


def test_gradients_are_the_same_and_fewer_activations_are_kept(losing):
    denoiser, parameters, loss = losing
    plain, plain_bytes = reference.gradients(parameters, loss()), kept_bytes(loss)
    assert plain.any()
    denoiser.enable_gradient_checkpointing()
    again, fewer_bytes = reference.gradients(parameters, loss()), kept_bytes(loss)
    assert reference.relative(again, plain) < 1e-6
    assert fewer_bytes < 0.8 * plain_bytes
