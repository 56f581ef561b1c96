"""The same weights are one base, wherever they lie; the Hub is a stand-in of its cache folder."""

import shutil

import pytest


@pytest.fixture
def hub(base, hub_cache):
    """The snapshot of the tiny base in a stand-in of the Hub's cache."""
    return hub_cache(base)


@pytest.mark.parametrize("pinned", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_hub_id_trains_and_shares_every_entry_with_the_folder(
    ensure, counted, adapter_of, hub, pinned
):
    local = ensure("train")
    encoded = dict(counted)
    overrides = ["family.base=someone/flux", *([f"family.revision={hub.name}"] if pinned else [])]
    remote = ensure("train", *overrides)
    assert counted == encoded
    assert remote.key == local.key
    again = ensure("train", *overrides, "rerun=true")
    assert adapter_of(again) == adapter_of(local)


def test_a_warm_run_from_the_hub_downloads_no_encoder(ensure, hub, monkeypatch):
    from lib import hub_download

    ensure("train", "family.base=someone/flux")
    for component in ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "vae"):
        shutil.rmtree(hub / component)

    def refuse(*args, **kwargs):
        raise AssertionError("the Hub was asked for a component")

    monkeypatch.setattr(hub_download, "component", refuse)
    monkeypatch.setattr(hub_download, "listing", refuse)
    assert ensure("train", "family.base=someone/flux", "adapter.rank=2").stage == "train"


def test_tiny_is_built_once_and_is_the_same_base_in_every_store(ensure, adapter_of, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    first = ensure("train", "family.base=tiny", root=one)
    second = ensure("train", "family.base=tiny", root=two)
    assert first.key == second.key
    assert adapter_of(first, one) == adapter_of(second, two)
    assert len(list((one / "store" / "bases").iterdir())) == 1
