"""Where what is compiled is kept, and who decides it."""

import os
from pathlib import Path

import pytest

from lib.compiled import FLASH, FLASH_PLACE, FOLDER, VARIABLES, builds_of, compiled_in

PLACE, TRITON, *_ = VARIABLES


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch):
    for name in VARIABLES:  # set first, so that what a test leaves is taken away
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def compile_something(name="kernel"):
    """As torch does: both variables are set, and files written under the first one's folder."""
    folder = os.environ[PLACE]
    os.makedirs(folder, exist_ok=True)
    os.environ.setdefault(TRITON, os.path.join(folder, "triton"))
    with open(os.path.join(folder, name), "wb") as file:
        file.write(b"compiled")


def test_what_is_compiled_lies_in_the_store_and_the_environment_is_as_before(tmp_path):
    with compiled_in(tmp_path, build="torch-2.11.0+cu130"):
        compile_something()
    (build,) = builds_of(tmp_path)
    assert build.path == tmp_path / FOLDER / "torch-2.11.0+cu130"
    assert (build.count, build.size_bytes) == (1, 8)
    assert not set(VARIABLES) & os.environ.keys()


def test_a_relative_store_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with compiled_in(Path("store"), build="torch"):
        os.chdir(tmp_path / "elsewhere")
        compile_something()
    assert len(builds_of(tmp_path / "store")) == 1


def test_a_run_that_compiles_nothing_leaves_nothing(tmp_path):
    with compiled_in(tmp_path / "store", build="torch"):
        pass
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("fails", [False, True])
def test_a_place_that_the_user_has_chosen_stays_theirs(tmp_path, monkeypatch, fails):
    theirs = {PLACE: str(tmp_path / "theirs"), TRITON: str(tmp_path / "triton")}
    for name, value in theirs.items():
        monkeypatch.setenv(name, value)
    try:
        with compiled_in(tmp_path / "store", build="torch"):
            compile_something()
            os.environ[TRITON] = "changed"
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert {name: os.environ[name] for name in VARIABLES if name in os.environ} == theirs
    assert (tmp_path / "theirs" / "kernel").exists()
    assert builds_of(tmp_path / "store") == []


def test_what_torch_has_set_by_itself_is_no_choice(tmp_path):
    """Importing its compiler does, which PEFT and bitsandbytes bring, before a run begins."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    before = {PLACE: cache_dir(), TRITON: os.path.join(cache_dir(), "triton", "0")}
    os.environ[TRITON] = before[TRITON]
    with compiled_in(tmp_path, build="torch"):
        compile_something()
        assert os.environ[TRITON] == str(tmp_path / FOLDER / "torch" / "triton")
    assert len(builds_of(tmp_path)) == 1
    assert {name: os.environ[name] for name in VARIABLES if name in os.environ} == before


def test_what_flash_attention_compiles_lies_beside_it(tmp_path, monkeypatch):
    with compiled_in(tmp_path / "store", build="torch"):
        ours = os.environ[FLASH], os.environ[FLASH_PLACE]
    assert ours == ("1", str(tmp_path / "store" / FOLDER / "torch" / "flash"))
    monkeypatch.setenv(PLACE, str(tmp_path / "theirs"))
    with compiled_in(tmp_path / "store", build="torch"):
        assert os.environ[FLASH_PLACE] == str(tmp_path / "theirs" / "flash")
    assert not set(VARIABLES[1:]) & os.environ.keys()


@pytest.mark.parametrize("name", [FLASH, FLASH_PLACE])
def test_flash_attention_is_left_to_a_user_who_has_chosen(tmp_path, monkeypatch, name):
    monkeypatch.setenv(name, "0")
    with compiled_in(tmp_path, build="torch"):
        assert {FLASH, FLASH_PLACE} & os.environ.keys() == {name}
    assert os.environ[name] == "0"


def test_each_use_of_a_build_is_marked(tmp_path):
    with compiled_in(tmp_path, build="one"):
        compile_something()
    with compiled_in(tmp_path, build="other"):
        compile_something()
    for build in builds_of(tmp_path):
        os.utime(build.path, (1, 1))
    with compiled_in(tmp_path, build="one"):
        pass
    times = {build.path.name: build.time for build in builds_of(tmp_path)}
    assert times["other"] == 1 < times["one"]
