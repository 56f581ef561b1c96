import dataclasses

import pytest

from lib.config import parse, read
from lib.errors import InputRefused
from lib.rules import RULES
from lib.schema import Config, value_of

NAN, INF = "nan", float("inf")

# setting -> values that break its rule
BROKEN = {
    "precision.mode": ["fp16", "automatic", ""],
    "dataset.trigger": ["", " ", " sks", "a\nb"],
    "dataset.prefix": ["", " \n"],
    "dataset.background": ["", "white", "#fff", "#12345g", "102030", "#1020300"],
    "dataset.min_side": [-1, 8193],
    "dataset.animated": ["", "all_frames"],
    "dataset.damaged": ["", "repair"],
    "buckets.resolution": [0, -64, 63, 8193],
    "buckets.step": [0, -1, 7, 513],
    "buckets.max_aspect": [0.9, 9.0, NAN, INF],
    "buckets.policy": ["", "upscale"],
    "captions.max_length": [0, 4097],
    "captions.dtype": ["fp64", "fp16", ""],
    "latents.variants": [0, 65],
    "latents.crop_seed": [-1, 2**63],
    "latents.dtype": ["auto", "fp16"],
    "latents.max_bytes": [-1, 2**50 + 1],
    "encode.batch_size": [0, 1025],
    "adapter.rank": [0, -1, 321],
    "adapter.rank_pattern": [{"to_q": 0}, {"to_q": 321}, {"to_q": 4, "to_k": -1}, {"": 4}],
    "adapter.targets": [[], [""], ["to_q", ""]],
    "adapter.dropout": [-0.1, 1.0, NAN],
    "timesteps.density": ["beta"],
    "timesteps.mean": [-10.5, 10.5, NAN, INF],
    "timesteps.std": [0.0, -1.0, NAN, INF],
    "timesteps.shift": [0.0, -3.0, NAN, INF],
    "timesteps.shift_by": ["", "resolution"],
    "objective.weighting": ["", "snr"],
    "objective.snr_gamma": [0.0, -1.0, NAN, INF],
    "optimizer.name": ["sgd"],
    "optimizer.lr": [0.0, -1e-4, 11.0, NAN, INF],
    "optimizer.weight_decay": [-0.1, 11.0, NAN],
    "optimizer.beta1": [-0.1, 1.0, NAN],
    "optimizer.beta2": [-0.1, 1.0, NAN],
    "optimizer.eps": [0.0, -1.0, NAN, INF],
    "lr_schedule.name": ["step"],
    "lr_schedule.warmup_steps": [-1, 100_001],
    "lr_schedule.num_cycles": [0, 1001],
    "lr_schedule.power": [0.0, -1.0, NAN, INF],
    "trainer.max_steps": [0, -5, 100_001],
    "trainer.num_epochs": [0, -5, 1001],
    "trainer.batch_size": [0, -1, 65, 10**12],
    "trainer.micro_batch": [0, -1, 65],
    "trainer.max_grad_norm": [-1.0, 1e7, NAN, INF],
    "trainer.save_every": [0, -1, 100_001],
    "trainer.gradient_checkpointing": ["", "sometimes"],
    "trainer.compile": ["", "sometimes"],
    "trainer.cuda_graphs": ["", "always"],
    "trainer.attention": ["", "cudnn"],
    "trainer.caption_dropout": [-0.1, 1.0, NAN],
    "export.format": ["webui"],
    "export.dtype": ["auto"],
    "upstream": ["always"],
    "seed": [-1, 2**63, 10**400],
    "trainer.ema_decay": [-0.1, 1.0, NAN],
    "sample.prompts": [["a"] * 65],
    "sample.seed": [-1, 2**63],
    "sample.num_seeds": [0, 17],
    "sample.steps": [0, 1001],
    "sample.every": [-1, 100_001],
    "validation.fraction": [-0.1, 1.0, NAN],
    "validation.every": [0, 100_001],
    "validation.num_draws": [0, 1001],
    "sample.guidance": [-1.0, 101.0, NAN, INF],
    "tracker.name": ["wandb", ""],
    "gc.keep_days": [-1.0, 36501.0, NAN, INF],
    "name": ["", "a/b", "../a", ".a", "-a", "a b", "a\n", "\u00e4", "a" * 101],
}


def test_every_rule_has_a_value_here_that_breaks_it():
    assert set(BROKEN) == {rule.setting for rule in RULES}
    assert len(RULES) == len(BROKEN)


CASES = [(setting, value) for setting, values in BROKEN.items() for value in values]


@pytest.mark.parametrize(("setting", "value"), CASES, ids=lambda part: str(part)[:24])
def test_a_broken_rule_names_setting_value_and_what_is_allowed(setting, value, valid):
    problems = read(valid({setting: value})).problems
    mine = [p for p in problems if p.subject == f"{setting}={value}" and p.why == "out of range"]
    rule = next(rule for rule in RULES if rule.setting == setting)
    assert [problem.allowed for problem in mine] == [rule.allowed]
    assert rule.allowed in str(mine[0])


EDGES = {
    "adapter.rank": [1, 320],
    "trainer.max_grad_norm": [0, 1e6],
    "adapter.dropout": [0, 0.99],
    "trainer.batch_size": [1, 64],
    "seed": [0, 2**63 - 1],
    "timesteps.mean": [-10, 10],
    "name": [None, "a", "A-1_b.c", "a" * 100],
}


@pytest.mark.parametrize(
    ("setting", "value"),
    [(setting, value) for setting, values in EDGES.items() for value in values],
)
def test_the_edges_of_a_range_belong_to_it(setting, value, valid):
    assert value_of(parse(valid({setting: value})), setting) == value


def test_the_defaults_are_valid_once_data_targets_and_a_length_are_given(tmp_path):
    found = read({"dataset": {"root": str(tmp_path)}}).problems
    assert {problem.subject for problem in found} == {
        "adapter.targets=[]",
        "trainer.max_steps=None",
    }
    given = {
        "dataset": {"root": str(tmp_path)},
        "adapter": {"targets": ["to_q"]},
        "trainer": {"max_steps": 1},
    }
    assert parse(given) == dataclasses.replace(
        Config(),
        dataset=dataclasses.replace(Config().dataset, root=str(tmp_path)),
        adapter=dataclasses.replace(Config().adapter, targets=["to_q"]),
        trainer=dataclasses.replace(Config().trainer, max_steps=1),
    )


# settings -> the setting that is refused and a word of the reason
CROSS = [
    ({"trainer.num_epochs": 3}, "trainer.num_epochs=3", "trainer.max_steps=10"),
    ({"trainer.max_steps": None}, "trainer.max_steps=None", "no length"),
    ({"trainer.batch_size": 4, "trainer.micro_batch": 3}, "trainer.micro_batch=3", "1, 2, 4"),
    ({"trainer.micro_batch": 2}, "trainer.micro_batch=2", "does not divide trainer.batch_size=1"),
    ({"buckets.resolution": 500}, "buckets.resolution=500", "multiple of buckets.step"),
    ({"dataset.root": "no/such/folder"}, "dataset.root=no/such/folder", "no such folder"),
    ({"dataset.root": ""}, "dataset.root=", "folder of pictures"),
    ({"adapter.alpha": 0.0}, "adapter.alpha=0.0", "above 0"),
    ({"adapter.alpha": -1.0}, "adapter.alpha=-1.0", "above 0"),
    ({"adapter.alpha": NAN}, "adapter.alpha=nan", "above 0"),
    ({"adapter.alpha": INF}, "adapter.alpha=inf", "above 0"),
    ({"adapter.alpha": 0.0, "adapter.rank": 0}, "adapter.rank=0", "1 to 320"),
    (
        {"trainer.deterministic": True, "trainer.cudnn_benchmark": True},
        "trainer.cudnn_benchmark=True",
        "from run to run",
    ),
]
WITHOUT_EFFECT = [
    ({"lr_schedule.warmup_steps": 5}, "lr_schedule.warmup_steps=5"),
    (
        {"lr_schedule.name": "constant_with_warmup", "lr_schedule.warmup_steps": 0},
        "lr_schedule.name=constant_with_warmup",
    ),
    ({"lr_schedule.num_cycles": 2}, "lr_schedule.num_cycles=2"),
    ({"lr_schedule.name": "cosine", "lr_schedule.num_cycles": 2}, "lr_schedule.num_cycles=2"),
    ({"lr_schedule.name": "linear", "lr_schedule.power": 2.0}, "lr_schedule.power=2.0"),
    ({"timesteps.density": "uniform", "timesteps.mean": 0.5}, "timesteps.mean=0.5"),
    ({"timesteps.density": "uniform", "timesteps.std": 2.0}, "timesteps.std=2.0"),
    ({"timesteps.shift_by": "tokens", "timesteps.shift": 3.0}, "timesteps.shift=3.0"),
    ({"objective.snr_gamma": 4.0}, "objective.snr_gamma=4.0"),
    ({"objective.weighting": "bell", "objective.snr_gamma": 4.0}, "objective.snr_gamma=4.0"),
    ({"sample.revision": "main"}, "sample.revision=main"),
    ({"sample.base": "tiny", "sample.revision": "main"}, "sample.revision=main"),
    ({"latents.random_flip": True}, "latents.random_flip=True"),
    ({"latents.crop_seed": 3}, "latents.crop_seed=3"),
    ({"family.revision": "main"}, "family.revision=main"),
    ({"validation.every": 7}, "validation.every=7"),
    ({"validation.num_draws": 3}, "validation.num_draws=3"),
    ({"precision.redecide": True}, "precision.redecide=True"),
    ({"precision.mode": "fp8", "precision.redecide": True}, "precision.redecide=True"),
]


@pytest.mark.parametrize(("settings", "subject", "word"), CROSS)
def test_a_rule_across_fields_names_the_setting_and_the_reason(settings, subject, word, valid):
    with pytest.raises(InputRefused) as caught:
        parse(valid(settings))
    assert [problem.subject for problem in caught.value.problems] == [subject]
    assert word in str(caught.value)


@pytest.mark.parametrize(("settings", "subject"), WITHOUT_EFFECT)
def test_an_option_without_effect_is_refused_with_what_would_give_it_one(settings, subject, valid):
    with pytest.raises(InputRefused, match="would have no effect") as caught:
        parse(valid(settings))
    (problem,) = caught.value.problems
    assert problem.subject == subject
    assert problem.remedy


@pytest.mark.parametrize(
    "settings",
    [
        {"lr_schedule.name": "constant_with_warmup", "lr_schedule.warmup_steps": 10},
        {"lr_schedule.name": "cosine_with_restarts", "lr_schedule.num_cycles": 2},
        {"lr_schedule.name": "polynomial", "lr_schedule.power": 2.0},
        {"latents.variants": 2, "latents.random_flip": True, "latents.crop_seed": 3},
        {"family.base": "someone/flux", "family.revision": "main"},
        {"sample.base": "someone/flux", "sample.revision": "main"},
        {"objective.weighting": "min_snr", "objective.snr_gamma": 4.0},
        {"timesteps.shift_by": "tokens", "timesteps.shift": 1.0},
        {"trainer.batch_size": 4, "trainer.micro_batch": 2},
        {"trainer.max_steps": None, "trainer.num_epochs": 2},
        {"buckets.resolution": 96, "buckets.step": 32},
        {"validation.fraction": 0.2, "validation.every": 7, "validation.num_draws": 3},
        {"precision.mode": "auto", "precision.redecide": True},
        {"trainer.deterministic": True, "trainer.cudnn_benchmark": False},
    ],
)
def test_where_an_option_has_an_effect_it_is_accepted(settings, valid):
    config = parse(valid(settings))
    assert all(value_of(config, setting) == value for setting, value in settings.items())


@pytest.mark.parametrize("setting", ["paths.store", "paths.outputs", "dataset.root"])
def test_a_file_where_a_folder_belongs_is_refused(setting, valid, tmp_path):
    (tmp_path / "file").write_text("")
    (problem,) = read(valid({setting: str(tmp_path / "file")})).problems
    assert problem.subject == f"{setting}={tmp_path / 'file'}"
    assert "not a folder" in problem.why
