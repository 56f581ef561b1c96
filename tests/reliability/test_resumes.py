"""A training run that ends after a step goes on in another process and folder, to the same bytes."""

import sys

import pytest

from lib import tensors
from tests.reliability import resumes
from tests.reliability.resumes import KILL, STOP

# `python -m bench.reliability_resume` takes every step of every variant in every family.
CASES = [pytest.param(STOP, 4, marks=pytest.mark.nightly), (KILL, 7), (STOP, 12)]
PLAIN, EIGHT_BITS = "AdamW, warm-up, EMA", "8-bit AdamW, linear"


@pytest.fixture(scope="module", params=[PLAIN, EIGHT_BITS])
def whole(request, tmp_path_factory):
    """The undisturbed run of a variant; what stands in for a package is gone afterwards."""
    lacked = resumes.lacks_bitsandbytes()
    run = resumes.whole_run("flux", request.param, tmp_path_factory.mktemp("resumes"))
    yield request.param, run
    if lacked:
        sys.modules.pop("bitsandbytes", None)


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "step"), CASES)
def test_stopped_or_killed_after_a_step_it_ends_as_the_unbroken_run(whole, sent, step):
    variant, run = whole
    (state,) = run.scratch.glob(f"whole/out/*/checkpoints/step-{resumes.STEPS:08d}/*.safetensors")
    kinds = {tensor.dtype for tensor in tensors.decode(state.read_bytes()).tensors.values()}
    assert ("U8" in kinds) == (variant == EIGHT_BITS)
    assert resumes.trial(run, sent, step=step) == []


def test_every_step_is_a_case_and_the_run_has_an_epoch_and_a_warm_up_inside():
    cases = resumes.cases()
    assert [step for sent, step in cases if sent == STOP] == [*range(1, resumes.STEPS + 1)]
    assert [step for sent, step in cases if sent == KILL] == [*range(1, resumes.STEPS)]
    epoch, warm_up = -(-len(resumes.rigs.PICTURES) // 2), int(resumes.WARM_UP.split("=")[1])
    assert epoch < warm_up < resumes.SAVE_EVERY < resumes.STEPS
