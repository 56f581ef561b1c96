"""What each setting may hold: ranges and choices; `lib.rules_across` looks at several at once."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
PRECISIONS = (*DENSE, "fp8", "int8", "nf4")
_COLOUR = re.compile("#[0-9a-fA-F]{6}")


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


def _ranks(pattern: dict[str, int]) -> bool:
    return all(name and 1 <= rank <= 320 for name, rank in pattern.items())


RULES: tuple[Rule, ...] = (
    _choice("precision.mode", *PRECISIONS, "auto"),
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
    _optional(_number("encode.batch_size", 1, 1024)),
    _number("adapter.rank", 1, 320),
    Rule("adapter.rank_pattern", _ranks, "module names with ranks of 1 to 320"),
    Rule("adapter.targets", lambda v: len(v) > 0 and all(v), "at least one module name"),
    Rule("adapter.dropout", lambda v: 0 <= v < 1, "0 to below 1"),
    _choice("timesteps.density", "logit_normal", "uniform"),
    _number("timesteps.mean", -10, 10),
    _number("timesteps.std", 0.01, 10),
    _above("timesteps.shift", 0),
    _choice("timesteps.shift_by", "constant", "tokens"),
    _choice("objective.weighting", "none", "bell", "min_snr"),
    _above("objective.snr_gamma", 0),
    _choice("optimizer.name", "adamw", "adamw_8bit"),
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
    _choice("trainer.gradient_checkpointing", "auto", "always", "never"),
    _choice("trainer.compile", "auto", "always", "never"),
    _choice("trainer.cuda_graphs", "auto", "never"),
    _choice("trainer.attention", "auto", "flash"),
    Rule("trainer.caption_dropout", lambda v: 0 <= v < 1, "0 to below 1"),
    Rule("validation.fraction", lambda v: 0 <= v < 1, "0 (none) to below 1"),
    _number("validation.every", 1, 100_000),
    _number("validation.num_draws", 1, 1000),
    _choice("export.format", "diffusers", "kohya", "comfyui"),
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
