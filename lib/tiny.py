"""Tokenizers and encoders for tiny bases: real classes, random weights, vocabularies made here."""

import json
from collections.abc import Mapping
from typing import Any

CORPUS = (
    "a photo of a dog on the grass",
    "a red circle on a blue background",
    "a watercolor painting of a cat with a hat, in the snow at night",
    "a 3D emoji of a fox beside a 3D emoji of an apple",
    "a drawing in flat style, stacked above another one",
)


def clip_tokenizer(*, pad_token: str = "<|endoftext|>") -> Any:
    """A CLIP byte-pair tokenizer; the end token has the highest id, since pooling looks for it."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import CLIPTokenizer

    suffix = "</w>"
    words = Regex(r"'s|'t|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix=suffix))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        min_frequency=1,
        special_tokens=["!"],
        initial_alphabet=alphabet,
        show_progress=False,
        end_of_word_suffix=suffix,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary: dict[str, int] = model["vocab"]
    # Every byte must exist as the last piece of a word too, or unseen words lose letters.
    for piece in (*(letter + suffix for letter in alphabet), "<|startoftext|>", "<|endoftext|>"):
        vocabulary.setdefault(piece, len(vocabulary))
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"]]
    options: dict[str, Any] = {"vocab": vocabulary, "merges": merges, "pad_token": pad_token}
    return CLIPTokenizer(**options, model_max_length=77)


def t5_tokenizer(*, model_max_length: int = 512) -> Any:
    """A T5 unigram tokenizer with the hundred sentinel pieces."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import T5Tokenizer

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    trainer = trainers.UnigramTrainer(
        vocab_size=200,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    pieces = [tuple(piece) for piece in json.loads(tokenizer.to_str())["model"]["vocab"]]
    pieces += [(f"<extra_id_{number}>", 0.0) for number in range(99, -1, -1)]
    return T5Tokenizer(vocab=pieces, model_max_length=model_max_length)


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
