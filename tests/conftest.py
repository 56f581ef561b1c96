"""Shapes are executed in tests: the hook must be installed before anything imports `lib`."""

import gc
import os
import re
import shutil
import signal
from pathlib import Path

# Tiny tensors gain nothing from threads, and two test processes lose much to them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")

import pytest
from jaxtyping import install_import_hook

CHECKOUT = Path(__file__).resolve().parent.parent


def modules_with_shapes():
    """Those that name a shape; the others, some of them called ten thousand times, pay nothing."""
    for path in sorted(CHECKOUT.glob("lib/**/*.py")):
        if re.search(r"\bshapes\.|\bjaxtyping\b", path.read_text(encoding="utf-8")):
            yield ".".join(path.relative_to(CHECKOUT).with_suffix("").parts)


# An integer is a float to annotations (PEP 484), and so to the hook.
install_import_hook(
    list(modules_with_shapes()),
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)


def pytest_sessionstart():
    """A configuration costs a test no composition that another had made."""
    from tests import composed

    composed.install()


def pytest_collection_finish():
    """What is there now stays: stages collect garbage after each model, and need not look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def unsynced():
    """No test cuts the power: what is written need not have reached the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def interruptible():
    """As in a terminal: what a shell starts in the background ignores Control-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


HUB_COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """Puts a base into a Hub cache as someone/flux at HUB_COMMIT, without a network; its snapshot."""
    from huggingface_hub import constants

    def put(base):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        repo = tmp_path / "hub" / "models--someone--flux"
        (repo / "refs").mkdir(parents=True)
        (repo / "refs" / "main").write_text(HUB_COMMIT)
        return shutil.copytree(base, repo / "snapshots" / HUB_COMMIT)

    return put


@pytest.fixture
def conf(tmp_path, monkeypatch):
    """A copy of conf/ that a test may change."""
    from stages import composing

    copy = tmp_path / "conf"
    shutil.copytree(composing.CONF, copy)
    monkeypatch.setattr(composing, "CONF", copy)
    return copy


@pytest.fixture(scope="session")
def empty_mlflow_store(tmp_path_factory):
    """A SQLite file with MLflow's tables, which take it seconds to make."""
    from lib.tracking.server import Server, prepare_environment

    prepare_environment()
    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    Server(f"sqlite:///{path}", "Default")
    return path


@pytest.fixture
def mlflow_store(tmp_path, empty_mlflow_store):
    """The address of an MLflow store of one test's own."""
    path = tmp_path / "tracked" / "mlflow.db"
    path.parent.mkdir()
    shutil.copy(empty_mlflow_store, path)
    return f"sqlite:///{path}"
