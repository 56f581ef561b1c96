"""Damaged entries and manifests: all of it is seen, and no wrong tensor comes out."""

import errno
import os
import random

import pytest

from lib.store import Damaged
from lib.tensors import decode
from tests.reliability import damages

FLIPS, OTHERS = 1000, 60


@pytest.mark.parametrize("kind", damages.KINDS)
def test_all_damage_of_a_kind_is_seen(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    count = FLIPS if kind == "bit flipped" else OTHERS
    found = damages.trials(kind, count=count, scratch=tmp_path, rng=random.Random(kind))
    assert [wrong for wrong in found if wrong] == []


def test_every_flipped_bit_of_a_manifest_is_seen(tmp_path):
    found = damages.manifest_trials(count=OTHERS * 5, scratch=tmp_path, rng=random.Random(0))
    assert [wrong for wrong in found if wrong] == []


def test_the_harness_sees_what_a_reader_without_digest_lets_through(tmp_path, monkeypatch):
    """safetensors itself returns changed data without a word."""
    from lib import tensors

    real = tensors.entry_digest
    claimed = {}

    def believing(found, *, metadata):
        return metadata.get("digest") or claimed.setdefault(0, real(found, metadata=metadata))

    store = damages.sound_store(tmp_path / "once")
    monkeypatch.setattr(tensors, "entry_digest", believing)
    path = store.entry_path("latents", damages.KEYS[0])
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert decode(bytes(data)).tensors != damages.tensors(0, size=damages.SIZE)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_an_entry_that_may_not_be_read_is_damage(tmp_path, monkeypatch, code):
    """As root a file without any permission is still read, so the refusal is put in place."""
    store = damages.sound_store(tmp_path)
    path, real = store.entry_path("latents", damages.KEYS[0]), os.open

    def refuse(name, *args, **named):
        if os.fspath(name) == str(path):
            raise OSError(code, os.strerror(code))
        return real(name, *args, **named)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(Damaged, match=os.strerror(code)):
        store.get("latents", damages.KEYS[0])
    assert store.get("latents", damages.KEYS[1])


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads a file whatever its permissions are")
def test_an_entry_without_permissions_is_damage(tmp_path):
    store = damages.sound_store(tmp_path)
    store.entry_path("latents", damages.KEYS[0]).chmod(0)
    with pytest.raises(Damaged, match="Permission denied"):
        store.get("latents", damages.KEYS[0])
