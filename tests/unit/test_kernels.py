"""Kernels of our own: who takes them, and that they have the bits of what they replace."""

import importlib.util
import os

import pytest
import torch

from lib import activations, float8, float8_kernels, head_kernels, kernels, products, rotary
from tests.unit.stored_in_nf4 import by_bitsandbytes

pytest.importorskip("bitsandbytes", exc_type=ImportError)

NESTED = pytest.mark.parametrize("nested", [True, False], ids=["nested", "not nested"])
# Triton's own sums are interpreted only where it was imported so.
INTERPRETED_WHOLE = pytest.mark.skipif(
    not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1",
    reason="without a GPU it needs TRITON_INTERPRET=1 in the environment",
)


def computing(module, monkeypatch):
    """Kernels of a module, and a device that computes them: without a GPU they are interpreted."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return module, torch.device("cuda")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = importlib.util.spec_from_file_location("kernels_interpreted", module.__file__)
    interpreted = importlib.util.module_from_spec(found)
    found.loader.exec_module(interpreted)
    return interpreted, torch.device("cpu")


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


@pytest.fixture
def ours(monkeypatch):
    return computing(kernels, monkeypatch)


@pytest.fixture
def of_heads(monkeypatch):
    return computing(head_kernels, monkeypatch)


def drawn(rows, features, *, nested, device="cpu"):
    """Every byte there may be, as what is stored; the maxima of its blocks."""
    from bitsandbytes import functional as bnb

    source = torch.Generator().manual_seed(rows)
    blocks = -(-rows * features // products.NF4_BLOCK)
    packed = torch.randint(256, (-(-rows * features // 2), 1), generator=source)
    found = [packed.to(torch.uint8)]
    if nested:
        found += [
            torch.randint(256, (blocks,), generator=source).to(torch.uint8),
            bnb.create_dynamic_map(),
            torch.rand(-(-blocks // products.NESTED_BLOCK), generator=source) / 7,
            torch.tensor(0.11),
        ]
    else:
        found.append(torch.rand(blocks, generator=source) / 7)
    return [t.to(device) for t in (*found, bnb.get_4bit_type("nf4", device="cpu"))]


def expected_of(stored, shape, dtype):
    """The weight by bitsandbytes."""
    from bitsandbytes.functional import QuantState

    packed, maxima, *nested, code = stored
    state = QuantState(maxima, torch.Size(shape), code, products.NF4_BLOCK, "nf4", dtype)
    if nested:
        inner, of_maxima, state.offset = nested
        kind = {"blocksize": products.NESTED_BLOCK, "code": inner, "dtype": torch.float32}
        state.nested, state.state2 = True, QuantState(of_maxima, **kind)
    return by_bitsandbytes(packed, state)


# 50 values; whole programs; more blocks than share a nested maximum, the last one cut short.
@pytest.mark.parametrize("shape", [(5, 10), (128, 64), (300, 202)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@NESTED
def test_nf4_widens_to_the_bits_of_bitsandbytes(ours, nested, dtype, shape):
    module, device = ours
    stored = drawn(*shape, nested=nested, device=device)
    sizes = {"block": products.NF4_BLOCK, "nested_block": products.NESTED_BLOCK}
    found = module.widened_nf4(stored, shape, dtype, **sizes)
    expected = expected_of(stored, shape, dtype)
    if dtype is torch.bfloat16 and module is not kernels:  # Triton's interpreter cuts off
        bits = expected_of(stored, shape, torch.float32).view(torch.int32)
        expected = (bits & -65536).view(torch.float32).to(dtype)
    assert (found.dtype, found.shape) == (dtype, shape)
    assert torch.equal(found, expected)
    assert expected.unique().numel() > 10


# Of the first a block ends within a row, of the others the last block is cut short.
@pytest.mark.parametrize("shape", [(192, 32), (5, 10), (5, 15), (300, 202), (255, 85)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@NESTED
def test_nf4_widens_to_the_same_bits_on_every_cpu(nested, dtype, shape):
    stored = drawn(*shape, nested=nested)
    found, expected = products.from_nf4(stored, shape, dtype), expected_of(stored, shape, dtype)
    assert (found.dtype, found.shape) == (dtype, shape)
    assert torch.equal(found, expected)
    assert expected.unique().numel() > 10


@NESTED
def test_nf4_widens_by_our_kernel_where_there_are_a_gpu_and_triton(monkeypatch, nested):
    """Without Triton by bitsandbytes' on a GPU, and by neither on a CPU."""
    from bitsandbytes import functional as bnb

    dequantize_4bit, theirs = bnb.dequantize_4bit, []

    def watched(packed, state):
        theirs.append(packed.is_cuda)
        return dequantize_4bit(packed, state)

    stored, shape = drawn(6, 64, nested=nested), (6, 64)
    there = [stored[0].as_subclass(OnGpu), *stored[1:]]
    asked = []

    def widened(given, *others, **sizes):
        asked.append((len(given), given[0].is_cuda, *others, sizes))
        return torch.zeros(shape)

    monkeypatch.setattr(bnb, "dequantize_4bit", watched)
    monkeypatch.setattr(kernels, "widened_nf4", widened)
    monkeypatch.setattr(kernels, "HERE", False)
    expected = products.from_nf4(there, shape, torch.float16)
    monkeypatch.setattr(kernels, "HERE", True)
    assert torch.equal(products.from_nf4(stored, shape, torch.float16), expected)
    assert (asked, theirs) == ([], [True])
    assert not products.from_nf4(there, shape, torch.float16).any()
    sizes = {"block": 64, "nested_block": 256}
    assert asked == [(6 if nested else 3, True, shape, torch.float16, sizes)]
    assert theirs == [True]


@INTERPRETED_WHOLE
@pytest.mark.parametrize("of_each", [False, True], ids=["angles of all", "angles of each"])
@pytest.mark.parametrize("heads", [8, 12])
def test_heads_are_normed_and_turned_as_plain_operators_do(of_heads, heads, of_each):
    """Forth and back, within a product's answer, into a part of a whole and into columns."""
    module, device = of_heads
    batch, tokens, width = 2, 5, 16
    source = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(*shape, generator=source).to(device)

    x = drawn(batch, tokens, 3 * heads * width)[..., heads * width : 2 * heads * width]
    x, weight = x.unflatten(-1, (heads, width)), drawn(width)
    angles = drawn(batch if of_each else 1, tokens, width // 2, 2)
    cos, sin = angles[..., 0], angles[..., 1]
    others = [x.cpu()], [weight.cpu()], [cos.cpu()], [sin.cpu()], 1e-6, 1.0
    turned = rotary.rotate(*others)
    gradient = drawn(batch, heads, tokens, width).transpose(1, 2)  # as attention leaves it
    of_x = rotary.rotate_back(gradient.cpu(), *others)[0]
    for target, rest in targets(x):
        module.rotate(x, weight, cos, sin, target, eps=1e-6, plus=1.0)
        torch.testing.assert_close(target.cpu(), turned)
        module.rotate_back(gradient, x, weight, cos, sin, target, eps=1e-6, plus=1.0)
        torch.testing.assert_close(target.cpu(), of_x)
        assert not any(part.any() for part in rest)


def targets(x):
    """Some tokens of a whole, and some columns of one; what is beside them."""
    batch, tokens, heads, width = x.shape
    whole = x.new_zeros(batch, tokens + 3, heads, width)
    yield whole[:, 2:-1], (whole[:, :2], whole[:, -1:])
    size = heads * width
    before, part, after = x.new_zeros(batch, tokens, 2 * size + 7).split([7, size, size], dim=-1)
    yield part.unflatten(-1, (heads, width)), (before, after)


@pytest.mark.parametrize("heads", [8, 12])
def test_heads_are_copied_into_columns(of_heads, heads):
    module, device = of_heads
    values = torch.arange(2 * heads * 5 * 16.0, device=device).view(2, heads, 5, 16) + 1
    for x in (values.transpose(1, 2), values.transpose(2, 3).contiguous().permute(0, 3, 1, 2)):
        for target, rest in targets(x):
            module.copy(x, target)
            assert torch.equal(target, x)
            assert not any(part.any() for part in rest)


ACTIVATIONS = {
    "gelu": (activations.gelu_back, {"doubled": activations.DOUBLED, "cubic": activations.CUBIC}),
    "swiglu": (activations.swiglu_back, {}),
}


# The interpreter's: an exponential beyond float32 is infinite, and its sigmoid 0.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
# A whole program; programs of which the last one is cut short.
@pytest.mark.parametrize("columns", [1024, 1300])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_of_activations_are_written_into_columns(ours, name, columns):
    """Of the activation's answer, columns of a wider gradient, as the second product leaves it."""
    module, device = ours
    plain, constants = ACTIVATIONS[name]
    times = 2 if name == "swiglu" else 1
    source = torch.Generator().manual_seed(columns)
    gradient = torch.randn(2, 3, 40 + columns, generator=source)[..., 40:]
    x = 4 * torch.randn(2, 3, 24 + times * columns, generator=source)[..., 24:]
    x[0, 0, ::100] *= 1000
    whole = x.new_zeros(2, 3, 24 + times * columns + 8).to(device)
    target, expected = whole[..., 24:-8], torch.empty_like(x)
    getattr(module, f"{name}_back")(gradient.to(device), x.to(device), target, **constants)
    plain(gradient, x, expected)
    torch.testing.assert_close(target.cpu(), expected, rtol=1e-5, atol=1e-5)
    assert not whole[..., :24].any()
    assert not whole[..., -8:].any()


@pytest.fixture
def of_rows(monkeypatch):
    """A row takes several turns of its program, of which the last one is cut short."""
    module, device = computing(float8_kernels, monkeypatch)
    monkeypatch.setattr(module, "BLOCK", 16)
    if device.type == "cpu":
        convert_as_torch(monkeypatch)
    return module, device


def convert_as_torch(monkeypatch):
    """The interpreter's own loses carries in float8, cuts bfloat16 off and knows no NaN."""
    from triton.runtime import interpreter

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8e4nv": products.FP8}
    held = {4: torch.float32, 2: torch.uint16, 1: torch.uint8}

    def converted(values, source, target, _rounding):
        found = torch.from_numpy(values.copy()).view(dtypes[source.name]).to(dtypes[target.name])
        return found.view(held[found.itemsize]).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", converted)


def columns_of_wider(dtype):
    """A gradient, the x it is of, and what is beside; of each a row is zeros."""
    source = torch.Generator().manual_seed(0)
    for columns, before in ((40, 3), (40, 7), (20, 5)):
        wider = 2 * torch.randn(5, before + columns + 8, generator=source).to(dtype)
        wider[3] = 0
        yield wider[:, before:-8]


ROWS = ("rows", "rows of columns", "gelu", "gelu, others", "gelu_back", "gelu_back, others")


def asked_for(name, gradient, x, beside):
    """A kernel, what it is given, and what it makes rows in float8 of."""
    of_x = torch.empty_like(x)
    activations.gelu_back(gradient, x, of_x)
    active = activations.gelu(x)
    return {
        "rows": ("rows", (x,), [x]),
        "rows of columns": ("rows", (x.t(),), [x.t()]),
        "gelu": ("gelu", (x, None), [active]),
        "gelu, others": ("gelu", (x, beside), [beside, active]),
        "gelu_back": ("gelu_back", (gradient, x, None), [of_x]),
        "gelu_back, others": ("gelu_back", (gradient, x, beside), [of_x, beside]),
    }[name]


def rows_by(of_rows, kernel, given):
    """By a kernel: the numbers in float8 and the scales, on the CPU."""
    module, device = of_rows
    settings = {"most": products.FP8_MAX} if kernel == "rows" else float8.GELU
    there = [tensor if tensor is None else tensor.to(device) for tensor in given]
    stored, scales = getattr(module, f"{kernel}_in_fp8")(*there, **settings)
    assert (stored.dtype, scales.dtype) == (products.FP8, torch.float32)
    return stored.cpu().float(), scales.cpu()


@INTERPRETED_WHOLE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_rows_are_made_in_float8_as_plain_operators_do(of_rows, name, dtype):
    kernel, given, parts = asked_for(name, *columns_of_wider(dtype))
    found, scales = rows_by(of_rows, kernel, given)
    stored, expected = products.in_fp8(torch.cat(parts, dim=1))
    # GELU's last bit may decide how a row's largest number is rounded to bfloat16.
    rounded = dtype is torch.bfloat16 and kernel != "rows"
    torch.testing.assert_close(scales, expected, rtol=2**-7 if rounded else 1e-6, atol=0)
    largest = scales * products.FP8_MAX
    torch.testing.assert_close(largest, largest.to(dtype).float(), rtol=1e-6, atol=1e-9)
    # By the last bit a number may be a step of float8 away, and few are.
    torch.testing.assert_close(found, stored.float(), rtol=1 / 8, atol=2**-9)
    assert (found != stored.float()).float().mean() < 0.05


@INTERPRETED_WHOLE
@pytest.mark.parametrize("name", ROWS)
def test_what_is_no_number_stays_none_in_float8(of_rows, name):
    tensors = [tensor.clone() for tensor in columns_of_wider(torch.float32)]
    for number, tensor in enumerate(tensors):
        tensor[1, 17 + number] = torch.nan
    kernel, given, parts = asked_for(name, *tensors)
    found, scales = rows_by(of_rows, kernel, given)
    places = torch.cat(parts, dim=1).isnan()
    assert places.sum() > 0
    assert found[places].isnan().all()
    others = ~places.any(dim=1)
    assert found[others].isfinite().all()
    assert scales[others].isfinite().all()
