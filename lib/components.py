"""Loading a base's components frozen, in evaluation mode, from safetensors alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from lib.hub import Base


def load_model(
    model_class: Any, base: Base, component: str, *, dtype: torch.dtype, device: Any
) -> Any:
    """A model of diffusers; modules that it keeps in float32 stay so."""
    return _frozen(model_class, base, component, device=device, torch_dtype=dtype)


def load_encoder(
    model_class: Any, base: Base, component: str, *, dtype: torch.dtype, device: Any
) -> Any:
    """A model of transformers."""
    return _frozen(model_class, base, component, device=device, dtype=dtype)


def _frozen(model_class: Any, base: Base, component: str, *, device: Any, **dtype: Any) -> Any:
    model = model_class.from_pretrained(
        base.folder(component), use_safetensors=True, local_files_only=True, **dtype
    )
    return model.requires_grad_(False).eval().to(device)
