"""A loss on a tiny denoiser with an adapter, and what autograd keeps for its backward."""

import torch
from torch.autograd.graph import saved_tensors_hooks

from lib.family import Frame
from lib.noise import DDPM
from tests.unit.families import reference

CAPTION_TOKENS = 32
LEVEL = {"flow": torch.tensor([0.25, 0.8]), "ddpm": torch.tensor([250.0, 800.0])}


def losing_of(family, folder):
    """A family's denoiser with an adapter, its parameters, and a function of its loss on one batch."""
    base = reference.make_base(family, folder)
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
