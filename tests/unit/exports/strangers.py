"""Tensors of other tools' adapter files, written out by hand after their conventions."""

import torch

from lib import families
from lib.hollow import hollow_denoiser, linear_sizes
from tests.unit.exports.cells import component_of, drawn

KREA2_NAMES = {
    "blocks.0.attn.wq": "transformer_blocks.0.attn.to_q",
    "blocks.1.attn.wo": "transformer_blocks.1.attn.to_out.0",
    "blocks.1.mlp.down": "transformer_blocks.1.ff.down",
    "txtfusion.refiner_blocks.0.attn.gate": "text_fusion.refiner_blocks.0.attn.to_gate",
    "txtmlp.3": "txt_in.linear_2",
    "last.linear": "final_layer.linear",
}
QWEN_IMAGE_NAMES = {
    "transformer_blocks_1_attn_to_q": "transformer_blocks.1.attn.to_q",
    "transformer_blocks_1_attn_to_out_0": "transformer_blocks.1.attn.to_out.0",
    "transformer_blocks_0_img_mlp_net_0_proj": "transformer_blocks.0.img_mlp.net.0.proj",
    "transformer_blocks_0_txt_mod_1": "transformer_blocks.0.txt_mod.1",
}


def sizes_of(name):
    return linear_sizes(hollow_denoiser(component_of(families.get(name))))


def flux_of_sd_scripts():
    """One matrix for query, key and value, alpha half the rank; another of alpha = rank."""
    width = 3072
    return {
        "lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight": drawn("down", (4, width)),
        "lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight": drawn("up", (3 * width, 4)),
        "lora_unet_double_blocks_0_img_attn_qkv.alpha": torch.tensor(2.0),
        "lora_unet_single_blocks_0_linear2.lora_down.weight": drawn("last down", (4, 5 * width)),
        "lora_unet_single_blocks_0_linear2.lora_up.weight": drawn("last up", (width, 4)),
        "lora_unet_single_blocks_0_linear2.alpha": torch.tensor(4.0),
    }


def krea2_of_ai_toolkit():
    """The authors' names under `diffusion_model.`, without alpha."""
    sizes, tensors = sizes_of("krea2"), {}
    for theirs, ours in KREA2_NAMES.items():
        rows, columns = sizes[ours]
        tensors[f"diffusion_model.{theirs}.lora_A.weight"] = drawn(f"{ours} A", (2, columns))
        tensors[f"diffusion_model.{theirs}.lora_B.weight"] = drawn(f"{ours} B", (rows, 2))
    return tensors


def qwen_image_of_musubi_tuner():
    """diffusers' names with underscores for dots, alpha a quarter of the rank."""
    sizes, tensors = sizes_of("qwen_image"), {}
    for theirs, ours in QWEN_IMAGE_NAMES.items():
        rows, columns = sizes[ours]
        tensors[f"lora_unet_{theirs}.lora_down.weight"] = drawn(f"{ours} A", (4, columns))
        tensors[f"lora_unet_{theirs}.lora_up.weight"] = drawn(f"{ours} B", (rows, 4))
        tensors[f"lora_unet_{theirs}.alpha"] = torch.tensor(1.0)
    return tensors
