"""The held-out split: by content, stable, refused where it leaves nothing on a side."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.errors import InputRefused
from lib.manifest import Sample
from lib.splits import split_by_content


def sample(content: int, name: str = "a.png") -> Sample:
    key = hashlib.sha256(str(content).encode()).hexdigest()
    return Sample(name, key, height=8, width=8, captions=("x",))


def sides(samples, fraction):
    split = split_by_content(samples, fraction=fraction)
    assert sorted((*split.train, *split.held_out), key=id) == sorted(samples, key=id)
    return {s.image_key for s in split.train}, {s.image_key for s in split.held_out}


MANY = [sample(content, f"{content}.png") for content in range(400)]


def test_without_a_fraction_everything_trains_and_the_key_knows_no_rule():
    split = split_by_content(MANY, fraction=0.0)
    assert (split.train, split.held_out, split.rule) == (tuple(MANY), (), None)


@given(st.floats(0.05, 0.95))
def test_about_the_fraction_is_held_out(fraction):
    _, held_out = sides(MANY, fraction)
    spread = (fraction * (1 - fraction) / len(MANY)) ** 0.5
    assert abs(len(held_out) / len(MANY) - fraction) < 5 * spread


@given(st.integers(50, 399))
def test_another_picture_moves_no_other(count):
    before, after = sides(MANY[:count], 0.2), sides(MANY[: count + 1], 0.2)
    assert before[0] <= after[0]
    assert before[1] <= after[1]


def test_copies_of_a_picture_fall_on_one_side_whatever_their_names():
    copies = [sample(n, name) for n in range(40) for name in (f"{n}.png", f"copy/{n}.png")]
    train, held_out = sides(copies, 0.3)
    assert not train & held_out


def test_a_larger_fraction_only_adds_to_what_is_held_out():
    assert sides(MANY, 0.2)[1] < sides(MANY, 0.4)[1]


@pytest.mark.parametrize(("fraction", "side"), [(1e-9, "none"), (1 - 1e-12, "all")])
def test_a_split_with_an_empty_side_is_refused(fraction, side):
    with pytest.raises(InputRefused, match=f"holds out {side} of the 5 pictures"):
        split_by_content(MANY[:5], fraction=fraction)


def test_the_rule_that_enters_the_key_says_the_fraction():
    assert split_by_content(MANY, fraction=0.2).rule == {"rule": "content-hash/1", "fraction": 0.2}
