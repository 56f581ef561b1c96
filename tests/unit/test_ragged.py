"""Attention over the valid keys alone, beside the same attention under a mask."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend

from lib import attention, processors, ragged
from lib.family import Conditioning
from tests.unit.bound import learnt, scattered, tiny

TOKENS, HEADS, WIDTH = 7, 4, 8


class Runs(torch.autograd.Function):
    """Flash attention over runs: of what lies behind them there is neither answer nor gradient."""

    @staticmethod
    def forward(ctx, query, key, value, ends, starts):
        ctx.save_for_backward(query, key, value, ends, starts)
        return Runs.each(query, key, value, ends, starts)

    @staticmethod
    def each(query, key, value, ends, starts):
        found = []
        for number in range(len(ends) - 1):
            own, run = slice(*ends[number : number + 2]), slice(*starts[number : number + 2])
            parts = [x.transpose(0, 1) for x in (query[own], key[run], value[run])]
            found.append(functional.scaled_dot_product_attention(*parts).transpose(0, 1))
        return torch.cat(found)

    @staticmethod
    def backward(ctx, gradient):
        *tensors, ends, starts = ctx.saved_tensors
        given = [x.detach().requires_grad_() for x in tensors]
        with torch.enable_grad():
            answer = Runs.each(*given, ends, starts)
        found = torch.autograd.grad(answer, given, gradient)
        for of_keys in found[1:]:
            of_keys[starts[-1] :] = torch.nan  # nothing is written there
        return *found, None, None


@pytest.fixture
def by_runs(monkeypatch):
    """How many tokens each call might attend to, of queries and keys."""
    calls = []

    def over_runs(query, key, value, ends, starts, most):
        calls.append(most)
        assert ends.dtype == starts.dtype == torch.int32
        assert query.shape[1] == key.shape[1]
        return Runs.apply(query, key, value, ends, starts)

    monkeypatch.setattr(ragged, "over_runs", over_runs)
    return calls


def under_a_mask(query, key, value, ends, starts, _most):
    """The same by sizes alone, as a compiler needs it."""
    of_query, of_key = (
        torch.bucketize(torch.arange(len(tokens)), last[1:].long(), right=True)
        for tokens, last in ((query, ends), (key, starts))
    )
    mask = of_query[:, None] == of_key[None, :]
    parts = [x.transpose(0, 1)[None] for x in (query, key, value)]
    found = functional.scaled_dot_product_attention(*parts, attn_mask=mask)
    return found[0].transpose(0, 1)


def masks(*rows):
    """Of texts as they are padded, a string a picture."""
    return torch.tensor([[letter == "x" for letter in row] for row in rows])


@pytest.mark.parametrize(
    "rows",
    [
        ("xxx..xx",),
        ("..xxxxx", "x...xxx"),
        ("xxxxxxx", "xx...xx", "x.x.x.x"),
        ("xxxxxxx", "xxxxxxx"),
    ],
    ids=str,
)
@pytest.mark.parametrize("heads", [HEADS, 2], ids=["heads alike", "fewer heads of keys"])
def test_answers_and_gradients_are_those_under_the_mask(by_runs, heads, rows):
    source = torch.Generator().manual_seed(1)

    def drawn(heads):
        shape = (len(rows), TOKENS, heads, WIDTH)
        return torch.randn(shape, generator=source).requires_grad_()

    given, mask = [drawn(HEADS), drawn(heads), drawn(heads)], masks(*rows)[:, None, None]
    gradient = drawn(HEADS).detach()
    parts = [x.transpose(1, 2) for x in given]
    masked = functional.scaled_dot_product_attention(*parts, attn_mask=mask, enable_gqa=True)
    expected = (
        masked.transpose(1, 2),
        *torch.autograd.grad(masked.transpose(1, 2), given, gradient),
    )
    answer = ragged.attended(*given, mask)
    found = (answer, *torch.autograd.grad(answer, given, gradient))
    torch.testing.assert_close(found, expected)
    assert by_runs == [(TOKENS, TOKENS)]


def test_valid_keys_come_first_in_their_order():
    runs = ragged.runs_of(masks("x..x", ".xx."))
    assert runs.source.tolist() == [0, 3, 5, 6, 1, 2, 4, 7]
    assert runs.place.tolist() == [0, 4, 5, 1, 6, 2, 3, 7]
    assert runs.starts.tolist() == [0, 2, 4]


def test_it_stands_for_masks_of_keys_alone_in_what_flash_attention_computes():
    query = torch.zeros(1, TOKENS, HEADS, WIDTH, dtype=torch.bfloat16)
    mask = torch.ones(1, 1, 1, TOKENS, dtype=torch.bool)
    assert ragged.takes(query, mask)
    assert not ragged.takes(query.float(), mask)
    assert not ragged.takes(query[..., :4], mask)
    assert not ragged.takes(query, mask.float())
    assert not ragged.takes(query, mask.expand(1, 1, TOKENS, TOKENS))
    torch.use_deterministic_algorithms(True)
    try:
        assert not ragged.takes(query, mask)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("kind", "major", "computes"), [("cuda", 8, True), ("cuda", 7, False), ("cpu", 9, False)]
)
def test_flash_attention_is_for_ampere_and_newer(monkeypatch, kind, major, computes):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (major, 0))
    assert ragged.computes_on(torch.device(kind)) == computes


@pytest.mark.parametrize("family", ["krea2", "qwen_image"])
def test_padded_texts_learn_what_they_learn_under_a_mask(by_runs, monkeypatch, family):
    made = scattered(tiny(family))
    texts = made.batch.conditioning["text_embeds"]
    mask = torch.arange(texts.shape[1])[None] < texts.shape[1] - 1
    made.batch.conditioning.tensors["text_mask"] = mask.expand(len(texts), -1)
    loss, gradients = learnt(made)
    monkeypatch.setattr(ragged, "computes_on", lambda _device: True)
    monkeypatch.setattr(ragged, "DTYPES", (torch.float32,))
    processors.engage(made.denoiser)
    again, others = learnt(made)
    assert by_runs
    torch.testing.assert_close(again, loss, rtol=1e-5, atol=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-3, atol=1e-6)


# torch's own: its compiler makes an instance of each Function, and looks at gradients of inputs.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")
@pytest.mark.parametrize("family", ["krea2", "qwen_image"])
def test_texts_of_several_lengths_compile_whole(monkeypatch, family):
    """From the second on the length is variable, as training has it."""
    monkeypatch.setattr(ragged, "over_runs", under_a_mask)
    monkeypatch.setattr(ragged, "computes_on", lambda _device: True)
    monkeypatch.setattr(ragged, "DTYPES", (torch.float32,))
    made = tiny(family)
    texts = made.batch.conditioning["text_embeds"]
    processors.engage(made.denoiser)

    def padded(length):
        wide = torch.cat([texts] * 4, dim=1)[:, :length]
        mask = (torch.arange(length)[None] < length - 2).expand(len(texts), -1)
        conditioning = Conditioning({"text_embeds": wide, "text_mask": mask})
        made.batch = replace(made.batch, conditioning=conditioning)

    lengths, found = [8, 12, 16, 20], []
    for compiled in (False, True):
        if compiled:
            made.denoiser.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
        for length in lengths:
            padded(length)
            found.append(learnt(made))
    for eager, compiled in zip(found[:4], found[4:], strict=True):
        torch.testing.assert_close(compiled, eager)


def test_the_probe_of_flash_4_attends_over_runs_where_texts_are_masked(by_runs):
    kinds = (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)
    runs, masked = (attention._attended(torch.device("cpu"), k, masked=True) for k in kinds)
    assert by_runs == [(attention.SHAPE[2],) * 2]
    for found, expected in zip(runs, masked, strict=True):
        assert (found - expected).norm() <= attention.NEAR * expected.norm()
    of_keys = masked[2]
    assert not of_keys[:, :, attention.PADDED].any()
    assert of_keys[:, :, : attention.PADDED.start].any()
