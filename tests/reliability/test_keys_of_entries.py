"""Keys of entries: no two sets of inputs share one, in any process."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from lib.images import Geometry
from lib.recipes import caption_key, latent_key
from tests.properties import many

ROOT = Path(__file__).resolve().parents[2]

# Few letters and signs of JSON, so that a value of one field is often a part of another's.
texts = st.text(st.sampled_from('a,:"[]{}\\ \n'), max_size=4)
rules = st.fixed_dictionaries(
    {"template": st.none() | texts, "positions": texts, "mask": st.none() | texts}
)
captions = st.fixed_dictionaries(
    {
        "text": st.none() | texts,
        "encoders": st.dictionaries(texts, texts, max_size=2),
        "rule": rules.map(lambda rule: {**rule, "unconditional": "of-empty"}),
        "settings": st.dictionaries(texts, st.lists(st.integers(0, 2), max_size=2), max_size=1),
        "max_length": st.integers(1, 3),
        "dtype": st.sampled_from(["fp32", "bf16"]),
    }
)
small = st.integers(0, 2)
geometries = st.builds(
    Geometry,
    resized_height=small,
    resized_width=small,
    top=small,
    left=small,
    height=small,
    width=small,
    flip=st.booleans(),
)
latents = st.fixed_dictionaries(
    {
        "image_key": texts,
        "geometry": geometries,
        "autoencoder": texts,
        "dtype": st.sampled_from(["fp32", "bf16"]),
        "routine": texts,
    }
)


def key_of_caption(inputs):
    return caption_key(inputs["text"], **{n: v for n, v in inputs.items() if n != "text"}).digest


def key_of_latent(inputs):
    rest = {n: v for n, v in inputs.items() if n not in ("image_key", "geometry")}
    return latent_key(inputs["image_key"], inputs["geometry"], **rest).digest


@many
@given(captions, captions, st.data())
def test_two_captions_share_a_key_exactly_when_all_inputs_are_equal(one, other, data):
    mixed = {name: data.draw(st.sampled_from([one[name], other[name]])) for name in one}
    for left, right in ((one, other), (one, mixed), (other, mixed)):
        assert (key_of_caption(left) == key_of_caption(right)) == (left == right)


@many
@given(latents, latents, st.data())
def test_two_latents_share_a_key_exactly_when_all_inputs_are_equal(one, other, data):
    mixed = {name: data.draw(st.sampled_from([one[name], other[name]])) for name in one}
    for left, right in ((one, other), (one, mixed), (other, mixed)):
        assert (key_of_latent(left) == key_of_latent(right)) == (left == right)


@many
@given(captions)
def test_what_moves_over_the_border_of_two_fields_is_another_key(inputs):
    """`ab` and `c` is not `a` and `bc`."""
    text = inputs["text"] or "x"
    rule = {**inputs["rule"], "template": text[:1], "positions": text[1:]}
    moved = {**inputs["rule"], "template": text, "positions": ""}
    one, other = {**inputs, "rule": rule}, {**inputs, "rule": moved}
    assert (key_of_caption(one) == key_of_caption(other)) == (rule == moved)


CODE = """
import json, sys
from lib.images import Geometry
from lib.recipes import caption_key, latent_key
for kind, inputs in json.load(sys.stdin):
    if kind == "caption":
        print(caption_key(inputs.pop("text"), **inputs).digest)
    else:
        cut = Geometry(**inputs.pop("geometry"))
        print(latent_key(inputs.pop("image_key"), cut, **inputs).digest)
"""


def test_keys_are_the_same_in_every_process_and_for_every_hash_seed():
    examples, expected = [], []

    @settings(max_examples=100, database=None, derandomize=True)
    @given(captions, latents)
    def collect(caption, latent):
        examples.append(("caption", caption))
        expected.append(key_of_caption(caption))
        examples.append(("latent", {**latent, "geometry": asdict(latent["geometry"])}))
        expected.append(key_of_latent(latent))

    collect()
    for seed in ("0", "1", "4711"):
        done = subprocess.run(
            [sys.executable, "-c", CODE],
            input=json.dumps(examples),
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == expected
