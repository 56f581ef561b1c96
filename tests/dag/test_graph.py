"""The graph: what is refused, what is healed, what stays as it was."""

import pytest
from PIL import Image

from lib.errors import InputRefused, SamplesFailed, StateRefused


def test_require_refuses_a_cold_store_and_names_stage_and_command(ensure):
    with pytest.raises(StateRefused, match=r"prepare_dataset.*python -m stages\.prepare_dataset"):
        ensure("train", "upstream=require")


def test_require_trains_when_everything_upstream_is_there(ensure):
    ensure("encode_captions")
    ensure("build_latent_cache")
    assert ensure("train", "upstream=require").stage == "train"


@pytest.mark.pictures
def test_a_run_shows_what_it_was_trained_on_and_how_its_loss_went(ensure, tmp_path):
    ensure("train", "name=shown")
    for name in ("contact_sheet.png", "loss.png"):
        with Image.open(tmp_path / "outputs" / "shown" / name) as picture:
            assert min(picture.size) > 100


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        ("latents", "flip"),
        ("captions", "truncate"),
        ("latents", "delete"),
        pytest.param("captions", "flip", marks=pytest.mark.nightly),
        pytest.param("latents", "truncate", marks=pytest.mark.nightly),
        pytest.param("captions", "delete", marks=pytest.mark.nightly),
    ],
)
def test_a_damaged_entry_is_set_aside_and_made_again(
    ensure, adapter_of, tmp_path, seen, kind, damage
):
    whole = ensure("train")
    first = adapter_of(whole)
    entry = sorted((tmp_path / "store" / kind).glob("*/*.safetensors"))[0]
    good = entry.read_bytes()
    spoil(entry, damage)
    again = ensure("train", "rerun=true")
    assert entry.read_bytes() == good
    assert adapter_of(again) == first
    if damage == "flip":
        assert len(list((tmp_path / "store" / "quarantine").iterdir())) == 1
        assert any("damaged" in e.data["text"] for e in seen if e.kind == "warning")


def test_require_refuses_a_damaged_entry_by_name(ensure, tmp_path):
    ensure("encode_captions")
    ensure("build_latent_cache")
    entry = sorted((tmp_path / "store" / "latents").glob("*/*.safetensors"))[0]
    spoil(entry, "flip")
    with pytest.raises(StateRefused, match=entry.name):
        ensure("train", "upstream=require")
    assert entry.exists()


def spoil(path, damage: str) -> None:
    data = bytearray(path.read_bytes())
    if damage == "delete":
        path.unlink()
    elif damage == "truncate":
        path.write_bytes(bytes(data[:-10]))
    else:
        data[-5] ^= 4
        path.write_bytes(bytes(data))


def test_all_bad_pictures_are_named_at_once_and_nothing_is_encoded(ensure, data, tmp_path):
    (data / "torn.png").write_bytes((data / "fox.png").read_bytes()[:500])
    (data / "torn.txt").write_text("torn", encoding="utf-8")
    (data / "text.png").write_text("not a picture", encoding="utf-8")
    (data / "text.txt").write_text("text", encoding="utf-8")
    with pytest.raises(SamplesFailed) as refused:
        ensure("train")
    assert [p.subject for p in refused.value.problems] == ["text.png", "torn.png"]
    assert refused.value.exit_code == 3
    assert not (tmp_path / "store" / "latents").exists()


def test_a_target_that_matches_nothing_is_refused_before_training(ensure, tmp_path):
    with pytest.raises(InputRefused, match=r"adapter\.targets=to_nothing.*to_q"):
        ensure("train", "adapter.targets=[to_q,to_nothing]")


def test_a_picture_changed_between_stages_is_named(ensure, data, monkeypatch):
    from lib.pipeline import build_latent_cache

    plan = build_latent_cache.plan

    def changing(*args, **kwargs):
        planned = plan(*args, **kwargs)
        (data / "fox.png").write_bytes((data / "pizza.png").read_bytes())
        return planned

    monkeypatch.setattr(build_latent_cache, "plan", changing)
    with pytest.raises(SamplesFailed, match=r"fox\.png.*changed"):
        ensure("build_latent_cache")


def test_one_failed_picture_fails_the_stage_after_the_others_were_kept(
    ensure, monkeypatch, tmp_path
):
    """A posterior that is not finite is never written; the next run makes only that one."""
    import torch
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution as Gaussian

    made, seen = Gaussian.__init__, []

    def failing(self, parameters, *args, **kwargs):
        seen.append(1)
        made(self, parameters * float("nan") if len(seen) == 3 else parameters, *args, **kwargs)

    monkeypatch.setattr(Gaussian, "__init__", failing)
    with pytest.raises(SamplesFailed, match="not finite"):
        ensure("build_latent_cache")
    assert len(list((tmp_path / "store" / "latents").glob("*/*"))) == 7
    monkeypatch.setattr(Gaussian, "__init__", made)
    manifest = ensure("build_latent_cache")
    assert len(manifest.entries["train"]) == 8
    assert torch.is_grad_enabled()


def test_a_divergence_leaves_the_last_good_checkpoint(ensure, tmp_path, monkeypatch):
    from lib.training import step
    from lib.training.loop import Diverged

    loss = step.per_sample_loss
    calls = []

    def poisoned(prediction, target):
        calls.append(1)
        return loss(prediction, target) * (float("nan") if len(calls) == 4 else 1.0)

    monkeypatch.setattr(step, "per_sample_loss", poisoned)
    with pytest.raises(Diverged, match=r"step 4.*sigmas.*samples"):
        ensure("train", "trainer.save_every=1", "trainer.batch_size=1")
    checkpoints = sorted(p.name for p in tmp_path.glob("outputs/*/checkpoints/*"))
    assert checkpoints == ["step-00000002", "step-00000003"]


def test_bf16_trains_and_keeps_a_float32_adapter(ensure, adapter_of):
    from lib.tensors import decode

    stored = decode(adapter_of(ensure("train", "precision=bf16"))).tensors
    assert {tensor.dtype for tensor in stored.values()} == {"F32"}


def test_dropout_and_caption_dropout_have_an_effect(ensure, adapter_of):
    plain = adapter_of(ensure("train"))
    assert adapter_of(ensure("train", "adapter.dropout=0.5")) != plain
    assert adapter_of(ensure("train", "trainer.caption_dropout=0.9")) != plain


def test_the_average_is_another_adapter_and_none_is_made_at_decay_zero(ensure, results_of):
    from lib.runs import ADAPTER_FILE, EMA_FILE
    from lib.tensors import decode

    both = results_of(ensure("train"))
    assert decode(both[ADAPTER_FILE]).tensors != decode(both[EMA_FILE]).tensors
    plain = results_of(ensure("train", "trainer.ema_decay=0"))
    assert list(plain) == [ADAPTER_FILE]
    assert decode(plain[ADAPTER_FILE]).tensors == decode(both[ADAPTER_FILE]).tensors


def test_the_record_of_a_run_names_keys_versions_and_no_caption(ensure, tmp_path, data):
    import json

    manifest = ensure("train", "name=mine")
    folder = tmp_path / "outputs/mine"
    record = json.loads((folder / "run.json").read_text())
    assert record["keys"]["train"] == manifest.key
    assert {"torch", "diffusers", "peft"} <= record["versions"].keys()
    assert (folder / "config.yaml").exists()
    events = (folder / "events.jsonl").read_text()
    assert "a 3D emoji of" not in events


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("fp32", marks=pytest.mark.nightly),
        "bf16",
        pytest.param("fp16", marks=pytest.mark.nightly),
    ],
)
def test_each_export_dtype_has_its_own_file_and_is_a_hit_afterwards(ensure, seen, dtype):
    from pathlib import Path

    first = ensure("export", f"export.dtype={dtype}")
    file = Path(first.payload["files"]["adapter"]["file"])
    data = file.read_bytes()
    assert file.parent.name == f"diffusers-{dtype}"
    ensure("export", f"export.dtype={dtype}")
    assert [e.data["status"] for e in seen if e.stage == "export"] == ["hit"]
    file.write_bytes(b"changed by somebody")
    again = ensure("export", f"export.dtype={dtype}")
    assert Path(again.payload["files"]["adapter"]["file"]).read_bytes() == data
    assert file.read_bytes() == b"changed by somebody"
