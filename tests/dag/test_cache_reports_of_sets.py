"""More public reports about caches: several samples, processes, and what lies about."""

import os
import shutil
import weakref
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from lib.keys import digest
from lib.store import Damaged, Store
from lib.tensors import Tensor
from lib.upkeep import gc, verify


def pictures(data, *named):
    """Only these pictures, each with its name as caption: (name, size, colour)."""
    for path in data.iterdir():
        path.unlink()
    for name, size, colour in named:
        Image.new("RGB", size, colour).save(data / f"{name}.png")
        (data / f"{name}.txt").write_text(name, encoding="utf-8")


def test_two_jobs_at_once_on_one_store_both_finish_with_whole_entries(
    configure, data, tmp_path, monkeypatch
):
    """The second does all its work while the first is about to name its first entry.

    It heeds no claim, since the first waits for it: entries are right without any.
    """
    from lib import claims, files
    from lib.events import Events
    from lib.pipeline import graph

    pictures(data, *((name, (64, 64), name) for name in ("red", "blue", "lime")))
    config, real, second = configure(), os.link, []

    def link(source, target):
        if not second:
            child = os.fork()
            second.append(child)
            if child == 0:
                code = 1
                try:
                    monkeypatch.setattr(claims.Claims, "_take", lambda *_: True)
                    graph.ensure("build_latent_cache", config, Events())
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitpid(child, 0)[1] == 0
        real(source, target)

    monkeypatch.setattr(os, "link", link)
    made = graph.ensure("build_latent_cache", config, Events())
    assert second
    store = Store(tmp_path / "store")
    assert store.complete(made) == ()
    report = verify(store, threads=2, progress=lambda done, total: None)
    assert (report.damaged, report.missing, report.stray) == ((), (), ())
    assert not list(store.root.rglob(f"{files.TEMP_PREFIX}*"))


def test_a_reader_at_any_moment_of_a_write_gets_a_whole_entry_or_none(tmp_path):
    from tests.reliability import trials
    from tests.reliability.crashes import Seam

    store, seen = Store(tmp_path / "store"), set()

    def read(_operation):
        try:
            found = store.get("latents", trials.KEY)
        except Damaged as damage:
            seen.add(type(damage.__cause__).__name__)
        else:
            seen.add(found.tensors == trials.tensors(1))

    with Seam(store.root, before=read, after=read):
        trials.put(store, trials.KEY, 1)
    assert seen == {"FileNotFoundError", True}


def test_strangers_in_the_store_are_listed_and_never_fatal(ensure, data, tmp_path, counted):
    pictures(data, ("red", (64, 64), "red"))
    first = ensure("build_latent_cache")
    root = tmp_path / "store"
    (entry,) = root.glob("latents/*/*")
    old = root / "latents" / "ab" / f"{'0' * 62}.safetensors"
    strays = [root / "latents" / "ab" / "junk.safetensors", root / "latents" / "junk.safetensors"]
    strays += [root / "manifests" / "build_latent_cache" / "junk.json"]
    for path in (old, *strays, root / "junk.safetensors"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b'\x18\0\0\0\0\0\0\0{"__metadata__":{}}     ')
    counted["latents"] = 0
    assert ensure("build_latent_cache") == first
    assert counted["latents"] == 0
    report = verify(Store(root), threads=2, progress=lambda done, total: None)
    assert [damage.path for damage in report.damaged] == [old]
    assert set(report.stray) == set(strays)
    gc(Store(root), keep_days=14, now=4e9, grace_seconds=0, dry_run=False)
    assert not old.exists()
    assert not entry.exists()
    assert all(path.exists() for path in strays)


def test_a_picture_clamped_to_its_bucket_trains_in_the_shape_it_was_stored_in(
    ensure, data, tmp_path
):
    pictures(data, ("wide", (200, 20), "red"), ("tall", (20, 200), "blue"), ("x", (64, 64), "lime"))
    prepared = ensure("prepare_dataset").payload
    made = ensure("build_latent_cache").payload
    store, shapes = Store(tmp_path / "store"), set()
    for image in prepared["images"]:
        (key,) = made["variants"][image["image_key"]]
        shape = store.get("latents", key).tensors["mean"].shape
        assert shape[1:] == tuple(side // 8 for side in image["bucket"])
        shapes.add(shape)
    assert len(shapes) == 3
    ensure("train", "trainer.max_steps=2", "trainer.batch_size=1", "trainer.save_every=2")


def test_every_row_of_three_shuffled_epochs_has_its_own_picture_and_caption(encoded, data):
    from lib.families import flux
    from lib.training.session import make_assembler

    colours = ("red", "lime", "blue", "white")
    pictures(data, *((name, (64, 64), name) for name in colours))
    config, opened, upstream = encoded()
    assembler = make_assembler(config, flux, opened.base, upstream=upstream, store=opened.store)
    images = {s["name"]: s["image_key"] for s in upstream["prepare_dataset"].payload["samples"]}
    texts, made = (upstream[s].payload for s in ("encode_captions", "build_latent_cache"))
    rows = 0
    for group in assembler.plan.groups(0, 3 * assembler.plan.steps_per_epoch):
        for batch in assembler.step(group).batches:
            sigma = batch.level.reshape(-1, 1, 1, 1)
            latents = batch.noisy - sigma * batch.target
            for row, name in enumerate(batch.names):
                (key,) = made["variants"][images[name]]
                record = assembler.records("latents", key)
                raw = flux.denormalise(latents[row : row + 1], made["constants"])[0]
                assert ((raw - record["mean"]).abs() < 8 * record["std"] + 1e-3).all(), name
                text = assembler.records("captions", texts["texts"][digest(Path(name).stem)])
                assert torch.equal(batch.conditioning["text_embeds"][row], text["text_embeds"])
                rows += 1
    assert rows == 12


def test_every_picture_and_text_is_encoded_though_the_last_batch_is_not_full(
    ensure, data, counted, tmp_path
):
    pictures(data, *((name, (64, 64), name) for name in ("red", "lime", "blue", "white", "gold")))
    made = [ensure(s, "encode.batch_size=2") for s in ("encode_captions", "build_latent_cache")]
    assert [len(one.entries["train"]) for one in made] == [5, 5]
    assert counted == {"captions": 6, "latents": 5}
    assert all(Store(tmp_path / "store").complete(one) == () for one in made)


def test_memory_holds_the_budget_while_many_entries_are_read(tmp_path, monkeypatch):
    from lib.batches import Records

    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    store = Store(tmp_path / "store")
    data = np.zeros(256, "<f4").tobytes()
    for number in range(500):
        tensors = {"mean": Tensor("F32", (256,), data)}
        store.put("latents", digest(number), tensors, metadata={}, inputs={})
    records, live = Records(store, max_bytes=10 * len(data)), weakref.WeakValueDictionary()
    for epoch in range(2):
        for number in range(500):
            # Told by where it lies: what lives has a place of its own.
            tensor = records("latents", digest(number))["mean"]
            live[id(tensor)] = tensor
            del tensor
        assert len(live) == 10, epoch


def test_repeats_and_copies_are_encoded_once(ensure, data, counted):
    pictures(data, *((name, (64, 80), name) for name in ("red", "lime", "blue")))
    for name in ("red", "lime", "blue"):
        for copy in range(4):
            for suffix in (".png", ".txt"):
                shutil.copy(data / f"{name}{suffix}", data / f"{name}-{copy}{suffix}")
    made = ensure("build_latent_cache")
    assert counted["latents"] == 3
    counted["latents"] = 0
    more = ensure("build_latent_cache", "latents.variants=2", "latents.random_flip=true")
    assert counted["latents"] == len(more.entries["train"]) - len(made.entries["train"]) <= 3


def test_an_entry_lost_before_the_manifest_is_made_again_and_not_missed_later(
    ensure, data, tmp_path, monkeypatch, counted
):
    """Whatever was to make it, the union of all work is looked at before anybody relies on it."""
    from lib.pipeline import build_latent_cache

    pictures(data, *((f"p{n}", (64, 64), (n, n, n)) for n in range(7)))
    real, lost = build_latent_cache._encode, []

    def forgetting(*args):
        real(*args)
        if not lost:
            lost.append(sorted((tmp_path / "store" / "latents").glob("*/*"))[3])
            lost[0].unlink()

    monkeypatch.setattr(build_latent_cache, "_encode", forgetting)
    made = ensure("build_latent_cache")
    assert counted["latents"] == 8
    assert lost[0].exists()
    assert len(made.entries["train"]) == 7
    assert Store(tmp_path / "store").complete(made) == ()
