"""What the unit tests share: a patient hypothesis, a valid configuration, a family of parts."""

import os
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings

# A busy machine must not fail a property.
settings.register_profile(
    "darkroom",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=os.environ.get("CI") == "true",  # a change must not fail for another's luck
)
settings.load_profile("darkroom")


@pytest.fixture
def valid(tmp_path):
    """Plain values of a valid configuration, with some settings changed by dotted name."""

    def make(changes=None):
        given = {
            "dataset.root": str(tmp_path),
            "adapter.targets": ["to_q"],
            "trainer.max_steps": 10,
            **(changes or {}),
        }
        raw = {}
        for setting, value in given.items():
            group, _, name = setting.rpartition(".")
            (raw.setdefault(group, {}) if group else raw)[name] = value
        return raw

    return make


@pytest.fixture
def fake_family():
    """A family made of the given parts; any other part fails when it is used."""
    from lib.family import Family

    def absent(*_args, **_names):
        raise AssertionError("the fake family has no such part")

    def make(**parts):
        names = {name for name in (*Family.__annotations__, *vars(Family)) if name[0] != "_"}
        return SimpleNamespace(**{**dict.fromkeys(names, absent), **parts})

    return make
