import math
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lib.buckets import (
    Bucket,
    assign,
    epoch_groups,
    kept_fraction,
    make_buckets,
    micro_batches,
    steps_per_epoch,
)
from lib.errors import InputRefused
from tests.properties import many

BUCKETS = make_buckets(resolution=64, step=16, max_aspect=3.0)

sides = st.integers(1, 4000)
pictures = st.tuples(sides, sides)


@st.composite
def settings_of_buckets(draw):
    step = draw(st.sampled_from([8, 16, 32, 64]))
    resolution = draw(st.integers(step, 768))
    return {"resolution": resolution, "step": step, "max_aspect": draw(st.floats(1.0, 4.0))}


@st.composite
def data_sets(draw):
    """Slots over a few buckets, in an order of their own."""
    bucket_of = draw(st.lists(st.sampled_from(BUCKETS), max_size=60))
    members = {}
    for slot, bucket in enumerate(bucket_of):
        members.setdefault(bucket, []).append(slot)
    return bucket_of, members


@many
@given(settings_of_buckets())
def test_sides_are_multiples_of_the_step_and_no_bucket_is_too_long(settings):
    for bucket in make_buckets(**settings):
        assert bucket.height % settings["step"] == bucket.width % settings["step"] == 0
        assert min(bucket.size) > 0
        assert max(bucket.size) <= settings["max_aspect"] * min(bucket.size)


@many
@given(settings_of_buckets())
def test_no_area_is_more_than_one_step_away_from_the_resolution(settings):
    for bucket in make_buckets(**settings):
        off = abs(bucket.height * bucket.width - settings["resolution"] ** 2)
        assert off <= settings["step"] * max(*bucket.size, settings["resolution"])


@many
@given(settings_of_buckets())
def test_buckets_are_sorted_unique_symmetric_and_hold_one_square(settings):
    buckets = make_buckets(**settings)
    assert list(buckets) == sorted(set(buckets))
    assert {(b.width, b.height) for b in buckets} == {b.size for b in buckets}
    assert sum(b.height == b.width for b in buckets) == 1


@many
@given(settings_of_buckets())
def test_no_two_buckets_share_an_aspect(settings):
    buckets = make_buckets(**settings)
    assert len({Fraction(*bucket.size) for bucket in buckets}) == len(buckets)


def test_the_square_is_the_resolution_when_the_step_divides_it():
    assert Bucket(512, 512) in make_buckets(resolution=512, step=64, max_aspect=2.0)
    assert make_buckets(resolution=512, step=64, max_aspect=1.0) == (Bucket(512, 512),)


def test_a_bucket_prints_as_height_by_width():
    assert str(Bucket(height=768, width=512)) == "768x512"


def test_refused_settings_are_named_all_at_once():
    with pytest.raises(InputRefused) as caught:
        make_buckets(resolution=0, step=0, max_aspect=math.nan)
    text = str(caught.value)
    assert all(
        name in text for name in ("buckets.resolution=0", "buckets.step=0", "max_aspect=nan")
    )
    with pytest.raises(InputRefused, match=r"buckets\.resolution=8"):
        make_buckets(resolution=8, step=16, max_aspect=2.0)


@many
@given(pictures, settings_of_buckets(), st.randoms(use_true_random=False))
def test_assignment_is_total_and_independent_of_the_order(size, settings, random):
    buckets = list(make_buckets(**settings))
    chosen = assign(size, buckets=buckets)
    random.shuffle(buckets)
    assert chosen in buckets
    assert assign(size, buckets=buckets) == chosen


@many
@given(pictures)
def test_no_other_bucket_keeps_more_of_a_picture(size):
    buckets = make_buckets(resolution=512, step=64, max_aspect=2.5)
    chosen = kept_fraction(size, bucket=assign(size, buckets=buckets))
    for bucket in buckets:
        scale = max(Fraction(bucket.height, size[0]), Fraction(bucket.width, size[1]))
        kept = Fraction(bucket.height * bucket.width) / (scale**2 * size[0] * size[1])
        assert kept <= chosen <= 1


@many
@given(pictures)
def test_a_turned_picture_goes_to_the_turned_bucket(size):
    assume(size[0] != size[1])
    buckets = make_buckets(resolution=512, step=64, max_aspect=2.5)
    one, other = assign(size, buckets=buckets), assign(size[::-1], buckets=buckets)
    assert len({one.size, other.size[::-1]}) == 1


@pytest.mark.parametrize("bucket", make_buckets(resolution=256, step=32, max_aspect=3.0), ids=str)
def test_a_picture_of_a_buckets_size_goes_to_that_bucket_whole(bucket):
    buckets = make_buckets(resolution=256, step=32, max_aspect=3.0)
    assert assign(bucket.size, buckets=buckets) == bucket
    assert kept_fraction(bucket.size, bucket=bucket) == 1
    larger = (round(bucket.height * 1.03), round(bucket.width * 1.03))
    assert assign(larger, buckets=buckets) == bucket


@many
@given(data_sets(), st.integers(0, 5), st.integers(1, 9))
def test_an_epoch_holds_every_slot_once_in_the_fewest_steps(data_set, epoch, batch_size):
    bucket_of, members = data_set
    groups = epoch_groups(members, seed=1, epoch=epoch, batch_size=batch_size)
    assert sorted(slot for group in groups for slot in group) == list(range(len(bucket_of)))
    assert len(groups) == math.ceil(len(bucket_of) / batch_size)
    assert len(groups) == steps_per_epoch(len(bucket_of), batch_size=batch_size)
    assert sum(len(group) < batch_size for group in groups) <= 1


@many
@given(data_sets(), st.integers(1, 9))
def test_only_remainders_share_a_group_with_another_bucket(data_set, batch_size):
    bucket_of, members = data_set
    groups = epoch_groups(members, seed=1, epoch=0, batch_size=batch_size)
    kinds = [{bucket_of[slot] for slot in group} for group in groups]
    pure = Counter(
        next(iter(kind))
        for kind, group in zip(kinds, groups, strict=True)
        if len(kind) == 1 and len(group) == batch_size
    )
    for bucket, slots in members.items():
        assert pure[bucket] >= len(slots) // batch_size


@many
@given(data_sets(), st.integers(1, 9))
def test_the_plan_does_not_depend_on_the_order_of_the_buckets(data_set, batch_size):
    _, members = data_set
    turned = dict(reversed(members.items()))
    plan = epoch_groups(members, seed=3, epoch=2, batch_size=batch_size)
    assert epoch_groups(turned, seed=3, epoch=2, batch_size=batch_size) == plan


def test_seed_and_epoch_change_the_order():
    members = {Bucket(64, 64): range(40), Bucket(48, 80): range(40, 60)}
    plans = {
        epoch_groups(members, seed=seed, epoch=epoch, batch_size=4)
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(plans) == 9


@many
@given(data_sets(), st.sampled_from([(1, 1), (4, 1), (4, 2), (4, 4), (6, 3), (9, 9)]))
def test_micro_batches_lose_nothing_and_count_nothing_twice(data_set, sizes):
    bucket_of, members = data_set
    batch_size, micro_batch = sizes
    for group in epoch_groups(members, seed=1, epoch=0, batch_size=batch_size):
        parts = micro_batches(group, bucket_of=bucket_of, micro_batch=micro_batch)
        rows = [row for part in parts for row in part.rows]
        real = [row for row in rows if row.weight == 1]
        assert {len(part.rows) for part in parts} == {micro_batch}
        assert all(bucket_of[row.slot] == part.bucket for part in parts for row in part.rows)
        assert all(group[row.position] == row.slot for row in rows)
        assert sum(row.weight for row in rows) == len(group)
        assert sorted(row.position for row in real) == list(range(len(group)))
        assert all(part.rows[0].weight == 1 for part in parts)


def test_a_slot_drawn_twice_in_a_group_keeps_two_positions():
    bucket = Bucket(64, 64)
    (part,) = micro_batches((7, 7), bucket_of={7: bucket}, micro_batch=3)
    assert [(row.slot, row.position, row.weight) for row in part.rows] == [
        (7, 0, 1),
        (7, 1, 1),
        (7, 0, 0),
    ]


def test_buckets_of_a_group_come_in_order_of_first_appearance():
    wide, tall = Bucket(48, 80), Bucket(80, 48)
    parts = micro_batches((5, 6, 7), bucket_of={5: tall, 6: wide, 7: tall}, micro_batch=1)
    assert [part.bucket for part in parts] == [tall, tall, wide]


def test_the_order_of_the_groups_is_another_one_each_epoch():
    members = {bucket: [slot] for slot, bucket in enumerate(BUCKETS)}
    orders = {epoch_groups(members, seed=0, epoch=epoch, batch_size=1) for epoch in range(8)}
    assert len(orders) > 4
