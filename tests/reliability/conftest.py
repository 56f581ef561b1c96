"""A rig and its undisturbed runs, made once; every trial is in a child of this process."""

import pytest

from tests.reliability import rigs, trials


@pytest.fixture(scope="session")
def rig(tmp_path_factory):
    return rigs.build(tmp_path_factory.mktemp("rig"))


@pytest.fixture(scope="session")
def whole(rig, tmp_path_factory):
    """The undisturbed run of each stage."""
    return trials.whole_runs(rig, tmp_path_factory.mktemp("whole"))
