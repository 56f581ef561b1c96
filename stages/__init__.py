"""What all doors share: compose, refuse in one report, run, print, exit code. Kept light."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lib import stopping
from lib.errors import DarkroomError, InputRefused, Problem, Stopped
from lib.events import Events
from lib.schema import Config
from lib.team import this_process
from stages.summary import Summary

HEARING_SECONDS = 5.0
SHARING = ("train", "encode_captions", "build_latent_cache", "prepare_dataset")

# The libraries' notices are not ours to give; a user who wants them sets the level.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
# For trainer.deterministic: torch looks once, at a process's first product, even an encoder's.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

Job = Callable[[Config, Summary], int]


def door(stage: str) -> None:
    """The command line of one stage of the graph."""
    main(lambda config, summary: run_stage(stage, config, summary))


def main(job: Job, *, arguments: Sequence[str] | None = None, opens_base: bool = True) -> None:
    """Compose the arguments into a configuration, run the job with it, exit with its code.

    `opens_base` False is for jobs that touch neither the base nor the data set.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if this_process().size > 1 and (refused := _refused_team(arguments, opens_base=opens_base)):
        sys.exit(refused)
    with stopping.heeding():
        code = guarded(lambda: _main(_checking(job) if opens_base else job, arguments))
    sys.exit(code)


def guarded(action: Callable[[], int]) -> int:
    """An exit code; a user's mistake is a report on stderr, a fault of ours keeps its traceback."""
    try:
        return action()
    except DarkroomError as error:
        if error.of_all and not this_process().leads:
            # The first process says it for all; torchrun would end it when this one ends.
            time.sleep(HEARING_SECONDS)
            return error.exit_code
        title = "refused" if isinstance(error, InputRefused) else "stopped"
        count = len(error.problems)
        print(f"{title}: {count} problem{'s' if count != 1 else ''}", file=sys.stderr)
        for problem in error.problems:
            print(f"  {problem}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # Whoever read our output has gone; Python would complain once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Stopped as stopped:
        if stopped.of_all and not this_process().leads:
            time.sleep(HEARING_SECONDS)
        else:
            print(f"stopped: {stopped}", file=sys.stderr)
        return stopped.exit_code


def _refused_team(arguments: Sequence[str], *, opens_base: bool) -> int:
    """0, or the exit code of what several processes cannot do together; the first says why."""
    flags = [word for word in arguments if word.startswith("-")]
    door_name = Path(sys.argv[0]).stem
    if opens_base and not flags and door_name in SHARING:
        return 0
    subject = f"WORLD_SIZE={this_process().size}"
    what = " ".join(["stages." + door_name, *flags])
    allowed = ", ".join(f"stages.{name}" for name in SHARING)
    remedy = "start it with `python -m`"
    problem = Problem(subject, f"{what} is work for one process", f"{allowed}, no flags", remedy)

    def refuse() -> int:
        raise InputRefused(problem)

    return guarded(refuse)


def _main(job: Job, arguments: Sequence[str]) -> int:
    from stages import composing

    flags = [word for word in arguments if word.startswith("-")]
    if not flags:
        return job(composing.compose(arguments), Summary())
    if {"-h", "--help"} & set(flags):
        print(composing.help_text())
        return 0
    if flags in (["--cfg"], ["-c"]) and "job" in arguments:
        print(composing.shown([word for word in arguments if word not in (*flags, "job")]))
        return 0
    from stages.sweeping import sweep

    return sweep(job, arguments)


def _checking(job: Job) -> Job:
    """The job, after refusing what only the family, the base and the data set can show."""

    def checked(config: Config, summary: Summary) -> int:
        from lib.pipeline import graph

        found = list(graph.problems(config, online=True))
        if found:
            raise InputRefused(found)
        return job(config, summary)

    return checked


def run_stage(stage: str, config: Config, summary: Summary) -> int:
    """Ensure one stage and everything upstream, showing progress, and sum up at the end."""
    from lib.pipeline import graph

    with showing(summary) as events:
        graph.ensure(stage, config, events)
    if this_process().leads:
        print("\n".join(summary.lines()))
    return 0


@contextmanager
def showing(summary: Summary) -> Iterator[Events]:
    """Events that the console shows and the summary keeps."""
    from stages.console import console

    if not this_process().leads:  # the first process shows what all of them do
        yield Events(kept=False)
        return
    with console() as sink:
        yield Events(sinks=(sink, summary))
