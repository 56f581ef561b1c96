"""Shapes of the families' denoisers at full size, made without a byte of weights."""

from functools import cache

import diffusers
from accelerate import init_empty_weights

from bench.full_size import preset_of
from bench.full_size_bases import FULL
from lib import families
from lib.footprint import count


@cache
def denoiser_of(name):
    """The denoiser on the meta device; nothing may change it."""
    facts = families.get(name).FACTS
    with init_empty_weights():
        return getattr(diffusers, facts.classes[facts.denoiser])(**FULL[name][facts.denoiser])


@cache
def weights_of(name, rank=16):
    """With an adapter on the preset's targets."""
    ranks = dict.fromkeys(preset_of(name)["targets"], rank)
    return count(shapes_of(denoiser_of(name)), families.get(name).FACTS.costs, ranks=ranks)


def shapes_of(denoiser):
    """As the headers of its files tell them."""
    return {name: tuple(tensor.shape) for name, tensor in denoiser.state_dict().items()}


def layers_of(denoiser):
    """Linear layers, by what files tell: matrices, with their sides."""
    shapes = shapes_of(denoiser)
    return {
        name.removesuffix(".weight"): (shape[1], shape[0])
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 2
    }
