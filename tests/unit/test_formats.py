import dataclasses
import json

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from diffusers.training_utils import _collate_lora_metadata
from peft.utils import get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lib import adapter
from lib.families import flux
from lib.formats import DIFFUSERS_FILE, METADATA_KEY, diffusers_file, prove_diffusers_file
from lib.schema import AdapterConfig

CONFIG = AdapterConfig(rank=4, alpha=6.5, targets=["to_q", "to_out.0", "ff.net.2"])


@pytest.fixture(scope="module")
def model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = FluxTransformer2DModel(**flux.TINY["transformer"])
        for parameter in adapter.inject(model, CONFIG, seed=0).parameters.values():
            parameter.data = torch.randn(parameter.shape)
    return model


@pytest.fixture
def exported(model, tmp_path):
    """Writes the adapter's file; returns its path."""

    def write(*, dtype="fp32", config=CONFIG, state=None, provenance=None):
        made = diffusers_file(
            state or adapter.state_dict(model),
            adapter=config,
            facts=flux.FACTS,
            dtype=dtype,
            provenance=provenance or {},
        )
        (tmp_path / DIFFUSERS_FILE).write_bytes(made.data)
        return tmp_path / DIFFUSERS_FILE

    return write


def header_of(path):
    with safe_open(path, framework="pt") as file:
        return file.metadata()


def prove(path, model, *, config=CONFIG, dtype="fp32"):
    prove_diffusers_file(
        path, adapter.state_dict(model), adapter=config, facts=flux.FACTS, dtype=dtype
    )


def test_keys_tensors_and_metadata_are_those_that_diffusers_itself_writes(
    model, exported, tmp_path
):
    FluxPipeline.save_lora_weights(
        tmp_path / "theirs",
        transformer_lora_layers=get_peft_model_state_dict(model),
        **_collate_lora_metadata({"transformer": model}),
    )
    ours, theirs = exported(), tmp_path / "theirs" / DIFFUSERS_FILE
    found, expected = load_file(ours), load_file(theirs)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert header_of(ours)["format"] == header_of(theirs)["format"] == "pt"
    found, expected = (json.loads(header_of(path)[METADATA_KEY]) for path in (ours, theirs))
    name = "transformer.base_model_name_or_path"
    assert found.pop(name, None) is None
    expected.pop(name, None)
    lists = "transformer.target_modules"
    assert sorted(found.pop(lists)) == sorted(expected.pop(lists))
    assert found == expected


def test_a_pipeline_loads_the_file_as_the_adapter_that_was_trained(model, exported):
    path = exported()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        fresh = FluxTransformer2DModel(**flux.TINY["transformer"])
    metadata = json.loads(header_of(path)[METADATA_KEY])
    fresh.load_lora_adapter(
        load_file(path), prefix="transformer", metadata=metadata, adapter_name="default"
    )
    layer = "transformer_blocks.0.attn.to_q"
    assert fresh.get_submodule(layer).scaling["default"] == 6.5 / 4
    inputs = torch.randn(2, 32, generator=torch.Generator().manual_seed(1))
    one, other = (m.get_submodule(layer)(inputs) for m in (model, fresh))
    assert torch.allclose(one, other, atol=1e-6)


def metadata_of(path):
    found = json.loads(header_of(path)[METADATA_KEY])
    return {name.removeprefix("transformer."): value for name, value in found.items()}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_file_is_proven_by_reading_it_back(model, exported, dtype):
    prove(exported(dtype=dtype), model, dtype=dtype)


def test_a_file_of_another_dtype_than_asked_for_is_not_proven(model, exported):
    with pytest.raises(ValueError, match="tensors differ"):
        prove(exported(dtype="bf16"), model, dtype="fp32")


def test_another_alpha_or_rank_is_not_proven(model, exported):
    path = exported(config=dataclasses.replace(CONFIG, alpha=7.0))
    with pytest.raises(ValueError, match="rank and alpha"):
        prove(path, model)
    path = exported(config=dataclasses.replace(CONFIG, rank=8))
    with pytest.raises(ValueError, match="rank and alpha"):
        prove(path, model)


def rewrite(path, change):
    header, tensors = header_of(path), load_file(path)
    header.pop("digest", None)
    change(tensors, header)
    save_file(tensors, path, metadata=header)


def nudge(tensors, header):
    name = sorted(tensors)[0]
    tensors[name] = tensors[name] * (1 + 1e-6)


def drop(tensors, header):
    del tensors[sorted(tensors)[0]]


def rename(tensors, header):
    name = sorted(tensors)[0]
    tensors[name.replace("transformer_blocks.0", "transformer_blocks.1")] = tensors.pop(name)


def other_alpha(tensors, header):
    header[METADATA_KEY] = header[METADATA_KEY].replace("6.5", "6.25")


@pytest.mark.parametrize("change", [nudge, drop, rename, other_alpha])
def test_a_file_with_one_thing_changed_is_not_proven(model, exported, change):
    path = exported()
    rewrite(path, lambda tensors, header: None)
    prove(path, model)
    rewrite(path, change)
    with pytest.raises(ValueError, match=r"differ|rank and alpha"):
        prove(path, model)


def test_values_that_a_dtype_turns_to_zero_are_counted():
    state = {
        "a.lora_A.weight": torch.tensor([[1e-9, -1e-9, 0.0, 1.0]]),
        "a.lora_B.weight": torch.tensor([[1e-8], [1e-4]]),
    }

    def flushed(dtype):
        made = diffusers_file(state, adapter=CONFIG, facts=flux.FACTS, dtype=dtype, provenance={})
        return made.num_flushed

    assert (flushed("fp32"), flushed("bf16"), flushed("fp16")) == (0, 0, 3)


def test_the_header_says_where_the_file_comes_from_and_names_no_machine(model, exported):
    header = header_of(exported(provenance={"train_key": "abc"}))
    assert header["darkroom.train_key"] == "abc"
    assert metadata_of(exported())["base_model_name_or_path"] is None
    assert "/" not in header[METADATA_KEY]


def test_the_same_adapter_makes_the_same_bytes(exported):
    assert exported().read_bytes() == exported().read_bytes()
