"""What compiling makes, kept in the store: a later run, or another machine's, need not make it."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lib import files

FOLDER = "compiled"
PLACE = "TORCHINDUCTOR_CACHE_DIR"  # asked at each compilation; Triton's lies under it
# FlashAttention-4's, which are asked when it is imported; it compiles anew in each process else.
FLASH = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
FLASH_PLACE = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
TRITON = "TRITON_CACHE_DIR"
VARIABLES = (PLACE, TRITON, FLASH, FLASH_PLACE)
# torch's module that sets the first one, to a folder of its own, once its compiler is imported.
SETS_PLACE = "torch._inductor.runtime.cache_dir_utils"


@dataclass(frozen=True)
class Build:
    """What one build of torch has compiled; `time` is when a run last used it."""

    path: Path
    count: int
    size_bytes: int
    time: float


@contextmanager
def compiled_in(root: Path, *, build: str) -> Iterator[None]:
    """Keep in a store what the block compiles; a place that the user has chosen stays theirs.

    What torch has set by itself is no choice. A folder for each build of torch, since none reads
    what another has made: torch creates it at the first compilation, and its time is that of its
    last use.
    """
    before = {name: os.environ.get(name) for name in VARIABLES}
    folder = root.absolute() / FOLDER / re.sub("[^0-9A-Za-z.+-]", "_", build)
    ours = before[PLACE] is None or _set_by_torch(before[PLACE])
    if ours:
        files.touch(folder)
        os.environ[PLACE] = str(folder)
        if _set_by_torch(before[TRITON]):
            del os.environ[TRITON]
    if before[FLASH] is None and before[FLASH_PLACE] is None:
        os.environ |= {FLASH: "1", FLASH_PLACE: str(Path(os.environ[PLACE]) / "flash")}
    try:
        yield
    finally:
        if ours:
            files.touch(folder)
        for name, value in before.items():  # torch sets both by itself
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _set_by_torch(place: str | None) -> bool:
    """Whether a place is torch's own, or lies in it."""
    if place is None or SETS_PLACE not in sys.modules:
        return False
    default = os.path.abspath(sys.modules[SETS_PLACE].default_cache_dir())
    return Path(place).is_relative_to(default)


def builds_of(root: Path) -> list[Build]:
    """What is there, by directory records alone."""
    parent = root / FOLDER
    folders = sorted(parent.iterdir()) if parent.is_dir() else []
    return [_build(path) for path in folders if path.is_dir() and not path.is_symlink()]


def _build(folder: Path) -> Build:
    sizes = [size for path in folder.rglob("*") if (size := _size_of(path)) is not None]
    return Build(folder, len(sizes), sum(sizes), folder.stat().st_mtime)


def _size_of(path: Path) -> int | None:
    """A file's size; None of a folder, and of a file that a compiler has just moved away."""
    try:
        return path.lstat().st_size if path.is_symlink() or path.is_file() else None
    except FileNotFoundError:
        return None
