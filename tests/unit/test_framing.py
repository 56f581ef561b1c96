"""The bucket each picture goes to under either policy, what it costs the picture, what a draw weighs."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.buckets import (
    Bucket,
    assign,
    assign_without_enlarging,
    enlargement,
    epoch_groups,
    make_buckets,
    slot_weights,
)
from lib.cuts import geometry
from lib.framing import bucket_table, enlarged, frame
from lib.manifest import Sample
from lib.schema import BucketsConfig

STEP, MAX_ASPECT = 16, 3.0
BUCKETS = make_buckets(resolution=64, step=STEP, max_aspect=MAX_ASPECT)

sides = st.integers(1, 2000)
sizes = st.tuples(sides, sides)


def kept_small(size):
    return assign_without_enlarging(size, buckets=BUCKETS, step=STEP, max_aspect=MAX_ASPECT)


def sample(name, size, *, repeats=1):
    return Sample(name, f"key of {name}", *size, captions=("a",), repeats=repeats)


@given(sizes)
def test_without_enlarging_no_side_of_any_picture_grows(size):
    bucket = kept_small(size)
    if min(size) < STEP:
        assert bucket is None
        return
    assert enlargement(size, bucket=bucket) <= 1
    cut = geometry(size, bucket=bucket.size)
    assert (cut.resized_height, cut.resized_width) <= size


@given(sizes)
def test_without_enlarging_buckets_stay_divisible_and_within_the_aspect(size):
    bucket = kept_small(size)
    if bucket:
        assert bucket.height % STEP == bucket.width % STEP == 0
        assert 0 < max(bucket.size) <= MAX_ASPECT * min(bucket.size)


@given(sizes)
def test_a_picture_that_covers_its_bucket_goes_to_the_same_one_under_either_policy(size):
    usual = assign(size, buckets=BUCKETS)
    if enlargement(size, bucket=usual) <= 1:
        assert kept_small(size) == usual


@given(sizes)
def test_a_bucket_of_its_own_is_the_largest_inside_the_picture(size):
    bucket = kept_small(size)
    if bucket and bucket not in BUCKETS:
        short_side, long_side = sorted(bucket.size)
        assert short_side + STEP > min(size)
        roomy = long_side + STEP <= max(size) and long_side + STEP <= MAX_ASPECT * short_side
        assert not roomy


@given(sizes)
def test_a_turned_picture_goes_to_the_turned_bucket_without_enlarging_too(size):
    bucket, turned = kept_small(size), kept_small(size[::-1])
    if bucket and size[0] != size[1]:
        assert turned.size == bucket.size[::-1]


@pytest.mark.parametrize("policy", ["area", "no_upscale"])
def test_enlarged_pictures_are_named_with_their_factor_the_softest_first(policy):
    samples = [sample("a", (32, 32)), sample("b", (128, 128)), sample("c", (16, 16))]
    config = BucketsConfig(resolution=64, step=STEP, max_aspect=MAX_ASPECT, policy=policy)
    framed = frame(samples, config=config, divisor=16)
    assert enlarged(framed) == (("c x4.00", "a x2.00") if policy == "area" else ())


def test_the_family_s_divisor_enters_the_step():
    config = BucketsConfig(resolution=96, step=8, max_aspect=2.0, policy="no_upscale")
    framed = frame([sample("a", (70, 50)), sample("b", (33, 31))], config=config, divisor=32)
    assert framed.buckets["key of a"] == Bucket(64, 32)
    assert framed.too_small == ("b",)
    assert [one.name for one in framed.samples] == ["a"]


def test_the_table_counts_pictures_and_draws_of_what_trains():
    samples = [sample("a", (64, 64), repeats=3), sample("b", (64, 64)), sample("c", (64, 128))]
    config = BucketsConfig(resolution=64, step=STEP, max_aspect=MAX_ASPECT)
    framed = frame(samples, config=config, divisor=16)
    wide = framed.buckets["key of c"]
    assert bucket_table(samples, framed) == [
        {"height": wide.height, "width": wide.width, "pictures": 1, "draws": 1},
        {"height": 64, "width": 64, "pictures": 2, "draws": 4},
    ]
    assert len(bucket_table(samples[:2], framed)) == 1


@given(st.lists(st.sampled_from(BUCKETS), min_size=1, max_size=40), st.integers(1, 9))
def test_a_slot_weighs_what_the_epochs_groups_give_it(bucket_of, batch_size):
    """By hand: a slot of a group of n has the n-th part of a step's gradient."""
    members: dict[Bucket, list[int]] = {}
    for slot, bucket in enumerate(bucket_of):
        members.setdefault(bucket, []).append(slot)
    weights = slot_weights(Counter(bucket_of), batch_size=batch_size)
    for epoch in range(3):
        given = Counter[Bucket]()
        for group in epoch_groups(members, seed=0, epoch=epoch, batch_size=batch_size):
            for slot in group:
                given[bucket_of[slot]] += Fraction(batch_size, len(group))
        assert weights == {bucket: given[bucket] / len(members[bucket]) for bucket in members}
