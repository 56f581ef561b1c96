"""Tokenizers of some two thousand pieces over the captions of flux-mini."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

PIECES = 2000
LETTERS = [chr(code) for code in range(33, 127)]


def clip_tokenizer(corpus: Sequence[str], *, length: int) -> Any:
    """A CLIP byte-pair tokenizer; the end token has the highest id, since pooling looks for it.

    The trainer breaks ties by chance, so its pieces are part of the shipped weights.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import CLIPTokenizer

    suffix = "</w>"
    trained = Tokenizer(models.BPE(end_of_word_suffix=suffix))
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=PIECES,
        initial_alphabet=alphabet,
        end_of_word_suffix=suffix,
        show_progress=False,
    )
    trained.train_from_iterator([text.lower() for text in corpus], trainer)
    merges = [tuple(merge) for merge in _merges(trained)]
    pieces = [*alphabet, *(letter + suffix for letter in alphabet), *("".join(m) for m in merges)]
    pieces += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    return CLIPTokenizer(
        vocab=vocabulary, merges=merges, pad_token="<|endoftext|>", model_max_length=length
    )


def _merges(tokenizer: Any) -> list[list[str]]:
    import json

    found = json.loads(tokenizer.to_str())["model"]["merges"]
    return [merge.split(" ") if isinstance(merge, str) else merge for merge in found]


def t5_tokenizer(corpus: Sequence[str], *, length: int) -> Any:
    """A T5 unigram tokenizer: the corpus's words and, for all others, single characters.

    Written, not trained: the trainer's pruning cuts words up that a small encoder needs whole.
    """
    from transformers import T5Tokenizer

    start = "\u2581"
    words = Counter(word for text in corpus for word in text.split())
    letters = sorted({*LETTERS, *(letter for word in words for letter in word)})
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), (start, -5.0)]
    pieces += [(start + word, -4.0) for word, _ in words.most_common()]
    pieces += [(letter, -6.0) for letter in letters]
    pieces += [(f"<extra_id_{number}>", 0.0) for number in range(99, -1, -1)]
    return T5Tokenizer(vocab=pieces, model_max_length=length)
