"""Tensor aliases and the one axis legend.

b batch, c channels, h w latent height and width, H W pixel height and width, l text tokens,
d features, n image tokens. Raw latents, as an autoencoder makes them, may have other channels and
sides than those that are trained on.

Annotations name these as `shapes.Latents` in modules with postponed annotations, so that a module
which only declares tensors does not import torch; under pytest they are executed.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Float32
    from torch import Tensor

    Pixels = Float32[Tensor, "b 3 H W"]
    RawLatents = Float[Tensor, "b raw_c raw_h raw_w"]
    Latents = Float32[Tensor, "b c h w"]
    Noise = Float32[Tensor, "b c h w"]
    Sigma = Float32[Tensor, "b"]
    Prediction = Float[Tensor, "b c h w"]
    Target = Float32[Tensor, "b c h w"]
    Weights = Float32[Tensor, "b"]
    PerSample = Float32[Tensor, "b"]
    Scalar = Float[Tensor, ""]
    Flag = Bool[Tensor, ""]
    AnyTensor = Tensor
    Module = Any
else:
    _SPECS = {
        "Pixels": ("Float32", "b 3 H W"),
        "RawLatents": ("Float", "b raw_c raw_h raw_w"),
        "Latents": ("Float32", "b c h w"),
        "Noise": ("Float32", "b c h w"),
        "Sigma": ("Float32", "b"),
        "Prediction": ("Float", "b c h w"),
        "Target": ("Float32", "b c h w"),
        "Weights": ("Float32", "b"),
        "PerSample": ("Float32", "b"),
        "Scalar": ("Float", ""),
        "Flag": ("Bool", ""),
    }

    def __getattr__(name: str) -> Any:
        """Make an alias on first use: only then does naming a shape import torch."""
        import jaxtyping
        import torch

        if name == "AnyTensor":
            return torch.Tensor
        if name == "Module":
            return torch.nn.Module
        if name not in _SPECS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        kind, axes = _SPECS[name]
        return getattr(jaxtyping, kind)[torch.Tensor, axes]
