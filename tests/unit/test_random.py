import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib import random

ROOT = Path(__file__).parents[2]
WHERE = {"seed": 7, "counter": 3, "sample_id": "a.png"}

# stream -> (two normal numbers, uniform, integer below 1000, seed64), of WHERE.
GOLDEN = {
    "order": ([-0.019199, -1.335831], 0.057186, 57, 6150981577017613304),
    "variant": ([0.424367, -0.850699], 0.210454, 210, 3599201000665311672),
    "geometry": ([-0.464179, 0.237949], 0.702425, 702, 5915594697739881294),
    "timestep": ([-1.660433, 2.206906], 0.987718, 987, 8661704736726604086),
    "noise": ([0.449761, 1.049793], 0.653943, 653, 1130815708055893218),
    "posterior": ([-0.7233, 0.704907], 0.38344, 383, 2377606689009043626),
    "caption": ([-0.475075, 0.023218], 0.411469, 411, 5703215225853707604),
    "caption_dropout": ([0.604469, -1.107555], 0.645504, 645, 7325801696920748976),
    "adapter_init": ([-1.030306, 0.681733], 0.460922, 460, 5140693471488700781),
    "adapter_dropout": ([0.735847, 2.066507], 0.481396, 481, 5666817560315553983),
    "validation": ([0.894112, 0.008051], 0.905897, 905, 985702365604698704),
}

streams = st.sampled_from(random.STREAMS)
places = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**63 - 1),
        "stream": streams,
        "counter": st.integers(0, 2**40),
        "sample_id": st.text(max_size=8),
    }
)


def draws(**where):
    return (
        random.normal((4,), **where).tolist(),
        random.uniform(**where),
        random.integer(2**40, **where),
        random.seed64(**where),
    )


@pytest.mark.parametrize("stream", random.STREAMS)
def test_each_stream_s_numbers_never_change(stream):
    where = {**WHERE, "stream": stream}
    normal, uniform, integer, seed = GOLDEN[stream]
    assert random.normal((2,), **where).tolist() == pytest.approx(normal, abs=1e-6)
    assert random.uniform(**where) == pytest.approx(uniform, abs=1e-6)
    assert random.integer(1000, **where) == integer
    assert random.seed64(**where) == seed


def test_the_order_of_an_epoch_never_changes():
    assert random.permutation(6, seed=7, epoch=3, name="a") == [1, 5, 3, 2, 4, 0]


@given(places)
def test_a_draw_repeats_itself_whatever_was_drawn_before(where):
    first = draws(**where)
    np.random.default_rng(0).standard_normal(3)
    random.uniform(**{**where, "counter": where["counter"] + 1})
    assert draws(**where) == first


@given(places, places)
def test_two_places_have_different_draws(one, other):
    assert (draws(**one) == draws(**other)) == (one == other)


@pytest.mark.parametrize(
    ("name", "other"), [("seed", 8), ("stream", "posterior"), ("counter", 4), ("sample_id", "b")]
)
def test_seed_stream_counter_and_sample_each_change_every_kind_of_draw(name, other):
    where = {**WHERE, "stream": "noise"}
    pairs = zip(draws(**where), draws(**{**where, name: other}), strict=True)
    assert all(one != two for one, two in pairs)


def test_seeds_above_32_bits_differ():
    seeds = [5, 5 + 2**32, 5 + 2**33, 5 + 2**62]
    assert len({random.uniform(**{**WHERE, "seed": s}, stream="noise") for s in seeds}) == 4


def test_the_boundary_of_two_fields_is_told():
    one = random.seed64(seed=1, stream="noise", counter=11, sample_id="1")
    other = random.seed64(seed=11, stream="noise", counter=1, sample_id="1")
    assert one != other


def test_a_fresh_process_draws_the_same_numbers():
    code = (
        "import json; from lib import random as r;"
        "w = dict(seed=7, stream='noise', counter=3, sample_id='a.png');"
        "print(json.dumps([r.normal((4,), **w).tolist(), r.uniform(**w), r.integer(2**40, **w),"
        " r.seed64(**w), r.permutation(9, seed=1, epoch=2, name='x')]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "5"},
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    order = random.permutation(9, seed=1, epoch=2, name="x")
    assert json.loads(done.stdout) == [*draws(**WHERE, stream="noise"), order]


def test_normal_numbers_are_float32_with_mean_zero_and_std_one():
    numbers = random.normal((100, 10, 20), **WHERE, stream="noise")
    assert (numbers.dtype, numbers.shape) == (np.float32, (100, 10, 20))
    assert abs(numbers.mean()) < 0.02
    assert abs(numbers.std() - 1) < 0.02
    assert abs((numbers < -1.96).mean() - 0.025) < 0.005


def test_uniform_numbers_fill_the_unit_interval_and_integers_their_range():
    place = {"seed": 0, "stream": "variant", "sample_id": "a"}
    uniform = [random.uniform(counter=n, **place) for n in range(1000)]
    assert min(uniform) >= 0
    assert max(uniform) < 1
    assert np.histogram(uniform, bins=5, range=(0, 1))[0].min() > 150
    assert {random.integer(3, counter=n, **place) for n in range(50)} == {0, 1, 2}


@given(st.integers(0, 40), st.integers(0, 2**63 - 1), st.integers(0, 1000))
def test_an_order_holds_each_place_once(count, seed, epoch):
    assert sorted(random.permutation(count, seed=seed, epoch=epoch, name="a")) == list(range(count))


def test_seed_epoch_and_name_each_change_an_order():
    place = {"seed": 1, "epoch": 2, "name": "a"}
    orders = [{}, {"seed": 2}, {"epoch": 3}, {"name": "b"}]
    assert len({tuple(random.permutation(20, **{**place, **change})) for change in orders}) == 4


def test_a_seed_for_others_fits_a_signed_64_bit_integer():
    seeds = [random.seed64(seed=n, stream="noise", counter=0, sample_id="") for n in range(200)]
    assert 0 <= min(seeds) < max(seeds) < 2**63
    assert max(seeds) > 2**62


def test_an_unknown_stream_is_refused():
    with pytest.raises(Exception, match="stream"):
        random.generator(seed=0, stream="luck", counter=0, sample_id="")
