"""Files of other tools, written out by hand after their conventions, as the reader takes them."""

import json

import pytest
import torch

from lib import families
from lib.changes import Change, difference
from lib.reading import read, targets_of
from tests.unit.exports.cells import drawn, trained
from tests.unit.exports.strangers import (
    KREA2_NAMES,
    QWEN_IMAGE_NAMES,
    flux_of_sd_scripts,
    krea2_of_ai_toolkit,
    qwen_image_of_musubi_tuner,
    sizes_of,
)


def read_as(name, format, tensors, metadata=None):
    family, sizes = families.get(name), sizes_of(name)
    component = family.FACTS.denoiser
    return read(
        tensors,
        metadata or {},
        targets=targets_of(family.NAMES, sizes, format=format, component=component),
        format=format,
        component=component,
    )


def same(change, up, down, scale=1.0):
    return difference(change, Change(down.double(), up.double() * scale)) < 1e-12


def test_a_flux_file_of_sd_scripts_loads():
    """One matrix for query, key and value, alpha half the rank."""
    tensors, width = flux_of_sd_scripts(), 3072
    found = read_as("flux", "kohya", tensors)
    assert found.unmatched == ()
    fused, last = (
        [tensors[f"lora_unet_{name}.lora_{half}.weight"] for half in ("up", "down")]
        for name in ("double_blocks_0_img_attn_qkv", "single_blocks_0_linear2")
    )
    block = "transformer_blocks.0.attn"
    for place, name in enumerate(("to_q", "to_k", "to_v")):
        rows = fused[0][place * width : (place + 1) * width]
        assert same(found.changes[f"{block}.{name}"], rows, fused[1], scale=0.5)
    assert same(found.changes["single_transformer_blocks.0.proj_out"], *last)
    assert len(found.changes) == 4


def test_a_krea_2_file_of_ai_toolkit_loads():
    """The authors' names under `diffusion_model.`, without alpha."""
    names, tensors = KREA2_NAMES, krea2_of_ai_toolkit()
    found = read_as("krea2", "comfyui", tensors)
    assert found.unmatched == ()
    assert found.changes.keys() == set(names.values())
    for theirs, ours in names.items():
        halves = (tensors[f"diffusion_model.{theirs}.lora_{half}.weight"] for half in "BA")
        assert same(found.changes[ours], *halves)


def test_a_qwen_image_file_of_musubi_tuner_loads():
    """diffusers' names with underscores for dots, alpha a quarter of the rank."""
    names, tensors = QWEN_IMAGE_NAMES, qwen_image_of_musubi_tuner()
    for format in ("kohya", "comfyui"):  # ComfyUI reads these as well
        found = read_as("qwen_image", format, tensors)
        assert found.unmatched == ()
        assert found.changes.keys() == set(names.values())
        for theirs, ours in names.items():
            up, down = (
                tensors[f"lora_unet_{theirs}.lora_{half}.weight"] for half in ("up", "down")
            )
            assert same(found.changes[ours], up, down, scale=0.25)


# Names as the tools' own models have them, written out: what a file may call the tiny bases' modules.
NAMED = {
    ("z_image", "kohya"): [
        "lora_unet_layers_0_attention_qkv",
        "lora_unet_layers_0_attention_out",
        "lora_unet_layers_1_attention_qkv",
        "lora_unet_layers_1_attention_out",
        "lora_unet_noise_refiner_0_attention_qkv",
        "lora_unet_noise_refiner_0_attention_out",
        "lora_unet_context_refiner_0_attention_qkv",
        "lora_unet_context_refiner_0_attention_out",
    ],
    ("qwen_image", "comfyui"): [
        f"diffusion_model.transformer_blocks.{block}.attn.{name}"
        for block in (0, 1)
        for name in (
            *("to_q", "to_k", "to_v", "to_out.0"),
            *("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
        )
    ],
    ("flux2_klein", "comfyui"): [
        "diffusion_model.double_blocks.0.img_attn.qkv",
        "diffusion_model.double_blocks.0.img_attn.proj",
        *(
            f"diffusion_model.single_blocks.{block}.linear{place}"
            for block in (0, 1)
            for place in (1, 2)
        ),
    ],
    ("flux", "kohya"): [
        "lora_unet_double_blocks_0_img_attn_qkv",
        "lora_unet_double_blocks_0_img_attn_proj",
        "lora_unet_double_blocks_0_txt_attn_qkv",
        "lora_unet_double_blocks_0_txt_attn_proj",
        "lora_unet_single_blocks_0_linear1",
    ],
    ("sdxl", "kohya"): [
        f"lora_unet_{place}_1_transformer_blocks_0_attn{which}_to_{part}"
        for place in ("input_blocks_3", "middle_block", "output_blocks_0", "output_blocks_1")
        for which in (1, 2)
        for part in ("q", "k", "v", "out_0")
    ],
}


def stems(tensors):
    return {
        key.removesuffix(".alpha").removesuffix(".weight").rsplit(".lora_", 1)[0] for key in tensors
    }


@pytest.mark.parametrize(("name", "format"), NAMED)
def test_modules_have_the_names_that_the_target_s_own_model_has(name, format, tmp_path):
    from safetensors.torch import load_file

    tensors = load_file(trained(name).write(tmp_path, format))
    assert sorted(stems(tensors)) == sorted(NAMED[name, format])


def test_split_names_of_a_fused_matrix_are_not_for_kohya_s_readers():
    """As some trainers write Z-Image files: ComfyUI's model has no such module."""
    sizes = sizes_of("z_image")
    rows, columns = sizes["layers.0.attention.to_q"]
    key = "lora_unet_layers_0_attention_to_q"
    tensors = {
        f"{key}.lora_down.weight": drawn("A", (4, columns)),
        f"{key}.lora_up.weight": drawn("B", (rows, 4)),
    }
    for format in ("kohya", "comfyui"):
        found = read_as("z_image", format, tensors)
        assert found.changes == {}
        assert found.unmatched == tuple(sorted(tensors))


def test_keys_without_partner_of_other_sizes_or_of_dora_are_left_over():
    sizes = sizes_of("qwen_image")
    stem = "diffusion_model.transformer_blocks.0.attn"
    rows, columns = sizes["transformer_blocks.0.attn.to_q"]
    down, up = drawn("A", (4, columns)), drawn("B", (rows, 4))
    tensors = {
        f"{stem}.to_q.lora_A.weight": down,  # no partner
        f"{stem}.to_k.lora_A.weight": down,
        f"{stem}.to_k.lora_B.weight": up[:-1],  # of another base
        f"{stem}.to_v.lora_A.weight": down,
        f"{stem}.to_v.lora_B.weight": up,
        f"{stem}.to_v.dora_scale": torch.ones(rows, 1),
        f"{stem}.to_out.0.lora_A.weight": down,
        f"{stem}.to_out.0.lora_B.weight": up,
        f"{stem}.norm_q.weight": torch.ones(4),
    }
    found = read_as("qwen_image", "comfyui", tensors)
    assert list(found.changes) == ["transformer_blocks.0.attn.to_out.0"]
    assert found.unmatched == tuple(sorted(k for k in tensors if ".to_out." not in k))


def test_a_diffusers_file_means_what_its_description_says():
    sizes = sizes_of("qwen_image")
    stem = "transformer.transformer_blocks.0.attn"
    rows, columns = sizes["transformer_blocks.0.attn.to_q"]
    down, up = drawn("A", (4, columns)), drawn("B", (rows, 4))
    tensors = {
        f"{stem}.{name}.lora_{half}.weight": tensor
        for name in ("to_q", "to_k")
        for half, tensor in (("A", down), ("B", up))
    }
    described = {
        "transformer.lora_alpha": 8,
        "transformer.use_rslora": True,
        "transformer.alpha_pattern": {"to_k": 2},
    }
    plain = read_as("qwen_image", "diffusers", tensors)
    assert same(plain.changes["transformer_blocks.0.attn.to_q"], up, down)
    metadata = {"lora_adapter_metadata": json.dumps(described)}
    found = read_as("qwen_image", "diffusers", tensors, metadata)
    assert same(found.changes["transformer_blocks.0.attn.to_q"], up, down, scale=8 / 2)
    assert same(found.changes["transformer_blocks.0.attn.to_k"], up, down, scale=2 / 2)
