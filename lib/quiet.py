"""Keeping the libraries' own progress bars, and a notice, out of ours."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_library_bars() -> Iterator[None]:
    """transformers draws no bar in the block; downloads, which take long, still do."""
    from transformers.utils import logging as bars

    was_enabled = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            bars.enable_progress_bar()


def drop_advice_on_kernels() -> None:
    """Whoever imports bitsandbytes on a CPU with AVX512-BF16 is told to install what it needs not.

    PEFT imports it too, so that every command would say so.
    """
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(_is_no_advice)


def _is_no_advice(record: logging.LogRecord) -> bool:
    return "gemm_4bit_forward" not in str(record.msg)
