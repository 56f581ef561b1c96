"""The first losses and gradient norms of every family, so that no mathematics changes unnoticed.

A change that is meant is written down by `RENEW_GOLDEN=1 python -m pytest
tests/dag/test_golden_losses.py`; the commit says why, and what else of a key's version it raises.
"""

import json
import os
from pathlib import Path

import pytest
import torch

from lib import families

NAMES = families.names()
TABLE = Path(__file__).with_name("golden_losses.json")
STEPS = 4
RELATIVE = 1e-4
SETTINGS = (f"trainer.max_steps={STEPS}", "trainer.caption_dropout=0.2")
LARGER = ("buckets.resolution=128", "buckets.step=64")  # the least that SDXL's base sees
ONLY = {"sdxl": LARGER}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """One for all: families that share an autoencoder share its latents."""
    return tmp_path_factory.mktemp("golden")


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def trained(family, store):
    """What the first steps of the settings of continuous integration tell."""
    from lib.events import Events
    from lib.pipeline import graph
    from stages.composing import compose

    places = (f"paths.store={store}/store", f"paths.outputs={store}/outputs")
    own = (*SETTINGS, *ONLY.get(family, ()))
    config, seen = compose(["+experiment=ci", f"family={family}", *places, *own]), []
    assert config.precision.mode == "fp32"
    graph.ensure("train", config, Events(sinks=(seen.append,)))
    steps = [event.data for event in seen if event.kind == "metric" and "loss" in event.data]
    return {name: [step[name] for step in steps] for name in ("loss", "grad_norm")}


def renewed(family, told):
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    rows = sorted({**table, family: told}.items())
    lines = [f"{json.dumps(name)}: {json.dumps(values)}" for name, values in rows]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


@pytest.mark.slow
@pytest.mark.parametrize("family", NAMES)
def test_the_first_losses_and_gradient_norms_are_those_of_the_table(family, store):
    told = trained(family, store)
    assert {name: len(values) for name, values in told.items()} == {
        "loss": STEPS,
        "grad_norm": STEPS,
    }
    if os.environ.get("RENEW_GOLDEN"):
        renewed(family, told)
        pytest.skip(f"{TABLE.name} is renewed")
    expected = json.loads(TABLE.read_text())[family]
    for name, values in told.items():
        assert values == pytest.approx(expected[name], rel=RELATIVE), name


def test_every_family_is_in_the_table():
    assert sorted(json.loads(TABLE.read_text())) == sorted(NAMES)
