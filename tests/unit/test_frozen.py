"""Layers in few bits: how near they compute, what they store, what they keep for the backward."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lib import adapter, families, frozen, products
from lib.batches import Batch, StepBatches
from lib.binding import bind
from lib.family import Frame
from lib.optimizers import make_optimizer
from lib.products import Up
from lib.schema import AdapterConfig, OptimizerConfig
from lib.training.step import Trainer
from tests.unit.bound import relative, tiny, trainer_of

FEATURES, ROWS = 128, 192
# The largest relative error of a product with normal numbers, and the bytes a weight takes.
NEAR = {"fp8": 0.045, "int8": 0.012, "nf4": 0.11}
STORED = {"fp8": (2.0, 2.1), "int8": (1.0, 1.05), "nf4": (0.5, 0.65)}
MINI = Path(__file__).resolve().parents[2] / "examples" / "flux_mini" / "base" / "transformer"


@pytest.fixture(params=sorted(frozen.KINDS))
def mode(request):
    if request.param == "nf4":
        pytest.importorskip("bitsandbytes", exc_type=ImportError)
    return request.param


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dense(*, bias=True, dtype=torch.float32):
    layer = nn.Linear(FEATURES, ROWS, bias=bias, dtype=dtype).requires_grad_(False)
    layer.weight.copy_(drawn(ROWS, FEATURES, seed=1) / FEATURES**0.5)
    if bias:
        layer.bias.copy_(drawn(ROWS, seed=2))
    return layer


def answered(layer, x, upstream):
    """What a layer answers, and the gradient of its input."""
    x = x.clone().requires_grad_()
    answer = layer(x)
    (answer * upstream).sum().backward()
    return answer.detach(), x.grad


@pytest.mark.parametrize("shape", [(64,), (3, 5), (1,), (2, 3, 7), ()], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_and_its_input_s_gradient_are_near_those_of_a_dense_layer(mode, shape, bias):
    layer = dense(bias=bias)
    x, upstream = drawn(*shape, FEATURES, seed=3), drawn(*shape, ROWS, seed=4)
    expected, expected_gradient = answered(layer, x, upstream)
    answer, gradient = answered(frozen.KINDS[mode](layer), x, upstream)
    offset = layer.bias if bias else 0
    bound = NEAR[mode] * (1 if answer.numel() > 1000 else 1.3)  # of one row: it scatters
    assert 0 < relative(answer - offset, expected - offset) < bound
    assert 0 < relative(gradient, expected_gradient) < bound
    assert answer.shape == expected.shape
    assert gradient.shape == x.shape


def test_a_bias_is_added_as_it_is(mode):
    layer = dense()
    nothing = torch.zeros(2, FEATURES)
    assert torch.equal(frozen.KINDS[mode](layer)(nothing), layer.bias.expand(2, ROWS))


def test_few_bits_are_stored_and_nothing_of_it_trains(mode):
    made = frozen.KINDS[mode](dense())
    assert [name for name, _ in made.named_parameters()] == ["bias"]
    assert not any(p.requires_grad for p in made.parameters())
    stored = sum(buffer.nbytes for buffer in made.buffers())
    low, high = STORED[mode]
    # Scales of a row are shared by 128 weights here, and by thousands in a base.
    tables = 4 * (256 + 16 + 1) if mode == "nf4" else 4 * 2 * (ROWS + FEATURES)
    assert low * FEATURES * ROWS <= stored <= high * FEATURES * ROWS + tables


def test_a_row_of_zeros_stays_zero(mode):
    layer = dense(bias=False)
    layer.weight[::2] = 0
    made = frozen.KINDS[mode](layer)
    answer, gradient = answered(made, drawn(5, FEATURES), drawn(5, ROWS))
    assert not answer[:, ::2].any()
    assert answer[:, 1::2].all()
    assert gradient.isfinite().all()


def test_an_input_of_zeros_has_an_answer_and_a_gradient(mode):
    x = torch.zeros(3, FEATURES)
    answer, gradient = answered(frozen.KINDS[mode](dense(bias=False)), x, drawn(3, ROWS))
    assert not answer.any()
    assert gradient.isfinite().all()


def test_a_part_is_rows_of_the_whole(mode):
    layer = dense()
    made = frozen.KINDS[mode](layer)
    x, upstream = drawn(5, FEATURES), drawn(5, ROWS)
    part = made.part(32, 96)
    assert torch.equal(part(x), made(x)[:, 32:96])
    assert part.whole is made
    masked = torch.zeros_like(upstream)
    masked[:, 32:96] = upstream[:, 32:96]
    assert torch.equal(answered(part, x, upstream[:, 32:96])[1], answered(made, x, masked)[1])


@pytest.mark.parametrize("bias", [True, False])
def test_joined_layers_are_parts_of_one(bias):
    layers = [dense(bias=bias), dense(bias=bias)]
    layers[1].weight.mul_(2)
    x = drawn(3, FEATURES)
    expected = torch.cat([layer(x) for layer in layers], dim=-1)
    whole = frozen.joined(layers)
    torch.testing.assert_close(whole(x), expected)
    held = {layer.weight.untyped_storage().data_ptr() for layer in (*layers, whole)}
    assert len(held) == 1


def test_a_layer_computes_in_the_precision_of_its_dense_weight(mode):
    made = frozen.KINDS[mode](dense(dtype=torch.bfloat16))
    assert made(drawn(3, FEATURES)).dtype == torch.bfloat16


def kept_bytes(layer, x):
    """What autograd holds between forward and backward, each storage once."""
    kept = {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.nbytes
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        answer = layer(x)
    del answer
    return sum(kept.values())


# torch's own: its compiler makes an instance of each Function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, True], ids=["as written", "compiled"])
def test_no_wide_weight_is_kept_for_the_backward(mode, compiled):
    made = frozen.KINDS[mode](dense())
    x, upstream = drawn(3, FEATURES), drawn(3, ROWS)
    plain = answered(made, x, upstream)
    if compiled:
        torch._dynamo.reset()
        made = torch.compile(made, backend="aot_eager", fullgraph=True)
        for one, other in zip(answered(made, x, upstream), plain, strict=True):
            torch.testing.assert_close(one, other)
    stored = sum(buffer.nbytes for buffer in made.buffers())
    assert stored / 3 < kept_bytes(made, x.requires_grad_()) <= stored + x.nbytes
    torch._dynamo.reset()


KINDS = {**frozen.KINDS, "dense": frozen.DenseLinear}


@pytest.fixture(params=sorted(KINDS))
def kind(request):
    if request.param == "nf4":
        pytest.importorskip("bitsandbytes", exc_type=ImportError)
    return request.param


def low_rank(sizes, *, rank=4, seed=8):
    """A matrix A for all, and each B with its rows and ranks."""
    down = (drawn(rank * len(sizes), FEATURES, seed=seed) / FEATURES**0.5).requires_grad_()
    ups, start = [], 0
    for number, size in enumerate(sizes):
        weight = drawn(size, rank, seed=seed + 1 + number).requires_grad_()
        ups.append(Up(weight, (start, start + size), (rank * number, rank * (number + 1))))
        start += size
    return down, ups


@pytest.mark.parametrize("sizes", [(ROWS,), (ROWS - 64, 64), (64,)], ids=str)
@pytest.mark.parametrize("shape", [(64,), (3, 5)], ids=str)
def test_an_adapter_s_part_is_as_if_computed_beside(kind, shape, sizes):
    made = KINDS[kind](dense())
    down, ups = low_rank(sizes)
    x, upstream = drawn(*shape, FEATURES, seed=3), drawn(*shape, ROWS, seed=4)
    answer, gradient = answered(partial(made.adapted, down=down, ups=ups), x, upstream)
    weights = [down, *(up.weight for up in ups)]
    found = [weight.grad for weight in weights]

    def beside(x):
        low = torch.nn.functional.linear(x, down)
        whole = made(x)
        for up in ups:
            part = low[..., slice(*up.ranks)] @ up.weight.t()
            whole = whole + torch.nn.functional.pad(part, (up.rows[0], ROWS - up.rows[1]))
        return whole

    for weight in weights:
        weight.grad = None
    expected, expected_gradient = answered(beside, x, upstream)
    torch.testing.assert_close(answer, expected)
    torch.testing.assert_close(gradient, expected_gradient)
    for one, weight in zip(found, weights, strict=True):
        torch.testing.assert_close(one, weight.grad)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_an_adapted_product_compiles_whole_to_the_same_numbers(kind):
    made = KINDS[kind](dense())
    down, ups = low_rank((ROWS - 64, 64))
    x, upstream = drawn(7, FEATURES, seed=3), drawn(7, ROWS, seed=4)

    def answer_of(x):
        return made.adapted(x, down=down, ups=ups)

    found = []
    for function in (answer_of, torch.compile(answer_of, backend="aot_eager", fullgraph=True)):
        down.grad = None
        for up in ups:
            up.weight.grad = None
        found.append([*answered(function, x, upstream), down.grad, *(u.weight.grad for u in ups)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    torch._dynamo.reset()


def test_no_sum_is_kept_beside_its_terms(kind):
    made = KINDS[kind](dense())
    down, ups = low_rank((ROWS - 64, 64))
    x = drawn(50, FEATURES).requires_grad_()
    still = sum(t.nbytes for t in (*made.stored, down, *(up.weight for up in ups)))
    kept = kept_bytes(partial(made.adapted, down=down, ups=ups), x)
    assert kept - still == x.nbytes + 4 * 50 * down.shape[0]  # A x besides x


def test_the_operators_are_what_torch_asks_of_one(kind):
    made = KINDS[kind](dense())
    down, ups = low_rank((ROWS - 64, 64))
    places = [number for up in ups for number in (*up.rows, *up.ranks)]
    weights, stored = [up.weight.detach() for up in ups], list(made.stored)
    # What the first compares on a CPU, it cannot in float8.
    tests = ("test_schema", "test_faketensor")[kind == "fp8" :]
    for operator, sides in ((products.forth, (FEATURES, ROWS)), (products.back, (ROWS, FEATURES))):
        x, low = drawn(5, sides[0]), drawn(5, down.shape[0])
        fed, scale = products.in_fp8(x) if kind == "fp8" else (x, None)
        rest = (low, weights, places) if operator is products.forth else (low, down.detach())
        bias = (made.bias.detach(),) if operator is products.forth else ()
        asked = (fed, scale, kind, stored, *bias, sides[1], torch.float32, *rest)
        torch.library.opcheck(operator, asked, test_utils=tests)


def test_what_a_cpu_can_compute_has_no_fault(mode):
    assert frozen.fault_of(mode, torch.device("cpu")) == ""


def test_a_kind_that_fails_or_computes_wrongly_is_told(monkeypatch):
    class Failing(frozen.Int8Linear):
        def forward(self, x):
            raise RuntimeError("no kernel\nand a trace")

    class Wrong(frozen.Int8Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    cpu = torch.device("cpu")
    monkeypatch.setitem(frozen.KINDS, "int8", Failing)
    assert frozen.fault_of("int8", cpu) == "cannot be computed here: RuntimeError: no kernel"
    monkeypatch.setitem(frozen.KINDS, "int8", Wrong)
    assert frozen.fault_of("int8", cpu) == "is computed wrongly here"


def mini_batch(family, source, *, size=2):
    """Noise in the shipped base's shapes."""
    configs = {"text_encoder": {"hidden_size": 128}, "text_encoder_2": {"d_model": 128}}
    shapes = family.caption_shapes(configs, max_length=16)
    records = [
        {n: torch.randn(shape, generator=source) for n, shape in shapes.items()}
        for _ in range(size)
    ]
    frame = Frame(original=(64, 64), crop=(0, 0), size=(64, 64))
    latents, noise = (torch.randn(size, 8, 8, 8, generator=source) for _ in range(2))
    level = torch.rand(size, generator=source) * 0.8 + 0.1
    share = level[:, None, None, None]
    return Batch(
        noisy=(1 - share) * latents + share * noise,
        target=noise - latents,
        level=level,
        weights=torch.ones(size),
        loss_weights=torch.ones(size),
        conditioning=family.conditioning(records, [frame] * size),
        names=("noise",) * size,
    )


def learnt(mode, *, steps=20, rate=2e-3):
    """The change of an adapter on the shipped base, and the sum of its gradients."""
    from diffusers import FluxTransformer2DModel

    family, device = families.get("flux"), torch.device("cpu")
    computes = torch.bfloat16 if mode == "bf16" else torch.float32
    denoiser = FluxTransformer2DModel.from_pretrained(MINI, torch_dtype=computes)
    config = AdapterConfig(rank=8, alpha=8.0, targets=["to_q", "to_k", "to_v", "to_out.0"])
    injected = adapter.inject(denoiser.requires_grad_(False).eval(), config, seed=0)
    weights = bind(
        denoiser,
        injected.parameters,
        shared=family.FACTS.shared_inputs,
        mode=mode,
        device=device,
        dtype=computes,
        scale=1.0,
    )
    trainer = Trainer(
        family=family,
        denoiser=denoiser,
        parameters=injected.parameters,
        optimizer=make_optimizer(injected.parameters.values(), OptimizerConfig(lr=rate)),
        device=device,
        autocast_dtype=computes if mode == "bf16" else None,
        max_grad_norm=0.0,
        seed=0,
        dropout=0.0,
        weights=weights,
    )
    (masters,) = weights.values()
    before, total = masters.clone(), torch.zeros_like(masters)
    source = torch.Generator().manual_seed(0)
    for step in range(steps):
        batch = mini_batch(family, source)
        assert trainer.step(StepBatches(step, (batch,), (0,), num_samples=2), rate=rate).finite
        total += weights.gradients()[0]
    return masters - before, total


@pytest.fixture(scope="module")
def exact():
    return learnt("fp32")


# Cosines of the adapter's change and of the summed gradient to those of the base in 16 bits,
# computed in float32. Adam's early steps have the size of the rate whatever the gradient, so
# that the change shows more of the rounding than the gradient does.
ALIKE = {
    "bf16": (0.998, 0.9999),
    "int8": (0.998, 0.9997),
    "fp8": (0.99, 0.998),
    "nf4": (0.955, 0.98),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    ["bf16", "nf4", *(pytest.param(mode, marks=pytest.mark.nightly) for mode in ("fp8", "int8"))],
)
def test_twenty_steps_in_few_bits_change_an_adapter_much_as_exact_ones_do(mode, exact):
    if mode == "nf4":
        pytest.importorskip("bitsandbytes", exc_type=ImportError)
    found = learnt(mode)
    cosines = [
        float(torch.nn.functional.cosine_similarity(one, other, dim=0))
        for one, other in zip(found, exact, strict=True)
    ]
    assert all(cosine > least for cosine, least in zip(cosines, ALIKE[mode], strict=True)), cosines


def gradients_of(mode, *, steps=20, rate=2e-3):
    """The sum of an adapter's gradients on a tiny FLUX while it learns one batch."""
    made = tiny("flux")
    weights = made.bind(mode=mode)
    trainer = trainer_of(made, lr=rate)
    total = torch.zeros_like(weights.gradients()[0])
    for step in range(steps):
        trainer.step(StepBatches(step, (made.batch,), (0,), num_samples=1), rate=rate)
        total += weights.gradients()[0]
    return total


def test_on_a_tiny_base_few_bits_point_where_float32_does(mode):
    """By the step of plain gradient descent, which no optimizer's scaling amplifies."""
    cosine = torch.nn.functional.cosine_similarity(gradients_of(mode), gradients_of("fp32"), dim=0)
    assert float(cosine) > {"nf4": 0.995, "fp8": 0.999, "int8": 0.9999}[mode]
