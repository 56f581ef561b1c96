"""What all doors share: compose, refuse with one report, run, print, exit code. Light on purpose."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lib.errors import DarkroomError, InputRefused
from lib.schema import Config

CHECKOUT = Path(__file__).resolve().parent.parent
INTERRUPTED = 130

Job = Callable[[Config], int]


def door(stage: str) -> None:
    """The command line of one stage of the graph."""
    main(lambda config: run_stage(stage, config))


def main(job: Job, *, arguments: Sequence[str] | None = None) -> None:
    """Compose the arguments into a configuration, run the job with it, exit with its code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    sys.exit(guarded(lambda: _main(job, arguments)))


def guarded(action: Callable[[], int]) -> int:
    """An exit code; a user's mistake is a report on stderr, a fault of ours keeps its traceback."""
    try:
        return action()
    except DarkroomError as error:
        title = "refused" if isinstance(error, InputRefused) else "stopped"
        count = len(error.problems)
        print(f"{title}: {count} problem{'s' if count != 1 else ''}", file=sys.stderr)
        for problem in error.problems:
            print(f"  {problem}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; the same command resumes from the last checkpoint", file=sys.stderr)
        return INTERRUPTED


def _main(job: Job, arguments: Sequence[str]) -> int:
    from stages import composing

    flags = [word for word in arguments if word.startswith("-")]
    if not flags:
        return job(checked(composing.compose(arguments)))
    if not {"-h", "--help", "--hydra-help", "-m", "--multirun"} & set(flags):
        composing.compose([word for word in arguments if "=" in word and word not in flags])
    return composing.with_hydra(lambda config: job(checked(config)), arguments)


def checked(config: Config) -> Config:
    """Refuse what only the family, the base and the data set can show, all of it together."""
    from lib.pipeline import graph

    found = list(graph.problems(config))
    if found:
        raise InputRefused(found)
    return config


def run_stage(stage: str, config: Config) -> int:
    """Ensure one stage and everything upstream, showing progress."""
    from lib.events import Events
    from lib.pipeline import graph
    from stages.console import console

    with console() as sink:
        graph.ensure(stage, config, Events(sinks=(sink,)))
    return 0
