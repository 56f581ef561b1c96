"""Public reports about caches of latents and captions, re-created on the small data set."""

import hashlib
import os
from pathlib import Path

import pytest
from PIL import Image

from lib.errors import SamplesFailed
from lib.store import Store

FULL = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes."
CACHES = ("encode_captions", "build_latent_cache")


def taken(rows: dict[str, int]) -> dict[str, int]:
    found = dict(rows)
    rows.update(captions=0, latents=0)
    return found


def entries(root: Path, kind: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(root.glob(f"store/{kind}/*/*"))}


@pytest.fixture
def few(data):
    """Leaves the first three pictures."""
    for path in sorted(data.glob("*.png"))[3:]:
        path.unlink()
        path.with_suffix(".txt").unlink()
    return sorted(data.glob("*.png"))


@pytest.fixture
def colours(data):
    """Four pictures of one colour each, whose captions are the colours."""
    for path in data.iterdir():
        path.unlink()
    for colour in ("red", "lime", "blue", "white"):
        Image.new("RGB", (64, 64), colour).save(data / f"{colour}.png")
        (data / f"{colour}.txt").write_text(colour, encoding="utf-8")
    return ("red", "lime", "blue", "white")


def test_a_picture_edited_under_its_name_size_and_time_is_made_again_alone(ensure, counted, few):
    for number, path in enumerate(few):
        Image.new("RGB", (64, 64), (number, 99, 0)).save(path, compress_level=0)
        os.utime(path, (1_000_000_000, 1_000_000_000))
    before = few[1].stat()
    ensure("build_latent_cache")
    taken(counted)
    data = bytearray(few[1].read_bytes())
    Image.new("RGB", (64, 64), (0, 0, 255)).save(few[1], compress_level=0)
    os.utime(few[1], ns=(before.st_atime_ns, before.st_mtime_ns))
    assert few[1].read_bytes() != bytes(data)
    assert (few[1].stat().st_size, few[1].stat().st_mtime) == (before.st_size, before.st_mtime)
    assert few[1].stat().st_ino == before.st_ino
    ensure("build_latent_cache")
    assert taken(counted)["latents"] == 1


def test_another_resolution_makes_all_again_and_the_first_one_s_are_still_there(
    ensure, counted, few
):
    for resolution, expected in ((64, 3), (96, 3), (64, 0), (96, 0)):
        ensure("build_latent_cache", f"buckets.resolution={resolution}")
        assert taken(counted)["latents"] == expected


def test_two_resolutions_in_one_store_never_get_each_other_s_shapes(ensure, tmp_path, few):
    store = Store(tmp_path / "store")
    for resolution in (64, 96, 64):
        prepared = ensure("prepare_dataset", f"buckets.resolution={resolution}").payload
        made = ensure("build_latent_cache", f"buckets.resolution={resolution}").payload
        for image in prepared["images"]:
            height, width = (side // 8 for side in image["bucket"])
            for key in made["variants"][image["image_key"]]:
                shape = store.get("latents", key).tensors["mean"].shape
                assert shape == (16, height, width)


def test_what_is_finished_is_kept_when_pictures_come_or_one_is_bad(ensure, counted, few, data):
    ensure("build_latent_cache")
    taken(counted)
    Image.new("RGB", (70, 64), "green").save(data / "new.png")
    (data / "new.txt").write_text("new", encoding="utf-8")
    ensure("build_latent_cache")
    assert taken(counted)["latents"] == 1
    (data / "zz.png").write_bytes(few[0].read_bytes()[:300])
    (data / "zz.txt").write_text("cut off", encoding="utf-8")
    with pytest.raises(SamplesFailed, match=r"zz\.png"):
        ensure("build_latent_cache")
    (data / "zz.png").unlink()
    (data / "zz.txt").unlink()
    ensure("build_latent_cache")
    assert taken(counted)["latents"] == 0


def test_files_of_other_tools_caches_among_the_pictures_change_nothing(ensure, counted, few):
    first = ensure("build_latent_cache")
    for path in few:
        for suffix in (".safetensors", ".npz", ".pt", "_te.npz", "_0064x0064_flux.safetensors"):
            path.with_name(path.stem + suffix).write_bytes(b"PK\3\4 not a picture")
    taken(counted)
    assert ensure("build_latent_cache") == first
    assert taken(counted) == {"captions": 0, "latents": 0}


@pytest.mark.parametrize("stage", CACHES)
def test_a_second_and_a_third_run_encode_nothing_and_leave_the_same_bytes(
    ensure, counted, few, tmp_path, stage
):
    ensure(stage)
    taken(counted)
    first = {kind: entries(tmp_path, kind) for kind in ("captions", "latents")}
    for _ in range(2):
        ensure(stage)
        assert taken(counted) == {"captions": 0, "latents": 0}
        assert {kind: entries(tmp_path, kind) for kind in first} == first


@pytest.mark.parametrize(
    "names",
    [
        ("v1.0 front", "v1.0 back"),
        ("a_0064x0064_b", "a_b"),
        pytest.param(("aaa.bbb", "aaa.ccc"), marks=pytest.mark.nightly),
    ],
)
def test_dots_and_underscores_in_names_mix_up_nothing(ensure, data, tmp_path, names):
    """Each picture's entries hold what that picture alone is encoded to."""
    for path in data.iterdir():
        path.unlink()
    store, alone = Store(tmp_path / "store"), {}
    for name, colour in zip(names, ("red", "blue"), strict=True):
        Image.new("RGB", (64, 64), colour).save(data / f"{name}.png")
        (data / f"{name}.txt").write_text(name, encoding="utf-8")
        alone[name] = (data / f"{name}.png").read_bytes()
    made = ensure("build_latent_cache").payload["variants"]
    prepared = ensure("prepare_dataset").payload
    assert {s["name"]: s["caption"] for s in prepared["samples"]} == {f"{n}.png": n for n in names}
    found = {}
    for name in names:
        (key,) = made[hashlib.sha256(alone[name]).hexdigest()]
        found[name] = store.get("latents", key).tensors
    assert found[names[0]] != found[names[1]]
    for name, other in (names, names[::-1]):
        (data / f"{other}.png").unlink(missing_ok=True)
        (data / f"{other}.txt").unlink(missing_ok=True)
        (data / f"{name}.png").write_bytes(alone[name])
        (data / f"{name}.txt").write_text(name, encoding="utf-8")
        root = tmp_path / f"alone {name}"
        ((key,),) = ensure("build_latent_cache", root=root).payload["variants"].values()
        assert Store(root / "store").get("latents", key).tensors == found[name]


@pytest.mark.parametrize("kind", ["captions", "latents"])
def test_exactly_the_damaged_entries_are_made_again_before_the_first_step(
    ensure, counted, tmp_path, kind, seen
):
    ensure("train", "trainer.max_steps=1")
    taken(counted)
    paths = sorted((tmp_path / "store" / kind).glob("*/*"))[:3]
    whole = entries(tmp_path, kind)
    flipped = bytearray(paths[2].read_bytes())
    flipped[len(flipped) // 2] ^= 1
    for path, data in zip(paths, (paths[0].read_bytes()[:10], b"", bytes(flipped)), strict=True):
        path.write_bytes(data)
    ensure("train", "trainer.max_steps=1", "rerun=true")
    expected = {"captions": 0, "latents": 0, kind: 3}
    assert taken(counted) == expected
    assert entries(tmp_path, kind) == whole
    told = [e.data["text"] for e in seen if e.kind == "warning" and "damaged" in e.data["text"]]
    assert told
    metrics = [n for n, e in enumerate(seen) if e.kind == "metric"]
    phases = [n for n, e in enumerate(seen) if e.kind == "phase" and e.data["status"] == "done"]
    assert phases[0] < metrics[0]


def test_damage_in_both_caches_is_mended_in_one_run(ensure, counted, tmp_path):
    """Each stage finds its own when another entry of it is missing."""
    ensure("train", "trainer.max_steps=1")
    taken(counted)
    for kind in ("captions", "latents"):
        gone, bad = sorted((tmp_path / "store" / kind).glob("*/*"))[:2]
        gone.unlink()
        bad.write_bytes(bytes(bad.stat().st_size))
    ensure("train", "trainer.max_steps=1", "rerun=true")
    assert taken(counted) == {"captions": 2, "latents": 2}


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_picture_for_which_memory_runs_out_fails_the_stage_by_name(
    ensure, few, monkeypatch, tmp_path, batch_size
):
    from diffusers import AutoencoderKL

    Image.new("RGB", (64, 64), "white").save(few[1])
    real = AutoencoderKL.encode

    def encode(self, x, *args, **named):
        if any(float(row.min()) > 0.99 for row in x):
            raise RuntimeError(FULL)
        return real(self, x, *args, **named)

    monkeypatch.setattr(AutoencoderKL, "encode", encode)
    with pytest.raises(SamplesFailed, match="allocate memory") as failed:
        ensure("build_latent_cache", f"encode.batch_size={batch_size}")
    assert [Path(p.subject).name for p in failed.value.problems] == [few[1].name]
    assert failed.value.exit_code == 3
    assert len(entries(tmp_path, "latents")) == 2
    assert not list(tmp_path.glob("store/manifests/build_latent_cache/*"))
    monkeypatch.undo()
    ensure("build_latent_cache")
    assert len(entries(tmp_path, "latents")) == 3


def test_texts_for_which_memory_runs_out_fail_the_stage_with_all_their_names(
    ensure, few, monkeypatch, tmp_path
):
    from transformers import T5EncoderModel

    real, calls = T5EncoderModel.forward, []

    def forward(self, *args, **named):
        calls.append(1)
        if len(calls) in (1, 3):
            raise RuntimeError(FULL)
        return real(self, *args, **named)

    monkeypatch.setattr(T5EncoderModel, "forward", forward)
    with pytest.raises(SamplesFailed) as failed:
        ensure("encode_captions")
    assert [p.subject for p in failed.value.problems] == [
        f"caption of {few[0].name}",
        f"caption of {few[2].name}",
    ]
    assert "a 3D emoji" not in str(failed.value)
    assert len(entries(tmp_path, "captions")) == 2


@pytest.mark.parametrize("stage", CACHES)
def test_a_fault_of_ours_in_an_encoder_is_a_traceback(ensure, few, monkeypatch, stage):
    from diffusers import AutoencoderKL
    from transformers import T5EncoderModel

    def broken(self, *args, **named):
        raise TypeError("a bug")

    monkeypatch.setattr(AutoencoderKL, "encode", broken)
    monkeypatch.setattr(T5EncoderModel, "forward", broken)
    with pytest.raises(TypeError, match="a bug"):
        ensure(stage)


def test_a_picture_whose_encoding_overflows_is_named_and_nothing_is_written_for_it(
    ensure, few, monkeypatch, tmp_path
):
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution as Gaussian

    made, calls = Gaussian.__init__, []

    def overflowing(self, parameters, *args, **named):
        calls.append(1)
        made(self, parameters * (float("inf") if len(calls) == 2 else 1), *args, **named)

    monkeypatch.setattr(Gaussian, "__init__", overflowing)
    with pytest.raises(SamplesFailed, match="not finite") as failed:
        ensure("build_latent_cache")
    (problem,) = failed.value.problems
    assert Path(problem.subject) in few
    assert len(entries(tmp_path, "latents")) == 2
