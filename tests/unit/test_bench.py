"""Benchmarks that need a GPU to mean anything run to their end on the tiny bases."""

import json
import re

import pytest

from bench import full_size_encoders
from lib import families


@pytest.mark.slow
def test_the_cache_stages_are_measured_beside_the_bare_encoders(capsys, monkeypatch):
    from bench import cache_stages

    monkeypatch.setattr(cache_stages, "BARE_SECONDS", 0.1)
    cache_stages.main(["flux", "--tiny", "--pictures", "3", "--captions", "4"])
    said = capsys.readouterr().out
    rows = dict(re.findall(r"^\| (latents|captions).*\| (\d+) \| [\d.]+ \| [\d.]+ \|$", said, re.M))
    assert rows == {"latents": "3", "captions": "5"}
    assert re.search(r"^\| 1 \| [\d.]+ \|$", said, re.M)  # decoded by one thread


def test_the_parts_of_a_start_are_told_by_a_run_s_events(tmp_path):
    from bench import startup

    told = [
        {"kind": "phase", "time": 12.0},
        {"kind": "decision", "name": "device", "time": 13.0},
        {"kind": "decision", "name": "compile", "time": 13.1},
        {"kind": "decision", "name": "adapter.targets", "time": 20.0},
        {"kind": "metric", "step": 0, "held_out_loss": 1.0, "time": 21.0},
        {"kind": "metric", "step": 1, "loss": 1.0, "time": 25.0},
        {"kind": "metric", "step": 2, "loss": 1.0, "time": 25.5},
        {"kind": "decision", "name": "compile", "time": 30.0},
    ]
    (tmp_path / "events.jsonl").write_text("\n".join(map(json.dumps, told)), encoding="utf-8")
    found = startup.parts(tmp_path, began=10.0)
    assert list(found) == list(startup.PARTS)
    assert list(found.values()) == [2, 1, 7, 5, 0.5, 15, 8]


@pytest.mark.parametrize("family", sorted(full_size_encoders.ENCODERS))
def test_a_full_size_recipe_has_the_shapes_that_the_denoiser_takes(family):
    from bench.full_size_bases import FULL

    module = families.get(family)
    expected = shapes_of(module, FULL[family])
    assert shapes_of(module, full_size_encoders.with_encoders(module)) == expected
    assert shapes_of(module, full_size_encoders.with_denoiser(module)) == expected


def shapes_of(module, recipe):
    """Of a caption's record and of a picture's latents."""
    parts = {name: part for name, part in recipe.items() if isinstance(part, dict)}
    length = module.FACTS.max_text_tokens
    captions = module.caption_shapes({"pipeline": {}, **parts}, max_length=length)
    return captions, module.latent_shape(recipe["vae"], height=64, width=64)
