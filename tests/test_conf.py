"""Every file under conf/ composes and parses; who wins when two places set one value."""

import dataclasses
import itertools
import re
import shutil
import typing
from pathlib import Path

import hydra
import pytest
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from lib import families
from lib.schema import Config, value_of
from stages import composing
from stages.overrides import NAMED_VALUES
from tests import composed

CHECKOUT = Path(__file__).resolve().parent.parent
CONF = CHECKOUT / "conf"
GROUPS = {
    folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
    for folder in sorted(CONF.iterdir())
    if folder.is_dir()
}
EXPERIMENTS = [f"+experiment={name}" for name in GROUPS["experiment"]]
# One option of every group at a time, until each has been chosen.
CHOICES = [
    [f"{g}={names[n % len(names)]}" for g, names in GROUPS.items() if names and g != "experiment"]
    for n in range(max(map(len, GROUPS.values())))
]
OPTIONS = [f"{g}={o}" for g, names in GROUPS.items() for o in names if g != "experiment"]

# The public names with a value, the setting that it moves, and what the configuration then holds.
PUBLIC = {
    "family=flux": ("family.name", "flux"),
    "family.base=tiny": ("family.base", "tiny"),
    "family.revision=0123abc": ("family.revision", "0123abc"),
    "family.allow_distilled=true": ("family.allow_distilled", True),
    "precision=bf16": ("precision.mode", "bf16"),
    "precision=fp8": ("precision.mode", "fp8"),
    "precision=int8": ("precision.mode", "int8"),
    "precision=nf4": ("precision.mode", "nf4"),
    "precision=auto": ("precision.mode", "auto"),
    "precision=auto precision.redecide=true": ("precision.redecide", True),
    "dataset.root=examples": ("dataset.root", "examples"),
    "dataset.instance_prompt='a red fox'": ("dataset.instance_prompt", "a red fox"),
    "dataset.trigger=sks": ("dataset.trigger", "sks"),
    "dataset.prefix='a photo of '": ("dataset.prefix", "a photo of "),
    "dataset.folder_repeats=true": ("dataset.folder_repeats", True),
    'dataset.background="#102030"': ("dataset.background", "#102030"),
    "dataset.min_side=256": ("dataset.min_side", 256),
    "dataset.animated=first_frame": ("dataset.animated", "first_frame"),
    "dataset.damaged=drop": ("dataset.damaged", "drop"),
    "buckets.resolution=640": ("buckets.resolution", 640),
    "buckets.step=32": ("buckets.step", 32),
    "buckets.policy=no_upscale": ("buckets.policy", "no_upscale"),
    "buckets.max_aspect=1.5": ("buckets.max_aspect", 1.5),
    "captions.max_length=77": ("captions.max_length", 77),
    "captions.dtype=fp32": ("captions.dtype", "fp32"),
    "latents.variants=4": ("latents.variants", 4),
    "latents.crop_seed=5 latents.variants=4": ("latents.crop_seed", 5),
    "latents.random_flip=true latents.variants=2": ("latents.random_flip", True),
    "latents.max_bytes=0": ("latents.max_bytes", 0),
    "latents.dtype=bf16": ("latents.dtype", "bf16"),
    "encode.batch_size=4": ("encode.batch_size", 4),
    "adapter.rank=8": ("adapter.rank", 8),
    "adapter.alpha=4": ("adapter.alpha", 4.0),
    "adapter.rslora=true": ("adapter.rslora", True),
    "adapter.rank_pattern={to_q:8}": ("adapter.rank_pattern", {"to_q": 8}),
    "adapter.targets=[to_q,to_k]": ("adapter.targets", ["to_q", "to_k"]),
    "adapter.dropout=0.1": ("adapter.dropout", 0.1),
    "objective=bell": ("objective.weighting", "bell"),
    "objective=min_snr objective.snr_gamma=4 family=sdxl": ("objective.snr_gamma", 4.0),
    "sample.base=tiny": ("sample.base", "tiny"),
    "sample.base=someone/flux-turbo sample.revision=0123abc": ("sample.revision", "0123abc"),
    "timesteps=uniform": ("timesteps.density", "uniform"),
    "timesteps.shift=3": ("timesteps.shift", 3.0),
    "timesteps.shift_by=tokens": ("timesteps.shift_by", "tokens"),
    "optimizer=adamw": ("optimizer.name", "adamw"),
    "optimizer=adamw_8bit": ("optimizer.name", "adamw_8bit"),
    "optimizer.lr=5e-5": ("optimizer.lr", 5e-5),
    "lr_schedule=cosine": ("lr_schedule.name", "cosine"),
    "trainer.max_steps=60": ("trainer.max_steps", 60),
    "trainer.extend=flux-01234567": ("trainer.extend", "flux-01234567"),
    "trainer.num_epochs=3 trainer.max_steps=null": ("trainer.num_epochs", 3),
    "trainer.batch_size=4": ("trainer.batch_size", 4),
    "trainer.micro_batch=2 trainer.batch_size=4": ("trainer.micro_batch", 2),
    "trainer.max_grad_norm=0": ("trainer.max_grad_norm", 0.0),
    "trainer.save_every=7": ("trainer.save_every", 7),
    "trainer.gradient_checkpointing=always": ("trainer.gradient_checkpointing", "always"),
    "trainer.compile=never": ("trainer.compile", "never"),
    "trainer.cuda_graphs=never": ("trainer.cuda_graphs", "never"),
    "trainer.tf32=true": ("trainer.tf32", True),
    "trainer.cudnn_benchmark=true": ("trainer.cudnn_benchmark", True),
    "trainer.deterministic=true": ("trainer.deterministic", True),
    "trainer.attention=flash": ("trainer.attention", "flash"),
    "trainer.caption_dropout=0.1": ("trainer.caption_dropout", 0.1),
    "trainer.ema_decay=0": ("trainer.ema_decay", 0.0),
    "sample.prompts=[a fox]": ("sample.prompts", ["a fox"]),
    "sample.negative_prompt=ugly": ("sample.negative_prompt", "ugly"),
    "sample.seed=3": ("sample.seed", 3),
    "sample.num_seeds=3": ("sample.num_seeds", 3),
    "sample.steps=4": ("sample.steps", 4),
    "sample.every=50": ("sample.every", 50),
    "validation.fraction=0.2": ("validation.fraction", 0.2),
    "validation.every=7 validation.fraction=0.2": ("validation.every", 7),
    "validation.num_draws=2 validation.fraction=0.2": ("validation.num_draws", 2),
    "sample.guidance=2": ("sample.guidance", 2.0),
    "export.format=diffusers": ("export.format", "diffusers"),
    "export.format=kohya": ("export.format", "kohya"),
    "export.format=comfyui": ("export.format", "comfyui"),
    "export.dtype=bf16": ("export.dtype", "bf16"),
    "export.prompts=true": ("export.prompts", True),
    "tracker=none": ("tracker.name", "none"),
    "tracker.uri=http://127.0.0.1:5000": ("tracker.uri", "http://127.0.0.1:5000"),
    "tracker.experiment=cats": ("tracker.experiment", "cats"),
    "tracker.parent=0123abc": ("tracker.parent", "0123abc"),
    "paths.store=elsewhere": ("paths.store", "elsewhere"),
    "paths.outputs=elsewhere": ("paths.outputs", "elsewhere"),
    "name=my-run": ("name", "my-run"),
    "seed=7": ("seed", 7),
    "upstream=require": ("upstream", "require"),
    "rerun=true": ("rerun", True),
    "gc.keep_days=0.5": ("gc.keep_days", 0.5),
}


def _leaves(schema, prefix=""):
    """Dotted names of all settings of a dataclass."""
    for name, hint in typing.get_type_hints(schema).items():
        if dataclasses.is_dataclass(hint):
            yield from _leaves(hint, f"{prefix}{name}.")
        else:
            yield prefix + name


def _flat(values, prefix=""):
    for name, value in values.items():
        if isinstance(value, dict) and prefix + name not in NAMED_VALUES:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def _from_yaml_alone(overrides):
    """Dotted names that the YAML files set, with an empty schema before them."""
    ConfigStore.instance().store(name="schema", node={})
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        raw = hydra.compose("config", overrides=list(overrides))
    plain = OmegaConf.to_container(raw, resolve=False)
    return set(_flat(plain))


@pytest.mark.parametrize("choice", [*CHOICES, *([name] for name in EXPERIMENTS)], ids=" ".join)
def test_every_experiment_and_every_option_composes_and_parses(choice):
    assert isinstance(composing.compose(choice), Config)


@pytest.mark.parametrize(
    "given",
    [
        ["family.base=tiny", "seed=3", "+hydra.job.env_set.A=b", "adapter.rank_pattern={to_q:8}"],
        ["lr_schedule=cosine", "family=sdxl", "+adapter={rank:5}", "trainer.batch_size=2"],
        [*EXPERIMENTS[:1], "optimizer.lr=0.5"],
    ],
    ids=" ".join,
)
def test_what_tests_have_composed_but_once_is_what_a_command_composes(given, monkeypatch):
    once, again = _plain(given), _plain(given)
    composed.withdraw(monkeypatch.setattr)
    assert _plain(given) == once == again


def _plain(given):
    return OmegaConf.to_container(composing._raw(given, typed=True), resolve=False)


def test_there_is_something_to_compose():
    """An empty list of parameters would be a test that passes for nothing."""
    assert {"family=flux", "precision=bf16", "lr_schedule=cosine"} <= set(OPTIONS)
    assert {option for choice in CHOICES for option in choice} == set(OPTIONS)
    assert EXPERIMENTS


def test_every_yaml_file_lies_in_a_group():
    elsewhere = [path for path in CONF.rglob("*.y*ml") if path.parent.parent != CONF]
    assert [path for path in elsewhere if CONF / "hydra" not in path.parents] == [
        CONF / "config.yaml"
    ]


@pytest.mark.parametrize("given", PUBLIC)
def test_every_public_option_is_taken(given):
    setting, expected = PUBLIC[given]
    assert value_of(composing.compose(_words(given)), setting) == expected


def _words(given):
    return [given] if "'" in given or "[" in given else given.split()


def test_every_setting_has_a_public_name_in_this_list():
    """Presets aside, which groups interpolate, and numbers that only experts touch."""
    experts = {"timesteps.mean", "timesteps.std", "optimizer.weight_decay", "optimizer.beta1"}
    experts |= {"optimizer.beta2", "optimizer.eps", "lr_schedule.warmup_steps"}
    experts |= {"lr_schedule.num_cycles", "lr_schedule.power"}
    named = {setting for setting, _ in PUBLIC.values()}
    settings = {name for name in _leaves(Config) if not name.startswith("family.preset.")}
    assert settings - experts - named == set()


@pytest.mark.parametrize("choice", CHOICES, ids=" ".join)
def test_every_setting_is_stated_in_yaml_and_none_only_in_the_schema(choice):
    stated = {name for name in _from_yaml_alone(choice) if not name.startswith("hydra.")}
    assert stated == set(_leaves(Config))


@pytest.mark.parametrize("option", GROUPS["family"])
def test_a_family_file_sets_nothing_but_its_family(option):
    loaded = OmegaConf.load(CONF / "family" / f"{option}.yaml")
    assert set(_flat(OmegaConf.to_container(loaded, resolve=False), "family.")) <= set(
        _leaves(Config)
    )
    assert loaded.name in families.names()


def test_each_family_has_a_file_of_its_own():
    own = {OmegaConf.load(CONF / "family" / f"{name}.yaml").name for name in families.names()}
    assert own == set(families.names())


def test_only_experiments_reach_beyond_their_group():
    reaching = [
        path.relative_to(CONF).as_posix()
        for path in CONF.rglob("*.yaml")
        if "@package" in path.read_text(encoding="utf-8")
    ]
    assert sorted(reaching) == [f"experiment/{name}.yaml" for name in GROUPS["experiment"]]


def test_no_file_names_code():
    """A configuration is data: nothing in it is imported or called."""
    assert [p for p in CONF.rglob("*.yaml") if "_target_" in p.read_text(encoding="utf-8")] == []


def test_a_preset_reaches_the_groups_that_take_it():
    presets = {
        "family.preset.rank=5": ("adapter.rank", 5),
        "family.preset.alpha=3": ("adapter.alpha", 3.0),
        "family.preset.lr=0.5": ("optimizer.lr", 0.5),
        "family.preset.resolution=256": ("buckets.resolution", 256),
        "family.preset.lr_schedule=linear": ("lr_schedule.name", "linear"),
        "family.preset.warmup_steps=9": ("lr_schedule.warmup_steps", 9),
        "family.preset.max_length=64": ("captions.max_length", 64),
        "family.preset.targets=[to_v]": ("adapter.targets", ["to_v"]),
    }
    config = composing.compose(list(presets))
    found = {given: value_of(config, setting) for given, (setting, _) in presets.items()}
    assert found == {given: expected for given, (_, expected) in presets.items()}


def test_every_preset_is_one_that_some_group_takes():
    texts = "".join(path.read_text(encoding="utf-8") for path in CONF.rglob("*.yaml"))
    presets = [name for name in _leaves(Config) if name.startswith("family.preset.")]
    assert [name for name in presets if f"${{{name}}}" not in texts] == []


@pytest.mark.parametrize(
    ("given", "alpha"), [([], 16.0), (["adapter.rank=8"], 8.0), (["adapter.alpha=4"], 4.0)]
)
def test_alpha_follows_the_rank_unless_it_is_given(given, alpha):
    assert composing.compose(given).adapter.alpha == alpha


def test_alpha_given_with_a_rank_stands():
    adapter = composing.compose(["adapter.alpha=4", "adapter.rank=8"]).adapter
    assert (adapter.rank, adapter.alpha) == (8, 4.0)


def test_the_order_of_overrides_does_not_matter():
    overrides = ["precision=bf16", "family.preset.lr=0.5", *EXPERIMENTS[:1], "adapter.rank=8"]
    first, *others = [composing.compose(o) for o in itertools.permutations(overrides)][::5]
    assert all(other == first for other in others)
    assert (first.optimizer.lr, first.adapter.alpha, first.precision.mode) == (0.5, 8.0, "bf16")


@pytest.fixture
def conf(tmp_path, monkeypatch):
    """A copy of conf/ that a test may change."""
    copy = tmp_path / "conf"
    shutil.copytree(CONF, copy)
    monkeypatch.setattr(composing, "CONF", copy)
    return copy


def test_an_experiment_wins_over_the_preset_and_the_command_line_over_both(conf):
    (conf / "experiment" / "probe.yaml").write_text(
        "# @package _global_\noptimizer:\n  lr: 0.25\nadapter:\n  rank: 4\n", encoding="utf-8"
    )
    preset, probe = "family.preset.lr=0.5", "+experiment=probe"
    assert composing.compose([preset]).optimizer.lr == 0.5
    assert composing.compose([preset, probe]).optimizer.lr == 0.25
    assert composing.compose([preset, probe, "optimizer.lr=0.125"]).optimizer.lr == 0.125
    adapter = composing.compose([probe]).adapter
    assert (adapter.rank, adapter.alpha) == (4, 4.0)


def test_an_experiment_may_choose_the_options_of_groups(conf):
    (conf / "experiment" / "probe.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /lr_schedule: linear\n", encoding="utf-8"
    )
    assert composing.compose(["+experiment=probe"]).lr_schedule.name == "linear"
    given = ["+experiment=probe", "lr_schedule=cosine"]
    assert composing.compose(given).lr_schedule.name == "cosine"


def test_the_readme_uses_only_names_that_exist():
    text = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    used = {
        word.split("=")[0].lstrip("+").strip("'\"`")
        for command in re.findall(r"python -m stages\.[^\n`#]*", text)
        for word in command.split()
        if "=" in word and not word.startswith("-")
    }
    assert used, "no command was found"
    assert used - set(_leaves(Config)) - set(GROUPS) == set()
