"""What would run, what is a hit and why not: stages, steps, buckets, bytes. Makes nothing."""

from lib.schema import Config
from stages import main
from stages.summary import Summary


def show_plan(config: Config, _summary: Summary) -> int:
    """Print the plan of everything up to `sample`."""
    from lib.pipeline import graph
    from lib.pipeline.planning import plan_lines

    plans = graph.plan("sample", config)
    print("\n".join(plan_lines(plans, graph.open_inputs(config).store)))
    return 0


if __name__ == "__main__":
    main(show_plan)
