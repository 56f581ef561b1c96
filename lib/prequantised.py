"""Models that their base stores in bitsandbytes' NF4: layers stay as stored, bit for bit.

diffusers puts bitsandbytes' own layers in, and only where there is a GPU; transformers does
anywhere, and on a CPU they may err. Here each is a `StoredNf4`, which PEFT and diffusers take for a
linear layer and `lib.binding` may join.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lib.errors import InputRefused, Problem
from lib.frozen import Nf4Linear, joined_bias, linear_of
from lib.products import NESTED_BLOCK, NF4_BLOCK, plain_maxima

if TYPE_CHECKING:
    from lib.hub import Base

STATE = ".weight.quant_state.bitsandbytes__nf4"
# Ours by the endings that bitsandbytes gives them.
PARTS = {
    "": "packed",
    ".absmax": "maxima",
    ".quant_map": "code",
    ".nested_absmax": "nested_maxima",
    ".nested_quant_map": "maxima_code",
}

Tensors = dict[str, torch.Tensor]


class StoredNf4(Nf4Linear, nn.Linear):  # type: ignore[override]  # torch calls x input
    """A layer as a base stores it; for PEFT and diffusers a linear one."""

    def __init__(self, linear: nn.Linear, stored: Mapping[str, torch.Tensor]):
        super().__init__(linear, stored)
        nothing = torch.full((1,), math.nan, dtype=self.dtype, device=stored["packed"].device)
        self.register_buffer("nothing", nothing, persistent=False)

    @property
    def weight(self) -> Any:  # type: ignore[override]  # torch's is a parameter
        """Its shape, dtype and device, which libraries ask for; computing with it gives NaN."""
        return self.get_buffer("nothing").expand(self.out_features, self.in_features)


def is_stored(denoiser: nn.Module) -> bool:
    """Whether a base stored some of its layers in few bits."""
    return any(isinstance(module, StoredNf4) for module in denoiser.modules())


def may_join(layers: Iterable[Any]) -> bool:
    """Whether the blocks of stored layers end where their rows do; dense ones have none."""
    stored = [layer for layer in layers if isinstance(layer, StoredNf4)]
    return not any(layer.in_features * layer.out_features % NF4_BLOCK for layer in stored)


def joined(layers: Sequence[StoredNf4]) -> Nf4Linear:
    """One layer with the rows of all, and the very numbers of each.

    The maxima of each are nested around an offset of their own; together they are float32.
    """
    first, rows = layers[0], sum(layer.out_features for layer in layers)
    weight = torch.empty(rows, first.in_features, dtype=first.dtype, device="meta")
    stored = {
        "packed": torch.cat([layer.stored[0] for layer in layers]),
        "maxima": torch.cat([plain_maxima(*layer.stored[1:-1]) for layer in layers]),
        "code": first.stored[-1],
    }
    return Nf4Linear(linear_of(weight, joined_bias(layers)), stored)


def load(model_class: Any, base: Base, component: str, *, dtype: torch.dtype) -> Any:
    """The model on the CPU; what is dense in `dtype`, but for what diffusers keeps in float32."""
    from accelerate import init_empty_weights

    described, folder = base.component(component), base.folder(component)
    found = _read(folder / name for name in described.weights)
    with init_empty_weights():  # buffers that the model computes are there
        model = model_class.from_config(dict(described.config))
    with _refusing(base, component):
        stored = dict(_stored(found))
        _fill(model, found, stored, dtype=dtype)
    return model


def take_over(model: Any, base: Base, component: str, *, dtype: torch.dtype) -> None:
    """bitsandbytes' own layers of a model on the CPU, which have not computed yet, become ours.

    With AVX512-BF16 theirs multiply in bfloat16 whatever is asked, by weights packed anew, which
    fails where a row is no whole number of blocks.
    """
    from bitsandbytes.nn import Linear4bit  # type: ignore[import-not-found]

    theirs = {n: layer for n, layer in model.named_modules() if isinstance(layer, Linear4bit)}
    with _refusing(base, component):
        for name, layer in theirs.items():
            weight = torch.empty(layer.out_features, layer.in_features, dtype=dtype, device="meta")
            parts = _parts(name, layer.weight)
            model.set_submodule(name, StoredNf4(linear_of(weight, layer.bias), parts))


def cast_dense(model: Any, dtype: torch.dtype) -> None:
    """As transformers casts a dense model's; of one in few bits it leaves them as they are stored.

    What it keeps in float32 it keeps from float16 alone.
    """
    wide = model._keep_in_fp32_modules if dtype == torch.float16 else set()
    for name, parameter in model.named_parameters():
        if type(parameter) is nn.Parameter and parameter.is_floating_point():
            kept = wide & set(name.split("."))
            parameter.data = parameter.data.to(torch.float32 if kept else dtype)


@contextmanager
def _refusing(base: Base, component: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        why, remedy = f"{component} cannot be read: {error}", "save it again, or take another base"
        raise InputRefused(Problem(f"family.base={base.reference}", why, remedy=remedy)) from error


def _parts(name: str, weight: Any) -> Tensors:
    """The tensors of bitsandbytes' own weight, under our names."""
    if (state := getattr(weight, "quant_state", None)) is None:
        raise ValueError(f"{name} is dense, which its configuration does not say")
    parts = {"packed": _bytes(weight.data), "maxima": state.absmax, "code": state.code}
    blocks = {"blocksize": state.blocksize}
    if (nested := state.state2) is not None:
        blocks["nested_blocksize"] = nested.blocksize
        parts |= {"maxima_code": nested.code, "nested_maxima": nested.absmax}
        parts["offset"] = state.offset
    _check(name, blocks, parts)
    return parts


def _bytes(packed: torch.Tensor) -> torch.Tensor:
    """Of any `bnb_4bit_quant_storage`."""
    return packed.view(torch.uint8).reshape(-1, 1)


def _read(paths: Iterable[Path]) -> Tensors:
    from safetensors.torch import load_file

    return {name: tensor for path in paths for name, tensor in load_file(path).items()}


def _stored(found: Tensors) -> Iterator[tuple[str, Tensors]]:
    """Each quantised layer's tensors under our names, which leave `found`."""
    for name in [key.removesuffix(STATE) for key in found if key.endswith(STATE)]:
        state = json.loads(bytes(found.pop(name + STATE).tolist()))
        keys = {part: f"{name}.weight{end}" for end, part in PARTS.items()}
        parts = {part: found.pop(key) for part, key in keys.items() if key in found}
        if "nested_offset" in state:
            parts["offset"] = torch.tensor(float(state["nested_offset"]))
        _check(name, state, parts)
        yield name, {**parts, "packed": _bytes(parts["packed"])}


def _check(name: str, state: Mapping[str, Any], parts: Tensors) -> None:
    """ValueError where the storage is not the one that bitsandbytes chooses by itself."""
    nested = "offset" in parts
    needed = set(Nf4Linear.PARTS if nested else ("packed", "maxima", "code"))
    if parts.keys() != needed:
        raise ValueError(f"{name} lacks or exceeds what nf4 needs: {sorted(needed ^ parts.keys())}")
    blocks = state["blocksize"], state.get("nested_blocksize", NESTED_BLOCK)
    if blocks != (NF4_BLOCK, NESTED_BLOCK):
        raise ValueError(f"{name} is in blocks of {blocks}, not {(NF4_BLOCK, NESTED_BLOCK)}")


def _fill(model: Any, dense: Tensors, stored: Mapping[str, Tensors], *, dtype: Any) -> None:
    """Give the model its tensors; ValueError where they are not those that it has."""
    wide = set(model._keep_in_fp32_modules or ())
    for name, tensor in dense.items():
        if tensor.is_floating_point():
            kept = wide & set(name.split("."))
            dense[name] = tensor.to(torch.float32 if kept else dtype)
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    given = {name: tensor.shape for name, tensor in dense.items()}
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    given |= {f"{name}.weight": _shape(linears.get(name), stored[name]) for name in stored}
    if wrong := [n for n in expected | given if expected.get(n) != given.get(n)]:
        raise ValueError(f"its configuration has other tensors: {sorted(wrong)[:4]}")
    model.load_state_dict(dense, strict=False, assign=True)
    for name, parts in stored.items():
        linear = linears[name]
        shell = linear_of(linear.weight.to(dtype), linear.bias)
        model.set_submodule(name, StoredNf4(shell, parts))


def _shape(linear: nn.Linear | None, parts: Tensors) -> torch.Size | None:
    """The layer's own, if so many numbers are packed."""
    if linear is None or parts["packed"].numel() != math.ceil(linear.weight.numel() / 2):
        return None
    return linear.weight.shape
