import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lib.encoding import posterior_record
from lib.family import Posterior
from lib.records import DTYPES, from_stored, num_bytes, to_stored
from lib.tensors import decode, encode

dtypes = st.sampled_from([*DTYPES.values(), torch.int64])
shapes = st.lists(st.integers(0, 4), max_size=4)


def filled(shape, dtype, seed=0):
    source = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=source) * 100).to(dtype) if shape else torch.tensor(
        2.5
    ).to(dtype)  # fmt: skip


@given(dtypes, shapes, st.integers(0, 99))
def test_a_tensor_comes_back_with_its_dtype_shape_and_bits(dtype, shape, seed):
    tensor = filled(shape, dtype, seed)
    back = from_stored(to_stored({"a": tensor}))["a"]
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(back, tensor)


@pytest.mark.parametrize("dtype", [*DTYPES.values(), torch.int64])
@pytest.mark.parametrize(
    "cut",
    [
        lambda t: t[1],
        lambda t: t[:, ::2],
        lambda t: t.transpose(0, 2),
        lambda t: t[0, 0, 0],
        lambda t: t.expand(5, 4, 3, 2),
        lambda t: t[:0],
        lambda t: t.reshape(1, 24).T,
    ],
)
def test_a_slice_is_stored_compactly_and_comes_back(dtype, cut):
    part = cut(filled((4, 3, 2), dtype))
    stored = to_stored({"part": part})["part"]
    assert len(stored.data) == part.numel() * part.element_size()
    assert torch.equal(from_stored({"part": stored})["part"], part)


def test_what_comes_back_owns_its_memory():
    stored = to_stored({"a": torch.zeros(3)})
    one, other = from_stored(stored)["a"], from_stored(stored)["a"]
    one += 1
    assert torch.equal(other, torch.zeros(3))
    assert torch.equal(from_stored(stored)["a"], torch.zeros(3))


def test_a_parameter_is_stored_without_its_graph():
    parameter = torch.nn.Parameter(torch.ones(2))
    back = from_stored(to_stored({"a": parameter * 2}))["a"]
    assert not back.requires_grad
    assert torch.equal(back, torch.full((2,), 2.0))


def test_records_go_through_a_file():
    tensors = {"a": filled((2, 3), torch.bfloat16), "b": filled((), torch.float32)}
    back = from_stored(decode(encode(to_stored(tensors), metadata={})).tensors)
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_a_dtype_that_is_never_stored_is_an_error():
    with pytest.raises(KeyError):
        to_stored({"a": torch.zeros(1, dtype=torch.complex64)})


def test_a_posterior_s_row_is_one_picture_s_mean_and_std():
    mean, std = filled((3, 4, 2, 2), torch.float32), filled((3, 4, 2, 2), torch.float32, 1)
    record = posterior_record(Posterior(mean=mean, std=std), row=1)
    assert record.keys() == {"mean", "std"}
    assert torch.equal(record["mean"], mean[1])
    assert torch.equal(record["std"], std[1])


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_planned_bytes_are_the_bytes_stored(dtype):
    shapes = {"text_embeds": (7, 4), "pooled_embeds": (3,), "scale": ()}
    tensors = {name: torch.zeros(shape, dtype=DTYPES[dtype]) for name, shape in shapes.items()}
    stored = sum(len(tensor.data) for tensor in to_stored(tensors).values())
    assert num_bytes(shapes, dtype=dtype) == stored
