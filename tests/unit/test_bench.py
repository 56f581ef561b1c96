"""Benchmarks that need a GPU to mean anything run to their end on the tiny bases."""

import json
import re

import pytest
import torch

from bench import full_size_encoders
from lib import families


@pytest.mark.nightly
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


def test_a_loop_is_timed_over_its_last_half_without_the_very_last_step():
    from bench import startup

    times = [0.0, 50.0, 51.0, 51.5, 52.0, 53.0, 54.0, 55.0, 59.0]  # of no step, then of 1 to 8
    told = [{"kind": "metric", "step": n, "loss": 1.0, "time": times[n]} for n in range(1, 9)]
    other = [{"kind": "metric", "step": 6, "held_out_loss": 1.0, "time": 99.0}]
    assert startup.pace([*told, *other]) == 1000  # from 4 to 7


@pytest.mark.parametrize(
    ("decided", "case"),
    [
        ((True, True, False), "bf16:512:1"),
        ((True, False, False), "bf16:512:1:compiled"),
        ((False, True, True), "bf16:512:1:graph:checkpointing"),
        ((False, False, False), "bf16:512:1:eager"),
    ],
)
def test_the_bare_step_is_run_as_the_loop_decided(decided, case):
    from bench import startup

    names = ("compile", "cuda_graphs", "gradient_checkpointing")
    found = dict(zip(names, decided, strict=True))
    assert startup.case_of(found, precision="bf16", side=512) == case
    chosen = {**found, "precision.mode": "fp8"}
    assert startup.case_of(chosen, precision="auto", side=512) == case.replace("bf16", "fp8")


@pytest.mark.slow
def test_a_denoiser_written_to_several_files_is_read_as_it_was_made(tmp_path):
    from bench import startup
    from bench.full_size import make_denoiser

    family, cpu = families.get("z_image"), torch.device("cpu")
    startup.write_denoiser(family, family.TINY, tmp_path / "there", device=cpu, shard="50KB")
    assert len(list((tmp_path / "there").glob("*.safetensors"))) > 1
    made = make_denoiser(family, family.TINY, device=cpu)
    read = type(made).from_pretrained(tmp_path / "there", torch_dtype=torch.bfloat16)
    assert dict(read.state_dict()).keys() == dict(made.state_dict()).keys()
    for name, tensor in made.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor)


def test_a_caption_is_padded_as_beside_a_longer_one_in_training():
    for name in ("qwen_image", "krea2"):
        found = batch_of(name, words=64, spoken=20).conditioning
        assert found["text_embeds"].shape[:2] == found["text_mask"].shape == (1, 64)
        assert found["text_mask"].tolist() == [[True] * 20 + [False] * 44]
        assert (found["text_embeds"][0, 20:] == 0).all()
        whole = batch_of(name, words=64).conditioning
        assert whole["text_embeds"].shape[1] == 64
        assert "text_mask" not in whole
    assert batch_of("z_image", words=40).conditioning.lengths == (40,)


def batch_of(name, **lengths):
    from bench.full_size import Texts, make_batch, preset_of

    family = families.get(name)
    return make_batch(family, family.TINY, preset_of(name), side=64, texts=Texts(**lengths))


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ("flux --words 64", "the captions of flux have one length"),
        ("sdxl --spoken 9", "the captions of sdxl have one length"),
        ("z_image --spoken 9", "no padding reaches the denoiser of z_image"),
        ("krea2 --words 600", "6 to 512 are allowed"),
        ("krea2 --words 0", "6 to 512 are allowed"),
        ("qwen_image --spoken 70", "1 to 64 are allowed"),
        ("qwen_image --words 40 --spoken 20", "training pads to multiples of 32"),
    ],
)
def test_a_length_of_text_without_effect_is_refused(asked, why, capsys):
    from bench import train_step

    with pytest.raises(SystemExit):
        train_step.parsed(asked.split())
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("asked", ["flux", "z_image --words 40", "krea2 --words 512 --spoken 72"])
def test_other_lengths_of_text_are_taken(asked):
    from bench import train_step

    assert train_step.parsed(asked.split()).family == asked.split()[0]


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen_image", "krea2"])
def test_a_step_over_padded_text_is_measured(family, capsys):
    from bench import train_step

    lengths = ["--words", "32", "--spoken", "20"]
    targets = ["--targets", "to_q", "to_out.0"]
    train_step.main([family, "--tiny", *lengths, *targets, "--cases", "fp32:64:2:eager"])
    said = capsys.readouterr().out
    assert "32 text tokens, its own: 20" in said
    assert len(re.findall(r"^\| ours \| fp32:64:2:eager \| [\d.]+ \|", said, re.M)) == 2


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


@pytest.mark.nightly
@pytest.mark.parametrize("family", families.names())
def test_diffusers_predicts_with_the_file_what_the_step_does(family, capsys):
    pytest.importorskip("bitsandbytes", exc_type=ImportError)
    from bench import reloaded

    reloaded.main([family, "--tiny"])
    said = capsys.readouterr().out
    rows = re.findall(r"^\| (\w+):64:1 \| ([\d.e+-]+) \| ([\d.e+-]+) \|$", said, re.M)
    assert [mode for mode, *_ in rows] == ["bf16", "fp8", "int8", "nf4"]
    for mode, apart, changed in rows:
        assert float(apart) < float(changed) / 3, mode
    assert float(rows[0][1]) < float(rows[0][2]) / 20
