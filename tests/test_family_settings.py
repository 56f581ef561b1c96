"""What a family brings to a configuration, what wins over it, and what it refuses."""

import dataclasses
import json
from functools import cache
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import stages
from lib import families
from lib.pipeline import graph
from lib.schema import value_of
from stages.composing import compose

CONF = Path(__file__).resolve().parent.parent / "conf"
NAMES = families.names()
FILES = sorted(path.stem for path in (CONF / "family").glob("*.yaml"))
TINY = "family.base=tiny"

PRESETS = {
    "rank": "adapter.rank",
    "alpha": "adapter.alpha",
    "targets": "adapter.targets",
    "lr": "optimizer.lr",
    "resolution": "buckets.resolution",
    "lr_schedule": "lr_schedule.name",
    "warmup_steps": "lr_schedule.warmup_steps",
    "max_length": "captions.max_length",
    "steps": "sample.steps",
    "guidance": "sample.guidance",
    "density": "timesteps.density",
    "shift": "timesteps.shift",
}


@cache
def plain(file):
    """A family's file as it is written, and the configuration that it makes."""
    written = OmegaConf.to_container(OmegaConf.load(CONF / "family" / f"{file}.yaml"))
    return written, compose([f"family={file}"])


def test_every_preset_has_a_setting():
    _, config = plain("flux")
    assert PRESETS.keys() == dataclasses.asdict(config.family.preset).keys()


@pytest.mark.parametrize("file", FILES)
def test_the_presets_of_a_family_reach_the_groups_that_take_them(file):
    written, config = plain(file)
    assert written["preset"].keys() == PRESETS.keys()
    expected = {**written["preset"], "alpha": written["preset"]["rank"]}  # it follows the rank
    assert written["preset"]["alpha"] == "${adapter.rank}"
    assert {name: value_of(config, setting) for name, setting in PRESETS.items()} == expected


@pytest.mark.parametrize("file", FILES)
def test_a_file_is_called_as_its_family_and_names_the_base_that_the_family_does(file):
    written, config = plain(file)
    if file == "flux_mini":  # the shipped small base of another family's
        assert (config.family.name, Path(config.family.base).name) == ("flux", "base")
        return
    assert (written["name"], written["base"]) == (file, families.get(file).FACTS.reference)


OF_PRESETS = {
    "timesteps=logit_normal": ("z_image", "timesteps.shift", 6.0),
    "timesteps=uniform": ("z_image", "timesteps.shift", 6.0),
    "lr_schedule=constant_with_warmup": ("flux", "lr_schedule.warmup_steps", 20),
    "optimizer=adamw": ("krea2", "optimizer.lr", 3e-4),
}


@pytest.mark.parametrize("option", OF_PRESETS)
def test_an_option_leaves_a_familys_other_presets_as_they_are(option):
    family, setting, expected = OF_PRESETS[option]
    assert value_of(compose([option, f"family={family}"]), setting) == expected


# What is typed beside an option: it wins over the option, which wins over the family's preset.
SCHEDULES = {
    "preset": {"name": "linear", "warmup_steps": 7},
    "constant": {"name": "constant_with_warmup", "warmup_steps": 7},
    "constant_with_warmup": {"warmup_steps": 7},
    "linear": {"warmup_steps": 7},
    "cosine": {"warmup_steps": 7},
    "cosine_with_restarts": {"num_cycles": 3},
    "polynomial": {"power": 3.0},
}
TIMESTEPS = {
    "preset": {"density": "logit_normal", "mean": 0.5},
    "logit_normal": {"std": 0.5},
    "uniform": {"density": "logit_normal", "std": 2.0},
}
OBJECTIVES = {
    "plain": {"weighting": "bell"},
    "bell": {"weighting": "none"},
    "min_snr": {"snr_gamma": 4.0},
}
OF_DDPM = {**OBJECTIVES, "plain": {"weighting": "min_snr", "snr_gamma": 4.0}}
OPTIMIZER = {"lr": 0.5, "beta1": 0.8, "eps": 1e-6}
FAMILYS = ("preset", "constant_with_warmup")  # what they hold depends on the family
OTHERS = [name for name in SCHEDULES if name not in FAMILYS]
CASES = [
    (name, schedule)
    for place, name in enumerate(NAMES)
    for schedule in (*FAMILYS, OTHERS[place % 5], OTHERS[(place + 2) % 5])
]


def chosen(family, schedule):
    """For each group its option with what is typed beside it."""
    noise, place = families.get(family).FACTS.noise, CASES.index((family, schedule)) % 4
    timesteps, objectives = list(TIMESTEPS), ["plain", "bell" if noise.shifts else "min_snr"]
    explicit = OBJECTIVES if noise.shifts else OF_DDPM
    step, objective = timesteps[place % 3], objectives[place % 2]
    shift = {"shift": 2.5} if noise.shifts else {}
    return {
        "lr_schedule": (schedule, SCHEDULES[schedule]),
        "optimizer": ("adamw", OPTIMIZER),
        "timesteps": (step, {**TIMESTEPS[step], **shift}),
        "objective": (objective, explicit[objective]),
    }


def typed(family, groups, *, turn):
    """The words of a command, options before explicit values, turned around by some places."""
    options = [f"{group}={option}" for group, (option, _) in groups.items()]
    values = [f"{g}.{n}={v}" for g, (_, explicit) in groups.items() for n, v in explicit.items()]
    words = [f"family={family}", TINY, *options, *values]
    return [*words[turn:], *words[:turn]]


# The last of each family repeats a schedule that another one's case has.
MARKED = [
    pytest.param(*case, marks=pytest.mark.nightly if place % 4 == 3 else ())
    for place, case in enumerate(CASES)
]


@pytest.mark.parametrize(("family", "schedule"), MARKED, ids=lambda value: value)
def test_explicit_values_win_over_options_and_options_over_presets_in_any_order(family, schedule):
    groups = chosen(family, schedule)
    turn = 3 * CASES.index((family, schedule)) % 13  # another first word in every case
    words = typed(family, groups, turn=turn)
    config, preset = compose(words), plain(family)[0]["preset"]
    for group, (option, explicit) in groups.items():
        written = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{option}.yaml"))
        told = {n: str(v).removeprefix("${family.preset.").strip("}") for n, v in written.items()}
        of_option = {name: preset.get(told[name], value) for name, value in written.items()}
        assert vars(value_of(config, group)) == {**of_option, **explicit}
    assert list(graph.problems(config, online=False)) == []
    if schedule == "preset":
        assert compose(words[::-1]) == config


def refused(capsys, store, *words):
    """The lines of a report by their settings, as a stage's command prints it."""
    with pytest.raises(SystemExit) as ended:
        stages.main(lambda *_: 0, arguments=[f"paths.store={store}", "tracker=none", *words])
    title, *lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert title.startswith(f"refused: {len(lines)} problem")
    return {line.split(":")[0].strip(): line for line in lines}


ALL_AT_ONCE = {
    "sdxl": {
        "objective.weighting=bell": "none, min_snr",
        "timesteps.shift=3.0": "would have no effect",
        "latents.dtype=bf16": "fp32",
        "captions.max_length=78": "1 to 77",
        "buckets.step=32": "a multiple of 64",
    },
    "krea2": {
        "objective.weighting=min_snr": "none, bell",
        "captions.max_length=5": "6 to 512",
        "buckets.step=8": "a multiple of 16",
    },
    "flux": {"objective.weighting=min_snr": "none, bell", "captions.max_length=513": "1 to 512"},
    "qwen_image": {"objective.weighting=min_snr": "none, bell", "captions.max_length=1025": "1024"},
    "z_image": {"objective.weighting=min_snr": "none, bell"},
    "flux2_klein": {"objective.weighting=min_snr": "none, bell"},
}


@pytest.mark.parametrize("family", NAMES)
def test_all_that_a_family_refuses_is_one_report_with_a_line_each(family, capsys, tmp_path):
    expected = ALL_AT_ONCE[family]
    found = refused(capsys, tmp_path, f"family={family}", TINY, *expected)
    assert found.keys() == expected.keys()
    for setting, allowed in expected.items():
        assert allowed in found[setting]


def saved(folder, family, **edits):
    """The tiny base's index and configurations, with empty weights: no more is looked at."""
    facts, tiny = family.FACTS, family.TINY
    classes = {name: ["a library", of.split("|")[0]] for name, of in facts.classes.items()}
    index = {"_class_name": facts.pipelines[0], **classes, **tiny.get("pipeline", {})}
    write(folder / "model_index.json", {**index, **edits.get("pipeline", {})})
    for name in classes:
        kind = name.split("_")[0]
        file = f"{kind}_config.json" if kind in ("tokenizer", "scheduler") else "config.json"
        write(folder / name / file, {**tiny.get(name, {}), **edits.get(name, {})})
        write(folder / name / "diffusion_pytorch_model.safetensors", {})
    return folder


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


DISTILLED = {
    "flux": {
        "transformer": {"guidance_embeds": False, "num_layers": 19, "num_single_layers": 38},
        "scheduler": {"use_dynamic_shifting": False, "shift": 1.0},
    },
    "flux2_klein": {"pipeline": {"is_distilled": True}},
    "krea2": {"pipeline": {"is_distilled": True}},
    "sdxl": {"scheduler": {"timestep_spacing": "trailing"}},
    "z_image": {"scheduler": {"shift": 3.0}},
}


def bases(family, folder):
    """An undistilled base, one that its name calls distilled, and one that says so itself."""
    yield saved(folder / "base", family), False
    yield saved(folder / "base-turbo", family), True
    if family.FACTS.name in DISTILLED:
        yield saved(folder / "other", family, **DISTILLED[family.FACTS.name]), True


# What a base says of its schedule, and why sigma is not shifted by tokens then; "": it is.
BY_TOKENS = {
    ("sdxl", None): "would have no effect",
    ("z_image", None): "a base with use_dynamic_shifting",
    ("z_image", "exponential"): "",
    ("flux", None): "",
    ("flux", "linear"): "time_shift_type=linear",
    ("flux2_klein", "linear"): "time_shift_type=linear",
    ("flux2_klein", None): "",
    ("krea2", None): "",
    ("qwen_image", None): "",
}


@pytest.mark.parametrize(("name", "kind"), BY_TOKENS)
def test_sigma_is_shifted_by_tokens_where_the_base_s_own_schedule_is(name, kind, tmp_path):
    family, (_, config) = families.get(name), plain(name)
    stated = {"use_dynamic_shifting": True, "time_shift_type": kind} if kind else {}
    folder = saved(tmp_path / "base", family, scheduler=stated)
    asked = dataclasses.replace(
        config,
        family=dataclasses.replace(config.family, base=str(folder)),
        timesteps=dataclasses.replace(config.timesteps, shift=1.0, shift_by="tokens"),
    )
    found, expected = list(graph.problems(asked, online=False)), BY_TOKENS[name, kind]
    assert [p.subject for p in found] == ["timesteps.shift_by=tokens"] * bool(expected)
    assert all(expected in str(problem) and problem.remedy for problem in found)


@pytest.mark.parametrize("name", NAMES)
def test_a_distilled_base_is_refused_without_consent(name, tmp_path):
    family, (_, config) = families.get(name), plain(name)
    for folder, distilled in bases(family, tmp_path):
        local = dataclasses.replace(config.family, base=str(folder))
        consented = dataclasses.replace(local, allow_distilled=True)
        found = list(graph.problems(dataclasses.replace(config, family=local), online=False))
        assert [problem.subject for problem in found] == [f"family.base={folder}"] * distilled
        for problem in found:
            assert "is distilled" in problem.why
            assert family.FACTS.reference in problem.allowed
            assert "family.allow_distilled=true" in problem.remedy
        consented = dataclasses.replace(config, family=consented)
        assert list(graph.problems(consented, online=False)) == []


def test_half_precision_a_distilled_base_and_the_familys_rules_are_one_report(capsys, tmp_path):
    folder = saved(tmp_path / "sdxl-turbo", families.get("sdxl"))
    half = ["captions.dtype=fp16", "latents.dtype=fp16", "precision=fp16"]
    words = ["family=sdxl", f"family.base={folder}", "objective=bell", *half]
    found = refused(capsys, tmp_path / "store", *words)
    assert sorted(found) == sorted([f"family.base={folder}", "objective.weighting=bell", *half])


def test_a_base_without_a_file_is_refused_beside_what_else_is_wrong(capsys, tmp_path):
    folder = saved(tmp_path / "base", families.get("sdxl"))
    (folder / "unet" / "config.json").unlink()
    words = ["family=sdxl", f"family.base={folder}", "objective=bell"]
    found = refused(capsys, tmp_path / "store", *words)
    assert list(found) == [f"family.base={folder}", "objective.weighting=bell"]
    assert "unet/config.json is missing" in found[f"family.base={folder}"]


# Where guidance is off and where it is on; None: a base with embedded guidance has no second branch.
GUIDANCE = {
    "flux": (3.5, None),
    "flux2_klein": (1.0, 1.5),
    "krea2": (0.0, 0.5),
    "qwen_image": (1.0, 1.5),
    "sdxl": (1.0, 1.5),
    "z_image": (0.0, 0.5),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_negative_prompt_is_refused_where_no_second_prediction_is_made(name, tmp_path):
    off, on = GUIDANCE[name]
    _, config = plain(name)
    tiny = dataclasses.replace(config.family, base="tiny")
    store = dataclasses.replace(config.paths, store=str(tmp_path))
    for scale, subjects in ((off, ["sample.negative_prompt"]), (on, [])):
        if scale is None:
            continue
        sample = dataclasses.replace(config.sample, negative_prompt="ugly", guidance=scale)
        asked = dataclasses.replace(config, family=tiny, paths=store, sample=sample)
        found = list(graph.problems(asked, online=False))
        assert [problem.subject for problem in found] == subjects
        assert all("no second prediction" in problem.why for problem in found)


# Linear layers that a preset's targets hit in the full-size denoiser.
MODULES = {
    "flux": 266,
    "flux2_klein": 60,
    "krea2": 232,
    "qwen_image": 480,
    "sdxl": 560,
    "z_image": 136,
}


@pytest.mark.parametrize("name", NAMES)
def test_the_targets_of_a_preset_hit_the_layers_of_the_full_size_denoiser(name):
    import diffusers
    import torch

    from bench.full_size_bases import FULL
    from lib.adapter import check_targets

    facts = families.get(name).FACTS
    with torch.device("meta"):
        denoiser = getattr(diffusers, facts.classes[facts.denoiser])(**FULL[name][facts.denoiser])
    matches = check_targets(denoiser, plain(name)[1].adapter.targets)
    assert sum(matches.values()) == MODULES[name]
