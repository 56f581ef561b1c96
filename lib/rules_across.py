"""Rules across settings: lengths, batches, places, and options that would have no effect."""

import math
from collections.abc import Iterator
from urllib.parse import urlsplit

from lib.errors import Problem
from lib.files import user_path
from lib.rules import RULES
from lib.schema import AUTO, TINY, Config, settings_of, value_of

STORES = ("sqlite", "http", "https", "postgresql", "mysql", "mssql")


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
    yield from _machine_rules(config)
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


def _schedule_effects(config: Config) -> Iterator[Problem]:
    schedule = config.lr_schedule
    if schedule.name == "constant_with_warmup" and not schedule.warmup_steps:
        yield _ignored(
            "lr_schedule.name=constant_with_warmup",
            "lr_schedule.warmup_steps=0 warms up nothing",
            "use lr_schedule=constant, or set lr_schedule.warmup_steps",
        )
    if schedule.name == "constant" and schedule.warmup_steps:
        yield _ignored(
            f"lr_schedule.warmup_steps={schedule.warmup_steps}",
            "lr_schedule.name=constant has no warm-up",
            "use lr_schedule=constant, which has none set, or lr_schedule=constant_with_warmup",
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


def _no_effect(config: Config) -> Iterator[Problem]:
    """An option that would be ignored is refused rather than believed."""
    yield from _schedule_effects(config)
    timesteps, default = config.timesteps, Config()
    for name in ("mean", "std"):
        value = getattr(timesteps, name)
        if timesteps.density == "uniform" and value != getattr(default.timesteps, name):
            why = "timesteps.density=uniform has none"
            yield _ignored(f"timesteps.{name}={value}", why, "use timesteps=logit_normal")
    if timesteps.shift_by == "tokens" and timesteps.shift != 1:
        why = "timesteps.shift_by=tokens takes the shift from each bucket's size"
        yield _ignored(f"timesteps.shift={timesteps.shift}", why, "use timesteps.shift=1")
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


def _machine_rules(config: Config) -> Iterator[Problem]:
    """How the machine computes."""
    mode, trainer = config.precision.mode, config.trainer
    if config.precision.redecide and mode != AUTO:
        why = f"precision.mode={mode} leaves nothing to decide"
        yield _ignored("precision.redecide=True", why, "use precision=auto")
    if trainer.deterministic and trainer.cudnn_benchmark:
        why = "which convolution is fastest changes from run to run, and with it the bits"
        remedy = "or drop trainer.deterministic"
        yield Problem("trainer.cudnn_benchmark=True", why, "false", remedy)


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
