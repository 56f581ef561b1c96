"""What a stage loaded on the device is given back before the next stage loads anything."""

import gc
import weakref

import pytest

LOADERS = {
    "encode_captions": "load_text_encoders",
    "build_latent_cache": "load_autoencoder",
    "train": "load_denoiser",
}


@pytest.mark.parametrize("stage", LOADERS)
def test_no_model_of_a_stage_is_left_when_its_memory_is_given_back(ensure, monkeypatch, stage):
    from lib import device
    from lib.families import flux

    loaded, left, given_back = [], [], []
    load = getattr(flux, LOADERS[stage])

    def noting(*args, **options):
        model = load(*args, **options)
        loaded.append(weakref.ref(model))
        return model

    def release():
        gc.collect()
        given_back.append(len(loaded))
        left.extend(ref for ref in loaded if ref() is not None)

    monkeypatch.setattr(flux, LOADERS[stage], noting)
    monkeypatch.setattr(device, "release", release)
    ensure(stage)
    assert loaded
    assert given_back[-1] == len(loaded), "nothing was given back after the last load"
    assert left == []
