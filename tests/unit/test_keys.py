import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.keys import Key, canonical_json, digest, file_digest, make_key
from tests.properties import many

ROOT = Path(__file__).parents[2]

# A small alphabet, so that pairs which a careless encoding would confuse do occur.
scalars = st.sampled_from(
    ["", "a", "b", "ab", ",", '"', "1", "true", "null", "[]", 0, 1, 1.0, -0.0, 0.5, True, None]
)


def nested(leaves):
    def level(inner):
        names = st.sampled_from(["a", "b", "ab", ""])
        return st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3)

    return st.recursive(leaves, level, max_leaves=5)


anything = nested(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)


def meaning(value):
    """What a value is, written without JSON: numbers are numbers, order of names is nothing."""
    if value is None or isinstance(value, bool | str):
        return type(value).__name__, value
    if isinstance(value, int | float):
        return "number", Fraction(value)
    if isinstance(value, dict):
        return "map", frozenset((name, meaning(item)) for name, item in value.items())
    return "list", tuple(meaning(item) for item in value)


@many
@given(nested(scalars), nested(scalars))
def test_two_digests_are_equal_exactly_when_the_values_are(one, other):
    assert (digest(one) == digest(other)) == (meaning(one) == meaning(other))


@many
@given(anything, anything)
def test_any_two_different_values_have_different_canonical_texts(one, other):
    assert (canonical_json(one) == canonical_json(other)) == (meaning(one) == meaning(other))


@many
@given(st.dictionaries(st.text(), anything, max_size=5), st.randoms())
def test_the_order_of_names_does_not_matter(value, shuffler):
    names = list(value)
    shuffler.shuffle(names)
    assert digest({name: value[name] for name in names}) == digest(value)


def test_a_whole_float_is_the_integer_and_a_bool_is_no_number():
    assert digest({"a": 1.0}) == digest({"a": 1})
    assert digest(-0.0) == digest(0)
    assert digest(1e300) == digest(int(1e300))
    assert len({digest(value) for value in (1, True, "1", [1])}) == 4


def test_a_tuple_is_the_list_and_a_key_is_its_digest():
    key = make_key("image", size=(3, 4))
    assert digest((1, (2,))) == digest([1, [2]])
    assert digest({"image": key}) == digest({"image": key.digest})
    assert str(key) == key.digest


names = st.sampled_from(["a", "b", "ab"])
fields = st.dictionaries(names, nested(scalars), max_size=3)


@many
@given(names, fields, names, fields)
def test_kind_and_fields_cannot_run_into_one_another(kind, inputs, other_kind, others):
    same = kind == other_kind and meaning(inputs) == meaning(others)
    assert (make_key(kind, **inputs).digest == make_key(other_kind, **others).digest) == same


@many
@given(fields)
def test_a_key_keeps_the_inputs_that_it_can_be_made_of_again(inputs):
    key = make_key("latent", **inputs)
    assert make_key("latent", **key.inputs) == key
    assert meaning(dict(key.inputs)) == meaning(inputs)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [1, v], lambda v: {"a": {"b": v}}])
def test_a_number_that_is_not_finite_is_refused_at_any_depth(number, wrap):
    with pytest.raises(ValueError, match="cannot hold"):
        digest(wrap(number))


@pytest.mark.parametrize("value", [b"bytes", {1, 2}, Path("a"), object()])
def test_what_json_cannot_say_is_refused(value):
    with pytest.raises(TypeError, match="cannot hold"):
        digest({"a": value})


def test_names_that_are_not_texts_are_refused():
    with pytest.raises(TypeError, match="string names"):
        digest({1: "a"})


def test_the_canonical_text_is_utf8_without_spaces_and_sorted():
    text = canonical_json({"b": [1.0, 2.5, None, True], "a": "\u00e4"})
    assert text == '{"a":"\u00e4","b":[1,2.5,null,true]}'.encode()


def test_known_digests_never_change():
    known = "26d99402c903f4cd8796458b9c84dff664e230343754991756438993a710b66a"
    assert digest({"b": [1.0, 2.5, None, True], "a": "\u00e4"}) == known
    key = make_key("latent", image="ab", size=[64.0, 32])
    assert key.digest == "6aceb9120b080207db0dfba302e5af684b75f0c5fff575235be6a656b8bef17c"
    assert key == Key(key.digest, {"image": "ab", "size": [64, 32]})


def test_a_digest_does_not_depend_on_the_process():
    code = "from lib.keys import digest; print(digest({n: {n: 1.5} for n in set('abcdefgh')}))"
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2", "77")
    }
    assert seen == {digest({n: {n: 1.5} for n in "abcdefgh"})}


def test_a_file_is_digested_by_its_bytes(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert file_digest(tmp_path / "a") == known
