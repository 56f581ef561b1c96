"""The configuration's shape: frozen dataclasses whose field names are the public option names.

Hydra checks overrides against them and `lib.config` builds them; neither rules nor logic live here.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

AUTO = "auto"  # of precision.mode: decided by the machine, once for each run
TINY = "tiny"
CAPTION_TEXTS = ("dataset.instance_prompt", "dataset.trigger", "dataset.prefix")


@dataclass(frozen=True)
class Preset:
    """A family's own values; groups interpolate them (`optimizer.lr: ${family.preset.lr}`)."""

    rank: int = 16
    alpha: float = 16.0
    lr: float = 1e-4
    resolution: int = 512
    lr_schedule: str = "constant"
    warmup_steps: int = 0
    max_length: int = 512
    steps: int = 28
    guidance: float = 3.5
    density: str = "logit_normal"
    shift: float = 1.0
    targets: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class FamilyConfig:
    name: str = "flux"
    base: str = TINY
    revision: str | None = None
    allow_distilled: bool = False
    preset: Preset = field(default_factory=Preset)


@dataclass(frozen=True)
class PrecisionConfig:
    mode: str = "fp32"
    redecide: bool = False


@dataclass(frozen=True)
class DatasetConfig:
    root: str = ""
    instance_prompt: str | None = None
    trigger: str | None = None
    prefix: str | None = None
    folder_repeats: bool = False
    background: str = "#ffffff"
    min_side: int = 0
    animated: str = "refuse"
    damaged: str = "refuse"


@dataclass(frozen=True)
class BucketsConfig:
    resolution: int = 512
    step: int = 64
    max_aspect: float = 2.0
    policy: str = "area"


@dataclass(frozen=True)
class CaptionsConfig:
    max_length: int = 512
    dtype: str = "auto"


@dataclass(frozen=True)
class LatentsConfig:
    variants: int = 1
    crop_seed: int = 0
    random_flip: bool = False
    dtype: str = "fp32"
    max_bytes: int = 4 * 1024**3


@dataclass(frozen=True)
class EncodeConfig:
    batch_size: int | None = None


@dataclass(frozen=True)
class AdapterConfig:
    rank: int = 16
    alpha: float = 16.0
    rslora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    targets: list[str] = field(default_factory=list)
    dropout: float = 0.0


@dataclass(frozen=True)
class TimestepsConfig:
    density: str = "logit_normal"
    mean: float = 0.0
    std: float = 1.0
    shift: float = 1.0
    shift_by: str = "constant"


@dataclass(frozen=True)
class ObjectiveConfig:
    weighting: str = "none"
    snr_gamma: float = 5.0


@dataclass(frozen=True)
class OptimizerConfig:
    name: str = "adamw"
    lr: float = 1e-4
    weight_decay: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8


@dataclass(frozen=True)
class LrScheduleConfig:
    name: str = "constant"
    warmup_steps: int = 0
    num_cycles: int = 1
    power: float = 1.0


@dataclass(frozen=True)
class TrainerConfig:
    max_steps: int | None = None
    num_epochs: int | None = None
    batch_size: int = 1
    micro_batch: int | None = None
    max_grad_norm: float = 1.0
    ema_decay: float = 0.99
    save_every: int = 100
    caption_dropout: float = 0.0
    gradient_checkpointing: str = "auto"
    compile: str = "auto"
    cuda_graphs: str = "auto"
    attention: str = "auto"
    tf32: bool = False
    cudnn_benchmark: bool = False
    deterministic: bool = False
    extend: str | None = None


@dataclass(frozen=True)
class ValidationConfig:
    fraction: float = 0.0
    every: int = 100
    num_draws: int = 8


@dataclass(frozen=True)
class ExportConfig:
    format: str = "diffusers"
    dtype: str = "fp32"
    prompts: bool = False


@dataclass(frozen=True)
class SampleConfig:
    base: str | None = None
    revision: str | None = None
    prompts: list[str] = field(default_factory=list)
    negative_prompt: str | None = None
    seed: int = 0
    num_seeds: int = 1
    steps: int = 28
    guidance: float = 3.5
    every: int = 0


@dataclass(frozen=True)
class TrackerConfig:
    name: str = "none"
    uri: str | None = None
    experiment: str | None = None
    parent: str | None = None


@dataclass(frozen=True)
class PathsConfig:
    store: str = "store"
    outputs: str = "outputs"


@dataclass(frozen=True)
class GcConfig:
    keep_days: float = 14.0


@dataclass(frozen=True)
class Config:
    """The whole configuration of one run; field names are the public option names (design 1)."""

    family: FamilyConfig = field(default_factory=FamilyConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    buckets: BucketsConfig = field(default_factory=BucketsConfig)
    captions: CaptionsConfig = field(default_factory=CaptionsConfig)
    latents: LatentsConfig = field(default_factory=LatentsConfig)
    encode: EncodeConfig = field(default_factory=EncodeConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    timesteps: TimestepsConfig = field(default_factory=TimestepsConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_schedule: LrScheduleConfig = field(default_factory=LrScheduleConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)
    gc: GcConfig = field(default_factory=GcConfig)
    name: str | None = None
    seed: int = 0
    upstream: str = "ensure"
    rerun: bool = False


def to_plain(config: Any) -> dict[str, Any]:
    """Plain nested values, as written to a run's config.yaml."""
    return dataclasses.asdict(config)


def with_mode(config: Config, mode: str) -> Config:
    """The configuration as if this precision had been asked for."""
    precision = dataclasses.replace(config.precision, mode=mode, redecide=False)
    return dataclasses.replace(config, precision=precision)


def settings_of(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting by its dotted name, with its value."""
    for field_ in dataclasses.fields(config):
        value = getattr(config, field_.name)
        if dataclasses.is_dataclass(value):
            yield from settings_of(value, f"{prefix}{field_.name}.")
        else:
            yield f"{prefix}{field_.name}", value


def value_of(config: Config, setting: str) -> Any:
    """The value of a dotted setting name."""
    value: Any = config
    for part in setting.split("."):
        value = getattr(value, part)
    return value
