"""Keeping the libraries' own progress bars out of ours."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_library_bars() -> Iterator[None]:
    """transformers draws no bar in the block; downloads, which take long, still do."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
