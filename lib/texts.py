"""What Qwen's encoders are asked, and text states of several lengths as one tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lib import shapes

INSTRUCTION = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:"
)
# What stands before and after a caption of Qwen-Image and of Krea 2.
PREFIX = f"<|im_start|>system\n{INSTRUCTION}<|im_end|>\n<|im_start|>user\n"
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"
PREFIX_TOKENS, SUFFIX_TOKENS = 34, 5
MULTIPLE = 32  # of the length of texts that are padded


def padded(texts: Sequence[shapes.AnyTensor]) -> tuple[shapes.AnyTensor, tuple[int, ...]]:
    """Stacked, zeros after each text's own tokens (its first axis); and the lengths."""
    from torch.nn.utils.rnn import pad_sequence

    return pad_sequence(list(texts), batch_first=True), tuple(len(text) for text in texts)


def mask_of(lengths: Sequence[int], *, longest: int) -> shapes.AnyTensor:
    """True at the tokens, False at the padding: b l."""
    import torch

    return torch.arange(longest)[None] < torch.tensor(lengths)[:, None]


def kept(states: shapes.AnyTensor, mask: shapes.AnyTensor) -> shapes.AnyTensor:
    """The positions of one text that a mask on the CPU keeps, taken without waiting for a GPU."""
    places = mask.nonzero().flatten()
    return states.index_select(0, places.to(states.device, non_blocking=True))


def masked(texts: Sequence[shapes.AnyTensor]) -> dict[str, shapes.AnyTensor]:
    """`text_embeds` as `padded`; a `text_mask` only where something is padded."""
    text, lengths = padded(texts)
    tensors = {"text_embeds": text}
    if min(lengths) < max(lengths):
        tensors["text_mask"] = mask_of(lengths, longest=max(lengths))
    return tensors


def in_few_lengths(tensors: Mapping[str, shapes.AnyTensor]) -> dict[str, shapes.AnyTensor]:
    """Masked texts padded further, to a multiple of 32: each shape is compiled and recorded anew.

    A sampler leaves them: the last bits of attention depend on the length.
    """
    from torch.nn.functional import pad

    if "text_mask" not in tensors:
        return dict(tensors)
    text, mask = tensors["text_embeds"], tensors["text_mask"]
    beyond = -mask.shape[1] % MULTIPLE
    longer = pad(text, [0, 0] * (text.ndim - 2) + [0, beyond])
    return {**tensors, "text_embeds": longer, "text_mask": pad(mask, [0, beyond])}
