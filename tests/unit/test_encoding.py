"""Encoding in batches: how much is decoded ahead, and what one failure costs the others."""

import hashlib
import threading
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from lib import encoding, families
from lib.cuts import geometry
from lib.encoding import (
    Failed,
    Picture,
    caption_order,
    caption_records,
    look_ahead,
    picture_order,
    picture_records,
)
from lib.family import Posterior

FULL = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes."


@pytest.fixture
def pictures(tmp_path):
    """So many small pictures of one shade each, in two buckets."""

    def make(count):
        made = []
        for number in range(count):
            path = tmp_path / f"{number}.png"
            Image.new("RGB", (16, 16), (number, 0, 0)).save(path)
            key = hashlib.sha256(path.read_bytes()).hexdigest()
            bucket = (16, 16) if number % 3 else (16, 8)
            made.append(Picture(key, geometry((16, 16), bucket=bucket), path))
        return made

    return make


def shade(pixels):
    """The number of a picture by its pixels."""
    return round(float(pixels[0, 0, 0] + 1) * 127.5)


@pytest.fixture
def family(fake_family):
    """Encodes a picture as its shade and a text as its length; `fail` may raise for either."""

    def make(fail=lambda number: None, *, mask=None, batches=None):
        batches = [] if batches is None else batches

        def encode_images(_autoencoder, pixels):
            batches.append([shade(one) for one in pixels])
            for number in batches[-1]:
                fail(number)
            mean = torch.tensor(batches[-1], dtype=torch.float32).reshape(-1, 1, 1, 1)
            return Posterior(mean=mean, std=torch.zeros_like(mean))

        def encode_captions(_encoders, captions, *, max_length):
            batches.append(list(captions))
            for text in captions:
                fail(len(text))
            return [{"text_embeds": torch.tensor([float(len(text))])} for text in captions]

        def encode_unconditional(_encoders, *, max_length):
            fail(0)
            return {"text_embeds": torch.zeros(1)}

        return fake_family(
            FACTS=replace(families.get("flux").FACTS, caption_rule={"mask": mask}),
            encode_images=encode_images,
            encode_captions=encode_captions,
            encode_unconditional=encode_unconditional,
        )

    return make


def failing(*numbers, error):
    def fail(number):
        if number in numbers:
            raise error

    return fail


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("cores", [1, 2, 4])
def test_no_more_pictures_are_decoded_at_once_than_the_batch_and_what_is_looked_ahead(
    family, pictures, monkeypatch, batch_size, cores
):
    monkeypatch.setattr(encoding, "_decoders", lambda: cores)
    live, most, lock = weakref.WeakSet(), [0], threading.Lock()
    real = encoding.render

    class Pixels(np.ndarray):
        """An array that can be told from its copies."""

        __hash__ = object.__hash__

    def render(*args):
        pixels = real(*args).view(Pixels)
        with lock:
            live.add(pixels)
            most[0] = max(most[0], len(live))
        return pixels

    monkeypatch.setattr(encoding, "render", render)
    found = []
    for picture, record in picture_records(
        family(), None, picture_order(pictures(40)), batch_size=batch_size
    ):
        assert not isinstance(record, Failed)
        time.sleep(0.002)  # the encoder's time, in which threads would run ahead
        found.append(picture)
    assert len(found) == 40
    assert batch_size <= most[0] <= batch_size + look_ahead(batch_size)
    assert look_ahead(batch_size) == max(batch_size, cores)
    assert not live


def test_there_are_as_many_decoders_as_cores_that_may_be_used(monkeypatch):
    monkeypatch.setattr(encoding.os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    assert encoding._decoders() == 6
    monkeypatch.setattr(encoding.os, "sched_getaffinity", lambda pid: set(range(99)), raising=False)
    assert encoding._decoders() == encoding.MOST_DECODERS
    monkeypatch.delattr(encoding.os, "sched_getaffinity")
    monkeypatch.setattr(encoding.os, "cpu_count", lambda: 3)
    assert encoding._decoders() == 3


def test_a_batch_has_one_bucket_and_every_picture_is_encoded_once(family, pictures):
    batches = []
    given = pictures(10)
    found = dict(picture_records(family(batches=batches), None, picture_order(given), batch_size=4))
    assert found.keys() == set(given)
    assert all(found[p]["mean"].item() == n for n, p in enumerate(given))
    assert sorted(len(batch) for batch in batches) == [2, 4, 4]
    assert all(len({number % 3 == 0 for number in batch}) == 1 for batch in batches)


@pytest.mark.parametrize(
    "error", [RuntimeError(FULL), torch.OutOfMemoryError("CUDA out of memory."), MemoryError()]
)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_pictures_that_cannot_be_encoded_cost_the_others_nothing(
    family, pictures, error, batch_size
):
    given = pictures(9)
    broken = family(failing(2, 7, error=error))
    found = dict(picture_records(broken, None, picture_order(given), batch_size=batch_size))
    failed = {n for n, p in enumerate(given) if isinstance(found[p], Failed)}
    assert failed == {2, 7}
    assert type(error).__name__ in found[given[2]].why
    assert "run again" in found[given[2]].remedy
    assert all(found[given[n]]["mean"].item() == n for n in set(range(9)) - failed)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_texts_that_cannot_be_encoded_cost_the_others_nothing(family, batch_size):
    texts = ["a", "bb", "ccc", "dddd", None]
    broken = family(failing(0, 3, error=RuntimeError(FULL)))
    found = dict(caption_records(broken, None, texts, max_length=9, batch_size=batch_size))
    assert {text for text, record in found.items() if isinstance(record, Failed)} == {"ccc", None}
    assert found["dddd"]["text_embeds"].item() == 4


@pytest.mark.parametrize("error", [TypeError("a bug"), NotImplementedError("a bug"), KeyError(1)])
def test_a_fault_of_ours_is_no_failed_sample(family, pictures, error):
    broken = family(failing(1, error=error))
    with pytest.raises(type(error)):
        list(picture_records(broken, None, picture_order(pictures(3)), batch_size=1))
    with pytest.raises(type(error)):
        list(caption_records(broken, None, ["x"], max_length=9, batch_size=1))


def test_a_batch_that_does_not_fit_is_encoded_one_by_one(family, pictures):
    batches = []

    def encode(fits):
        def fail(_number):
            if len(batches[-1]) > fits:
                raise RuntimeError(FULL)

        return fail

    given = pictures(9)
    small = family(encode(1), batches=batches)
    found = dict(picture_records(small, None, picture_order(given), batch_size=4))
    assert all(found[p]["mean"].item() == n for n, p in enumerate(given))


def test_a_picture_that_has_changed_or_gone_fails_alone(family, pictures):
    given = pictures(4)
    given[1].path.write_bytes(given[2].path.read_bytes())
    given[3].path.unlink()
    found = dict(picture_records(family(), None, picture_order(given), batch_size=2))
    assert "changed while" in found[given[1]].why
    assert "cannot be read" in found[given[3]].why
    assert found[given[2]]["mean"].item() == 2


@pytest.mark.parametrize(
    ("mask", "expected"), [(None, ["bbb", "a", "cc"]), ("tokens", ["a", "cc", "bbb"])]
)
def test_texts_go_by_length_only_where_padding_is_masked(family, mask, expected):
    batches = []
    of = family(mask=mask, batches=batches)
    order = caption_order(of, ["bbb", "a", "cc"])
    found = dict(caption_records(of, None, order, max_length=9, batch_size=2))
    assert [text for batch in batches for text in batch] == expected
    assert set(found) == {"a", "bbb", "cc"}


@pytest.mark.parametrize("late", [0, 1, 4])
def test_records_are_waited_for_when_so_many_others_are_on_their_way(
    family, pictures, monkeypatch, late
):
    sent, waited = [], []

    def arriving(tensor):
        sent.append(tensor)
        return tensor, lambda: waited.append((len(sent), tensor.item()))

    monkeypatch.setattr(encoding, "arriving", arriving)
    broken, given = family(failing(5, error=RuntimeError(FULL))), pictures(9)
    order = [given.index(picture) for picture in picture_order(given)]
    stream = picture_records(broken, None, picture_order(given), batch_size=1, late=late)
    found = [given.index(picture) for picture, _ in stream]
    assert found == order
    means = [item for _, item in waited[::2]]
    assert means == [number for number in order if number != 5]
    ahead = [count // 2 - done for done, (count, _) in enumerate(waited[::2], start=1)]
    assert max(ahead) == late


def test_a_late_batch_is_given_before_the_one_after_the_next_is_encoded(family):
    """A device has one batch at work and one waiting, and memory holds two."""
    batches, seen = [], []
    of = family(batches=batches)
    texts = [letter * 2 for letter in "abcdefgh"]
    for text, record in caption_records(of, None, texts, max_length=9, batch_size=2, late=2):
        assert record["text_embeds"].item() == 2
        seen.append((text, len(batches)))
    assert [text for text, _ in seen] == texts
    assert [encoded for _, encoded in seen] == [2, 2, 3, 3, 4, 4, 4, 4]


def test_stopping_early_leaves_no_thread_at_work(family, pictures):
    stream = picture_records(family(), None, picture_order(pictures(30)), batch_size=1)
    next(stream)
    before = threading.active_count()
    stream.close()
    assert threading.active_count() <= before
