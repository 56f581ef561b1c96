"""What a configuration may hold: ranges, choices, rules across fields, options without effect."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from lib.errors import Problem
from lib.files import user_path
from lib.schema import TINY, Config, settings_of, value_of

SCHEDULES = (
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
)
DENSE = ("fp32", "bf16")
DTYPES = (*DENSE, "fp16")
_COLOUR = re.compile("#[0-9a-fA-F]{6}")
STORES = ("sqlite", "http", "https", "postgresql", "mysql", "mssql")


@dataclass(frozen=True)
class Rule:
    """One setting and what it may be; `allowed` is the sentence a user reads."""

    setting: str
    holds: Callable[[Any], bool]
    allowed: str
    remedy: str = ""


def _number(setting: str, low: float, high: float, remedy: str = "") -> Rule:
    allowed = f"{low:g} to {high:g}"
    return Rule(setting, lambda v: low <= v <= high, allowed, remedy)


def _above(setting: str, low: float, remedy: str = "") -> Rule:
    return Rule(setting, lambda v: math.isfinite(v) and v > low, f"above {low:g}", remedy)


def _optional(rule: Rule) -> Rule:
    return Rule(rule.setting, lambda v: v is None or rule.holds(v), f"{rule.allowed}, or null")


def _choice(setting: str, *choices: str, remedy: str = "") -> Rule:
    return Rule(setting, lambda v: v in choices, ", ".join(choices), remedy)


RULES: tuple[Rule, ...] = (
    _choice("precision.mode", "fp32", "bf16"),
    Rule("dataset.trigger", lambda v: v is None or _word(v), "words on one line, or null"),
    Rule("dataset.prefix", lambda v: v is None or v.strip() != "", "a text, or null"),
    Rule("dataset.background", lambda v: _COLOUR.fullmatch(v) is not None, "#rrggbb"),
    _number("dataset.min_side", 0, 8192, "0 drops none"),
    _choice("dataset.animated", "refuse", "first_frame"),
    _choice("dataset.damaged", "refuse", "drop"),
    _number("buckets.resolution", 64, 8192),
    _number("buckets.step", 8, 512),
    _number("buckets.max_aspect", 1, 8),
    _choice("buckets.policy", "area", "no_upscale"),
    _number("captions.max_length", 1, 4096),
    _choice("captions.dtype", "auto", *DENSE, remedy="encoders overflow in fp16"),
    _number("latents.variants", 1, 64),
    _number("latents.crop_seed", 0, 2**63 - 1),
    _choice("latents.dtype", *DENSE, remedy="autoencoders overflow in fp16"),
    _number("latents.max_bytes", 0, 2**50),
    _number("encode.batch_size", 1, 1024),
    _number("adapter.rank", 1, 320),
    Rule("adapter.targets", lambda v: len(v) > 0 and all(v), "at least one module name"),
    Rule("adapter.dropout", lambda v: 0 <= v < 1, "0 to below 1"),
    _choice("timesteps.density", "logit_normal", "uniform"),
    _number("timesteps.mean", -10, 10),
    _number("timesteps.std", 0.01, 10),
    _above("timesteps.shift", 0),
    _choice("objective.weighting", "none", "bell", "min_snr"),
    _above("objective.snr_gamma", 0),
    _choice("optimizer.name", "adamw"),
    _number("optimizer.lr", 1e-12, 10),
    _number("optimizer.weight_decay", 0, 10),
    Rule("optimizer.beta1", lambda v: 0 <= v < 1, "0 to below 1"),
    Rule("optimizer.beta2", lambda v: 0 <= v < 1, "0 to below 1"),
    _above("optimizer.eps", 0),
    _choice("lr_schedule.name", *SCHEDULES),
    _number("lr_schedule.warmup_steps", 0, 100_000),
    _number("lr_schedule.num_cycles", 1, 1000),
    _above("lr_schedule.power", 0),
    _optional(_number("trainer.max_steps", 1, 100_000)),
    _optional(_number("trainer.num_epochs", 1, 1000)),
    _number("trainer.batch_size", 1, 64),
    _optional(_number("trainer.micro_batch", 1, 64)),
    _number("trainer.max_grad_norm", 0, 1e6, "0 turns clipping off"),
    Rule("trainer.ema_decay", lambda v: 0 <= v < 1, "0 (no average) to below 1"),
    _number("trainer.save_every", 1, 100_000),
    Rule("trainer.caption_dropout", lambda v: 0 <= v < 1, "0 to below 1"),
    Rule("validation.fraction", lambda v: 0 <= v < 1, "0 (none) to below 1"),
    _number("validation.every", 1, 100_000),
    _number("validation.num_draws", 1, 1000),
    _choice("export.format", "diffusers"),
    _choice("export.dtype", *DTYPES),
    Rule("sample.prompts", lambda v: len(v) <= 64, "at most 64 prompts"),
    _number("sample.seed", 0, 2**63 - 1),
    _number("sample.num_seeds", 1, 16),
    _number("sample.steps", 1, 1000),
    _number("sample.guidance", 0, 100),
    _number("sample.every", 0, 100_000, "0 draws none while training"),
    _choice("tracker.name", "mlflow", "none"),
    _choice("upstream", "ensure", "require"),
    _number("seed", 0, 2**63 - 1),
    _number("gc.keep_days", 0, 36500),
    Rule(
        "name",
        lambda v: v is None or _plain_name(v),
        "letters, digits, '.', '_', '-'; at most 100; not starting with '.' or '-'",
    ),
)


def _word(text: str) -> bool:
    """Text that stands before a caption as it is: no line end, no space around it."""
    return text != "" and text == text.strip() and len(text.splitlines()) == 1


def _plain_name(name: str) -> bool:
    safe = all(c.isascii() and (c.isalnum() or c in "._-") for c in name)
    return safe and 0 < len(name) <= 100 and name[0] not in ".-"


def problems_of(config: Config) -> Iterator[Problem]:
    """Every rule that the configuration breaks."""
    for rule in RULES:
        value = value_of(config, rule.setting)
        if not rule.holds(value):
            yield Problem(f"{rule.setting}={value}", "out of range", rule.allowed, rule.remedy)
    yield from _finite_rules(config)
    yield from _length_rules(config)
    yield from _alpha_rule(config)
    yield from _batch_rules(config)
    yield from _no_effect(config)
    yield from _tracker_rules(config)
    yield from _path_rules(config)


def _finite_rules(config: Config) -> Iterator[Problem]:
    """Numbers that no rule above looks at, such as a family's presets."""
    ruled = {rule.setting for rule in RULES} | {"adapter.alpha"}
    for setting, value in settings_of(config):
        if isinstance(value, float) and not math.isfinite(value) and setting not in ruled:
            yield Problem(f"{setting}={value}", "out of range", "a finite number")


def _length_rules(config: Config) -> Iterator[Problem]:
    steps, epochs = config.trainer.max_steps, config.trainer.num_epochs
    if steps is not None and epochs is not None:
        yield Problem(
            f"trainer.num_epochs={epochs}",
            f"trainer.max_steps={steps} sets the length too",
            "one of the two",
            "add trainer.max_steps=null to train by epochs",
        )
    if steps is None and epochs is None:
        yield Problem(
            "trainer.max_steps=None", "no length is set", "trainer.max_steps or trainer.num_epochs"
        )


def _alpha_rule(config: Config) -> Iterator[Problem]:
    """An alpha that merely follows a refused rank is not a second mistake."""
    rank, alpha = config.adapter.rank, config.adapter.alpha
    if not (math.isfinite(alpha) and alpha > 0) and alpha != rank:
        yield Problem(f"adapter.alpha={alpha}", "out of range", "above 0")


def _batch_rules(config: Config) -> Iterator[Problem]:
    batch, micro = config.trainer.batch_size, config.trainer.micro_batch
    if micro is not None and micro > 0 and batch % micro:
        divisors = ", ".join(str(n) for n in range(1, min(batch, 64) + 1) if batch % n == 0)
        yield Problem(
            f"trainer.micro_batch={micro}",
            f"does not divide trainer.batch_size={batch}",
            divisors,
        )
    if config.buckets.step > 0 and config.buckets.resolution % config.buckets.step:
        yield Problem(
            f"buckets.resolution={config.buckets.resolution}",
            f"not a multiple of buckets.step={config.buckets.step}",
            "a multiple of buckets.step",
        )


def _no_effect(config: Config) -> Iterator[Problem]:
    """An option that would be ignored is refused rather than believed."""
    schedule, timesteps, default = config.lr_schedule, config.timesteps, Config()
    if schedule.name == "constant" and schedule.warmup_steps:
        yield _ignored(
            f"lr_schedule.warmup_steps={schedule.warmup_steps}",
            "lr_schedule.name=constant has no warm-up",
            "use lr_schedule=constant_with_warmup",
        )
    if schedule.name != "cosine_with_restarts" and schedule.num_cycles != 1:
        yield _ignored(
            f"lr_schedule.num_cycles={schedule.num_cycles}",
            f"lr_schedule.name={schedule.name} has no cycles",
            "use lr_schedule=cosine_with_restarts",
        )
    if schedule.name != "polynomial" and schedule.power != 1.0:
        yield _ignored(
            f"lr_schedule.power={schedule.power}",
            f"lr_schedule.name={schedule.name} has no power",
            "use lr_schedule=polynomial",
        )
    for name in ("mean", "std"):
        value = getattr(timesteps, name)
        if timesteps.density == "uniform" and value != getattr(default.timesteps, name):
            why = "timesteps.density=uniform has none"
            yield _ignored(f"timesteps.{name}={value}", why, "use timesteps=logit_normal")
    objective = config.objective
    if objective.weighting != "min_snr" and objective.snr_gamma != default.objective.snr_gamma:
        yield _ignored(
            f"objective.snr_gamma={objective.snr_gamma}",
            f"objective.weighting={objective.weighting} has none",
            "use objective=min_snr",
        )
    if config.latents.variants == 1:
        if config.latents.random_flip:
            yield _ignored(
                "latents.random_flip=True",
                "the first variant is the plain centre crop",
                "use latents.variants=2 or more",
            )
        if config.latents.crop_seed:
            yield _ignored(
                f"latents.crop_seed={config.latents.crop_seed}",
                "the first variant is the plain centre crop",
                "use latents.variants=2 or more",
            )
    for name in ("every", "num_draws"):
        value = getattr(config.validation, name)
        if not config.validation.fraction and value != getattr(default.validation, name):
            yield _ignored(
                f"validation.{name}={value}",
                "validation.fraction=0.0 holds no picture out",
                "use validation.fraction=0.1",
            )
    for group in ("family", "sample"):
        base, revision = (value_of(config, f"{group}.{name}") for name in ("base", "revision"))
        if revision is not None and (base is None or _is_local(base)):
            why = f"{group}.base={base} is no Hub id"
            yield _ignored(f"{group}.revision={revision}", why, f"drop {group}.revision")


def _tracker_rules(config: Config) -> Iterator[Problem]:
    tracker = config.tracker
    for name in ("uri", "experiment", "parent"):
        value = getattr(tracker, name)
        if tracker.name == "none" and value is not None:
            why = "tracker.name=none records nothing"
            yield _ignored(f"tracker.{name}={value}", why, f"drop tracker.{name}")
    if tracker.name != "mlflow":
        return
    if not _is_store(tracker.uri or ""):
        allowed = ", ".join(f"{scheme}://..." for scheme in STORES)
        yield Problem(f"tracker.uri={tracker.uri}", "no tracking store", allowed)
    if not (tracker.experiment or "").strip():
        yield Problem(f"tracker.experiment={tracker.experiment}", "has no name", "a name")


def _is_store(uri: str) -> bool:
    """Whether it is an address of a kind we know; a "/" in a password would end the host."""
    try:
        urlsplit(uri).port  # noqa: B018
    except ValueError:
        return False
    return uri.partition("://")[0] in STORES


def _ignored(subject: str, why: str, remedy: str) -> Problem:
    return Problem(subject, f"would have no effect: {why}", remedy=remedy)


def _is_local(base: str) -> bool:
    return base == TINY or user_path(base).is_dir()


def _path_rules(config: Config) -> Iterator[Problem]:
    root = user_path(config.dataset.root)
    if not config.dataset.root or not root.is_dir():
        why = "no such folder" if not root.exists() else "not a folder"
        remedy = "give a folder of pictures, relative to where you stand or absolute"
        yield Problem(f"dataset.root={config.dataset.root}", why, remedy=remedy)
    for setting in ("paths.store", "paths.outputs"):
        path = user_path(value_of(config, setting))
        if path.exists() and not path.is_dir():
            yield Problem(f"{setting}={path}", "exists and is not a folder")
