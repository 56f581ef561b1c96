"""Encoders that run ahead of the disk, as beside a GPU, leave what those leave that wait for it."""

import pytest

from lib.errors import SamplesFailed
from lib.keeping import Pace

KINDS = {"encode_captions": "captions", "build_latent_cache": "latents"}


@pytest.fixture
def hurrying(monkeypatch):
    """The pace of a GPU, on the CPU."""

    def of(cls, device, *, asked, fitting):
        return cls(3, late=3, writers=4)

    monkeypatch.setattr(Pace, "of", classmethod(of))


def entries(root, kind):
    return {path.name: path.read_bytes() for path in root.glob(f"store/{kind}/*/*")}


@pytest.mark.parametrize("stage", list(KINDS))
def test_the_pace_changes_no_byte(ensure, tmp_path, request, stage):
    waited = ensure(stage, "encode.batch_size=3", root=tmp_path / "waited")
    request.getfixturevalue("hurrying")
    hurried = ensure(stage, root=tmp_path / "hurried")
    assert hurried == waited
    found = entries(tmp_path / "hurried", KINDS[stage])
    assert found == entries(tmp_path / "waited", KINDS[stage])
    assert len(found) >= 8


def test_a_bad_picture_fails_by_name_at_any_pace(ensure, data, monkeypatch, hurrying, tmp_path):
    from diffusers import AutoencoderKL

    real, calls = AutoencoderKL.encode, []

    def encode(self, x, *args, **named):
        calls.append(len(x))
        if len(calls) in (2, 3):  # a batch, and then the first of it alone
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return real(self, x, *args, **named)

    monkeypatch.setattr(AutoencoderKL, "encode", encode)
    with pytest.raises(SamplesFailed, match="allocate memory") as failed:
        ensure("build_latent_cache")
    assert len(failed.value.problems) == 1
    assert len(entries(tmp_path, "latents")) == len(list(data.glob("*.png"))) - 1
