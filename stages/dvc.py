"""DVC's door: `compose` writes each stage's settings, a stage's name makes it and points to it."""

import sys

from lib.schema import Config
from stages import main, showing
from stages.summary import Summary

RECIPE = "+experiment=ci"
COMPOSE = "compose"
USAGE = 2


def compose(config: Config, _summary: Summary) -> int:
    """Write the settings by which DVC tells which stages an edit of `conf/` concerns."""
    from lib.pipeline import pointers

    pointers.write_settings(config)
    return 0


def make(stage: str, config: Config, summary: Summary) -> int:
    """Ensure one stage, showing progress, and leave its pointer."""
    from lib.pipeline import graph, pointers

    pointers.check_settings(stage, config)
    with showing(summary) as events:
        pointers.publish(graph.ensure(stage, config, events), config, events)
    return 0


def actions() -> list[str]:
    """`compose`, and the stages of the graph."""
    from lib.pipeline import graph

    return [COMPOSE, *graph.STAGES]


if __name__ == "__main__":
    words = sys.argv[1:]
    if words in (["-h"], ["--help"]):
        print(f"python -m stages.dvc {'|'.join(actions())}\n{__doc__}")
        sys.exit(0)
    if len(words) != 1 or words[0] not in actions():
        shown, allowed = " ".join(words), ", ".join(actions())
        print(f"refused: dvc {shown}: not one action; allowed: {allowed}", file=sys.stderr)
        sys.exit(USAGE)
    action = words[0]
    job = compose if action == COMPOSE else lambda config, summary: make(action, config, summary)
    main(job, arguments=[RECIPE], opens_base=action != COMPOSE)
