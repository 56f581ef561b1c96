"""What each family's test file has: the tiny base of the family it is named after, and its parts."""

import pytest

from lib import families
from tests.unit.families import reference


@pytest.fixture(scope="module")
def under_test(request):
    """The family of `test_<family>.py`."""
    return families.get(request.module.__name__.rpartition("test_")[2])


@pytest.fixture(scope="module")
def base(under_test, tmp_path_factory):
    return reference.make_base(under_test, tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def pipeline(base):
    return reference.make_pipeline(base)


@pytest.fixture(scope="module")
def encoders(under_test, base):
    return reference.encoders_of(under_test, base)


@pytest.fixture(scope="module")
def denoiser(under_test, base):
    return reference.denoiser_of(under_test, base)
