"""Loading a base's components frozen, in evaluation mode, from safetensors alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from lib.hub import Base

QUANTISED = "quantization_config"  # in the configuration of a component stored in few bits


def load_model(
    model_class: Any, base: Base, component: str, *, dtype: torch.dtype, device: Any
) -> Any:
    """A model of diffusers, as it is stored; modules that it keeps in float32 stay so."""
    if QUANTISED in base.component(component).config:
        from lib import prequantised

        return _frozen(prequantised.load(model_class, base, component, dtype=dtype)).to(device)
    return _read(model_class, base, component, torch_dtype=dtype).to(device)


def load_encoder(
    model_class: Any, base: Base, component: str, *, dtype: torch.dtype, device: Any
) -> Any:
    """A model of transformers, as it is stored."""
    if QUANTISED not in base.component(component).config:
        return _read(model_class, base, component, dtype=dtype).to(device)
    # One in 4 bits cannot be moved later.
    model = _read(model_class, base, component, dtype=dtype, device_map={"": str(device)})
    from lib import prequantised

    if str(device) == "cpu":
        prequantised.take_over(model, base, component, dtype=dtype)
    prequantised.cast_dense(model, dtype)
    return _frozen(model)


def _read(model_class: Any, base: Base, component: str, **options: Any) -> Any:
    model = model_class.from_pretrained(
        base.folder(component), use_safetensors=True, local_files_only=True, **options
    )
    return _frozen(model)


def _frozen(model: Any) -> Any:
    return model.requires_grad_(False).eval()
