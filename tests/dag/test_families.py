"""Every family over the whole graph on its tiny base, in bfloat16 as on a GPU; what only one has."""

import json
import math
import shutil
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
from PIL import Image

from lib import families

NAMES = families.names()
LONG = "a watercolor painting of a cat with a hat, in the snow at night, " * 8
PICTURES = {  # width and height, caption
    "wide-1": ((250, 70), ""),
    "wide-2": ((220, 70), LONG),
    "wide-3": ((240, 80), "a red circle"),
    "tall-1": ((70, 250), "a dog on the grass"),
    "tall-2": ((64, 200), LONG + "two"),
    "square": ((96, 96), "a drawing in flat style"),
}
LENGTH = 40  # text tokens; the long captions have more
STEPS = 4
SMALL = (
    "family.base=tiny",
    "precision=bf16",
    "buckets.max_aspect=3",
    f"captions.max_length={LENGTH}",
    "encode.batch_size=3",  # so that captions are padded
    "adapter.rank=2",
    "optimizer.lr=1e-2",
    "lr_schedule=constant",
    f"trainer.max_steps={STEPS}",
    "trainer.batch_size=2",
    "trainer.save_every=2",
    "trainer.caption_dropout=0.3",
    "validation.fraction=0.2",
    "validation.num_draws=2",
    "sample.steps=2",
    "tracker=none",
)
# Their text has no part in the last block's prediction.
IDLE = {
    "qwen_image": {
        "transformer_blocks.1.attn.add_q_proj",
        "transformer_blocks.1.attn.to_add_out",
    }
}


def side_of(family):
    """The bucket square's side: two steps of SDXL's buckets, four of the others'."""
    return 128 if family == "sdxl" else 64


@cache
def composed(root, family, *overrides, store=None):
    """A configuration of the small run; composing takes longer than a stage that is a hit."""
    from stages.composing import compose

    side = side_of(family)
    small = [
        f"family={family}",
        f"dataset.root={root}/data",
        f"paths.store={store or root}/store",
        f"paths.outputs={store or root}/outputs",
        f"buckets.resolution={side}",
        f"buckets.step={64 if family == 'sdxl' else 16}",
        *SMALL,
        *overrides,
    ]
    return compose(list({text.split("=")[0]: text for text in small}.values()))


@dataclass(frozen=True)
class Made:
    """What ensuring a stage left and told."""

    manifest: object
    events: list

    def told(self, name):
        """A metric by step."""
        metrics = [e.data for e in self.events if e.kind == "metric" and name in e.data]
        return {data["step"]: data[name] for data in metrics}

    @property
    def statuses(self):
        return {e.stage: e.data["status"] for e in self.events if e.kind == "phase"}

    @property
    def made(self):
        """How many entries each cache stage made; a hit made none."""
        return {e.stage: e.data["made"] for e in self.events if "made" in e.data}


def ensure(root, stage, family, *overrides, store=None):
    from lib.events import Events
    from lib.pipeline import graph

    config, events = composed(root, family, *overrides, store=store), []
    return Made(graph.ensure(stage, config, Events(sinks=(events.append,))), events)


def results(manifest, store):
    """The bytes of a run's adapter and of its average."""
    from lib import runs

    folder = runs.completed(store / "store", manifest.key)
    return [(folder / name).read_bytes() for name in (runs.ADAPTER_FILE, runs.EMA_FILE)]


def tensors_of(data):
    from lib.records import from_stored
    from lib.tensors import decode

    return from_stored(decode(data).tensors)


@pytest.fixture(scope="module", autouse=True)
def undrawn_runs():
    """No contact sheet and no loss plot for the runs that several tests share."""
    from lib.pipeline import train

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "_show_data", lambda *_: None)
        patch.setattr(train, "_show_losses", lambda *_: None)
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A data set, and the store that all families share."""
    folder = tmp_path_factory.mktemp("families")
    (folder / "data").mkdir()
    across = np.arange(256, dtype=np.uint8)[None, :].repeat(256, axis=0)
    for place, (name, (size, caption)) in enumerate(PICTURES.items()):
        blue = np.full_like(across, 20 * place)
        picture = Image.fromarray(np.dstack([across, across.T, blue])).resize(size)
        picture.save(folder / "data" / f"{name}.png")
        (folder / "data" / f"{name}.txt").write_text(caption)
    return folder


# The others are in the table of golden losses, and their parts in tests/unit/families.
HERE = ("sdxl",)


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=() if n in HERE else pytest.mark.nightly) for n in NAMES],
)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def drawn(root, family):
    """The whole graph of a family, from nothing."""
    return ensure(root, "sample", family)


@pytest.fixture
def trained(root, family, drawn):
    """Its training."""
    return ensure(root, "train", family)


def test_every_tensor_of_an_adapter_that_can_learn_moves(root, family, trained):
    plain, average = (tensors_of(data) for data in results(trained.manifest, root))
    for state in (plain, average):
        still = {name.removesuffix(".lora_B.weight") for name, t in state.items() if not t.any()}
        assert still == IDLE.get(family, set())
    assert any((plain[name] != average[name]).any() for name in plain)


def test_every_loss_is_a_number_the_held_out_one_too(drawn):
    assert list(drawn.told("loss")) == list(range(1, STEPS + 1))
    for name in ("held_out_loss", "held_out_loss_ema"):
        assert list(drawn.told(name)) == [0, STEPS]
    told = [value for name in ("loss", "held_out_loss") for value in drawn.told(name).values()]
    assert all(math.isfinite(loss) and 0 < loss < 10 for loss in told)
    first, last = drawn.told("held_out_loss").values()
    assert first != last


def test_wide_and_tall_pictures_train_and_are_held_out(root, family):
    prepared = ensure(root, "prepare_dataset", family).manifest.payload
    bucket_of = {image["image_key"]: image["bucket"] for image in prepared["images"]}
    for part in ("samples", "held_out"):
        buckets = [bucket_of[sample["image_key"]] for sample in prepared[part]]
        assert min(h - w for h, w in buckets) < 0 < max(h - w for h, w in buckets)


def test_a_caption_record_is_padded_to_the_maximum_or_holds_its_own_tokens(root, family):
    from lib.keys import digest
    from lib.store import Store

    store, facts = Store(root / "store"), families.get(family).FACTS
    texts = ensure(root, "encode_captions", family).manifest.payload["texts"]
    empty, long = (store.get("captions", texts[digest(t)]).tensors for t in ("", LONG.strip()))
    lengths = [record["text_embeds"].shape[0] for record in (empty, long)]
    assert lengths[1] == LENGTH
    assert (lengths[0] < LENGTH) == (facts.caption_rule["positions"] == "valid")


def test_the_grid_shows_base_adapter_average_and_the_held_out_picture(family, drawn):
    from lib.pictures import LINE, MARGIN

    side = side_of(family) if side_of(family) > 96 else 2 * side_of(family)
    with Image.open(drawn.manifest.payload["files"]["grid"]["file"]) as image:
        sheet = np.asarray(image).astype(int)
    assert sheet.shape[1] == MARGIN + 4 * (side + MARGIN)
    top = LINE + MARGIN
    columns = [sheet[top:, MARGIN + (side + MARGIN) * n :][:side, :side] for n in range(4)]
    base, adapter, average, target = columns
    assert not np.array_equal(base, adapter)
    assert not np.array_equal(adapter, average)
    assert target.std() > 0
    assert all(column.std() > 0 for column in columns)


def test_a_second_run_is_a_hit_that_loads_no_model(root, family, drawn, monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("a model was loaded")

    for load in ("load_text_encoders", "load_autoencoder", "load_denoiser"):
        monkeypatch.setattr(families.get(family), load, refuse)
    again = ensure(root, "sample", family)
    assert set(again.statuses.values()) == {"hit"}
    assert again.manifest.key == drawn.manifest.key


def test_families_with_one_autoencoder_share_its_latents(root, monkeypatch):
    crops = ("latents.variants=2", "buckets.max_aspect=2")
    first = ensure(root, "build_latent_cache", "qwen_image", *crops)
    ensure(root, "prepare_dataset", "krea2", *crops)  # builds its base
    loads = families.get("krea2")
    monkeypatch.setattr(loads, "load_autoencoder", lambda *_, **__: pytest.fail("it is loaded"))
    second = ensure(root, "build_latent_cache", "krea2", *crops)
    assert first.manifest.entries == second.manifest.entries
    assert first.made["build_latent_cache"] > 0


class Clean:
    """A noise process that adds no noise, so that a batch shows its latents."""

    def __init__(self, process):
        self._process = process

    def __getattr__(self, name):
        return getattr(self._process, name)

    def add_noise(self, latents, noise, level):
        return latents


def flipped_crop(root, name, cut):
    """The picture as it is resized and, if the cut says so, mirrored, before any crop."""
    from lib.images import Geometry, render

    whole = {"top": 0, "left": 0, "height": cut["resized_height"], "width": cut["resized_width"]}
    with Image.open(root / "data" / name) as picture:
        return [render(picture, Geometry(**{**cut, **part})) for part in (whole, {})]


def test_time_ids_tell_the_picture_and_the_cut_that_is_in_the_batch(root, monkeypatch):
    """Checked on pixels: the told crop of the mirrored picture is what was encoded."""
    from lib.pipeline import graph
    from lib.store import Store
    from lib.training.session import make_assembler

    flips = ("latents.variants=3", "latents.random_flip=true")
    config = composed(root, "sdxl", *flips)
    needs = ("prepare_dataset", "encode_captions", "build_latent_cache")
    upstream = {stage: ensure(root, stage, "sdxl", *flips).manifest for stage in needs}
    prepared, opened = upstream["prepare_dataset"].payload, graph.open_inputs(config)
    family, store = opened.family, Store(root / "store")
    monkeypatch.setattr(family, "FACTS", replace(family.FACTS, draws_mode=True))
    assembler = make_assembler(config, family, opened.base, upstream=upstream, store=store)
    assembler = replace(assembler, process=Clean(assembler.process))
    images = {image["image_key"]: image for image in prepared["images"]}
    keys = {sample["name"]: sample["image_key"] for sample in prepared["samples"]}
    variants, constants = (
        upstream["build_latent_cache"].payload[name] for name in ("variants", "constants")
    )
    seen = set()
    for group in assembler.plan.groups(0, 30):
        for batch in assembler.step(group).batches:
            rows = zip(batch.names, batch.noisy, batch.conditioning["time_ids"], strict=True)
            for name, latents, ids in rows:
                image, entries = images[keys[name]], variants[keys[name]]
                means = [tensors_of_entry(store, key)["mean"][None] for key in entries]
                normal = [family.normalise(mean, constants)[0] for mean in means]
                (place,) = (n for n, one in enumerate(normal) if one.equal(latents))
                cut = image["variants"][place]
                whole, rendered = flipped_crop(root, name, cut)
                height, width, top, left, *bucket = ids.int().tolist()
                told = whole[:, top : top + bucket[0], left : left + bucket[1]]
                assert np.array_equal(told, rendered)
                assert (width, height) == PICTURES[name.removesuffix(".png")][0]
                assert bucket == image["bucket"] == [8 * side for side in latents.shape[1:]]
                seen.add((cut["flip"], left > 0, place > 0))
    assert {(True, True, True), (False, True, True), (False, True, False)} <= seen


def tensors_of_entry(store, key):
    from lib.records import from_stored

    return from_stored(store.get("latents", key).tensors)


def test_a_velocity_base_is_another_run_on_the_same_records_and_is_drawn_as_one(root, tmp_path):
    from lib.pipeline import graph

    noise = ensure(root, "sample", "sdxl")
    (tiny,) = (root / "store" / "bases").glob("sdxl-*")
    folder = shutil.copytree(tiny, tmp_path / "velocity")
    path = folder / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"prediction_type": "v_prediction"}))
    overrides = (f"family.base={folder}", "captions.dtype=fp32")
    planned = {plan.stage: plan for plan in graph.plan("train", composed(root, "sdxl", *overrides))}
    assert planned["encode_captions"].hit
    assert planned["build_latent_cache"].hit
    trained = ensure(root, "train", "sdxl").manifest
    assert planned["train"].manifest.key != trained.key
    short = ("trainer.max_steps=1", "trainer.ema_decay=0")
    velocity = ensure(root, "sample", "sdxl", *overrides, *short)
    other = ensure(root, "train", "sdxl", *overrides, *short).manifest
    # Before the first step both predict the same: it is the target that differs.
    first = [held_out_losses(root, run)["0"]["held_out_loss"] for run in (other, trained)]
    assert first[0] != first[1]
    assert not np.array_equal(base_column(noise), base_column(velocity))


def base_column(made):
    """The first column of a grid of SDXL's, where no adapter is."""
    with Image.open(made.manifest.payload["files"]["grid"]["file"]) as sheet:
        return np.asarray(sheet.crop((0, 0, side_of("sdxl"), sheet.height)))


OBJECTIVES = {
    "sdxl": ("objective=min_snr", "objective.snr_gamma=0.1"),  # which all but the noisiest exceed
    "z_image": ("objective=bell",),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_another_objective_is_another_adapter_measured_alike(root, name):
    plain = ensure(root, "train", name)
    weighted = ensure(root, "train", name, *OBJECTIVES[name])
    assert weighted.made == {}
    states = [tensors_of(results(run.manifest, root)[0]) for run in (plain, weighted)]
    assert any((states[0][tensor] != states[1][tensor]).any() for tensor in states[0])
    before, after = (held_out_losses(root, run.manifest) for run in (plain, weighted))
    assert before["0"] == after["0"]
    assert before[str(STEPS)] != after[str(STEPS)]


def held_out_losses(root, manifest):
    from lib import runs

    folder = runs.completed(root / "store", manifest.key)
    return json.loads((folder / "validation.json").read_text())


class Killed(Exception):
    """The end of a process, as far as a step sees it."""


@pytest.mark.parametrize("name", ["sdxl", "qwen_image"])
def test_a_run_that_was_stopped_ends_as_the_unbroken_one(root, name, tmp_path, monkeypatch):
    from lib.training import step

    whole = ensure(root, "train", name)
    shutil.copytree(root / "store", tmp_path / "store", ignore=shutil.ignore_patterns("runs"))
    whole_launch = step.Trainer.launch

    def dying(self, group, *, rate):
        if group.step == STEPS - 1:
            raise Killed
        return whole_launch(self, group, rate=rate)

    with monkeypatch.context() as patch:
        patch.setattr(step.Trainer, "launch", dying)
        with pytest.raises(Killed):
            ensure(root, "train", name, store=tmp_path)
    resumed = ensure(root, "train", name, store=tmp_path)
    assert list(resumed.told("loss")) == [3, 4]  # the last checkpoint before was that of step 2
    assert resumed.made == {}
    assert results(resumed.manifest, tmp_path) == results(whole.manifest, root)
