import dataclasses
import inspect

import pytest

from lib import recipes
from lib.families import flux
from lib.hub import Base, Component
from lib.images import Geometry
from lib.memory import Memory
from lib.pipeline import train
from lib.pipeline.contract import Inputs
from lib.schema import Config, value_of
from lib.store import EntryRef, Manifest, Store

GEOMETRY = Geometry(80, 64, 8, 0, 64, 64, False)
OTHER_GEOMETRY = {"flip": True, "background": "#ffffff"}
RULE = {"template": None, "positions": "all", "mask": None, "unconditional": "zeros"}
SAMPLE = {
    "name": "a.png",
    "image_key": "aa",
    "width": 3,
    "height": 4,
    "captions": ["x"],
    "repeats": 1,
    "background": None,
}

# recipe -> (its arguments, another value for each of them)
RECIPES = {
    recipes.manifest_key: (
        {"samples": [SAMPLE], "split": None},
        {
            "samples": [[{**SAMPLE, name: "other"}] for name in SAMPLE] + [[], [SAMPLE, SAMPLE]],
            "split": [{"rule": "content-hash/1", "fraction": f} for f in (0.1, 0.2)],
        },
    ),
    recipes.captions_key: ({"texts": ["a", "b"]}, {"texts": [["a"], ["a", "c"], ["ab"]]}),
    recipes.images_key: (
        {"images": [{"image_key": "aa"}], "settings": {"step": 64}},
        {"images": [[], [{"image_key": "ab"}]], "settings": [{"step": 32}, {}]},
    ),
    recipes.component_identity: (
        {"class_name": "A", "config": {"d": 1, "_name": "x"}, "weights": ["1", "2"]},
        {
            "class_name": ["B"],
            "config": [{"d": 2}, {}, {"d": 1, "e": None}],
            "weights": [["1"], ["1", "3"], ["12"]],
        },
    ),
    recipes.caption_key: (
        {
            "text": "a",
            "encoders": {"t5": "1"},
            "rule": RULE,
            "settings": {"layers": [2, 5]},
            "max_length": 77,
            "dtype": "bf16",
        },
        {
            "text": ["b", "", None],
            "encoders": [{"t5": "2"}, {"clip": "1"}],
            "rule": [{**RULE, name: "other"} for name in ("template", "positions", "mask")],
            "settings": [{"layers": [2]}, {"layers": [25]}, {}],
            "max_length": [78],
            "dtype": ["fp32"],
        },
    ),
    recipes.latent_key: (
        {
            "image_key": "aa",
            "geometry": GEOMETRY,
            "autoencoder": "v",
            "dtype": "fp32",
            "routine": "image-4d/1",
        },
        {
            "image_key": ["ab"],
            "geometry": [
                dataclasses.replace(GEOMETRY, **{name: OTHER_GEOMETRY.get(name, 99)})
                for name in (field.name for field in dataclasses.fields(Geometry))
            ],
            "autoencoder": ["w"],
            "dtype": ["bf16"],
            "routine": ["image-4d/2"],
        },
    ),
    recipes.cache_key: (
        {"stage": "encode_captions", "roles": {"train": ["1", "2"]}},
        {
            "stage": ["build_latent_cache"],
            "roles": [{"train": ["1"]}, {"sample": ["1", "2"]}, {"train": ["12"]}],
        },
    ),
    recipes.train_key: (
        {"seed": 0, "settings": {"rank": 4}},
        {"seed": [1], "settings": [{"rank": 5}]},
    ),
    recipes.export_key: (
        {
            "train": "t",
            "adapters": ["adapter"],
            "format": "diffusers",
            "dtype": "fp32",
            "prompts": False,
        },
        {
            "train": ["u"],
            "adapters": [["ema"], ["adapter", "ema"]],
            "format": ["kohya"],
            "dtype": ["bf16"],
            "prompts": [True],
        },
    ),
    recipes.sample_key: (
        {"export": "e", "captions": ["a", "b"]},
        {"export": ["f"], "captions": [["b", "a"], ["a"]]},
    ),
}


def test_every_recipe_and_every_argument_of_it_is_tried_here():
    found = {f for name, f in vars(recipes).items() if name.endswith(("_key", "_identity"))}
    assert found - {recipes.make_key} == set(RECIPES)
    for recipe, (arguments, others) in RECIPES.items():
        assert arguments.keys() == others.keys()
        if recipe not in (recipes.train_key, recipes.sample_key):
            assert inspect.signature(recipe).parameters.keys() == arguments.keys()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_each_input_alone_makes_another_key(recipe):
    arguments, others = RECIPES[recipe]
    keys = [called(recipe, arguments)]
    for name, values in others.items():
        keys += [called(recipe, {**arguments, name: value}) for value in values]
    assert len({key.digest for key in keys}) == len(keys)
    assert called(recipe, dict(reversed(arguments.items()))) == keys[0]


def called(recipe, arguments):
    given = inspect.signature(recipe).bind(**arguments)
    return recipe(*given.args, **given.kwargs)


def test_no_two_recipes_share_a_key():
    keys = {called(recipe, arguments).digest for recipe, (arguments, _) in RECIPES.items()}
    assert len(keys) == len(RECIPES)


@pytest.mark.parametrize("name", ["library_version", "version", "alpha", "depth"])
def test_another_decoding_makes_other_keys_of_pictures(name, monkeypatch):
    touched = (recipes.manifest_key, recipes.images_key, recipes.latent_key)
    before = [called(recipe, RECIPES[recipe][0]).digest for recipe in touched]
    monkeypatch.setitem(recipes.RECIPE, name, "another")
    after = [called(recipe, RECIPES[recipe][0]).digest for recipe in touched]
    assert not set(before) & set(after)


def test_another_resize_filter_makes_other_keys_of_pictures(monkeypatch):
    touched = (recipes.images_key, recipes.latent_key)
    before = [called(recipe, RECIPES[recipe][0]).digest for recipe in touched]
    monkeypatch.setattr(recipes, "resize_filter", "box")
    assert not set(before) & {called(recipe, RECIPES[recipe][0]).digest for recipe in touched}


def test_the_unconditional_record_is_no_caption_and_its_kind_counts():
    def key(text, kind):
        rule = {**RULE, "unconditional": kind}
        return recipes.caption_key(
            text, encoders={}, rule=rule, settings={}, max_length=7, dtype="fp32"
        ).digest

    assert key(None, "zeros") not in {key("", "zeros"), key("zeros", "zeros"), key(None, "empty")}
    assert key("a", "zeros") == key("a", "empty")


def test_underscored_names_and_the_order_of_weights_do_not_matter_to_a_component():
    def identity(config, weights):
        return recipes.component_identity(class_name="A", config=config, weights=weights).digest

    plain = identity({"d": 1}, ["1", "2"])
    assert identity({"_name_or_path": "/home/x", "d": 1, "_v": "9"}, ["2", "1"]) == plain
    assert identity({"d": {"_inner": 1}}, ["1"]) != identity({"d": {}}, ["1"])


def test_a_cache_key_knows_sets_of_entries():
    one = recipes.cache_key("latents", {"train": ["2", "1", "1"], "val": []})
    assert one == recipes.cache_key("latents", {"val": [], "train": ["1", "2"]})


class FixedBase(Base):
    weights = "w"

    def identity(self, name):
        return f"{name}-{self.weights}"

    def component(self, name):
        return Component("AScheduler", config={}, weights={})


def upstream(**changes):
    what = {"manifest": "m", "train": "c1", "unconditional": "u1", "sample": "s1", "latents": "l1"}
    what |= changes
    payload = {"samples": [SAMPLE] * 3, "keys": {"manifest": what["manifest"]}}
    texts = {
        role: (EntryRef("captions", what[role], 1),)
        for role in ("train", "unconditional", "sample")
    }
    images = {"train": (EntryRef("latents", what["latents"], 1),)}
    return {
        "prepare_dataset": Manifest("prepare_dataset", "p", {}, {}, payload),
        "encode_captions": Manifest("encode_captions", "e", {}, texts, {}),
        "build_latent_cache": Manifest("build_latent_cache", "b", {}, images, {}),
    }


@pytest.fixture
def key_of(tmp_path):
    base = FixedBase("tiny", root=tmp_path, name="file:x", memory=Memory(tmp_path))

    def key(settings=None, **changes):
        config = changed(Config(), {"trainer.num_epochs": 2, **(settings or {})})
        inputs = Inputs(flux, base, upstream(**changes), base)
        return train.plan(config, inputs, Store(tmp_path)).manifest.key

    return key


def changed(config, settings):
    for setting, value in settings.items():
        group, _, name = setting.rpartition(".")
        if not group:
            config = dataclasses.replace(config, **{name: value})
            continue
        outer, _, inner = group.partition(".")
        part = dataclasses.replace(value_of(config, group), **{name: value})
        if inner:
            part = dataclasses.replace(value_of(config, outer), **{inner: part})
        config = dataclasses.replace(config, **{outer: part})
    return config


def leaves(value=None, prefix=""):
    value = Config() if value is None else value
    for field in dataclasses.fields(value):
        found = getattr(value, field.name)
        if dataclasses.is_dataclass(found):
            yield from leaves(found, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", found


# `trainer.extend` enters by the digest of the checkpoint it names: tests/dag/test_extend.py.
LEAVES = [leaf for leaf in leaves() if leaf[0] != "trainer.extend"]
KEYED_GROUPS = ("adapter", "timesteps", "objective", "optimizer", "lr_schedule")
KEYED = {
    "trainer.max_steps",
    "trainer.num_epochs",
    "trainer.batch_size",
    "trainer.max_grad_norm",
    "trainer.caption_dropout",
    "trainer.ema_decay",
    "seed",
    "precision.mode",
}


def another(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, list):
        return [*value, "to_q"]
    if isinstance(value, dict):
        return {**value, "to_q": 8}
    return f"{value}x" if isinstance(value, str) else (value or 0) + 1


TEXTS_OR_NULL = (
    "name",
    "family.revision",
    "sample.base",
    "sample.revision",
    "dataset.instance_prompt",
    "dataset.trigger",
    "dataset.prefix",
    "sample.negative_prompt",
    "tracker.uri",
    "tracker.experiment",
    "tracker.parent",
)


@pytest.mark.parametrize(("setting", "value"), LEAVES, ids=[name for name, _ in LEAVES])
def test_what_moves_the_weights_is_in_the_train_key_and_levers_are_not(setting, value, key_of):
    value = {"trainer.num_epochs": 2, **dict.fromkeys(TEXTS_OR_NULL, "")}.get(setting, value)
    moves = setting in KEYED or setting.split(".")[0] in KEYED_GROUPS
    assert (key_of({setting: another(value)}) != key_of()) == moves


def test_the_train_key_follows_the_entries_that_training_uses(key_of):
    assert len({key_of(), key_of(manifest="n"), key_of(train="c2"), key_of(latents="l2")}) == 4
    assert key_of(sample="s2") == key_of(unconditional="u2") == key_of()
    dropping = {"trainer.caption_dropout": 0.1}
    assert key_of(dropping, unconditional="u2") != key_of(dropping)


def test_the_scheduler_s_points_move_the_train_key_where_levels_are_shifted_by_tokens(
    key_of, monkeypatch
):
    by_tokens = {"timesteps.shift_by": "tokens"}
    before, before_by_tokens = key_of(), key_of(by_tokens)
    numbers = [{"base_shift": 0.6}, {"max_shift": 0.9}, {"max_image_seq_len": 8192}]
    for config in ({"base_image_seq_len": 128}, *numbers):
        scheduler = Component("AScheduler", config=config, weights={})
        monkeypatch.setattr(FixedBase, "component", lambda self, name, of=scheduler: of)
        assert key_of() == before
        assert key_of(by_tokens) != before_by_tokens
    written = Component("AScheduler", config={"base_shift": 0.5, "shift": 3.0}, weights={})
    monkeypatch.setattr(FixedBase, "component", lambda self, name: written)
    assert key_of(by_tokens) == before_by_tokens


def test_the_train_key_follows_the_denoiser(key_of, monkeypatch):
    before = key_of()
    monkeypatch.setattr(FixedBase, "weights", "other")
    assert key_of() != before
