"""Blocks in float8 beside the same layers apart: fewer rows are written, the numbers are theirs."""

import copy
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from bench.full_size import preset_of
from bench.stepping import several
from lib import activations, float8, parallel
from lib.compiling import run_as_written
from lib.parallel import Columns
from lib.products import Up, in_fp8
from tests.unit import bound
from tests.unit.bound import scattered, tiny
from tests.unit.compilers import as_written, engage, showing

OURS = torch.ops.darkroom
GELU, GELU_BACK = OURS.gelu_in_fp8.default, OURS.gelu_back_in_fp8.default
HEADS_BACK, WHOLE_BACK = OURS.heads_back.default, OURS.parallel_back.default
CAT = torch.ops.aten.cat.default
PRECISIONS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)

# torch's own: its compiler makes an instance of each Function, and looks at gradients of inputs.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning"),
]


def ready(family="flux", *, mode="fp8", dtype=torch.float32, change=None):
    """A denoiser bound in a precision, and a batch of two unlike pictures."""
    made = scattered(tiny(family))
    made.denoiser.to(dtype).register_forward_pre_hook(cast, with_kwargs=True)
    made.batch = several(made.batch, 2)
    made.batch.noisy[1].neg_()
    made.bind(mode=mode, dtype=dtype)
    if change is not None:
        change(made.denoiser)
    return made


def cast(denoiser, args, kwargs):
    """What a denoiser is given, in its own precision."""
    floats = {n for n, t in kwargs.items() if isinstance(t, torch.Tensor) and t.is_floating_point()}
    return args, {n: t.to(denoiser.dtype) if n in floats else t for n, t in kwargs.items()}


def target(names, monkeypatch):
    """Have the next denoisers' adapters on these layers."""
    preset = {**preset_of("flux"), "targets": names}
    monkeypatch.setattr(bound, "preset_of", lambda _family: preset)


def of_layers_apart(made, monkeypatch):
    """The loss and the gradients of the same denoiser where float8 takes nothing."""
    with monkeypatch.context() as patch:
        patch.setattr(float8, "takes", lambda *_: False)
        patch.setattr(float8, "engage", lambda _denoiser: None)
        engage(made, patch)
        found, calls = as_written(made)
    assert not calls[GELU]
    run_as_written(made.denoiser)
    return found


def assert_alike(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        if gradient is None:  # of a compiled block it is zeros
            assert found[1][name] is None or not found[1][name].any(), name
        else:
            nearly = 1e-3 if gradient.dtype == torch.bfloat16 else 1e-4
            assert (found[1][name] - gradient).norm() <= nearly * gradient.norm(), name


# GELU's operator forth and back, and the heads'. The answer of Qwen-Image's last texts is not read.
CALLS = {"flux": (3, 3, 1), "qwen_image": (4, 3, 0)}


@PRECISIONS
@pytest.mark.parametrize("family", CALLS)
def test_losses_and_gradients_are_those_of_the_layers_apart(family, dtype, monkeypatch):
    made = ready(family, dtype=dtype)
    expected = of_layers_apart(made, monkeypatch)
    engage(made, monkeypatch)
    found, calls = as_written(made)
    assert_alike(found, expected)
    assert (calls[GELU], calls[GELU_BACK], calls[HEADS_BACK]) == CALLS[family]
    assert not calls[WHOLE_BACK]


@pytest.mark.parametrize("names", [["attn.to_k"], ["attn.to_q", "attn.to_v"]], ids=" ".join)
def test_an_adapter_may_be_on_some_of_q_k_and_v(names, monkeypatch):
    target(names, monkeypatch)
    made = ready()
    expected = of_layers_apart(made, monkeypatch)
    engage(made, monkeypatch)
    found, calls = as_written(made)
    assert_alike(found, expected)
    assert calls[HEADS_BACK] == 1


def made_by(node_target, graphs):
    """How many columns an operator's answers have."""
    nodes = [node for graph in graphs for node in graph.nodes if node.target is node_target]
    return [node.meta["val"].shape[-1] for node in nodes]


def ours_in(graph):
    return Counter(
        n.target for n in graph.nodes if getattr(n.target, "namespace", "") == "darkroom"
    )


@pytest.mark.parametrize("family", CALLS)
def test_a_compiled_backward_joins_nothing_wide(family, monkeypatch):
    """Neither a first product's gradient nor a second's x: their rows are made in float8."""
    made, graphs = ready(family), []
    expected = of_layers_apart(made, monkeypatch)
    engage(made, monkeypatch, showing(graphs.append))
    assert_alike(made.gradients(), expected)
    times, _, blocks = CALLS[family]
    assert sum(ours_in(graph)[GELU_BACK] for graph in graphs) == times
    of_blocks = [ours_in(graph) for graph in graphs if ours_in(graph)[HEADS_BACK]]
    alone = {HEADS_BACK: 1, GELU_BACK: 1, OURS.back.default: 2}
    assert of_blocks == [alone] * blocks
    joined = set(made_by(CAT, graphs))
    assert joined  # of q, k and v
    assert max(joined) < 128  # what an activation makes of 32 features


def test_it_is_taken_back_with_compilation(monkeypatch):
    made = ready()
    own = made.gradients()
    engage(made, monkeypatch)
    assert as_written(made)[1][GELU] == 3
    run_as_written(made.denoiser)
    found, calls = as_written(made)
    assert not calls
    assert not [m for m in made.denoiser.modules() if "forward" in m.__dict__]
    assert_alike(found, own)


def dropping(denoiser):
    denoiser.transformer_blocks[0].ff.net[1] = nn.Dropout(0.5)


def dropping_last(denoiser):
    denoiser.transformer_blocks[0].ff.net.append(nn.Dropout(0.5))


def by_the_error_function(denoiser):
    denoiser.transformer_blocks[0].ff.net[0].approximate = "none"


TARGETS = preset_of("flux")["targets"]
# What is given to `ready`, the adapter's targets, and how many of two feed-forwards and of one
# single block are ours.
LEFT = {
    "in float32": ({"mode": "fp32"}, TARGETS, 0, 0),
    "in int8": ({"mode": "int8"}, TARGETS, 0, 0),
    "no adapter beside": ({}, ["to_out.0"], 2, 0),
    "proj_mlp adapted": ({}, [*TARGETS, "proj_mlp"], 2, 0),
    "proj_out adapted": ({}, [*TARGETS, "single_transformer_blocks.0.proj_out"], 2, 0),
    "ff first adapted": ({}, [*TARGETS, "ff.net.0.proj"], 1, 1),
    "ff second adapted": ({}, [*TARGETS, "ff.net.2"], 1, 1),
    "ff drops": ({"change": dropping}, TARGETS, 1, 1),
    "ff drops last": ({"change": dropping_last}, TARGETS, 1, 1),
    "another GELU": ({"change": by_the_error_function}, TARGETS, 1, 1),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_another_is_left_to_the_layers_apart(case, monkeypatch):
    given, names, feed_forwards, blocks = LEFT[case]
    target(names, monkeypatch)
    made = ready(**given)
    expected = of_layers_apart(made, monkeypatch)
    engage(made, monkeypatch)
    assert len([m for m in made.denoiser.modules() if ours(m)]) == feed_forwards
    found, calls = as_written(made)
    assert calls[GELU] == feed_forwards + blocks
    assert (calls[HEADS_BACK], calls[WHOLE_BACK]) == (blocks, 1 - blocks)
    assert_alike(found, expected)


def ours(module):
    """Whether a module is a feed-forward whose forward is ours."""
    return type(module).__name__ == "FeedForward" and "forward" in module.__dict__


def test_a_feed_forward_with_gates_keeps_its_own():
    made = tiny("sdxl")
    made.bind(mode="fp8")
    float8.engage(made.denoiser)
    assert not [m for m in made.denoiser.modules() if ours(m)]


def test_a_block_is_taken_whose_products_are_both_in_float8_and_adapter_on_q_k_and_v():
    block = ready().denoiser.single_transformer_blocks[0]
    group, second, columns = block.proj_mlp.group, block.proj_out, Columns(128, 0, 32)
    before = Up(group.ups[0].weight, rows=(0, 128), ranks=(0, 12))
    assert float8.takes(group, second, columns)
    assert not float8.takes(group, block.norm.linear, columns)
    assert not float8.takes(replace(group, base=block.norm.linear), second, columns)
    assert not float8.takes(replace(group, down=None, ups=()), second, columns)
    assert not float8.takes(replace(group, ups=(*group.ups, before)), second, columns)
    assert not float8.takes(group, second, Columns(query=0, hidden=96, size=32))


def test_a_copy_of_a_denoiser_computes_with_layers_of_its_own(monkeypatch):
    made = ready()
    engage(made, monkeypatch)
    copied = copy.deepcopy(made.denoiser)
    mine = [m for m in copied.modules() if ours(m)]
    assert len(mine) == 2
    assert all(module.forward.__self__ is module for module in mine)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        before = made.predict(), made.predict(copied)
        for module in made.denoiser.modules():
            if ours(module):
                module.net[2].bias.add_(1)
        after = made.predict(), made.predict(copied)
    assert not torch.equal(after[0], before[0])
    assert torch.equal(after[1], before[1])


def drawn(*sides, dtype=torch.float32):
    """Columns of a wider tensor."""
    source = torch.Generator().manual_seed(sum(sides))
    *others, columns = sides
    return torch.randn(*others, columns + 20, generator=source).to(dtype)[..., 8:-12]


def given(with_others, dtype=torch.float32):
    """A gradient of GELU's answers, its x, and what is beside."""
    gradient, x = drawn(7, 47, dtype=dtype)[:, 7:], drawn(7, 40, dtype=dtype)
    return gradient, x, drawn(7, 24, dtype=dtype) if with_others else None


def joined(gradient, x, beside):
    """What each operator makes rows in float8 of, as a whole tensor."""
    of_x = torch.empty_like(x)
    activations.gelu_back(gradient, x, of_x)
    forth, back = [activations.gelu(x)], [of_x]
    if beside is not None:
        forth, back = [beside, *forth], [*back, beside]
    return torch.cat(forth, dim=1), torch.cat(back, dim=1)


def by_operators(gradient, x, beside):
    return float8.gelu_in_fp8(x, beside), float8.gelu_back_in_fp8(gradient, x, beside)


BESIDE = pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside others"])


@PRECISIONS
@BESIDE
def test_rows_are_those_of_the_plain_join(beside, dtype):
    tensors = given(beside, dtype)
    dense = [None if t is None else t.contiguous() for t in tensors]
    for found, whole, of_dense in zip(
        by_operators(*tensors), joined(*tensors), by_operators(*dense), strict=True
    ):
        expected = in_fp8(whole)
        assert found[0].shape == (7, 64 if beside else 40)
        assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(found[1], expected[1])
        # A dense tensor's exponentials may differ in their last bit, and a number by a step so.
        torch.testing.assert_close(found[0].float(), of_dense[0].float(), rtol=1 / 8, atol=2**-9)
        torch.testing.assert_close(found[1], of_dense[1])


# All but the schema's, which compares answers: on a CPU it cannot in float8.
FLOAT8_TESTS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@PRECISIONS
@BESIDE
def test_a_compiler_knows_what_the_operators_make(beside, dtype):
    gradient, x, others = given(beside, dtype)
    asked = {float8.gelu_in_fp8: (x, others), float8.gelu_back_in_fp8: (gradient, x, others)}
    for operator, arguments in asked.items():
        torch.library.opcheck(operator, arguments, test_utils=FLOAT8_TESTS)


def of_heads():
    """Gradients of q, k and v as attention leaves them, and all else, in both orders of columns."""
    heads = [drawn(2, 3 + number, 5, 8)[:, :3].transpose(1, 2) for number in range(3)]
    norms, angles = (drawn(8), drawn(1, 8)[0] + 1), drawn(1, 5, 4, 2).unbind(-1)
    for query, hidden in ((40, 0), (0, 72)):
        yield (*heads, drawn(2, 5, 112), *norms, *angles, [query, hidden, 24], 1e-6)


def test_gradients_of_heads_are_columns_of_the_whole_gradient():
    for case in of_heads():
        *heads, whole, norm_q, norm_k, cos, sin, columns, eps = case
        rest = (whole, norm_q, norm_k, cos, sin, columns, False, eps)
        expected = parallel.parallel_back(*heads, drawn(2, 5, 40), *rest)
        found = parallel.heads_back(*case)
        assert torch.equal(found, expected[..., columns[0] : columns[0] + 72])
        torch.library.opcheck(parallel.heads_back, case)


@BESIDE
def test_what_is_no_number_stays_none_in_its_row_alone(beside):
    tensors = [None if t is None else t.clone() for t in given(beside)]
    for row, tensor in enumerate(tensors):
        if tensor is not None:
            tensor[row, 3] = torch.nan
    for (stored, scale), whole in zip(by_operators(*tensors), joined(*tensors), strict=True):
        places = whole.isnan()
        assert places.any()
        assert stored[places].isnan().all()
        others = ~places.any(dim=1)
        assert stored.float()[others].isfinite().all()
        assert scale[others].isfinite().all()


def test_what_is_no_number_stays_none_in_its_token_alone():
    feed_forward = ready().denoiser.transformer_blocks[0].ff
    float8.engage(feed_forward)
    assert ours(feed_forward)
    x, gradient = (drawn(2, 5, 32).clone() for _ in range(2))
    x[0, 1, 7] = gradient[1, 2, 7] = torch.nan
    answer = feed_forward(x.requires_grad_())
    (of_x,) = torch.autograd.grad(answer, [x], gradient)
    expected = torch.zeros(2, 5, dtype=torch.bool)
    expected[0, 1] = True
    assert torch.equal(answer.isnan().all(-1), expected)
    assert torch.equal(answer.isnan().any(-1), expected)
    expected[1, 2] = True
    assert torch.equal(of_x.isnan().all(-1), expected)
    assert torch.equal(of_x.isnan().any(-1), expected)
