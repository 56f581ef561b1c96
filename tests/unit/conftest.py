"""What the unit tests share: a patient hypothesis, a valid configuration, a family, a store."""

import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from lib.keys import digest
from lib.store import Manifest, Store
from lib.tensors import Tensor
from lib.upkeep import verify

OLD = 2_000_000_000.0 - 100 * 86_400  # longer ago than any test keeps what is unused

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


@pytest.fixture(params=["stand-in", "real"])
def bitsandbytes(request, monkeypatch):
    """8-bit AdamW by a stand-in, and by the package where it is installed."""
    if request.param == "real":
        return pytest.importorskip("bitsandbytes", exc_type=ImportError)
    from tests.unit import eight_bits

    monkeypatch.setitem(sys.modules, "bitsandbytes", eight_bits.module())
    return sys.modules["bitsandbytes"]


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


@pytest.fixture(scope="session")
def put():
    """Puts a small entry of a name, last used long ago."""

    def put(store, name, *, kind="latents", when=OLD):
        tensors = {"mean": Tensor("F32", (8,), np.full(8, 0.5, "<f4").tobytes())}
        ref = store.put(kind, digest(name), tensors, metadata={}, inputs={})
        os.utime(store.entry_path(kind, ref.key), (when, when))
        return ref

    return put


@pytest.fixture(scope="session")
def publish():
    """Publishes a manifest of a name over entries, last used long ago."""

    def publish(store, name, *refs, when=OLD):
        manifest = store.publish(Manifest("cache", digest(name), {}, {"train": refs}, {}))
        os.utime(store.manifest_path("cache", manifest.key), (when, when))
        return manifest

    return publish


@pytest.fixture(scope="session")
def check():
    """Verifies a store."""
    return lambda store: verify(store, threads=2, progress=lambda done, total: None)
