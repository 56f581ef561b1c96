"""Tokenizers and encoders for tiny bases: real classes, random weights, vocabularies made here."""

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from lib import texts

CORPUS = (
    "a photo of a dog on the grass",
    "a red circle on a blue background",
    "a watercolor painting of a cat with a hat, in the snow at night",
    "a 3D emoji of a fox beside a 3D emoji of an apple",
    "a drawing in flat style, stacked above another one",
)


def clip_tokenizer(*, pad_token: str = "<|endoftext|>") -> Any:
    """A CLIP byte-pair tokenizer; the end token has the highest id, since pooling looks for it."""
    from tokenizers import pre_tokenizers
    from transformers import CLIPTokenizer

    suffix = "</w>"
    # Every byte must exist as the last piece of a word too, or unseen words lose letters.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges: list[Any] = [
        (word[:end], word[end] + suffix * (end == len(word) - 1))
        for word in _words()
        for end in range(1, len(word))
    ]
    merges = list(dict.fromkeys(merges))
    pieces = [
        *letters,
        *(letter + suffix for letter in letters),
        *("".join(merge) for merge in merges),
        "<|startoftext|>",
        "<|endoftext|>",
    ]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, pad_token=pad_token, model_max_length=77)


def t5_tokenizer(*, model_max_length: int = 512) -> Any:
    """A T5 unigram tokenizer with the hundred sentinel pieces."""
    from transformers import T5Tokenizer

    start = "\u2581"
    words = [start + word for word in _words()]
    letters = sorted({letter for text in CORPUS for letter in text if letter != " "})
    pieces = [(piece, 0.0) for piece in ("<pad>", "</s>", "<unk>")]
    pieces += [(word, -4.0) for word in words] + [(start, -5.0)]
    pieces += [(letter, -6.0) for letter in letters]
    pieces += [(f"<extra_id_{number}>", 0.0) for number in range(99, -1, -1)]
    return T5Tokenizer(vocab=pieces, model_max_length=model_max_length)


def _words() -> list[str]:
    """The corpus's words in order of appearance: no training, which breaks ties by chance."""
    return list(dict.fromkeys(re.findall(r"[a-z]{2,}", " ".join(CORPUS).lower())))


def clip_text_model(tokenizer: Any, config: Mapping[str, Any]) -> Any:
    """A CLIP text encoder over the tokenizer's vocabulary."""
    from transformers import CLIPTextConfig, CLIPTextModel

    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return CLIPTextModel(CLIPTextConfig(vocab_size=len(tokenizer), **ids, **config))


def t5_encoder(tokenizer: Any, config: Mapping[str, Any]) -> Any:
    """A T5 encoder over the tokenizer's vocabulary."""
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(vocab_size=len(tokenizer), **config))


AUTOENCODER_KL: Mapping[str, Any] = {  # what the families' recipes share
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [8, 8, 16, 16],
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "sample_size": 64,
    "mid_block_add_attention": False,
}
AUTOENCODER_16: Mapping[str, Any] = {  # of FLUX.1, which Z-Image has too
    **AUTOENCODER_KL,
    "latent_channels": 16,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "force_upcast": False,
}
AUTOENCODER_VIDEO: Mapping[str, Any] = {  # Qwen-Image's and Krea 2's: they share latent entries
    "base_dim": 8,
    "z_dim": 16,
    "dim_mult": [1, 1, 2, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
    "latents_mean": [channel / 8 - 1 for channel in range(16)],
    "latents_std": [channel / 8 + 1 for channel in range(16)],
}
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)


def qwen_tokenizer() -> Any:
    """A byte-level BPE tokenizer in Qwen's format: every word of the template is one token, so
    that the families' fixed counts of template tokens hold (34 before the prompt, 5 after it).
    """
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    known = ["system", "user", "assistant", *re.findall("[A-Za-z]+", texts.INSTRUCTION), *_words()]
    merges: dict[tuple[str, str], int] = {}
    for word in dict.fromkeys(form for one in known for form in (one, f"\u0120{one}")):
        pieces = _merged(list(word), merges)
        for end in range(1, len(pieces)):  # join left to right what is not one piece yet
            merges.setdefault(("".join(pieces[:end]), pieces[end]), len(merges))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*letters, *("".join(pair) for pair in merges)]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    pairs: list[Any] = list(merges)
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary, merges=pairs, model_max_length=2048, pad_token="<|endoftext|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL[1:])})
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _merged(pieces: list[str], merges: Mapping[tuple[str, str], int]) -> list[str]:
    """A word's pieces as BPE leaves them: the earliest merge first, wherever it applies."""
    while found := [pair for pair in pairwise(pieces) if pair in merges]:
        first, place = min(found, key=merges.__getitem__), 0
        joined: list[str] = []
        while place < len(pieces):
            both = tuple(pieces[place : place + 2])
            joined.append("".join(both) if both == first else pieces[place])
            place += 2 if both == first else 1
        pieces = joined
    return pieces


def qwen_ids(tokenizer: Any) -> dict[str, int]:
    """The ids that a vision-language configuration names."""
    names = ("image_pad", "video_pad", "vision_start", "vision_end")
    keys = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return {
        key: tokenizer.convert_tokens_to_ids(f"<|{name}|>")
        for key, name in zip(keys, names, strict=True)
    }
