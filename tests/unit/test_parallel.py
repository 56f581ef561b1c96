"""A parallel block's first product, whose gradient is written where it is to be."""

from functools import partial

import pytest
import torch

from lib import activations, parallel, processors, rotary
from lib.compiling import run_as_written
from lib.parallel import Columns
from tests.unit.bound import scattered, tiny
from tests.unit.compilers import Counting, as_written, engage, showing

BLOCKS = {"flux": 1, "flux2_klein": 2}  # single ones of a tiny denoiser
CAT = torch.ops.aten.cat.default
BACK = torch.ops.darkroom.parallel_back.default

# torch's own: its compiler makes an instance of each Function, and looks at gradients of inputs.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning"),
]


def bound(family, **settings):
    made = scattered(tiny(family))
    made.bind(**settings)
    return made


def assert_alike(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    for name, gradient in expected[1].items():
        nearly = 1e-5 * float(gradient.abs().max())
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=nearly)


@pytest.mark.parametrize("family", BLOCKS)
def test_losses_and_gradients_are_those_of_diffusers(family, monkeypatch):
    made = bound(family)
    own = made.gradients()
    engage(made, monkeypatch)
    found, calls = as_written(made)
    assert calls[BACK] == BLOCKS[family]
    assert_alike(found, own)


def made_by(target, graphs):
    """The sides of what an operator makes, by graph."""
    return [
        [tuple(n.meta["val"].shape) for n in graph.nodes if n.target is target] for graph in graphs
    ]


@pytest.mark.parametrize("family", BLOCKS)
def test_a_compiled_backward_makes_the_whole_gradient_by_one_operator(family, monkeypatch):
    made, graphs = bound(family), []
    own = made.gradients()
    engage(made, monkeypatch, showing(graphs.append))
    assert_alike(made.gradients(), own)
    wholes = [found for found in made_by(BACK, graphs) if found]
    assert [len(found) for found in wholes] == [1]  # one graph is of all single blocks
    joined = {sides[-1] for found in made_by(CAT, graphs) for sides in found}
    assert joined
    assert wholes[0][0][-1] not in joined


@pytest.mark.parametrize("family", BLOCKS)
def test_it_is_taken_back_with_compilation(family, monkeypatch):
    made = bound(family)
    own = made.gradients()
    engage(made, monkeypatch)
    assert as_written(made)[1][BACK] == BLOCKS[family]
    run_as_written(made.denoiser)
    found, calls = as_written(made)
    assert calls[BACK] == 0
    assert_alike(found, own)


@pytest.mark.parametrize("kind", ["dropout", "unbound"])
def test_layers_that_do_not_answer_together_keep_the_block_of_diffusers(kind, monkeypatch):
    made = scattered(tiny("flux"))
    if kind == "dropout":
        made.bind(dropout=True)
    own = made.gradients()
    engage(made, monkeypatch)
    found, calls = as_written(made)
    assert calls[BACK] == 0
    assert_alike(found, own)


def block_of(made):
    """A single block, and what it is called with."""
    block, calls = made.denoiser.single_transformer_blocks[0], []
    keep = partial(block.register_forward_pre_hook, with_kwargs=True)
    handle = keep(lambda _block, args, kwargs: calls.append((args, kwargs)))
    with torch.no_grad():
        made.predict()
    handle.remove()
    return block, calls[0]


def without_group(block):
    block.proj_mlp.group = None


def in_another_order(block):
    block.proj_mlp.group.members = block.proj_mlp.group.members[::-1]


def of_fewer(block):
    block.proj_mlp.group.members = block.proj_mlp.group.members[:3]


def that_drops(block):
    block.proj_mlp.group.dropout = torch.nn.Dropout(0.5)


def switched_off(block):
    block.attn.to_k.enable_adapters(False)


def by_the_error_function(block):
    block.act_mlp = torch.nn.GELU()


def fused(block):
    block.attn.fused_projections = True


def of_diffusers(block):
    block.attn.processor = block.attn.processor.own


CHANGES = [without_group, in_another_order, of_fewer, that_drops, switched_off]
CHANGES += [by_the_error_function, fused, of_diffusers]


@pytest.mark.parametrize("change", CHANGES)
def test_a_block_that_is_another_is_left_to_diffusers(change):
    made = bound("flux")
    processors.engage(made.denoiser)
    block, (args, kwargs) = block_of(made)
    assert parallel.flux_block(block, *args, **kwargs) is not None
    change(block)
    assert parallel.flux_block(block, *args, **kwargs) is None


@pytest.mark.parametrize(
    "given", [{"image_rotary_emb": None}, {"joint_attention_kwargs": {"a": 1}}]
)
def test_a_block_that_is_called_otherwise_is_left_to_diffusers(given):
    made = bound("flux")
    processors.engage(made.denoiser)
    block, (args, kwargs) = block_of(made)
    assert parallel.flux_block(block, *args, **{**kwargs, **given}) is None


def test_a_feed_forward_that_is_another_keeps_the_processor_of_diffusers():
    made = bound("flux2_klein")
    processors.engage(made.denoiser)
    for block in made.denoiser.single_transformer_blocks:
        block.attn.mlp_act_fn = torch.nn.GLU()
    with Counting() as counting:
        made.gradients()
    assert counting.calls[BACK] == 0


def test_answers_in_float16_stay_finite_as_those_of_diffusers():
    made, given = tiny("flux"), block_of(tiny("flux"))[1][1]
    made.denoiser.half()
    made.bind(dtype=torch.float16)
    processors.engage(made.denoiser)
    block = made.denoiser.single_transformer_blocks[0]
    tokens = {n: torch.full_like(given[n], 6e4) for n in ("hidden_states", "encoder_hidden_states")}
    halves = {name: t.half() for name, t in {**tokens, "temb": given["temb"]}.items()}
    with torch.no_grad():
        block.proj_out.bias.fill_(3e4)
        block.norm.linear.bias.fill_(3)
        found = parallel.flux_block(block, **{**given, **halves})
        own = block(**{**given, **halves})
    assert all(torch.equal(one, other) for one, other in zip(found, own, strict=True))
    assert found[0].max() == 65504


def heads(batch=2, tokens=5, number=3, width=8):
    """A gradient as attention leaves it: batch, tokens, heads, width."""
    return torch.randn(batch, number, tokens, width).transpose(1, 2)


# FLUX.1's order, and FLUX.2's.
ORDERS = {False: Columns(query=40, hidden=0, size=24), True: Columns(query=0, hidden=72, size=24)}


def case(gated):
    """Gradients of q, k, v and the activation, and all else that the operator takes."""
    torch.manual_seed(0)
    wide = torch.randn(2, 5, 24 + 40)  # of the second product's x: attention's columns first
    whole = torch.randn(2, 5, 72 + (80 if gated else 40))
    norms = torch.randn(8), torch.randn(8)
    angles = torch.randn(1, 5, 4, 2).unbind(-1)
    gradients = (heads(), heads(), heads(), wide[..., 24:])
    return gradients, (whole, *norms, *angles), (list(ORDERS[gated]), gated, 1e-6)


@pytest.mark.parametrize("gated", [False, True], ids=["gelu", "swiglu"])
def test_strided_gradients_are_written_as_plain_operators_join_them(gated):
    gradients, (whole, norm_q, norm_k, cos, sin), settings = case(gated)
    x = whole.clone().requires_grad_()
    start, hidden, _ = settings[0]
    query, key, value = x[..., start : start + 72].unflatten(-1, (3, 3, 8)).unbind(2)
    streams = [rotary.Stream(*given, cos, sin) for given in ((query, norm_q), (key, norm_k))]
    turned = [rotary.rotated([stream], eps=1e-6) for stream in streams]
    fed = x[..., hidden : hidden + (80 if gated else 40)]
    active = activations.swiglu(fed) if gated else activations.gelu(fed)
    (expected,) = torch.autograd.grad([*turned, value, active], [x], gradients)
    found = parallel.parallel_back(*gradients, whole, norm_q, norm_k, cos, sin, *settings)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gated", [False, True], ids=["gelu", "swiglu"])
def test_a_compiler_knows_what_the_operator_makes(gated):
    gradients, tensors, settings = case(gated)
    torch.library.opcheck(parallel.parallel_back, (*gradients, *tensors, *settings))
