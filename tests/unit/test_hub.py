import json
import os
import shutil

import pytest

from lib.errors import InputRefused
from lib.families import flux
from lib.hub import Base, open_base
from lib.hub_download import weight_files
from lib.memory import Memory
from lib.schema import FamilyConfig

VAE = "vae/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="session")
def pristine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases") / "flux"
    flux.build_tiny(folder)
    return folder


@pytest.fixture
def folder(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "base")


def opened(folder, store=None, **config):
    """The base, by a fresh memory over the store beside it."""
    store = store or folder.parent / "store"
    config = FamilyConfig(base=str(folder), **config)
    return open_base(config, family=flux, store=store, memory=Memory(store))


def identities(base):
    return {name: base.identity(name) for name in flux.FACTS.classes}


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_an_identity_is_what_a_component_is_and_not_where_or_when(folder, tmp_path):
    before = identities(opened(folder))
    assert len(set(before.values())) == len(before)
    moved = shutil.copytree(folder, tmp_path / "elsewhere")
    for path in moved.rglob("*"):
        os.utime(path, (1, 1))
    edit(moved / "vae" / "config.json", _name_or_path="someone/else", _diffusers_version="9")
    assert identities(opened(moved, tmp_path / "another store")) == before
    assert opened(folder).remote is None


def test_one_byte_of_weights_makes_another_identity_of_that_component_alone(folder):
    before = identities(opened(folder))
    data = bytearray((folder / VAE).read_bytes())
    data[-1] ^= 1
    (folder / VAE).write_bytes(data)
    after = identities(opened(folder))
    assert {name for name in before if before[name] != after[name]} == {"vae"}


@pytest.mark.parametrize(
    ("component", "file"),
    [
        ("vae", "config.json"),
        ("scheduler", "scheduler_config.json"),
        ("transformer", "config.json"),
    ],
)
def test_another_configuration_makes_another_identity(folder, component, file):
    before = identities(opened(folder))
    edit(folder / component / file, scaling_factor=0.5)
    after = identities(opened(folder))
    assert {name for name in before if before[name] != after[name]} == {component}


def test_another_vocabulary_makes_another_tokenizer(folder):
    before = identities(opened(folder))
    path = folder / "tokenizer" / "tokenizer.json"
    path.write_bytes(path.read_bytes() + b" ")
    after = identities(opened(folder))
    assert {name for name in before if before[name] != after[name]} == {"tokenizer"}


def test_absent_files_keep_their_last_identity_and_are_named_when_needed(folder):
    before = identities(opened(folder))
    (folder / VAE).unlink()
    shutil.rmtree(folder / "text_encoder")
    base = opened(folder)
    assert identities(base) == before
    for component, file in (("vae", VAE), ("text_encoder", "text_encoder/model.safetensors")):
        with pytest.raises(InputRefused) as caught:
            base.folder(component)
        assert f"family.base={folder}: {file} is missing" in str(caught.value)
    assert base.folder("transformer") == folder / "transformer"


@pytest.mark.parametrize("gone", [VAE, "vae/config.json"])
def test_an_absent_file_that_was_never_known_is_refused(folder, gone):
    (folder / gone).unlink()
    with pytest.raises(InputRefused, match=r"vae/.* is missing"):
        opened(folder).identity("vae")


def shard(folder):
    """The denoiser's one file as two shards with their index."""
    whole = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    data = whole.read_bytes()
    names = [whole.with_name(f"part-{n}-of-2.safetensors") for n in (1, 2)]
    for name, part in zip(names, (data[:100], data[100:]), strict=True):
        name.write_bytes(part)
    index = {"weight_map": {"a": names[1].name, "b": names[0].name, "c": names[1].name}}
    whole.with_name("diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    return names


def test_of_sharded_weights_every_shard_counts_and_nothing_else(folder):
    names = shard(folder)
    assert weight_files(folder / "transformer") == [path.name for path in names]
    base = opened(folder)
    before = base.identity("transformer")
    assert base.component("transformer").weights.keys() == {path.name for path in names}
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").write_bytes(b"other")
    assert opened(folder).identity("transformer") == before
    names[0].write_bytes(b"other")
    assert opened(folder).identity("transformer") != before


def test_a_shard_that_was_never_there_is_named(folder):
    names = shard(folder)
    names[1].unlink()
    with pytest.raises(InputRefused, match=r"transformer/part-2-of-2.safetensors is missing"):
        opened(folder).identity("transformer")


@pytest.mark.parametrize("base", ["./no/such", "/no/such", "~/no/such", "a/b/c", "word"])
def test_a_folder_that_is_not_there_is_refused(base, tmp_path):
    with pytest.raises(InputRefused, match="no such folder"):
        opened_by(base, tmp_path)


def opened_by(base, store, **config):
    config = FamilyConfig(base=base, **config)
    return open_base(config, family=flux, store=store, memory=Memory(store))


@pytest.fixture
def cached(pristine, hub_cache):
    """The snapshot of the tiny base in a stand-in of the Hub's cache."""
    return hub_cache(pristine)


def test_a_cached_hub_base_is_its_commit_and_its_components(cached, folder, tmp_path):
    base = opened_by("someone/flux", tmp_path / "s")
    assert base.remote == ("someone/flux", cached.name)
    assert base.root == cached
    assert base.folder("vae") == cached / "vae"
    assert identities(base) == identities(opened(folder))
    pinned = opened_by("someone/flux", tmp_path / "t", revision=cached.name)
    assert pinned.name == base.name == f"hub:someone/flux@{cached.name}"


def test_a_hub_base_once_known_needs_none_of_its_files_but_the_index(cached, tmp_path):
    before = identities(opened_by("someone/flux", tmp_path / "s"))
    for component in flux.FACTS.classes:
        shutil.rmtree(cached / component)
    base = opened_by("someone/flux", tmp_path / "s")
    assert identities(base) == before
    with pytest.raises(InputRefused, match="is missing"):
        base.folder("vae")


@pytest.mark.parametrize("gone", [VAE, "vae"])
def test_a_cached_hub_base_without_a_component_s_weights_is_refused(cached, gone, tmp_path):
    shutil.rmtree(cached / gone) if gone == "vae" else (cached / gone).unlink()
    with pytest.raises(InputRefused, match=r"family\.base=someone/flux: vae/"):
        opened_by("someone/flux", tmp_path / "s").identity("vae")


def test_a_cached_hub_base_without_one_shard_is_refused(cached, tmp_path):
    names = shard(cached)
    names[1].unlink()
    with pytest.raises(InputRefused, match=r"transformer/part-2-of-2.safetensors"):
        opened_by("someone/flux", tmp_path / "s").identity("transformer")


@pytest.mark.parametrize("base", ["someone/else", "some one/else", "someone/flux--x"])
def test_an_unknown_hub_base_is_refused_in_one_line(cached, base, tmp_path):
    with pytest.raises(InputRefused) as caught:
        opened_by(base, tmp_path / "s")
    assert len(str(caught.value).splitlines()) == 1
    assert str(caught.value).startswith(f"family.base={base}: ")
    assert caught.value.exit_code == 2


def test_the_tiny_base_is_built_once_and_is_the_same_everywhere(pristine, tmp_path):
    unbuilt = opened_by("tiny", tmp_path / "s")
    assert not unbuilt.built
    assert unbuilt.component("vae").config == flux.TINY["vae"]
    assert not (tmp_path / "s" / "bases").exists()
    built = unbuilt.build()
    again = opened_by("tiny", tmp_path / "s")
    assert type(again) is type(built) is Base
    assert identities(again) == identities(opened(pristine, tmp_path / "t"))
