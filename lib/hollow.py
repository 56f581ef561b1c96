"""A base's denoiser without its weights: its modules by name and size, in no memory to speak of."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from lib.family import Facts
    from lib.hub import Component

Sizes = Mapping[str, tuple[int, int]]  # module -> rows and columns of its weight


def hollow_denoiser(component: Component) -> Any:
    """The real class; every weight is one zero, seen at its full size, so loaders work on it."""
    import diffusers

    model_class = getattr(diffusers, component.class_name)
    with torch.device("meta"):
        model = model_class.from_config(dict(component.config)).requires_grad_(False)
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            full = torch.zeros(1).expand(weight.shape)
            module.register_parameter(name, torch.nn.Parameter(full, requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, torch.zeros(1, dtype=buffer.dtype).expand(buffer.shape))
    return model


def linear_sizes(denoiser: Any) -> dict[str, tuple[int, int]]:
    """The linear modules, which an adapter may change."""
    return {
        name: (module.out_features, module.in_features)
        for name, module in denoiser.named_modules()
        if isinstance(module, torch.nn.Linear)
    }


def hollow_pipeline(denoiser: Any, facts: Facts) -> Any:
    """The family's pipeline with this denoiser and nothing else, to load adapters with."""
    import diffusers

    pipeline_class = getattr(diffusers, facts.pipelines[0])
    needed = inspect.signature(pipeline_class.__init__).parameters.items()
    parts = {n: None for n, p in needed if n != "self" and p.default is inspect.Parameter.empty}
    return pipeline_class(**{**parts, facts.denoiser: denoiser})
