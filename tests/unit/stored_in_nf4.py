"""Bases as people publish them: components stored in bitsandbytes' NF4, and their dense twins."""

import copy
import json
import math
import shutil

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "diffusion_pytorch_model.safetensors"


def store(folder, made, *, component="transformer", nested=True, only=None, dtype=torch.float32):
    """A copy of a pipeline whose denoiser is what diffusers' save_pretrained writes of one in nf4.

    Every linear layer is quantised, modulations and embedders too, or those of `only`.
    """
    made = shutil.copytree(folder, made)
    config, tensors = _config(made / component), _tensors(made / component)
    every = linears(config)
    skip = [] if only is None else [name for name in every if name not in only]
    _describe(made / component, nested=nested, skip=skip)
    for name in [name for name in every if name not in skip]:
        layer = quantised(tensors.pop(f"{name}.weight").to(dtype), nested=nested)
        tensors |= {f"{name}.{key}": value for key, value in layer.state_dict().items()}
    _write(made / component, tensors)
    return made


def store_encoder(folder, made, *, model_class, component, **settings):
    """A copy whose text encoder transformers itself has quantised and saved."""
    from transformers import BitsAndBytesConfig

    made = shutil.copytree(folder, made)
    kind = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **settings)
    model = model_class.from_pretrained(
        folder / component, quantization_config=kind, device_map={"": "cpu"}, dtype=torch.float32
    )
    shutil.rmtree(made / component)
    model.save_pretrained(made / component)
    return made


def widened(folder, made, *, component="transformer"):
    """A dense copy of a stored base, whose weights are the stored ones, dequantised."""
    made = shutil.copytree(folder, made)
    config, tensors = _config(made / component), _tensors(made / component)
    dense = {name: t for name, t in tensors.items() if ".weight." not in name}
    for key in tensors:
        if key.endswith(".quant_state.bitsandbytes__nf4"):
            name = key.removesuffix(".quant_state.bitsandbytes__nf4")
            dense[name] = dequantised(tensors, name)
    del config["quantization_config"]
    (made / component / "config.json").write_text(json.dumps(config))
    _write(made / component, dense)
    return made


def quantised(weight, *, nested=True):
    """bitsandbytes' own layer with this weight."""
    from bitsandbytes.nn import Linear4bit

    rows, features = weight.shape
    layer = Linear4bit(
        features, rows, bias=False, compress_statistics=nested, quant_type="nf4", device="meta"
    )
    layer.weight = type(layer.weight)(
        weight.contiguous(),
        requires_grad=False,
        compress_statistics=nested,
        quant_type="nf4",
        module=layer,
    )
    return layer.to("cpu")


def dequantised(tensors, name):
    """A stored weight by bitsandbytes' own hands, whatever ours are."""
    from bitsandbytes.functional import QuantState

    parts = {key: t for key, t in tensors.items() if key.startswith(f"{name}.")}
    state = QuantState.from_dict(dict(parts), device=torch.device("cpu"))
    return by_bitsandbytes(tensors[name], state)


def by_bitsandbytes(packed, state):
    """The weight of a state by bitsandbytes' public function, the same on every CPU.

    Its kernel for AVX-512 errs where a block ends within a row. Of rows of one number each it takes
    its plain operators instead, which it would compile for every size.
    """
    from bitsandbytes.functional import dequantize_4bit

    column = copy.copy(state)
    column.shape = torch.Size((math.prod(state.shape), 1))
    with torch.compiler.set_stance("force_eager"):
        return dequantize_4bit(packed, column).view(state.shape)


def compute_alike(monkeypatch):
    """bitsandbytes' own layers multiply by the numbers that they hold, on every CPU.

    Made on one with AVX512-BF16 they pack them anew, which fails where a row is no whole number of
    blocks, and multiply in bfloat16 whatever they are asked for.
    """
    import bitsandbytes

    def matmul_4bit(x, packed, *, bias, quant_state):
        state = copy.copy(quant_state)
        state.dtype = x.dtype
        return torch.nn.functional.linear(x, by_bitsandbytes(packed, state), bias)

    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: False)
    monkeypatch.setattr(bitsandbytes, "matmul_4bit", matmul_4bit)


def linears(config):
    """Names of the linear layers of a denoiser by its configuration."""
    import diffusers

    with torch.device("meta"):
        model = getattr(diffusers, config["_class_name"]).from_config(config)
    return [n for n, module in model.named_modules() if isinstance(module, torch.nn.Linear)]


def _describe(folder, *, nested, skip):
    from diffusers import BitsAndBytesConfig

    kind = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_skip_modules=list(skip) or None,
    )
    config = {**_config(folder), "quantization_config": kind.to_dict()}
    (folder / "config.json").write_text(json.dumps(config))


def _config(folder):
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def _tensors(folder):
    return {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}


def _write(folder, tensors):
    (there,) = folder.glob("*.safetensors")
    save_file({name: t.contiguous() for name, t in tensors.items()}, there, {"format": "pt"})
