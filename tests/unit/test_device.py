"""What a run sets for its process, and that it is put back, whatever it was and however it ends."""

import os

import pytest
import torch

from lib import levers
from lib.device import WORKSPACE
from lib.events import Events
from stages.composing import compose

ASKED = ("trainer.deterministic=true", "trainer.cudnn_benchmark=true", "trainer.tf32=true")


def held():
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warns": torch.is_deterministic_algorithms_warn_only_enabled(),
        "timed": torch.backends.cudnn.benchmark,
        "workspace": os.environ.get(WORKSPACE),
        "products": torch.get_float32_matmul_precision(),
    }


def kernels(*overrides):
    config = compose(["+experiment=flat_style", "trainer.attention=flash", *overrides])
    return levers.kernels(config, flash4=False)


@pytest.fixture(params=["as torch has it", "all the other way"])
def before(request, monkeypatch):
    """What is set when a run begins; put back after the test."""
    was = held()
    monkeypatch.delenv(WORKSPACE, raising=False)
    if request.param == "all the other way":
        monkeypatch.setenv(WORKSPACE, ":16:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = True
    yield held()
    torch.use_deterministic_algorithms(was["deterministic"], warn_only=was["warns"])
    torch.backends.cudnn.benchmark = was["timed"]


@pytest.mark.parametrize("asked", ASKED)
def test_what_is_asked_holds_for_the_run_and_is_put_back(before, asked):
    with kernels(asked):
        found = held()
    assert held() == before
    with pytest.raises(KeyboardInterrupt), kernels(asked):
        raise KeyboardInterrupt
    assert held() == before
    if asked.startswith("trainer.deterministic"):
        assert (found["deterministic"], found["warns"]) == (True, False)
        assert found["workspace"] in (":4096:8", ":16:8")
    assert found["timed"] is asked.startswith("trainer.cudnn_benchmark")


def test_a_workspace_that_was_set_stays(before):
    with kernels(ASKED[0]):
        assert os.environ[WORKSPACE] == (before["workspace"] or ":4096:8")


def test_nothing_is_repeatable_or_timed_unless_asked(before):
    with kernels():
        found = held()
    assert found["timed"] is False
    same = ("deterministic", "warns", "workspace")
    assert [found[name] for name in same] == [before[name] for name in same]


def test_the_workspace_is_set_before_any_product_of_a_command():
    """torch looks at it once: a caption that is encoded first would fix that it is not there."""
    import stages  # noqa: F401

    assert os.environ[WORKSPACE] in (":4096:8", ":16:8")


def test_what_was_asked_is_recorded():
    found = []
    config = compose(["+experiment=flat_style", ASKED[0], "trainer.cudnn_benchmark=false"])
    events = Events(sinks=(found.append,))
    levers.choose(config, device=torch.device("cpu"), total_steps=1, events=events)
    told = {event.data["name"]: event.data["value"] for event in found}
    assert told["deterministic"] is True
    assert "cudnn_benchmark" not in told
