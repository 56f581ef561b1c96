"""Whether a base can be trained, told from its index and configurations alone."""

import dataclasses
import json
import shutil

import pytest

from lib import fitting
from lib.families import flux
from lib.fitting import (
    base_problems,
    diffusers_problem,
    distillation_problem,
    precision_problem,
    stored_kind,
)
from lib.hub import Base, UnbuiltTiny
from lib.memory import Memory

VAE = "vae/diffusion_pytorch_model.safetensors"
OTHERS = {
    "sdxl": dataclasses.replace(flux.FACTS, name="sdxl", pipelines=("StableDiffusionXLPipeline",)),
    "flux": flux.FACTS,
}


@pytest.fixture(scope="session")
def pristine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases") / "flux"
    flux.build_tiny(folder)
    return folder


@pytest.fixture
def folder(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "base")


def opened(folder, *, reference=None):
    reference = reference or str(folder)
    memory = Memory(folder.parent / "store")
    return Base(reference, root=folder, name=f"file:{folder}", memory=memory)


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def problems(folder):
    return list(base_problems(opened(folder), family=flux, others=OTHERS))


def test_a_base_that_fits_has_no_problem(folder):
    assert problems(folder) == []


def test_a_folder_without_an_index_is_one_problem(folder):
    (folder / "model_index.json").unlink()
    (problem,) = problems(folder)
    assert problem.subject == f"family.base={folder}"
    assert "has no model_index.json" in problem.why


def test_a_base_of_another_family_is_one_problem_with_the_family_that_fits(folder):
    edit(folder / "model_index.json", _class_name="StableDiffusionXLPipeline")
    (problem,) = problems(folder)
    assert "StableDiffusionXLPipeline" in problem.why
    assert "FluxPipeline" in problem.why
    assert problem.remedy == "use family=sdxl"
    edit(folder / "model_index.json", _class_name="UnheardOfPipeline")
    (problem,) = problems(folder)
    assert problem.remedy == ""


def test_a_component_of_another_class_and_an_absent_one_are_a_problem_each(folder):
    index = json.loads((folder / "model_index.json").read_text())
    del index["vae"]
    index["text_encoder_2"] = ["transformers", "CLIPTextModel"]
    index["tokenizer"] = ["transformers", "CLIPTokenizerFast"]
    (folder / "model_index.json").write_text(json.dumps(index))
    found = {problem.why: problem.allowed for problem in problems(folder)}
    assert found == {
        "model_index.json names no vae": "AutoencoderKL",
        "text_encoder_2 is a CLIPTextModel": "T5EncoderModel",
    }


def test_weights_that_are_only_pickled_are_a_problem_each(folder):
    (folder / VAE).rename(folder / "vae" / "diffusion_pytorch_model.bin")
    (folder / "text_encoder" / "pytorch_model.bin").write_bytes(b"")
    (problem,) = problems(folder)
    assert problem.why == "vae has pickled weights only"
    assert "safe_serialization" in problem.remedy


NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
OTHER_KINDS = {
    "bitsandbytes fp4": {**NF4, "bnb_4bit_quant_type": "fp4"},
    "bitsandbytes int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "gptq": {"quant_method": "gptq", "bits": 4},
    "torchao": {"quant_method": "torchao"},
    "gguf": {"quant_method": "gguf"},
    "an unnamed method": {"bits": 4},
}


@pytest.fixture
def installed(monkeypatch):
    """bitsandbytes is there, whether it is or not."""
    monkeypatch.setattr(fitting, "find_spec", lambda name: name)


def store(folder, *components, kind=NF4):
    for component in components:
        edit(folder / component / "config.json", quantization_config=kind)


@pytest.mark.parametrize("kind", OTHER_KINDS)
@pytest.mark.parametrize(
    "components", [("transformer",), ("transformer", "text_encoder_2")], ids=" ".join
)
def test_a_base_stored_in_other_few_bits_is_pointed_to_the_dense_one(folder, components, kind):
    store(folder, *components, kind=OTHER_KINDS[kind])
    (problem,) = problems(folder)
    for component in components:
        assert f"{component} ({kind})" in problem.why
    assert problem.allowed == "a dense base such as black-forest-labs/FLUX.1-dev"
    assert "bitsandbytes' nf4" in problem.remedy
    assert stored_kind(opened(folder), flux) == ""


def test_a_denoiser_and_text_encoders_in_nf4_are_no_problem(folder, installed):
    store(folder, "transformer", "text_encoder", "text_encoder_2")
    assert problems(folder) == []


def test_an_autoencoder_in_few_bits_is_refused_of_any_kind(folder, installed):
    store(folder, "vae", "text_encoder_2")
    (problem,) = problems(folder)
    assert problem.why == "is stored quantised: vae (bitsandbytes nf4)"


def test_without_bitsandbytes_a_base_in_nf4_is_refused_with_the_line_that_installs_it(
    folder, monkeypatch
):
    monkeypatch.setattr(fitting, "find_spec", lambda name: None)
    assert problems(folder) == []
    store(folder, "transformer", "text_encoder_2")
    (problem,) = problems(folder)
    assert "stores text_encoder_2, transformer in" in problem.why
    assert "bitsandbytes is not installed" in problem.why
    assert problem.remedy == 'pip install -e ".[quant]"'


@pytest.mark.parametrize("mode", ["fp32", "bf16", "int8", "fp8", "nf4", "auto"])
def test_a_denoiser_in_nf4_is_computed_in_nf4_and_in_nothing_else(folder, mode):
    def problem():
        return precision_problem(opened(folder), family=flux, mode=mode)

    assert problem() is None
    store(folder, "text_encoder_2")
    assert (stored_kind(opened(folder), flux), problem()) == ("", None)
    store(folder, "transformer")
    assert stored_kind(opened(folder), flux) == "nf4"
    if mode in ("nf4", "auto"):
        assert problem() is None
    else:
        assert problem().subject == f"precision.mode={mode}"
        assert problem().why == f"{folder} stores its transformer in nf4"
        assert problem().allowed == "nf4, auto"
        assert "precision=nf4" in problem().remedy
        assert "black-forest-labs/FLUX.1-dev" in problem().remedy


def test_what_is_in_few_bits_is_told_without_reading_a_weight(folder, installed):
    """By configurations alone: there are none of the tensors that nf4 consists of."""
    store(folder, "transformer")
    assert stored_kind(opened(folder), flux) == "nf4"
    assert problems(folder) == []


def test_a_name_that_sounds_quantised_is_no_problem(folder):
    moved = folder.rename(folder.with_name("model-bnb-4bit-nf4"))
    assert problems(moved) == []


def test_a_folder_of_gguf_files_is_named_as_such(tmp_path):
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    (problem,) = problems(tmp_path)
    assert "GGUF" in problem.why
    assert "safetensors" in problem.allowed


@pytest.mark.parametrize(
    ("reference", "word"),
    [
        ("stabilityai/sdxl-turbo", "turbo"),
        ("black-forest-labs/FLUX.1-schnell", "schnell"),
        ("ByteDance/SDXL-Lightning", "lightning"),
        ("/models/Krea-2-Turbo", "turbo"),
        ("someone/model-LCM-v2", "lcm"),
    ],
)
def test_a_base_whose_name_says_distilled_is_refused_with_the_consent(folder, reference, word):
    problem = distillation_problem(opened(folder, reference=reference), family=flux)
    assert repr(word) in problem.why
    assert "FLUX.1-dev" in problem.allowed
    assert "family.allow_distilled=true" in problem.remedy


@pytest.mark.parametrize("reference", ["someone/turbocharged", "someone/hyperion", "a/flux-dev"])
def test_a_word_that_only_begins_so_is_no_distillation(folder, reference):
    assert distillation_problem(opened(folder, reference=reference), family=flux) is None


def test_schnell_is_known_by_its_schedule_without_its_name(folder):
    transformer = folder / "transformer" / "config.json"
    edit(transformer, guidance_embeds=False)
    assert distillation_problem(opened(folder), family=flux) is None
    edit(folder / "scheduler" / "scheduler_config.json", use_dynamic_shifting=False, shift=1.0)
    assert distillation_problem(opened(folder), family=flux) is None  # such as our own small base
    edit(transformer, num_layers=19, num_single_layers=38)
    assert "schnell" in distillation_problem(opened(folder), family=flux).why


def test_a_tiny_base_that_is_not_built_has_no_problem(tmp_path):
    unbuilt = UnbuiltTiny(flux, root=tmp_path / "tiny", memory=Memory(tmp_path))
    assert list(base_problems(unbuilt, family=flux, others=OTHERS)) == []
    assert distillation_problem(unbuilt, family=flux) is None


@pytest.mark.parametrize(
    ("installed", "needed", "fits"),
    [
        ("0.42.1", "0.30", True),
        ("0.42.1", "0.42", True),
        ("0.9.0", "0.30", False),
        ("0.42.1", "0.43", False),
        ("1.0.0.dev0", "0.42", True),
    ],
)
def test_a_diffusers_without_the_familys_pipeline_is_too_old(monkeypatch, installed, needed, fits):
    monkeypatch.setattr(fitting, "version", lambda name: installed)
    problem = diffusers_problem(dataclasses.replace(flux.FACTS, diffusers=needed))
    assert (problem is None) == fits
    if problem:
        assert f"diffusers {installed} has no FluxPipeline" in problem.why
        assert "pip install" in problem.remedy
