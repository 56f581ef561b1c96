"""What is made once is not made again: rows are counted at the encoders' classes themselves."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]


def taken(rows: dict[str, int]) -> dict[str, int]:
    found = dict(rows)
    rows.update(captions=0, latents=0)
    return found


def test_another_rank_or_seed_encodes_nothing(ensure, counted):
    ensure("train")
    assert taken(counted) == {"captions": 9, "latents": 8}
    ensure("train", "adapter.rank=8")
    ensure("train", "seed=7", "trainer.max_steps=4")
    assert taken(counted) == {"captions": 0, "latents": 0}


def test_one_changed_caption_encodes_one_text(ensure, counted, data):
    ensure("build_latent_cache")
    ensure("encode_captions")
    taken(counted)
    (data / "fox.txt").write_text("a fox of another colour", encoding="utf-8")
    ensure("train")
    assert taken(counted) == {"captions": 1, "latents": 0}


def test_one_changed_picture_encodes_its_own_variants(ensure, counted, data):
    from PIL import Image

    overrides = ("latents.variants=3", "latents.random_flip=true")
    before = ensure("build_latent_cache", *overrides)
    taken(counted)
    Image.open(data / "owl-crown.png").convert("RGB").rotate(180).save(data / "owl-crown.png")
    after = ensure("build_latent_cache", *overrides)
    changed = set(after.payload["variants"]) - set(before.payload["variants"])
    assert len(changed) == 1
    expected = len(after.payload["variants"][changed.pop()])
    assert taken(counted) == {"captions": 0, "latents": expected}
    assert expected >= 2


def test_another_resolution_encodes_latents_only(ensure, counted):
    ensure("encode_captions")
    ensure("build_latent_cache")
    taken(counted)
    ensure("train", "buckets.resolution=96", "trainer.max_steps=2")
    assert taken(counted) == {"captions": 0, "latents": 8}


def test_one_caption_for_all_pictures_is_encoded_once(ensure, counted, data):
    for sidecar in data.glob("*.txt"):
        sidecar.write_text("an emoji", encoding="utf-8")
    ensure("encode_captions")
    assert taken(counted)["captions"] == 2  # it and the unconditional record


def test_a_touched_or_moved_data_set_encodes_nothing(ensure, counted, data, settings, tmp_path):
    ensure("build_latent_cache")
    taken(counted)
    for picture in data.glob("*.png"):
        picture.touch()
    moved = data.rename(tmp_path / "elsewhere")
    ensure("train", f"dataset.root={moved}")
    assert taken(counted) == {"captions": 9, "latents": 0}


def test_a_complete_run_is_a_hit_that_loads_nothing(ensure, counted, seen, monkeypatch):
    first = ensure("export")
    from diffusers import FluxTransformer2DModel

    def refuse(*args, **kwargs):
        raise AssertionError("the denoiser was built")

    monkeypatch.setattr(FluxTransformer2DModel, "__init__", refuse)
    assert ensure("export").key == first.key
    assert [e.data["status"] for e in seen if e.kind == "phase"].count("hit") == 5


WARM = """
import sys
sys.path.insert(0, {checkout!r})
from diffusers import AutoencoderKL
from transformers import CLIPTextModel, T5EncoderModel

def refuse(self, *args, **kwargs):
    raise AssertionError(f"{{type(self).__name__}} was built")

for encoder in (AutoencoderKL, CLIPTextModel, T5EncoderModel):
    encoder.__init__ = refuse
from lib.events import Events
from lib.pipeline import graph
from stages.composing import compose
graph.ensure("train", compose({overrides!r}), Events())
"""


@pytest.mark.slow
@pytest.mark.parametrize("loss", [pytest.param("zeros", marks=pytest.mark.nightly), "deleted"])
def test_a_warm_run_needs_neither_encoders_nor_their_files(ensure, settings, base, tmp_path, loss):
    """In a fresh process, weights overwritten by zeros (and the memory made to believe them)."""
    import shutil

    from lib.memory import Memory

    own = tmp_path / "base"
    shutil.copytree(base, own)
    ensure("train", f"family.base={own}")
    memory = Memory(tmp_path / "store")
    for component in ("vae", "text_encoder", "text_encoder_2"):
        for path in (own / component).glob("*.safetensors"):
            name = f"file:{path.resolve()}"
            known = memory.last(name)
            assert known is not None
            if loss == "deleted":
                path.unlink()
                continue
            path.write_bytes(bytes(path.stat().st_size))
            _age(path)
            memory.remember(name, path, known)
    overrides = settings(f"family.base={own}", "adapter.rank=2")
    script = textwrap.dedent(WARM).format(checkout=str(CHECKOUT), overrides=overrides)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _age(path: Path) -> None:
    """An hour old: what was just written is not remembered as settled."""
    import os
    import time

    old = time.time() - 3600
    os.utime(path, (old, old))


def test_a_changed_encoder_file_is_hashed_anew(ensure, counted, base, tmp_path):
    import shutil

    own = tmp_path / "base"
    shutil.copytree(base, own)
    ensure("encode_captions", f"family.base={own}")
    taken(counted)
    path = own / "text_encoder_2" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    ensure("encode_captions", f"family.base={own}")
    assert taken(counted)["captions"] == 9
