import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lib import random
from lib.batches import Assembler, Plan, Records, Slot, slots_of
from lib.buckets import Bucket
from lib.family import Conditioning, Frame
from lib.keys import digest
from lib.noise import Flow
from lib.records import to_stored
from lib.schema import ObjectiveConfig, TimestepsConfig
from lib.store import Store
from lib.timesteps import draw_sigma
from tests.properties import many

WIDE, TALL = Bucket(32, 48), Bucket(48, 32)
UNCONDITIONAL = digest("unconditional")


def slot(name, bucket=WIDE, variants=1):
    latents = tuple(digest([name, variant]) for variant in range(variants))
    frame = Frame(original=(90, 90), crop=(0, 0), size=(bucket.height, bucket.width))
    return Slot(name, bucket, latents, (digest(f"caption of {name}"),), (frame,) * variants)


SLOTS = tuple(slot(f"{number}.png", WIDE if number % 3 else TALL) for number in range(7))


def numbers_of(key, shape):
    return torch.from_numpy(
        random.normal(shape, seed=0, stream="noise", counter=0, sample_id=f"record {key}")
    )


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


@pytest.fixture
def family(fake_family):
    return fake_family(
        FACTS=SimpleNamespace(draws_mode=False, divisor=16),
        normalise=lambda raw, constants: (raw - constants["shift"]) * constants["scale"],
        conditioning=lambda records, frames: Conditioning(
            {"text_embeds": torch.stack([record["text_embeds"] for record in records])}
        ),
    )


@pytest.fixture
def assembler(store, family):
    """Makes an assembler over the given slots, with their records in a store."""

    def make(slots, *, batch_size=4, micro_batch=4, caption_dropout=0.0, seed=1, mode=False):
        for one in slots:
            shape = (4, one.bucket.height // 16, one.bucket.width // 16)
            for key in one.latents:
                record = {"mean": numbers_of(key, shape), "std": numbers_of(f"s{key}", shape).abs()}
                store.put("latents", key, to_stored(record), metadata={}, inputs={})
        for key in {key for one in slots for key in one.captions} | {UNCONDITIONAL}:
            record = {"text_embeds": numbers_of(key, (3, 2))}
            store.put("captions", key, to_stored(record), metadata={}, inputs={})
        family.FACTS.draws_mode = mode
        return Assembler(
            plan=Plan(tuple(slots), seed=seed, batch_size=batch_size),
            family=family,
            records=Records(store, max_bytes=1 << 20),
            constants={"shift": 0.5, "scale": 2.0},
            process=Flow({}),
            timesteps=TimestepsConfig(),
            objective=ObjectiveConfig(),
            micro_batch=micro_batch,
            caption_dropout=caption_dropout,
            unconditional=UNCONDITIONAL,
        )

    return make


def groups(plan, start, stop):
    return list(plan.groups(start, stop))


def rows_of(made):
    """The rows that count: (name, level, mixture, target, text) of a step, by noise level."""
    rows = []
    for batch in made.batches:
        for row, name in enumerate(batch.names):
            if batch.weights[row]:
                tensors = (
                    batch.noisy[row],
                    batch.target[row],
                    batch.conditioning["text_embeds"][row],
                )
                rows.append((name, float(batch.level[row]), *(t.tolist() for t in tensors)))
    return sorted(rows)


@many
@given(
    st.integers(1, 9), st.integers(1, 4), st.integers(0, 99), st.integers(0, 12), st.integers(0, 9)
)
def test_steps_from_any_start_are_those_of_a_fresh_run(count, batch_size, seed, start, more):
    slots = tuple(slot(str(n), WIDE if n % 2 else TALL) for n in range(count))
    plan = Plan(slots, seed=seed, batch_size=batch_size)
    fresh = groups(plan, 0, start + more)
    assert [group.step for group in fresh] == list(range(start + more))
    assert groups(plan, start, start + more) == fresh[start:]


@many
@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 99))
def test_each_sample_drawn_has_a_counter_of_its_own(count, batch_size, seed):
    plan = Plan(tuple(slot(str(n)) for n in range(count)), seed=seed, batch_size=batch_size)
    steps = 3 * plan.steps_per_epoch
    counters = [
        group.first_counter + place
        for group in groups(plan, 0, steps)
        for place in range(len(group.slots))
    ]
    assert counters == list(range(3 * count))


def test_an_epoch_draws_every_slot_once_and_the_next_in_another_order():
    plan = Plan(SLOTS, seed=0, batch_size=2)
    epochs = [
        [s for group in groups(plan, at, at + plan.steps_per_epoch) for s in group.slots]
        for at in (0, plan.steps_per_epoch)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(7))
    assert epochs[0] != epochs[1]


def test_one_picture_four_times_in_a_step_has_four_noises_and_sigmas(assembler):
    made = assembler([slot("a.png")] * 4)
    (batch,) = made.step(next(made.plan.groups(0, 1))).batches
    assert batch.names == ("a.png",) * 4
    assert len(set(batch.level.tolist())) == 4
    assert len({tuple(row.flatten().tolist()) for row in batch.target}) == 4


def test_any_micro_batch_has_the_same_draws(assembler):
    by_size = []
    for micro_batch in (1, 2, 4):
        made = assembler(SLOTS, micro_batch=micro_batch, caption_dropout=0.4)
        by_size.append([rows_of(made.step(group)) for group in made.plan.groups(0, 6)])
    assert by_size[0] == by_size[1] == by_size[2]
    assert [len(rows) for rows in by_size[0]] == [len(g.slots) for g in made.plan.groups(0, 6)]


def test_every_micro_batch_is_full_and_of_one_bucket_and_fillers_weigh_nothing(assembler):
    made = assembler(SLOTS, batch_size=4, micro_batch=4)
    short = 0
    for group in made.plan.groups(0, 4):
        step = made.step(group)
        assert step.num_samples == len(group.slots)
        assert sum(float(batch.weights.sum()) for batch in step.batches) == len(group.slots)
        for batch in step.batches:
            assert len(batch.names) == len(batch.level) == len(batch.noisy) == 4
            for filler in (batch.weights == 0).nonzero().flatten().tolist():
                short += 1
                assert torch.equal(batch.noisy[filler], batch.noisy[0])
    assert short


def test_a_row_is_the_mathematics_of_its_record_and_its_draws(assembler):
    made = assembler([slot("a.png")], batch_size=1, micro_batch=1, seed=5)
    (batch,) = made.step(list(made.plan.groups(0, 3))[2]).batches
    where = {"seed": 5, "counter": 2, "sample_id": "a.png"}
    key, shape = digest(["a.png", 0]), (1, 4, 2, 3)
    posterior, noise = (
        torch.from_numpy(random.normal(shape, stream=stream, **where))
        for stream in ("posterior", "noise")
    )
    raw = numbers_of(key, shape[1:]) + numbers_of(f"s{key}", shape[1:]).abs() * posterior
    latents, sigma = (raw - 0.5) * 2.0, draw_sigma(TimestepsConfig(), **where)
    assert float(batch.level) == sigma
    assert torch.allclose(batch.noisy, (1 - sigma) * latents + sigma * noise, atol=1e-6)
    assert torch.allclose(batch.target, noise - latents, atol=1e-6)
    text = numbers_of(digest("caption of a.png"), (3, 2))
    assert torch.equal(batch.conditioning["text_embeds"][0], text)


def test_two_buckets_of_one_group_are_shifted_by_their_own_sizes(assembler):
    small, large = slot("a.png", Bucket(32, 48)), slot("b.png", Bucket(512, 1024))
    made = assembler([small, large], batch_size=2, micro_batch=1)
    numbers = {"base_image_seq_len": 6, "max_image_seq_len": 2048, "base_shift": 0.5}
    process = Flow({**numbers, "max_shift": 1.15})
    by_size = dataclasses.replace(
        made, process=process, timesteps=TimestepsConfig(shift_by="tokens")
    )
    (group,) = made.plan.groups(0, 1)
    plain, shifted = (
        {batch.names[0]: batch.level.item() for batch in one.step(group).batches}
        for one in (made, by_size)
    )
    for name, mu in (("a.png", 0.5), ("b.png", 1.15)):
        s = plain[name]
        assert shifted[name] == pytest.approx(math.exp(mu) / (math.exp(mu) + 1 / s - 1), rel=1e-5)


def test_a_family_that_takes_the_mode_draws_no_posterior(assembler):
    made = assembler([slot("a.png")], batch_size=1, micro_batch=1, mode=True)
    latents = (numbers_of(digest(["a.png", 0]), (4, 2, 3)) - 0.5) * 2.0
    for group in made.plan.groups(0, 2):
        (batch,) = made.step(group).batches
        undone = batch.noisy - batch.level.view(-1, 1, 1, 1) * batch.target
        assert torch.allclose(undone[0], latents, atol=1e-5)


def test_every_variant_of_a_picture_is_drawn(assembler):
    made = assembler([slot("a.png", variants=3)], batch_size=1, micro_batch=1, mode=True)
    undone = set()
    for group in made.plan.groups(0, 30):
        (batch,) = made.step(group).batches
        latents = batch.noisy - batch.level.view(-1, 1, 1, 1) * batch.target
        undone.add(round(float(latents.sum()), 2))
    assert len(undone) == 3


def test_dropped_captions_carry_the_unconditional_record_at_the_rate_asked_for(assembler):
    made = assembler([slot("a.png")], batch_size=1, micro_batch=1, caption_dropout=0.3)
    whole = dataclasses.replace(made, caption_dropout=0.0)
    texts = {
        "dropped": numbers_of(UNCONDITIONAL, (3, 2)),
        "kept": numbers_of(digest("caption of a.png"), (3, 2)),
    }
    found = []
    for group in made.plan.groups(0, 150):
        text = made.step(group).batches[0].conditioning["text_embeds"][0]
        found.append(next(name for name, known in texts.items() if torch.equal(text, known)))
        if group.step < 10:
            plain = whole.step(group).batches[0].conditioning["text_embeds"][0]
            assert torch.equal(plain, texts["kept"])
    assert abs(found.count("dropped") / 150 - 0.3) < 0.1


def several(name, count):
    return dataclasses.replace(slot(name), captions=tuple(digest(n) for n in range(count)))


def drawn_captions(made, steps):
    """The place of the caption of each step's one sample."""
    texts = [numbers_of(digest(place), (3, 2)) for place in range(3)]
    found = []
    for group in made.plan.groups(0, steps):
        text = made.step(group).batches[0].conditioning["text_embeds"][0]
        (place,) = [n for n, known in enumerate(texts) if torch.equal(text, known)]
        found.append(place)
    return found


def test_of_several_captions_each_is_drawn_and_every_draw_is_its_counter_s(assembler):
    made = assembler([several("a.png", 3)], batch_size=1, micro_batch=1)
    found = drawn_captions(made, 150)
    where = {"seed": 1, "stream": "caption", "sample_id": "a.png"}
    expected = [random.integer(3, counter=n, **where) for n in range(3000)]
    assert found == expected[:150]
    assert all(abs(expected.count(place) / 3000 - 1 / 3) < 0.04 for place in range(3))


def test_several_captions_change_no_other_draw(assembler):
    group = next(Plan(SLOTS[:1], seed=1, batch_size=1).groups(0, 1))
    one, more = (
        assembler([single], batch_size=1, micro_batch=1).step(group).batches[0]
        for single in (slot("a.png"), several("a.png", 3))
    )
    assert torch.equal(one.noisy, more.noisy)
    assert torch.equal(one.level, more.level)


def test_of_one_caption_nothing_is_drawn(assembler, monkeypatch):
    made = assembler([slot("a.png")], batch_size=1, micro_batch=1)
    integer = random.integer

    def watched(below, **where):
        assert where["stream"] != "caption"
        return integer(below, **where)

    monkeypatch.setattr(random, "integer", watched)
    made.step(next(made.plan.groups(0, 1)))
    assert made.plan.first_captions() == {"a.png": 0}


def test_the_first_captions_are_those_of_the_first_epoch(assembler):
    made = assembler([several("a.png", 3), several("b.png", 2), slot("c.png")] * 2, batch_size=2)
    drawn = {}
    for group in made.plan.groups(0, made.plan.steps_per_epoch):
        for place, index in enumerate(group.slots):
            chosen = made.plan.slots[index]
            where = {"seed": 1, "stream": "caption", "sample_id": chosen.name}
            counter = group.first_counter + place
            drawn.setdefault(
                chosen.name, random.integer(len(chosen.captions), counter=counter, **where)
            )
    assert made.plan.first_captions() == drawn
    assert drawn.keys() == {"a.png", "b.png", "c.png"}


def test_the_seed_changes_order_noise_and_sigma(assembler):
    group = next(Plan(SLOTS, seed=1, batch_size=4).groups(0, 1))
    one, other = (assembler(SLOTS, seed=seed).step(group) for seed in (1, 2))
    assert not {row[1] for row in rows_of(one)} & {row[1] for row in rows_of(other)}
    assert groups(Plan(SLOTS, seed=1, batch_size=2), 0, 4) != groups(
        Plan(SLOTS, seed=2, batch_size=2), 0, 4
    )


def test_slots_follow_the_samples_with_repeats_in_place():
    samples = [
        {"name": "a.png", "image_key": "ka", "captions": ["x"], "repeats": 2},
        {"name": "b.png", "image_key": "kb", "captions": ["y", "x"], "repeats": 1},
    ]
    found = slots_of(
        samples,
        images=[image_record("ka", WIDE, flips=(False, True)), image_record("kb", TALL)],
        latents={"ka": ["1", "2"], "kb": ["3"]},
        texts={digest("x"): "cx", digest("y"): "cy"},
    )
    cuts = tuple(Frame((40, 100), (0, left), WIDE.size) for left in (10, 22))
    one = Slot("a.png", WIDE, ("1", "2"), ("cx",), cuts)
    other = Slot("b.png", TALL, ("3",), ("cy", "cx"), (Frame((40, 100), (0, 10), TALL.size),))
    assert found == (one, one, other)


def image_record(key, bucket, *, flips=(False,)):
    """As a prepared data set lists a picture of 40 x 100, cut 10 from the left of 80 pixels."""
    cut = {"resized_height": 32, "resized_width": 80, "top": 0, "left": 10}
    cut |= {"height": bucket.height, "width": bucket.width}
    variants = [{**cut, "flip": flip} for flip in flips]
    size = {"height": 40, "width": 100}
    return {"image_key": key, "bucket": list(bucket.size), "variants": variants, **size}


def test_records_are_kept_up_to_the_limit_and_read_again_beyond_it(store, monkeypatch):
    keys = [digest(number) for number in range(3)]
    for key in keys:
        record = {"mean": numbers_of(key, (4,))}  # 16 bytes
        store.put("latents", key, to_stored(record), metadata={}, inputs={})
    read, get = [], Store.get
    monkeypatch.setattr(Store, "get", lambda *a: read.append(a[2]) or get(*a))
    records = Records(store, max_bytes=40)
    for _ in range(3):
        for key in keys:
            assert torch.equal(records("latents", key)["mean"], numbers_of(key, (4,)))
    assert [read.count(key) for key in keys] == [1, 1, 3]
