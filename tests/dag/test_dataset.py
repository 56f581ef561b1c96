"""The data set's options and reports, seen from the stages that follow."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

CHECKOUT = Path(__file__).resolve().parents[2]
NAME, CAPTION = "caf\u00e9 \u65e5\u672c \U0001f600", "\u732b a cat"


def photo(width=96, height=64):
    """A picture without symmetry."""
    down, across = np.mgrid[0:height, 0:width]
    levels = np.stack([down * 3, across * 2, (down + across) % 256], axis=-1)
    return Image.fromarray(levels.astype(np.uint8))


def saved(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def only(folder, files):
    """The folder with these files and no others."""
    for path in folder.iterdir():
        path.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def stored(ensure, tmp_path, *overrides):
    """The prepared pictures by name, each with its latents of the first variant."""
    from lib.store import Store
    from lib.tensors import Tensor

    prepared = ensure("prepare_dataset", *overrides).payload
    latents = ensure("build_latent_cache", *overrides).payload["variants"]
    images = {image["image_key"]: image for image in prepared["images"]}
    found = {}
    for sample in prepared["samples"]:
        key = sample["image_key"]
        entry = Store(tmp_path / "store").get("latents", latents[key][0])
        mean: Tensor = entry.tensors["mean"]
        found[sample["name"]] = (tuple(images[key]["bucket"]), mean.shape, mean.data)
    return found


def test_all_orientations_of_a_picture_have_one_bucket_and_one_latent(ensure, data, tmp_path):
    undo = {1: None, 2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}
    files = {}
    for orientation, turn in undo.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        turned = photo() if turn is None else photo().transpose(Image.Transpose(turn))
        files[f"{orientation}.png"] = saved(turned, exif=exif)
    only(data, files)
    found = stored(ensure, tmp_path, "dataset.instance_prompt=x")
    assert len(set(found.values())) == 1
    (bucket, shape, _), *_ = found.values()
    assert bucket == (shape[-2] * 8, shape[-1] * 8)
    assert bucket[1] > bucket[0]


def test_another_background_encodes_the_transparent_pictures_again(ensure, data, counted):
    clear = Image.new("RGBA", (64, 64), (255, 0, 0, 0))
    opaque = Image.new("RGBA", (64, 64), (0, 0, 255, 255))
    only(data, {"a.png": saved(clear), "b.png": saved(photo()), "c.png": saved(opaque)})
    prompt = "dataset.instance_prompt=x"
    before = ensure("build_latent_cache", prompt).payload["variants"]
    assert counted["latents"] == 3
    after = ensure("build_latent_cache", prompt, 'dataset.background="#102030"').payload["variants"]
    assert counted["latents"] == 4
    assert len([key for key in before if before[key] != after[key]]) == 1


def test_the_hidden_colour_of_a_transparent_picture_is_not_what_is_encoded(ensure, data, tmp_path):
    clear = Image.new("RGBA", (64, 64), (255, 0, 0, 0))
    plain = Image.new("RGB", (64, 64), (16, 32, 48))
    only(data, {"a.png": saved(clear), "b.png": saved(plain)})
    overrides = ("dataset.instance_prompt=x", 'dataset.background="#102030"')
    found = stored(ensure, tmp_path, *overrides)
    assert found["a.png"] == found["b.png"]


def test_two_pictures_of_one_stem_have_their_own_latents(ensure, data, tmp_path):
    red, blue = (Image.new("RGB", (64, 64), colour) for colour in ("red", "blue"))
    only(data, {"a.jpg": saved(red, "JPEG"), "a.png": saved(blue), "a.txt": "both"})
    found = stored(ensure, tmp_path)
    assert found["a.jpg"] != found["a.png"]


def test_every_caption_of_a_picture_is_encoded_and_trains(ensure, data, counted, adapter_of):
    captions = ["a cat", "a red cat", "a small cat"]
    row = json.dumps({"file_name": "a.png", "text": captions})
    only(data, {"a.png": saved(photo()), "metadata.jsonl": row})
    made = ensure("train")
    assert counted["captions"] == 4  # and the unconditional record
    only(data, {"a.png": saved(photo()), "a.txt": captions[0]})
    assert adapter_of(ensure("train")) != adapter_of(made)


def test_the_held_out_loss_takes_the_first_caption(ensure, data, encoded):
    from lib.family import process_of
    from lib.keys import digest
    from lib.training.watching import make_held_out

    names = [path.name for path in data.glob("*.png")]
    for sidecar in data.glob("*.txt"):
        sidecar.unlink()
    rows = [{"file_name": name, "text": [f"{name} one", f"{name} two"]} for name in names]
    (data / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    overrides = ("validation.fraction=0.4",)
    config, opened, upstream = encoded(*overrides)
    process = process_of(opened.family, opened.base)
    held_out = make_held_out(config, opened.family, process, upstream, opened.store)
    texts = upstream["encode_captions"].payload["texts"]
    assert held_out.draws
    for draw in held_out.draws:
        assert draw.slot.captions == (texts[digest(f"{draw.slot.name} one")],)
    ensure("train", *overrides)


def test_repeats_and_a_trigger_reach_the_training(ensure, data):
    folder = data / "3_fox"
    folder.mkdir()
    (data / "fox.png").rename(folder / "fox.png")
    overrides = ("dataset.folder_repeats=true", "dataset.trigger=sks")
    prepared = ensure("prepare_dataset", *overrides).payload
    repeats = {sample["name"]: sample["repeats"] for sample in prepared["samples"]}
    assert repeats.pop("3_fox/fox.png") == 3
    assert set(repeats.values()) == {1}
    assert sum(bucket["draws"] for bucket in prepared["buckets"]) == 10
    assert all(caption.startswith("sks, ") for caption in prepared["captions"])
    assert "sks, fox" in prepared["captions"]


def test_found_is_kept_and_every_kind_of_drop_stored_and_told(ensure, data, seen):
    bad = {
        "cut.png": saved(photo())[:100],
        "empty.jpg": b"",
        "small.png": saved(photo(16, 16)),
        "long.png": saved(photo(800, 9)),
        "anim.webp": saved(photo(), "WEBP", save_all=True, append_images=[photo(96, 64).rotate(9)]),
        "old.bmp": b"BM",
    }
    for name, content in bad.items():
        (data / name).write_bytes(content)
        (data / name).with_suffix(".txt").write_text(name)
    (data / "lone.png").write_bytes(saved(photo()))
    report = ensure("prepare_dataset", "dataset.damaged=drop", "dataset.min_side=17").payload[
        "report"
    ]
    dropped = {name: kind for kind, names in report["dropped"].items() for name in names}
    assert dropped.keys() == {*bad, "lone.png"}
    assert (report["found"], report["kept"]) == (8 + len(dropped), 8)
    assert list(report["dropped"]["no caption"]) == ["lone.png"]
    told = "\n".join(event.data["text"] for event in seen if event.kind == "warning")
    assert told.startswith("15 pictures found = 8 kept + ")
    assert all(name in told for name in dropped)


def test_of_many_names_twenty_are_told_and_all_are_stored(ensure, data, seen):
    names = [f"{number:02}.png" for number in range(25)]
    for name in names:
        (data / name).write_bytes(saved(photo(64, 64)))
    report = ensure("prepare_dataset").payload["report"]
    assert list(report["dropped"]["no caption"]) == names
    (told,) = [e.data["text"] for e in seen if e.kind == "warning" and "dropped" in e.data["text"]]
    assert told.endswith("19.png and 5 more")


def test_when_everything_is_dropped_the_report_says_what(ensure):
    from lib.errors import InputRefused

    with pytest.raises(InputRefused, match="no picture is left of 8: 8 smaller than"):
        ensure("prepare_dataset", "dataset.min_side=8192")


def test_all_that_is_wrong_is_one_report_before_any_model_loads(ensure, data, counted):
    from lib.errors import DarkroomError

    (data / "fox.txt").write_bytes(b"man\x92s hat")
    whole = (data / "pizza.png").read_bytes()
    (data / "pizza.png").write_bytes(whole[:400])
    (data / "key.png").write_bytes(whole[:700])
    with pytest.raises(DarkroomError) as caught:
        ensure("train")
    assert [problem.subject for problem in caught.value.problems] == [
        "fox.txt",
        "key.png",
        "pizza.png",
    ]
    (data / "fox.txt").write_text("mended")
    with pytest.raises(DarkroomError) as caught:
        ensure("train")
    assert [problem.subject for problem in caught.value.problems] == ["key.png", "pizza.png"]
    assert caught.value.exit_code == 3
    assert counted == {"captions": 0, "latents": 0}


def test_litter_changes_neither_the_samples_nor_a_key(ensure, data):
    before = ensure("prepare_dataset").payload["keys"]
    for name in ("Thumbs.db", "desktop.ini", ".DS_Store", "notes.md", "fox.png:Zone.Identifier"):
        (data / name).write_text("junk")
    assert ensure("prepare_dataset").payload["keys"] == before
    os.utime(data / ".DS_Store")
    assert ensure("prepare_dataset").payload["keys"] == before


def test_the_steps_of_an_epoch_count_pictures_of_every_case(ensure, data, planned_steps):
    for name, to in (("fox.png", "fox.PNG"), ("fox.txt", "fox.TXT"), ("pizza.png", "pizza.Png")):
        (data / name).rename(data / to)
    assert (
        planned_steps("trainer.max_steps=null", "trainer.num_epochs=1", "trainer.batch_size=1") == 8
    )


@pytest.fixture
def planned_steps(configure):
    def steps(*overrides):
        from lib.pipeline import graph

        return {plan.stage: plan.total for plan in graph.plan("train", configure(*overrides))}[
            "train"
        ]

    return steps


def prepared(settings, data, **variables):
    """The stage in a process of its own, over a name and a caption of several scripts."""
    only(
        data,
        {f"{NAME}.png": saved(photo()), f"{NAME}.txt": CAPTION, f"{NAME} 2.png": saved(photo())},
    )
    inherited = {
        name: value for name, value in os.environ.items() if name[:3] not in ("LC_", "LAN")
    }
    return subprocess.run(
        [sys.executable, "-m", "stages.prepare_dataset", *settings()],
        cwd=CHECKOUT,
        env={**inherited, "LC_ALL": "C", **variables},
        capture_output=True,
    )


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_names_and_captions_of_any_script_pass_any_locale(settings, data, tmp_path, encoding):
    run = prepared(settings, data, PYTHONIOENCODING=encoding)
    assert run.returncode == 0, run.stderr
    assert b"1 pictures dropped, no caption: caf" in run.stderr
    (manifest,) = (tmp_path / "store" / "manifests" / "prepare_dataset").rglob("*.json")
    assert CAPTION in json.dumps(json.loads(manifest.read_bytes()), ensure_ascii=False)


def test_a_python_that_is_told_not_to_use_utf8_says_what_to_set(settings, data):
    run = prepared(settings, data, PYTHONUTF8="0", PYTHONIOENCODING="ascii")
    assert run.returncode == 2
    assert b"set PYTHONUTF8=1" in run.stderr
