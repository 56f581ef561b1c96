"""What other libraries have to say and no command shows."""

import importlib.util
import sys

import pytest


def test_bitsandbytes_advises_nothing_on_any_cpu_and_says_the_rest(monkeypatch, caplog):
    """It does on one with AVX512-BF16, by a module that looks for another package's kernel."""
    pytest.importorskip("bitsandbytes", exc_type=ImportError)
    monkeypatch.setattr("bitsandbytes.functional.has_avx512bf16", lambda: True)
    monkeypatch.setattr("bitsandbytes._ops.register_kernel", lambda *_: lambda kernel: kernel)
    monkeypatch.setitem(sys.modules, "kernels", None)
    spec = importlib.util.find_spec("bitsandbytes.backends.cpu.ops")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert caplog.messages == []
    module.logger.warning("something else")
    assert caplog.messages == ["something else"]
