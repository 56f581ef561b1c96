"""Text states of several lengths as one tensor."""

from __future__ import annotations

from collections.abc import Sequence

from lib import shapes


def padded(texts: Sequence[shapes.AnyTensor]) -> tuple[shapes.AnyTensor, tuple[int, ...]]:
    """Stacked, zeros after each text's own tokens (its first axis); and the lengths."""
    from torch.nn.utils.rnn import pad_sequence

    return pad_sequence(list(texts), batch_first=True), tuple(len(text) for text in texts)


def mask_of(lengths: Sequence[int], *, longest: int) -> shapes.AnyTensor:
    """True at the tokens, False at the padding: b l."""
    import torch

    return torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
