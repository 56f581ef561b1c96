"""Gradient checkpointing: the same gradients from fewer kept activations, in every family."""

import pytest

from lib import families
from lib.recomputing import recompute
from tests.unit.families import reference
from tests.unit.losing import kept_bytes, losing_of


@pytest.fixture(params=families.names())
def losing(request, tmp_path):
    return losing_of(families.get(request.param), tmp_path)


def test_gradients_are_the_same_and_fewer_activations_are_kept(losing):
    denoiser, parameters, loss = losing
    plain, plain_bytes = reference.gradients(parameters, loss()), kept_bytes(loss)
    assert plain.any()
    recompute(denoiser)
    again, fewer_bytes = reference.gradients(parameters, loss()), kept_bytes(loss)
    assert reference.relative(again, plain) < 1e-6
    assert fewer_bytes < 0.8 * plain_bytes
