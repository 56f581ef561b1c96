"""Process-wide settings of attention and float32 products: set for a run, and put back."""

import sys
import types

import pytest
import torch
from torch.nn.attention import SDPBackend

from lib import attention
from lib.device import float32_products
from lib.levers import kernels
from lib.schema import Config, TrainerConfig

CPU = torch.device("cpu")


def settings():
    return (
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
    )


@pytest.mark.parametrize("tf32", [False, True])
def test_a_run_s_settings_hold_within_it_and_are_put_back_after_a_fault(tf32):
    before = settings()
    config = Config(trainer=TrainerConfig(tf32=tf32))
    held = []

    def run():
        with kernels(config, flash4=False):
            held.append(settings())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert held == [(False, "high" if tf32 else "highest", tf32)]
    assert settings() == before


def test_what_was_set_before_is_what_comes_back():
    with float32_products(tf32=True), float32_products(tf32=False):
        assert torch.get_float32_matmul_precision() == "highest"
    with float32_products(tf32=True):
        with float32_products(tf32=False):
            pass
        assert torch.get_float32_matmul_precision() == "high"


def test_flash_4_is_for_a_gpu():
    assert attention.fault_of_flash4(CPU) == "there is no GPU"


def test_the_probe_s_attention_has_a_gradient_for_each_input():
    answer, *gradients = attention._attended(CPU, SDPBackend.MATH)
    assert len(gradients) == 3
    assert all(g.shape == answer.shape and g.any() and g.isfinite().all() for g in gradients)


def test_the_probe_tells_rounding_from_wrong_numbers():
    exact = attention._attended(CPU, SDPBackend.MATH)
    rounded = attention._attended(CPU, SDPBackend.FLASH_ATTENTION)
    apart = [(a - b).norm() / b.norm() for a, b in zip(rounded, exact, strict=True)]
    assert 0 < max(apart) < attention.NEAR / 3


def test_torch_is_handed_as_many_numbers_as_it_asks_for(monkeypatch):
    interface = types.ModuleType("flash_attn.cute.interface")
    interface._flash_attn_fwd = lambda *_, **__: ("out", "lse", None, None, None)
    interface._flash_attn_bwd = lambda *_, **__: ("dq", "dk", "dv", None)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    assert attention._flash_attn_fwd() == ("out", "lse")
    assert attention._flash_attn_bwd() == ("dq", "dk", "dv")
