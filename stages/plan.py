"""What would run, what is a hit and why not: stages, steps, buckets, bytes, memory. Makes nothing.

With `modes=true` also which precisions this machine can compute, and what `precision=auto` would
take: the one case in which a plan imports torch.
"""

import sys

from lib.schema import Config, with_mode
from stages import main
from stages.summary import Summary

MODES = "modes=true"


def show_plan(config: Config, _summary: Summary) -> int:
    """Print the plan of everything up to `sample`."""
    from lib.pipeline import graph
    from lib.pipeline.planning import memory_lines, mode_lines, plan_lines

    plans, opened = graph.plan("sample", config), graph.open_inputs(config)
    inputs = opened.inputs({one.stage: one.manifest for one in plans if one.manifest})
    (trained,) = (planned for planned in plans if planned.stage == "train")
    config = with_mode(config, trained.settings["precision.mode"])  # what `auto` was decided to be
    lines = [
        *plan_lines(plans, opened.store),
        *memory_lines(config, inputs, opened.store, total_steps=trained.total),
    ]
    if MODES in sys.argv[1:]:
        lines += mode_lines(config, inputs, opened.store)
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    main(show_plan, arguments=[word for word in sys.argv[1:] if word != MODES])
