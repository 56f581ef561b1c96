"""What DVC compares: pointers, and the settings by which it tells what an edit concerns."""

import shutil
import time
from dataclasses import replace

import pytest


@pytest.mark.nightly
def test_pointers_are_the_same_bytes_in_another_place(ensure, configure, tmp_path):
    from lib.events import Events
    from lib.pipeline import graph, pointers
    from lib.store import Store

    found = []
    for name in ("here", "there"):
        config = configure(root=tmp_path / name)
        ensure("sample", root=tmp_path / name)
        for stage in graph.STAGES:
            (manifest,) = Store(tmp_path / name / "store").manifests(stage)
            pointers.publish(manifest, config, Events())
        files = sorted((tmp_path / name / "outputs" / "dvc").glob("*.*"))
        found.append({path.name: path.read_bytes() for path in files})
    assert found[0] == found[1]
    assert {f"{stage}.json" for stage in graph.STAGES} < found[0].keys()
    assert not [name for name, data in found[0].items() if str(tmp_path).encode() in data]


def test_gc_keeps_what_pointers_point_to_for_as_long_as_they_are_there(ensure, configure, tmp_path):
    from lib.events import Events
    from lib.pipeline import pointers
    from lib.store import Store
    from lib.upkeep import gc

    def collect():
        gc(store, keep_days=0, now=time.time() + 60, grace_seconds=0, dry_run=False)

    store, manifest = Store(tmp_path / "store"), ensure("build_latent_cache")
    pointers.publish(manifest, configure(), Events())
    collect()
    assert store.manifest(manifest.stage, manifest.key) == manifest
    assert store.complete(manifest) == ()
    shutil.rmtree(tmp_path / "outputs" / "dvc")
    collect()
    assert store.manifest(manifest.stage, manifest.key) is None
    assert len(store.complete(manifest)) == len(manifest.entries["train"])


def test_a_stage_is_refused_when_its_settings_are_not_those_that_dvc_saw(configure):
    from lib.errors import StateRefused
    from lib.pipeline import pointers

    with pytest.raises(StateRefused, match="dvc repro"):
        pointers.check_settings("train", configure())
    pointers.write_settings(configure())
    pointers.check_settings("train", configure("trainer.save_every=1"))
    pointers.check_settings("encode_captions", configure("optimizer.lr=1"))
    with pytest.raises(StateRefused, match=r"train\.json"):
        pointers.check_settings("train", configure("optimizer.lr=1"))


OTHERS = {
    "captions.dtype": "bf16",
    "latents.dtype": "bf16",
    "precision.mode": "bf16",
    "export.format": "another",
    "export.dtype": "bf16",
    "timesteps.density": "uniform",
    "timesteps.shift_by": "tokens",
    "optimizer.name": "another",
    "lr_schedule.name": "cosine",
    "trainer.gradient_checkpointing": "always",
    "trainer.compile": "never",
    "trainer.cuda_graphs": "never",
    "trainer.attention": "flash",
    "sample.negative_prompt": "blurred",
    "validation.fraction": 0.5,
    "buckets.policy": "no_upscale",
    "dataset.background": "#102030",
}


def changed(config, setting: str):
    """The configuration with another value of one setting, as it would be without any rule."""
    from lib.schema import value_of

    *groups, name = setting.split(".")
    value = value_of(config, setting)
    if setting in OTHERS:
        other = OTHERS[setting]
    elif isinstance(value, bool):
        other = not value
    elif isinstance(value, list):
        other = [*value, "more"]
    elif isinstance(value, dict):
        other = {**value, "to_q": 2}
    else:
        other = value * 2 if value else type(value)(1)
    node = replace(value_of(config, ".".join(groups)) if groups else config, **{name: other})
    return replace(config, **{groups[0]: node}) if groups else node


def test_no_setting_enters_a_key_without_its_stage_or_one_upstream_showing_it_to_dvc(
    ensure, configure
):
    """Whatever moves a planned key moves the settings of that stage, or of one before it."""
    from lib.pipeline import graph
    from lib.schema import settings_of

    def seen(config):
        plans = {p.stage: p.manifest for p in graph.plan("sample", config)}
        keys = {stage: manifest and manifest.key for stage, manifest in plans.items()}
        shown = {stage: module.key_settings(config) for stage, (module, _) in graph.STAGES.items()}
        return keys, shown

    config = configure()
    ensure("prepare_dataset")
    keys, shown = seen(config)
    moved = set()
    for setting, value in settings_of(config):
        free_text = isinstance(value, str | None) and setting not in OTHERS
        # A data set without folders of repeats refuses them.
        if free_text or setting.startswith("family.") or setting == "dataset.folder_repeats":
            continue
        new_keys, new_shown = seen(changed(config, setting))
        for stage in graph.STAGES:
            if new_keys[stage] != keys[stage]:
                moved.add(setting)
                assert any(new_shown[s] != shown[s] for s in graph.order(stage)), (setting, stage)
    assert {"optimizer.lr", "buckets.step", "captions.max_length", "export.dtype"} <= moved
    levers = {"trainer.compile", "trainer.cuda_graphs", "trainer.attention"}
    levers |= {"trainer.gradient_checkpointing"}
    assert levers <= OTHERS.keys()
    levers |= {"trainer.cudnn_benchmark", "trainer.deterministic", "precision.redecide"}
    assert not {"trainer.save_every", "encode.batch_size", "latents.max_bytes", *levers} & moved
