"""Every stage on a base whose denoiser and text encoder are stored in 4 bits."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.unit import stored_in_nf4

pytest.importorskip("bitsandbytes", exc_type=ImportError)

DRAWS = ("sample.steps=2", "sample.prompts=[a fox, a red key]", "sample.every=4")
HELD_OUT = ("validation.fraction=0.3", "validation.every=3", "validation.num_draws=2")


@pytest.fixture(scope="session")
def few(base, tmp_path_factory) -> Path:
    """The tiny base with transformer and T5 as people publish them."""
    from transformers import T5EncoderModel

    root = tmp_path_factory.mktemp("few")
    stored_in_nf4.store(base, root / "denoiser")
    kind = {"model_class": T5EncoderModel, "component": "text_encoder_2"}
    return stored_in_nf4.store_encoder(root / "denoiser", root / "both", **kind)


@pytest.fixture(scope="session")
def wide(few, tmp_path_factory) -> Path:
    """A dense base with the same numbers."""
    root = tmp_path_factory.mktemp("wide")
    stored_in_nf4.widened(few, root / "denoiser")
    return stored_in_nf4.widened(root / "denoiser", root / "both", component="text_encoder_2")


@pytest.fixture
def on(ensure, few):
    """Ensure a stage on the base in 4 bits."""

    def made(stage, *overrides, **options):
        where = (f"family.base={few}", "precision=nf4")
        return ensure(stage, *where, *overrides, **options)

    return made


@pytest.fixture
def ups_of(adapter_of):
    """Every B that a run taught, from zero, by its train manifest."""

    def found(manifest, root):
        from lib.records import from_stored
        from lib.tensors import decode

        state = from_stored(decode(adapter_of(manifest, root)).tensors)
        return torch.cat([t.flatten() for n, t in sorted(state.items()) if "lora_B" in n])

    return found


def held_out(seen):
    metrics = [e.data for e in seen if e.kind == "metric"]
    return [data["held_out_loss"] for data in metrics if "held_out_loss" in data]


def test_it_trains_validates_exports_and_draws_as_a_dense_base_of_its_numbers(
    on, ensure, seen, wide, ups_of, tmp_path
):
    one, two = tmp_path / "one", tmp_path / "two"
    dense = (f"family.base={wide}", "precision=bf16", *DRAWS, *HELD_OUT)
    trained = [on("train", *DRAWS, *HELD_OUT, root=one)]
    losses = [held_out(seen)]
    trained.append(ensure("train", *dense, root=two))
    losses.append(held_out(seen))
    assert trained[0].key != trained[1].key
    assert len(losses[0]) == 3  # before the first step, after 3 and 6
    learnt = [ups_of(m, root) for m, root in zip(trained, (one, two), strict=True)]
    assert float(learnt[0].norm()) > 0
    assert float(torch.cosine_similarity(*learnt, dim=0)) > 0.95
    assert list(one.glob("outputs/*/samples/step-000004.png"))
    assert losses[0] == pytest.approx(losses[1], rel=0.02)

    grids = [on("sample", *DRAWS, *HELD_OUT, root=one), ensure("sample", *dense, root=two)]
    shown = [np.asarray(Image.open(m.payload["files"]["grid"]["file"])) for m in grids]
    assert shown[0].shape == shown[1].shape
    assert np.abs(shown[0].astype(int) - shown[1].astype(int)).mean() < 4


def test_what_it_exports_is_sound_and_fits_it(on, few, tmp_path, monkeypatch, capsys):
    import stages
    from stages.inspect import looking_at

    exported = on("export").payload["files"]["adapter"]["file"]
    monkeypatch.chdir(tmp_path)
    words = [f"family.base={few}", "paths.store=other", "paths.outputs=others"]
    with pytest.raises(SystemExit) as exit:
        stages.main(looking_at(exported, words), arguments=words, opens_base=False)
    assert (exit.value.code, capsys.readouterr().out.splitlines()[-1]) == (
        0,
        f"sound, and fits family.base={few}",
    )


@pytest.mark.parametrize("format", ["kohya", pytest.param("comfyui", marks=pytest.mark.nightly)])
def test_other_formats_are_drawn_with_too(on, format):
    drawn = on("sample", *DRAWS[:2], f"export.format={format}")
    assert Path(drawn.payload["files"]["grid"]["file"]).is_file()


class CutShort(Exception):
    """A run ends here."""


def test_a_run_cut_short_goes_on_to_the_same_bits(on, seen, results_of, tmp_path, monkeypatch):
    from lib.training import step

    one, two = tmp_path / "one", tmp_path / "two"
    whole = on("train", root=one)
    launch = step.Trainer.launch

    def cut(self, group, *, rate):
        if group.step == 3:
            raise CutShort
        return launch(self, group, rate=rate)

    monkeypatch.setattr(step.Trainer, "launch", cut)
    with pytest.raises(CutShort):
        on("train", root=two)
    monkeypatch.setattr(step.Trainer, "launch", launch)
    resumed = on("train", root=two)
    assert "resume" in [e.data["name"] for e in seen if e.kind == "decision"]
    assert resumed.key == whole.key
    assert results_of(resumed, two) == results_of(whole, one)


def test_captions_of_a_quantised_encoder_are_entries_of_their_own(on, ensure, counted):
    dense = ensure("encode_captions")
    rows = counted["captions"]
    few = on("encode_captions")
    assert counted["captions"] == 2 * rows
    keys = [{key for text in m.payload["texts"].values() for key in [text]} for m in (dense, few)]
    assert keys[0].isdisjoint(keys[1])


def test_what_is_recorded_says_that_layers_are_as_the_base_stores_them(on, seen):
    on("train", "trainer.max_steps=1")
    (told,) = [e.data for e in seen if e.kind == "decision" and e.data["name"] == "precision"]
    assert told["reason"].endswith("M weights in nf4; as the base stores them")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "fp8"])
def test_any_other_precision_is_refused_before_a_weight_is_read(
    configure, few, tmp_path, precision
):
    from lib.pipeline import graph

    emptied = shutil.copytree(few, tmp_path / "emptied")
    for path in emptied.glob("*/*.safetensors"):
        path.write_bytes(b"")
    config = configure(f"family.base={emptied}", f"precision={precision}")
    (problem,) = graph.problems(config, online=True)
    assert problem.subject == f"precision.mode={precision}"
    assert problem.allowed == "nf4, auto"
    fits = configure(f"family.base={emptied}", "precision=nf4")
    assert list(graph.problems(fits, online=True)) == []


def test_a_dense_base_is_drawn_on_one_in_few_bits_whatever_the_precision(ensure, few):
    drawn = ensure("sample", f"sample.base={few}", *DRAWS[:2])
    assert Path(drawn.payload["files"]["grid"]["file"]).is_file()
