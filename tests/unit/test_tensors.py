"""The bytes of an entry: safetensors for everyone, any change seen by us."""

import json
import random
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import deserialize
from safetensors.numpy import load

from lib.tensors import HEADER_CAP_BYTES, ITEM_BYTES, Tensor, decode, encode, entry_digest

ENTRY = {
    "mean": Tensor("F32", (2, 3), np.arange(6, dtype="<f4").tobytes()),
    "std": Tensor("BF16", (4,), np.arange(4, dtype="<u2").tobytes()),
    "mask": Tensor("BOOL", (5,), b"\0\1\1\0\1"),
    "empty": Tensor("I64", (0, 7), b""),
}
METADATA = {"kind": "latents", "note": 'a f\u00f6x, "quoted"\n'}
INTEGERS = [name for name in ITEM_BYTES if name[0] in {"B", "U", "I"} and name != "BF16"]

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@st.composite
def parts_of_tensors(draw):
    dtype = draw(st.sampled_from(INTEGERS))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    size = ITEM_BYTES[dtype] * int(np.prod(shape))
    return dtype, shape, draw(st.binary(min_size=size, max_size=size))


names = texts.filter(lambda name: name != "__metadata__")
entries = st.dictionaries(names, parts_of_tensors(), max_size=4)
metadatas = st.dictionaries(texts.filter(lambda name: name != "digest"), texts, max_size=3)


@settings(max_examples=60)
@given(parts=entries, metadata=metadatas)
def test_a_file_round_trips_and_its_order_has_no_effect(parts, metadata):
    tensors = {name: Tensor(*part) for name, part in parts.items()}
    found = decode(encode(tensors, metadata=metadata))
    assert found.tensors == tensors
    assert {**found.metadata, "digest": ""} == {**metadata, "digest": ""}
    turned = dict(reversed(tensors.items()))
    assert encode(turned, metadata=metadata) == encode(tensors, metadata=metadata)


def test_other_readers_find_the_same_values_aligned():
    data = encode({name: ENTRY[name] for name in ("mean", "mask", "empty")}, metadata=METADATA)
    found = load(data)
    assert np.array_equal(found["mean"], np.arange(6, dtype="<f4").reshape(2, 3))
    assert found["mask"].tolist() == [False, True, True, False, True]
    header_bytes = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + header_bytes])
    for name, item in header.items():
        if name != "__metadata__":
            assert (8 + header_bytes + item["data_offsets"][0]) % ITEM_BYTES[item["dtype"]] == 0


def test_every_single_bit_of_a_small_file_matters():
    data = encode(ENTRY, metadata=METADATA)
    for position in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            with pytest.raises((ValueError, RecursionError)):
                decode(bytes(changed))


def test_safetensors_alone_would_not_see_a_changed_bit():
    data = bytearray(encode(ENTRY, metadata=METADATA))
    data[-1] ^= 1
    assert deserialize(bytes(data))


@pytest.mark.parametrize("part", ["name", "dtype", "shape", "metadata", "data"])
def test_the_digest_covers(part):
    mean = ENTRY["mean"]
    changed = {
        "name": ({**ENTRY, "mode": mean}, METADATA),
        "dtype": ({**ENTRY, "mean": replace(mean, dtype="I32")}, METADATA),
        "shape": ({**ENTRY, "mean": replace(mean, shape=(3, 2))}, METADATA),
        "metadata": (ENTRY, {**METADATA, "note": "another"}),
        "data": ({**ENTRY, "mean": replace(mean, data=mean.data[::-1])}, METADATA),
    }
    tensors, metadata = changed[part]
    if part == "name":
        del tensors["mean"]
    assert entry_digest(tensors, metadata=metadata) != entry_digest(ENTRY, metadata=METADATA)


def test_truncated_appended_and_zeroed_files_are_refused():
    data = encode({"mean": Tensor("I32", (4096,), random.Random(0).randbytes(16384))}, metadata={})
    cut = [data[:size] for size in (0, 1, 7, 8, 9, 100, len(data) - 1)]
    appended = [data + b"\0", data + b" " * 8, data + data]
    zeroed = [data[:at] + bytes(4096) + data[at + 4096 :] for at in (0, 4096, 8192)]
    for damaged in cut + appended + zeroed:
        with pytest.raises(ValueError, match=r"\w"):
            decode(damaged)


def raw(header: object, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def item(start: int, end: int) -> dict:
    return {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "data",
    [
        (1 << 63).to_bytes(8, "little"),
        raw(b" " * (HEADER_CAP_BYTES + 1)),
        raw(b"[" * 1_000_000),
        raw([]),
        raw(b"null"),
        raw(b"\xff\xfe"),
        raw({"__metadata__": None}),
        raw({"__metadata__": {"digest": 5}}),
        raw({"a": item(0, 4), "b": item(2, 6)}, b"abcdef"),
        raw({"a": item(0, 2), "b": item(4, 6)}, b"abcdef"),
        raw({"a": {"dtype": "U8", "shape": [1 << 62, 8], "data_offsets": [0, 1]}}, b"a"),
        raw({"a": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]}}, b"a"),
        raw({"a": {"dtype": "WHAT", "shape": [1], "data_offsets": [0, 1]}}, b"a"),
    ],
    ids=range(13),
)
def test_hostile_headers_are_refused(data):
    with pytest.raises((ValueError, RecursionError)):
        decode(data)


def test_a_sound_file_with_a_header_over_the_cap_is_refused():
    data = encode({}, metadata={})
    text = data[8:] + b" " * (HEADER_CAP_BYTES - len(data[8:]))
    assert decode(raw(text)).tensors == {}
    with pytest.raises(ValueError, match="a header of"):
        decode(raw(text + b" " * 8))


def test_a_name_given_twice_is_refused():
    data = encode({"a": Tensor("U8", (1,), b"x")}, metadata={})
    text = data[8:].replace(b'"a":{', b'"b":{}, "b":{')
    with pytest.raises(ValueError, match="twice"):
        decode(raw(text[:-1], b"x"))


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"])
@pytest.mark.parametrize("sign", [0, 1])
def test_numbers_that_are_not_finite_are_refused_and_the_largest_is_not(dtype, sign):
    bits = 8 * ITEM_BYTES[dtype]
    mantissa = {"F64": 52, "F32": 23, "F16": 10, "BF16": 7, "F8_E4M3": 3, "F8_E5M2": 2}[dtype]
    infinity = (1 << bits - 1) - (1 << mantissa)
    nan = (1 << bits - 1) - 1
    largest = nan - 1 if dtype == "F8_E4M3" else infinity - 1
    bad = [nan] if dtype == "F8_E4M3" else [infinity, infinity + 1, nan]

    def entry(pattern):
        data = (pattern | sign << bits - 1).to_bytes(bits // 8, "little")
        return {"fine": Tensor("U8", (1,), b"\xff"), "odd": Tensor(dtype, (1,), data)}

    assert decode(encode(entry(largest), metadata={}))
    for pattern in bad:
        with pytest.raises(ValueError, match="'odd' is not finite"):
            encode(entry(pattern), metadata={})


@pytest.mark.parametrize(
    ("tensors", "metadata"),
    [
        ({"a": Tensor("F33", (1,), b"1234")}, {}),
        ({"a": Tensor("F32", (2,), b"1234")}, {}),
        ({"__metadata__": Tensor("U8", (1,), b"1")}, {}),
        ({}, {"digest": "mine"}),
        ({}, {"note": "x" * (HEADER_CAP_BYTES + 1)}),
    ],
)
def test_what_could_not_be_read_back_is_not_written(tensors, metadata):
    with pytest.raises(ValueError, match=r"\w"):
        encode(tensors, metadata=metadata)
