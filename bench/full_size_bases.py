"""The six families' bases at full size, as far as denoisers and shapes are made of them.

In the form of a family's TINY: component, then what differs from its class's defaults. Each
denoiser's values are those of its base's config.json on the Hub, as public code quotes that file.
"""

from collections.abc import Mapping
from typing import Any

_KL = {"block_out_channels": [128, 256, 512, 512]}  # three times halved
_VIDEO = {"temperal_downsample": [False, True, True], "z_dim": 16}

# A quarter of a denoiser's width, for what is counted in hidden states; a U-Net's half.
QUARTER: Mapping[str, Mapping[str, Any]] = {
    "flux": {"num_attention_heads": 6},
    "sdxl": {"block_out_channels": [160, 320, 640]},
    "qwen_image": {"num_attention_heads": 6},
    "z_image": {"dim": 1024, "n_heads": 8, "n_kv_heads": 8},
    "krea2": {"num_attention_heads": 12, "num_key_value_heads": 3, "intermediate_size": 4096},
    "flux2_klein": {"num_attention_heads": 6},
}

FULL: Mapping[str, Mapping[str, Any]] = {
    # FLUX.1-dev's transformer/config.json: the class's defaults and embedded guidance.
    "flux": {
        "transformer": {"guidance_embeds": True},
        "vae": {**_KL, "latent_channels": 16},
        "text_encoder": {"hidden_size": 768},
        "text_encoder_2": {"d_model": 4096},
    },
    # stable-diffusion-xl-base-1.0's unet/config.json.
    "sdxl": {
        "unet": {
            "sample_size": 128,
            "block_out_channels": [320, 640, 1280],
            "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
            "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
            "transformer_layers_per_block": [1, 2, 10],
            "attention_head_dim": [5, 10, 20],
            "use_linear_projection": True,
            "cross_attention_dim": 2048,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
        },
        "vae": {**_KL, "latent_channels": 4},
        "text_encoder": {"hidden_size": 768},
        "text_encoder_2": {"hidden_size": 1280, "projection_dim": 1280},
    },
    # Qwen-Image's transformer/config.json: the class's defaults.
    "qwen_image": {
        "transformer": {},
        "vae": _VIDEO,
        "text_encoder": {"text_config": {"hidden_size": 3584}},
    },
    # Z-Image-Turbo's transformer/config.json, whose shape the dense base shares.
    "z_image": {
        "transformer": {"axes_lens": [1536, 512, 512]},
        "vae": {**_KL, "latent_channels": 16},
        "text_encoder": {"hidden_size": 2560},
    },
    # Krea-2-Raw's transformer/config.json: the class's defaults.
    "krea2": {
        "transformer": {},
        "vae": _VIDEO,
        "text_encoder": {"text_config": {"hidden_size": 2560}},
        "pipeline": {},
    },
    # FLUX.2-klein-4B's transformer/config.json, whose shape the undistilled base shares.
    "flux2_klein": {
        "transformer": {
            "num_layers": 5,
            "num_single_layers": 20,
            "num_attention_heads": 24,
            "joint_attention_dim": 7680,
            "guidance_embeds": False,
        },
        "vae": {**_KL, "latent_channels": 32},
        "text_encoder": {"hidden_size": 2560},
    },
}
