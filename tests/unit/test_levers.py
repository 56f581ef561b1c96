"""What engages on which machine, and the reason that is recorded."""

import pytest
import torch

from lib.events import Events
from lib.footprint import WORTH_COMPILING
from lib.levers import Levers, choose
from stages.composing import compose

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def chosen(*overrides, device=GPU, total_steps=WORTH_COMPILING):
    """The levers, and each decision's data by its name."""
    found = []
    events = Events(sinks=(found.append,))
    # Torch's own attention: no machine is asked whether it has another.
    config = compose(["+experiment=flat_style", "trainer.attention=flash", *overrides])
    levers = choose(config, device=device, total_steps=total_steps, events=events)
    return levers, {event.data["name"]: event.data for event in found}


TABLE = [
    # compile, steps, device, whether it engages, where that comes from, a part of the reason
    ("auto", WORTH_COMPILING, GPU, True, "auto", "first step of each shape"),
    ("auto", WORTH_COMPILING - 1, GPU, False, "auto", "fewer than 100 steps"),
    ("auto", 10_000, CPU, False, "auto", "on a CPU"),
    ("always", 1, CPU, True, "config", "as asked"),
    ("always", 1, GPU, True, "config", "as asked"),
    ("never", 10_000, GPU, False, "config", "as asked"),
]


@pytest.mark.parametrize(("asked", "steps", "device", "engages", "source", "why"), TABLE)
def test_blocks_compile_where_it_earns_its_seconds_back(asked, steps, device, engages, source, why):
    levers, told = chosen(f"trainer.compile={asked}", device=device, total_steps=steps)
    assert levers.compile is engages
    assert told["compile"]["value"] == engages
    assert told["compile"]["source"] == source
    assert why in told["compile"]["reason"]


GRAPHS = [
    ("auto", GPU, 0.0, True, "auto", "one graph for each shape"),
    ("auto", CPU, 0.0, False, "auto", "no GPU"),
    ("auto", GPU, 0.1, False, "auto", "adapter.dropout"),
    ("never", GPU, 0.0, False, "config", "as asked"),
]


@pytest.mark.parametrize(("asked", "device", "dropout", "engages", "source", "why"), GRAPHS)
def test_steps_are_recorded_where_a_replay_is_the_same_work(
    asked, device, dropout, engages, source, why
):
    overrides = (f"trainer.cuda_graphs={asked}", f"adapter.dropout={dropout}")
    levers, told = chosen(*overrides, device=device)
    assert levers.cuda_graphs is engages
    assert told["cuda_graphs"]["value"] == engages
    assert told["cuda_graphs"]["source"] == source
    assert why in told["cuda_graphs"]["reason"]


def test_nothing_engages_by_itself():
    assert Levers() == Levers(compile=False, cuda_graphs=False)
