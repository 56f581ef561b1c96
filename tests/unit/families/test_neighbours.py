"""What a caption's record owes to those it is encoded with: nothing, in batches of one size."""

import pytest
import torch

from lib import families
from tests.unit.families import reference

OWN = "a photo of a dog on the grass"
ALIKE = ("a red fox on the blue grass", "a cat with a hat in snow", "a drawing of a fox on it")
OTHERS = ("a painting of a dog in snow", "a fox with a hat at night", "a photo of an apple on it")
LONGER = ("a cat", " ".join(["a drawing in flat style, stacked above another one"] * 3), "a dog")
LENGTH = 77
# Pads to the longest of a batch: another length is another shape of every product.
PADS_TO_LONGEST = {"qwen_image"}


@pytest.fixture(scope="module", params=sorted(families.names()))
def encoded(request, tmp_path_factory):
    """The record of one caption at a place among others."""
    family = families.get(request.param)
    base = reference.make_base(family, tmp_path_factory.mktemp("bases"))
    encoders = reference.encoders_of(family, base)

    def encode(others, *, place):
        captions = [*others[:place], OWN, *others[place:]]
        return family.encode_captions(encoders, captions, max_length=LENGTH)[place]

    encode.family = request.param
    return encode


def test_neighbours_and_the_place_among_them_change_no_bit(encoded):
    first = encoded(ALIKE, place=0)
    for others, place in ((OTHERS, 2), (ALIKE[::-1], 3)):
        again = encoded(others, place=place)
        assert all(torch.equal(again[name], tensor) for name, tensor in first.items())


def test_longer_neighbours_change_no_bit_either_but_where_a_family_pads_to_the_longest(encoded):
    first, again = encoded(ALIKE, place=0), encoded(LONGER, place=1)
    for name, tensor in first.items():
        if encoded.family in PADS_TO_LONGEST:
            torch.testing.assert_close(again[name], tensor, rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(again[name], tensor)
