"""Training that ends after any step and goes on elsewhere, beside the run that nothing disturbed."""

import hashlib
import importlib.util
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import chdir
from dataclasses import dataclass, replace
from pathlib import Path

from lib import runs, stopping
from lib.events import Events
from lib.schema import Config
from tests.reliability import crashes, rigs

STEPS, SAVE_EVERY = 12, 5
STEPS_DONE = range(1, STEPS + 1)
STOP, KILL = signal.SIGTERM, signal.SIGKILL
UPSTREAM = ("encode_captions", "build_latent_cache")
LARGER = ("buckets.resolution=128", "buckets.step=64")  # the least that SDXL's base sees
ONLY = {"sdxl": LARGER}
SETTINGS = (
    *("family.base=tiny", "precision=fp32", "tracker=none", "buckets.resolution=64"),
    *("buckets.step=16", "buckets.max_aspect=3", "captions.max_length=24", "captions.dtype=fp32"),
    *("adapter.rank=4", "optimizer.lr=1e-2", "trainer.batch_size=2"),  # an epoch is 3 steps
    *(f"trainer.max_steps={STEPS}", f"trainer.save_every={SAVE_EVERY}"),
)
WARM_UP = "lr_schedule.warmup_steps=4"
VARIANTS = {
    "AdamW, warm-up, EMA": ("lr_schedule=constant_with_warmup", WARM_UP),
    # Its moments of 4096 numbers and more are of 8 bits: 128 ranks by 32 features.
    "8-bit AdamW, linear": ("optimizer=adamw_8bit", "lr_schedule=linear", "adapter.rank=128"),
    "cosine, no EMA": ("lr_schedule=cosine", WARM_UP, "trainer.ema_decay=0"),
    "restarts, adapter dropout": (
        *("lr_schedule=cosine_with_restarts", "lr_schedule.num_cycles=2", "adapter.dropout=0.3"),
    ),
    "polynomial, caption dropout, micro-batch 1": (
        *("lr_schedule=polynomial", "trainer.caption_dropout=0.4", "trainer.micro_batch=1"),
        *("latents.variants=2", "adapter.rslora=true"),
    ),
}


@dataclass(frozen=True)
class Whole:
    """An undisturbed run: what it left and told, and what was there before it."""

    config: Config
    before: Path
    left: dict[str, str]
    told: list[dict[str, float]]
    scratch: Path

    @property
    def log(self) -> Path:
        return self.scratch / "log"


def whole_run(family: str, variant: str, scratch: Path) -> Whole:
    """Encode what a variant needs, and train it in one go."""
    from stages.composing import compose

    _import(family)
    data = rigs.fresh(scratch / "data")
    for name in rigs.PICTURES:
        shutil.copy(rigs.EMOJI / f"{name}.png", data / f"{name}.png")
        (data / f"{name}.txt").write_text(f"a 3D emoji of {name}", encoding="utf-8")
    own = (f"family={family}", f"dataset.root={data}", *ONLY.get(family, ()), *VARIANTS[variant])
    whole = Whole(compose([*SETTINGS, *own]), rigs.fresh(scratch / "before"), {}, [], scratch)
    for stage in UPSTREAM:
        _sound(whole, lambda s=stage: _make(whole, whole.before, s))
    root = rigs.fresh(scratch / "whole", like=whole.before)
    _sound(whole, lambda: _make(whole, root, "train"))
    return replace(whole, left=_left(root), told=_told(root))


def _import(family: str) -> None:
    """All that the children would import, each anew."""
    import diffusers
    import peft  # noqa: F401
    import transformers

    from lib import families
    from lib.training import session  # noqa: F401

    for classes in families.get(family).FACTS.classes.values():
        name = classes.split("|")[0]
        getattr(diffusers, name, None) or getattr(transformers, name, None)
    if lacks_bitsandbytes():
        from peft import import_utils

        from tests.unit import eight_bits

        # They remember it: the stand-in has none of the layers for which PEFT would look.
        assert not any((import_utils.is_bnb_available(), import_utils.is_bnb_4bit_available()))
        sys.modules["bitsandbytes"] = eight_bits.module()


def lacks_bitsandbytes() -> bool:
    """Whether no package of that name can be imported, nor stands one in already."""
    return "bitsandbytes" not in sys.modules and importlib.util.find_spec("bitsandbytes") is None


def _make(whole: Whole, root: Path, stage: str) -> None:
    from lib.pipeline import graph, train

    train._show_data = train._show_losses = lambda *_: None
    paths = replace(whole.config.paths, store=str(root / "store"), outputs=str(root / "out"))
    with stopping.heeding():
        graph.ensure(stage, replace(whole.config, paths=paths), Events())


def _sound(whole: Whole, action: Callable[[], None]) -> None:
    if crashes.run(action, log=whole.log):
        raise AssertionError(whole.log.read_text())


def _left(root: Path) -> dict[str, str]:
    """The digests of the adapter, of its average, and of the last checkpoint: all the state."""
    (folder,) = (root / "out").iterdir()
    state = f"checkpoints/step-{STEPS:08d}/state.safetensors"
    names = (runs.ADAPTER_FILE, runs.EMA_FILE, state)
    paths = {name: folder / name for name in names if (folder / name).exists()}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in paths.items()}


def _told(root: Path) -> list[dict[str, float]]:
    """Loss, norm, rate and count of every step, as often as it ran."""
    (folder,) = (root / "out").iterdir()
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    names = ("step", "loss", "grad_norm", "lr", "num_samples_seen")
    return [{n: e[n] for n in names} for e in events if e["kind"] == "metric"]


def cases() -> list[tuple[signal.Signals, int]]:
    """Stopped after each step of the run, and killed after each but the last."""
    return [*((STOP, step) for step in STEPS_DONE), *((KILL, step) for step in STEPS_DONE[:-1])]


def trial(whole: Whole, sent: signal.Signals, *, step: int) -> list[str]:
    """What differs once a run that a signal ended after a step has gone on in another folder."""
    said = f"{sent.name} after step {step}"
    root = rigs.fresh(whole.scratch / "trial", like=whole.before)
    first = crashes.run(lambda: _disturbed(whole, root, sent, step=step), log=whole.log)
    if first != (75 if sent == STOP else -sent):
        return [f"{said}: it ended with {first}: {whole.log.read_text()[-500:]}"]
    elsewhere = rigs.fresh(whole.scratch / "elsewhere")
    with chdir(elsewhere):
        second = crashes.run(lambda: _make(whole, root, "train"), log=whole.log)
    if second:
        return [f"{said}: the second process ended with {second}"]
    saved = step if sent == STOP else step - step % SAVE_EVERY
    wrong, told, left = [], _told(root), _left(root)
    if left != whole.left:
        names = {n for n in left.keys() | whole.left.keys() if left.get(n) != whole.left.get(n)}
        wrong.append(f"{said}: different: {sorted(names)}")
    # What dies may not have told of its last step yet.
    least = len(told) - (STEPS - saved) if sent == KILL else step
    ran = [*range(1, least + 1), *range(saved + 1, STEPS + 1)]
    if not step - 1 <= least <= step or told != [whole.told[number - 1] for number in ran]:
        wrong.append(f"{said}: other losses, rates or steps: {[one['step'] for one in told]}")
    if temporary := rigs.leftovers(root):
        wrong.append(f"{said}: left: {temporary}")
    return wrong


def _disturbed(whole: Whole, root: Path, sent: signal.Signals, *, step: int) -> None:
    """Train, and be sent a signal: to stop while the step is made, to die when it is done."""
    from lib.training.step import Trainer

    made = Trainer.launch
    at = step - 1 if sent == STOP else step

    def sending(self: Trainer, group, **named):
        if group.step == at:
            os.kill(os.getpid(), sent)
        return made(self, group, **named)

    Trainer.launch = sending
    _make(whole, root, "train")
