"""What Qwen's encoders are asked, and text states of several lengths as one tensor."""

from __future__ import annotations

from collections.abc import Sequence

from lib import shapes

INSTRUCTION = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:"
)
# What stands before and after a caption of Qwen-Image and of Krea 2.
PREFIX = f"<|im_start|>system\n{INSTRUCTION}<|im_end|>\n<|im_start|>user\n"
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"
PREFIX_TOKENS, SUFFIX_TOKENS = 34, 5


def padded(texts: Sequence[shapes.AnyTensor]) -> tuple[shapes.AnyTensor, tuple[int, ...]]:
    """Stacked, zeros after each text's own tokens (its first axis); and the lengths."""
    from torch.nn.utils.rnn import pad_sequence

    return pad_sequence(list(texts), batch_first=True), tuple(len(text) for text in texts)


def mask_of(lengths: Sequence[int], *, longest: int) -> shapes.AnyTensor:
    """True at the tokens, False at the padding: b l."""
    import torch

    return torch.arange(longest)[None] < torch.tensor(lengths)[:, None]


def masked(
    texts: Sequence[shapes.AnyTensor],
) -> tuple[dict[str, shapes.AnyTensor], tuple[int, ...]]:
    """`text_embeds` and lengths as `padded`; a `text_mask` only where something is padded."""
    text, lengths = padded(texts)
    tensors = {"text_embeds": text}
    if min(lengths) < max(lengths):
        tensors["text_mask"] = mask_of(lengths, longest=max(lengths))
    return tensors, lengths
