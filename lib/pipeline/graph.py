"""The one table of stages, and `ensure`: a stage with all that is missing upstream (design 2)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import ModuleType

from lib import families, stopping
from lib.errors import InputRefused, Problem, StateRefused
from lib.events import Events
from lib.family import Facts, Family, process_of
from lib.files import user_path
from lib.fitting import (
    base_problems,
    diffusers_problem,
    distillation_problem,
    precision_problem,
)
from lib.hub import Base, UnbuiltTiny, on_hub, open_base
from lib.leases import lease
from lib.memory import Memory
from lib.naming import is_named
from lib.pipeline import (
    build_latent_cache,
    deciding,
    encode_captions,
    export,
    prepare_dataset,
    sample,
    train,
)
from lib.pipeline.contract import Inputs, StagePlan
from lib.schema import Config, FamilyConfig, TimestepsConfig
from lib.store import Manifest, Store
from lib.team import this_process
from lib.verify import EntriesDamaged

STAGES: dict[str, tuple[ModuleType, tuple[str, ...]]] = {
    "prepare_dataset": (prepare_dataset, ()),
    "encode_captions": (encode_captions, ("prepare_dataset",)),
    "build_latent_cache": (build_latent_cache, ("prepare_dataset",)),
    "train": (train, ("prepare_dataset", "encode_captions", "build_latent_cache")),
    "export": (export, ("train",)),
    "sample": (
        sample,
        ("prepare_dataset", "encode_captions", "build_latent_cache", "train", "export"),
    ),
}


@dataclass(frozen=True)
class Opened:
    """What every stage works with: the store, the family and the resolved base."""

    store: Store
    family: Family
    base: Base
    canvas: Base  # what samples are drawn on

    def inputs(self, upstream: Mapping[str, Manifest]) -> Inputs:
        return Inputs(self.family, self.base, upstream, self.canvas)


def order(target: str) -> list[str]:
    """The target's upstream stages, each once, in the order they run, and the target."""
    _, needs = STAGES[target]
    before = [stage for need in needs for stage in order(need)]
    return [*dict.fromkeys(before), target]


def problems(config: Config, *, online: bool) -> Iterator[Problem]:
    """What is wrong with the family, its base and the data set, before any weight is read.

    Without `online` a base on the Hub is not looked at.
    """
    if config.family.name not in families.names():
        allowed = ", ".join(families.names())
        yield Problem(f"family={config.family.name}", "unknown family", allowed)
        return
    family = families.get(config.family.name)
    yield from _family_rules(config, family)
    if online or not on_hub(config.family.base):
        yield from _and_refusals(_base_problems(config, family))
    if config.sample.base is not None and (online or not on_hub(config.sample.base)):
        yield from map(_of_sample, _and_refusals(_canvas_problems(config, family)))
    if config.dataset.root and user_path(config.dataset.root).is_dir():
        yield from prepare_dataset.problems(config, Store(user_path(config.paths.store)))
    yield from _and_refusals(train.problems(config))


def _and_refusals(problems: Iterator[Problem]) -> Iterator[Problem]:
    """The problems, and those of a refusal that ends them, such as of a file that is missing."""
    try:
        yield from problems
    except InputRefused as refused:
        yield from refused.problems


def _base_problems(config: Config, family: Family) -> Iterator[Problem]:
    base = _open_base(config.family, config, family)
    found = list(base_problems(base, family=family, others=_all_facts()))
    yield from found
    if found:
        return
    if wrong := precision_problem(base, family=family, mode=config.precision.mode):
        yield wrong
    distilled = distillation_problem(base, family=family)
    if distilled and not config.family.allow_distilled:
        yield distilled
    if config.sample.negative_prompt is not None and config.sample.base is None:
        yield from _negative_rules(config, family, base)
    yield from process_of(family, base).problems(config.timesteps)


def _canvas_problems(config: Config, family: Family) -> Iterator[Problem]:
    """The base drawn on must be one of the family's; a distilled one is welcome."""
    if config.sample.every:
        why = "grids while training are drawn on family.base, with what is meant for sample.base"
        yield Problem(f"sample.every={config.sample.every}", why, "0", "or drop sample.base")
    canvas = _open_canvas(config, family)
    found = list(base_problems(canvas, family=family, others=_all_facts()))
    yield from found
    if found:
        return
    if config.sample.negative_prompt is not None:
        yield from _negative_rules(config, family, canvas)
    process_of(family, canvas)


def _negative_rules(config: Config, family: Family, base: Base) -> Iterator[Problem]:
    scale = config.sample.guidance
    if not family.guides(scale, base=base):
        why = f"would have no effect: sample.guidance={scale} asks {base.reference} for no second"
        yield Problem("sample.negative_prompt", f"{why} prediction", remedy="drop it")


def _of_sample(problem: Problem) -> Problem:
    """The same of `sample.base`; what is wrong with a base is said of `family.base`."""
    if not problem.subject.startswith("family."):
        return problem
    return replace(problem, subject="sample." + problem.subject.removeprefix("family."))


def _family_rules(config: Config, family: Family) -> Iterator[Problem]:
    facts, step, length = family.FACTS, config.buckets.step, config.captions.max_length
    if too_old := diffusers_problem(facts):
        yield too_old
    if step % facts.divisor:
        allowed = f"a multiple of {facts.divisor}"
        yield Problem(f"buckets.step={step}", f"family={facts.name} cannot use it", allowed)
    if not facts.min_text_tokens <= length <= facts.max_text_tokens:
        how = "long" if length > facts.max_text_tokens else "short"
        why = f"too {how} for family={facts.name}"
        allowed = f"{facts.min_text_tokens} to {facts.max_text_tokens}"
        yield Problem(f"captions.max_length={length}", why, allowed)
    if (dtype := config.latents.dtype) not in facts.latent_dtypes:
        why = f"the autoencoder of family={facts.name} needs more"
        yield Problem(f"latents.dtype={dtype}", why, ", ".join(facts.latent_dtypes))
    if (format := config.export.format) not in (formats := family.NAMES.formats):
        why = f"diffusers reads no such adapter of family={facts.name}"
        yield Problem(f"export.format={format}", why, ", ".join(formats))
    yield from _lost_in_export(config, family)
    if (weighting := config.objective.weighting) not in facts.noise.weightings:
        why, allowed = f"family={facts.name} has none such", ", ".join(facts.noise.weightings)
        yield Problem(f"objective.weighting={weighting}", why, allowed)
    if config.trainer.batch_size % (processes := this_process().size):
        why = f"does not divide among the {processes} processes of the run"
        allowed = f"a multiple of WORLD_SIZE={processes}"
        yield Problem(f"trainer.batch_size={config.trainer.batch_size}", why, allowed)
    if config.precision.redecide and processes > 1:
        why = f"each of {processes} processes would decide for itself"
        remedy = "decide in one process, then train in several"
        yield Problem("precision.redecide=True", why, "false", remedy)
    for name in ("shift", "shift_by"):
        value = getattr(config.timesteps, name)
        if value != getattr(TimestepsConfig(), name) and not facts.noise.shifts:
            why = f"would have no effect: family={facts.name} has steps, not sigmas, to draw"
            yield Problem(f"timesteps.{name}={value}", why, remedy="drop it")


def _lost_in_export(config: Config, family: Family) -> Iterator[Problem]:
    """Modules that the run would train and its export could not write: after hours, not before."""
    format, names = config.export.format, family.NAMES
    for target in config.adapter.targets:
        lost = [m for m in names.lost_modules(format) if is_named(m, target=target)]
        if lost:
            why = f"its readers would leave out {lost[0]}, which adapter.targets={target} means"
            allowed = ", ".join(one for one in names.formats if one != format)
            yield Problem(f"export.format={format}", why, allowed, "or drop the target")


def _all_facts() -> dict[str, Facts]:
    return {name: families.get(name).FACTS for name in families.names()}


def _open_canvas(config: Config, family: Family) -> Base:
    """What samples are drawn on where it is another base; a refusal names its setting."""
    base = config.sample.base or config.family.base
    which = replace(config.family, base=base, revision=config.sample.revision)
    try:
        return _open_base(which, config, family)
    except InputRefused as refused:
        raise InputRefused(map(_of_sample, refused.problems)) from refused


def _open_base(which: FamilyConfig, config: Config, family: Family) -> Base:
    store = user_path(config.paths.store)
    return open_base(which, family=family, store=store, memory=Memory(store))


def open_inputs(config: Config) -> Opened:
    """Open the store, the family and the base; nothing is built."""
    store = Store(user_path(config.paths.store))
    family = families.get(config.family.name)
    base = canvas = _open_base(config.family, config, family)
    if config.sample.base is not None:
        canvas = _open_canvas(config, family)
    return Opened(store=store, family=family, base=base, canvas=canvas)


def ensure(target: str, config: Config, events: Events) -> Manifest:
    """The target's manifest, making whatever is missing; damaged entries are made again."""
    stop_file = user_path(config.paths.outputs) / stopping.STOP_FILE
    stopping.refuse_if_asked(stop_file, whom="every run here", remedy="remove the file")
    # Says that this process writes, from the first file on: what it leaves if killed is cleared.
    with lease(Store(user_path(config.paths.store)), ()), stopping.watching(stop_file):
        opened = open_inputs(config)
        unbuilt = [b for b in (opened.base, opened.canvas) if isinstance(b, UnbuiltTiny)]
        for base in unbuilt:
            base.build()
        if unbuilt:
            opened = open_inputs(config)
        if train.STAGE in order(target):
            deciding.check_machine(config, lambda: plan(target, config))
        # Each stage may find damage of its own; what then still fails is beyond mending here.
        for _ in order(target):
            try:
                return _ensure(target, config, opened, events)
            except EntriesDamaged as found:
                _set_aside(found, config, opened.store, events)
        return _ensure(target, config, opened, events)


def _set_aside(found: EntriesDamaged, config: Config, store: Store, events: Events) -> None:
    """Make room for entries that are damaged, unless only the stage itself may run."""
    if config.upstream == "require":
        raise StateRefused(_rebuild(d.kind, str(d.path)) for d in found.damaged) from found
    for damage in found.damaged:
        store.quarantine(damage.kind, damage.key)
    events.warning(f"{len(found.damaged)} damaged entries set aside; they are made again")


def _ensure(target: str, config: Config, opened: Opened, events: Events) -> Manifest:
    made: dict[str, Manifest] = {}
    for stage in order(target):
        stopping.check()
        module, needs = STAGES[stage]
        inputs = opened.inputs({need: made[need] for need in needs})
        if config.upstream == "require" and stage != target:
            _require(module.plan(config, inputs, opened.store))
        if stage == train.STAGE:
            config = deciding.decided(config, inputs, opened.store, events)
        made[stage] = module.run(config, inputs, opened.store, events)
    return made[target]


def plan(target: str, config: Config) -> list[StagePlan]:
    """What `ensure` would do, stage by stage; imports no torch and makes nothing."""
    opened = open_inputs(config)
    plans: dict[str, StagePlan] = {}
    for stage in order(target):
        module, needs = STAGES[stage]
        known = {need: m for need in needs if (m := plans[need].manifest)}
        inputs = opened.inputs(known)
        if stage == train.STAGE:
            config = deciding.known(config, inputs, opened.store)
        plans[stage] = module.plan(config, inputs, opened.store)
    return list(plans.values())


def _require(planned: StagePlan) -> None:
    if not planned.hit:
        raise StateRefused(
            Problem(
                "upstream=require",
                f"{planned.stage} is not complete: {planned.missing} of {planned.total} missing",
                remedy=f"run `python -m stages.{planned.stage}` or set upstream=ensure",
            )
        )


def _rebuild(kind: str, path: str) -> Problem:
    stage = {"captions": "encode_captions", "latents": "build_latent_cache"}[kind]
    return Problem(
        path, "is damaged", remedy=f"run `python -m stages.{stage}` with upstream=ensure"
    )
