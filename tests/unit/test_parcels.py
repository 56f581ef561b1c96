"""What is packed into one buffer comes out as it went in, and in one copy."""

import pytest
import torch

from lib.parcels import ALIGN_BYTES, pack

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.uint8)
SHAPES = ((), (3,), (2, 0, 5), (1, 2, 3, 5), (7,))


def filled(dtype, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def all_kinds():
    return [filled(dtype, shape, i) for i, dtype in enumerate(DTYPES) for shape in SHAPES]


def test_tensors_come_out_as_they_went_in():
    tensors = all_kinds()
    opened = pack(tensors, pinned=False).opened(CPU)
    for found, expected in zip(opened, tensors, strict=True):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.equal(expected)


def test_every_tensor_begins_where_any_dtype_may():
    assert {place.start % ALIGN_BYTES for place in pack(all_kinds(), pinned=False).places} == {0}


def test_what_is_packed_is_a_copy_of_tensors_however_they_lie():
    tensor = torch.arange(6.0).reshape(2, 3).t()
    parcel = pack([tensor], pinned=False)
    tensor.zero_()
    (found,) = parcel.opened(CPU)
    assert found.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_a_device_gets_one_copy():
    """`meta` stands for a device: what comes from one buffer shares its storage."""
    opened = pack(all_kinds(), pinned=False).opened(torch.device("meta"))
    assert len({tensor.untyped_storage()._cdata for tensor in opened}) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs a GPU's driver")
def test_a_pinned_parcel_reaches_the_gpu_unchanged():
    tensors = all_kinds()
    opened = pack(tensors, pinned=True).opened(torch.device("cuda"))
    assert all(a.cpu().equal(b) for a, b in zip(opened, tensors, strict=True))
