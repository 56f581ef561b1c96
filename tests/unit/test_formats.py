import json
import math

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from diffusers.training_utils import _collate_lora_metadata
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file

from lib import adapter
from lib.changes import changes_of, unwrapped
from lib.errors import InputRefused
from lib.families import flux
from lib.formats import DIFFUSERS_FILE, METADATA_KEY, Target, adapter_file
from lib.hollow import linear_sizes
from lib.hub import Component
from lib.proof import NotProven, prove
from lib.records import to_stored
from lib.schema import AdapterConfig
from lib.tensors import encode

CONFIG = AdapterConfig(rank=4, alpha=4.0, targets=["to_q", "to_out.0", "ff.net.2"])
STRONG = AdapterConfig(rank=4, alpha=6.5, targets=CONFIG.targets)
DENOISER = Component("FluxTransformer2DModel", flux.TINY["transformer"], {})


def plain_model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return FluxTransformer2DModel(**flux.TINY["transformer"])


def adapted(config):
    model = plain_model()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for parameter in adapter.inject(model, config, seed=0).parameters.values():
            parameter.data = torch.randn(parameter.shape)
    return model


SIZES = linear_sizes(plain_model())


@pytest.fixture(scope="module")
def model():
    return adapted(CONFIG)


def target_of(format="diffusers", dtype="fp32"):
    return Target(format, dtype, flux.NAMES, "transformer", SIZES)


@pytest.fixture
def exported(model, tmp_path):
    """Writes the adapter's file; returns its path."""

    def write(*, dtype="fp32", config=CONFIG, state=None, format="diffusers", provenance=None):
        description = adapter.peft_config(config)
        made = adapter_file(
            changes_of(state or adapter.state_dict(model), description),
            target_of(format, dtype),
            description=description,
            provenance=provenance or {},
        )
        (tmp_path / DIFFUSERS_FILE).write_bytes(made.data)
        return tmp_path / DIFFUSERS_FILE

    return write


def header_of(path):
    with safe_open(path, framework="pt") as file:
        return file.metadata()


def metadata_of(path):
    found = json.loads(header_of(path)[METADATA_KEY])
    return {name.removeprefix("transformer."): value for name, value in found.items()}


def prove_file(path, model, *, config=CONFIG, dtype="fp32"):
    changes = changes_of(adapter.state_dict(model), adapter.peft_config(config))
    prove(path, changes, target_of(dtype=dtype), family=flux, denoiser=DENOISER)


def test_keys_tensors_and_metadata_are_those_that_diffusers_itself_writes(
    model, exported, tmp_path
):
    """Where alpha is the rank; any other alpha is folded into B."""
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


def forward(model, layer="transformer_blocks.0.attn.to_q"):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        inputs = torch.randn(2, 32)
    return model.get_submodule(layer)(inputs)


@pytest.mark.parametrize("described", [True, False])
def test_a_pipeline_loads_the_file_as_the_adapter_that_was_trained(exported, described):
    """With the description, and as readers do that know nothing of it."""
    trained = adapted(STRONG)
    path = exported(config=STRONG, state=adapter.state_dict(trained))
    fresh = plain_model()
    before = forward(fresh)
    metadata = json.loads(header_of(path)[METADATA_KEY]) if described else None
    fresh.load_lora_adapter(
        load_file(path), prefix="transformer", metadata=metadata, adapter_name="default"
    )
    assert not torch.allclose(forward(fresh), before, atol=1e-3)
    assert torch.allclose(forward(fresh), forward(trained), atol=1e-5)


def test_a_folded_file_says_that_its_scale_is_one(exported):
    config = AdapterConfig(rank=4, alpha=8.0, targets=CONFIG.targets)
    found = metadata_of(exported(config=config))
    assert (found["r"], found["lora_alpha"], found["use_rslora"]) == (4, 4, False)
    assert found["alpha_pattern"] == found["rank_pattern"] == {}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_file_is_proven_by_reading_it_back(model, exported, dtype):
    prove_file(exported(dtype=dtype), model, dtype=dtype)


def test_a_file_of_another_dtype_than_asked_for_is_not_proven(model, exported):
    with pytest.raises(NotProven, match="weight changes differ"):
        prove_file(exported(dtype="bf16"), model, dtype="fp32")


def test_a_file_of_another_alpha_is_not_proven(model, exported):
    with pytest.raises(NotProven, match="weight changes differ"):
        prove_file(exported(config=STRONG), model)


def rewrite(path, change):
    header, tensors = header_of(path), load_file(path)
    header.pop("digest", None)
    change(tensors, header)
    path.write_bytes(encode(to_stored(tensors), metadata=header))


def nudge(tensors, header):
    name = sorted(tensors)[0]
    tensors[name] = tensors[name] * (1 + 1e-5)


def drop(tensors, header):
    del tensors[sorted(tensors)[0]]


def drop_a_pair(tensors, header):
    for name in sorted(tensors)[:2]:
        del tensors[name]


def rename(tensors, header):
    name = sorted(tensors)[0]
    tensors[name.replace("transformer_blocks.0", "transformer_blocks.1")] = tensors.pop(name)


def wrap(tensors, header):
    for name in [*tensors]:
        tensors[name.replace("transformer.", "transformer.base_model.model.", 1)] = tensors.pop(
            name
        )


def other_style(tensors, header):
    """Some modules in another tool's spelling, which one reader or the other leaves out."""
    name = next(n for n in sorted(tensors) if "to_q.lora_A" in n)
    for half, theirs in (("lora_A", "lora_down"), ("lora_B", "lora_up")):
        old = name.replace("lora_A", half)
        new = old.removeprefix("transformer.").replace(half, theirs)
        tensors[f"lora_unet_{new}"] = tensors.pop(old)


def other_alpha(tensors, header):
    header[METADATA_KEY] = header[METADATA_KEY].replace(
        '"transformer.lora_alpha": 4', '"transformer.lora_alpha": 5'
    )


@pytest.mark.parametrize(
    "change", [nudge, drop, drop_a_pair, rename, wrap, other_style, other_alpha]
)
def test_a_file_with_one_thing_changed_is_not_proven(model, exported, change):
    path = exported()
    rewrite(path, lambda tensors, header: None)
    prove_file(path, model)
    rewrite(path, change)
    with pytest.raises(NotProven, match=r"differ|no module has"):
        prove_file(path, model)


def test_values_that_a_dtype_turns_to_zero_are_counted():
    state = {
        "x_embedder.lora_A.weight": torch.tensor([[1e-9, -1e-9, 0.0, 1.0]]),
        "x_embedder.lora_B.weight": torch.tensor([[1e-8], [1e-4]]),
    }
    description = LoraConfig(r=1, lora_alpha=1, target_modules=["x_embedder"])

    def flushed(dtype):
        return adapter_file(
            changes_of(state, description),
            target_of(dtype=dtype),
            description=description,
            provenance={},
        ).num_flushed

    assert (flushed("fp32"), flushed("bf16"), flushed("fp16")) == (0, 0, 3)


def test_values_that_do_not_fit_a_dtype_are_refused_with_another(model, exported):
    state = {n: t * 1e4 if "lora_B" in n else t for n, t in adapter.state_dict(model).items()}
    exported(state={n: t * 1e-3 for n, t in state.items()}, dtype="fp16")
    with pytest.raises(InputRefused) as refused:
        exported(state={n: t * 1e2 for n, t in state.items()}, dtype="fp16")
    (problem,) = refused.value.problems
    assert problem.subject == "export.dtype=fp16"
    assert "not finite" in problem.why
    assert "bf16" in problem.remedy
    broken = {n: torch.full_like(t, math.nan) for n, t in state.items()}
    with pytest.raises(InputRefused, match="not finite"):
        exported(state=broken)


def test_the_header_says_where_the_file_comes_from_and_names_no_machine(model, exported):
    header = header_of(exported(provenance={"train_key": "abc"}))
    assert header["darkroom.train_key"] == "abc"
    assert metadata_of(exported())["base_model_name_or_path"] is None
    assert "/" not in header[METADATA_KEY]


def test_the_same_adapter_makes_the_same_bytes(exported):
    assert exported().read_bytes() == exported().read_bytes()


def test_names_that_wrappers_leave_are_not_in_the_file(model, exported):
    """PEFT's wrapper, its adapter's name and torch.compile's, as a trained state may have them."""
    plain = adapter.state_dict(model)
    expected = exported().read_bytes()
    wrapped = {
        f"base_model.model.{name.replace('.weight', '.default.weight')}": tensor
        for name, tensor in plain.items()
    }
    assert exported(state=wrapped).read_bytes() == expected


def test_names_that_compiling_leaves_are_not_in_the_file(model, exported):
    plain, expected = adapter.state_dict(model), exported().read_bytes()
    whole = {f"_orig_mod.{name}": tensor for name, tensor in plain.items()}
    inner = {
        name.replace("transformer_blocks.0.", "transformer_blocks.0._orig_mod.", 1): tensor
        for name, tensor in plain.items()
    }
    for state in (whole, inner):
        assert any("_orig_mod" in name for name in state)
        assert exported(state=state).read_bytes() == expected
    assert unwrapped("a.default_scale.b") == "a.default_scale.b"


def test_what_no_format_can_hold_is_refused(model, exported):
    """DoRA's magnitudes have no common name; half of a pair changes nothing."""
    plain = adapter.state_dict(model)
    magnitude = {"transformer_blocks.0.attn.to_q.lora_magnitude_vector.weight": torch.ones(32)}
    with pytest.raises(ValueError, match="no part of a LoRA pair"):
        exported(state={**plain, **magnitude})
    with pytest.raises(ValueError, match="half of a pair"):
        exported(state=dict(list(plain.items())[1:]))


def test_modules_that_a_format_s_readers_leave_out_are_refused_by_name(tmp_path, exported):
    """diffusers drops what lies outside the blocks of kohya's FLUX files, or fails on it."""
    config = AdapterConfig(rank=4, alpha=4.0, targets=["to_q", "x_embedder", "proj_out"])
    state = adapter.state_dict(adapted(config))
    with pytest.raises(InputRefused) as refused:
        exported(config=config, state=state, format="kohya")
    (problem,) = refused.value.problems
    assert problem.subject == "export.format=kohya"
    assert "proj_out, x_embedder" in problem.why
    assert problem.allowed == "diffusers, comfyui"
    exported(config=config, state=state, format="comfyui")
