"""Hydra's own flags and its launchers: the job of each combination, here or in other processes."""

import contextlib
import importlib.util
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from lib.config import Reading
from lib.errors import InputRefused, Problem
from lib.files import user_path
from stages import composing

LAUNCHER = "hydra/launcher="
_CALLBACK = "+hydra.callbacks.darkroom._target_=stages.launching.Beginnings"
INSTALL = "python -m pip install -e '.[sweep]' -c constraints.txt"


@dataclass(frozen=True)
class Combination:
    """One combination of a sweep: its place in it, its overrides, what was read.

    `folder` is the sweep's own.
    """

    number: int
    overrides: tuple[str, ...]
    reading: Reading
    folder: Path


HydraJob = Callable[[Combination], None]
Begin = Callable[[Reading, Path], None]
_begin: list[Begin] = []  # Hydra makes the callback itself, and hands it nothing of ours


class Beginnings(Callback):
    """Hydra's callback in the process of the command, before any combination starts."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        names = [str(name) for name in config if name != "hydra"]
        raw = OmegaConf.masked_copy(config, names)
        for begin in _begin:
            begin(composing.reading_of(raw), _folder(config.hydra))


@dataclass(frozen=True)
class _Task:
    """What Hydra calls with each combination; a launcher pickles it for another process."""

    job: HydraJob

    def __call__(self, raw: DictConfig) -> None:
        ours: Any = HydraConfig.get()
        number = OmegaConf.select(ours, "job.num", throw_on_missing=False) or 0
        overrides = tuple(ours.overrides.task)
        # hydra.job.chdir moves us into the sweep's folder; paths start where the user stands.
        with contextlib.chdir(ours.runtime.cwd):
            self.job(Combination(number, overrides, composing.reading_of(raw), _folder(ours)))


def with_hydra(job: HydraJob, arguments: Sequence[str], *, begin: Begin | None = None) -> None:
    """Hydra's own flags, --multirun among them: the job runs once for each combination.

    What it raises would end the whole command. `begin` is called in this process, before the
    first of several, with what they share; the job may run in others.
    """
    composing.register(typed=True)
    sys.argv[1:] = [*arguments, *([_CALLBACK] if begin else [])]
    _begin[:] = [begin] if begin else []
    main = hydra.main(
        version_base="1.3", config_path=str(composing.CONF), config_name=composing.NAME
    )
    main(_Task(job))()


def launcher_problems(arguments: Sequence[str]) -> Iterator[Problem]:
    """Why jobs cannot be handed to the launcher that the arguments name."""
    for word in arguments:
        name = word.removeprefix(LAUNCHER)
        if not word.startswith(LAUNCHER) or name == "basic":
            continue
        if importlib.util.find_spec("submitit") is None:
            yield Problem(word, "needs hydra-submitit-launcher", remedy=INSTALL)
        elif name.endswith("slurm") and shutil.which("srun") is None:
            remedy = "start the command on a login node of the cluster"
            yield Problem(word, "finds no srun: this is no machine of a SLURM cluster", "", remedy)


def check_launcher(arguments: Sequence[str]) -> None:
    """Refuse a launcher that could not start anything."""
    if problems := list(launcher_problems(arguments)):
        raise InputRefused(problems)


def _folder(ours: Any) -> Path:
    return Path(ours.runtime.cwd, user_path(ours.sweep.dir))
