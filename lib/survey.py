"""What files a data set's folder holds, which names are refused, and how one file is read."""

import errno
import os
import posixpath
import stat
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lib.errors import Problem

EXTENSIONS = (".jfif", ".jpeg", ".jpg", ".png", ".webp")
# Pictures too, but none that we read: passing over them in silence would lose them.
FOREIGN = (".avif", ".bmp", ".gif", ".heic", ".heif", ".jp2", ".jxl", ".svg", ".tif", ".tiff")
SIDECARS = (".caption", ".txt")
METADATA = ("metadata.csv", "metadata.jsonl")
MAX_PICTURE_BYTES = 1 << 30
MAX_SIDECAR_BYTES = 1 << 20
MAX_METADATA_BYTES = 1 << 28

# Letters of these kinds, and those that turn the direction of what follows, hide what a name is.
_UNPRINTABLE = ("Cc", "Cs", "Zl", "Zp")
_TURNING = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


@dataclass(frozen=True)
class Tree:
    """Files that may be used, by relative POSIX path; `links` are those that are links to files."""

    files: Mapping[str, Path]
    pictures: tuple[str, ...]
    links: tuple[str, ...]
    hidden: int
    problems: tuple[Problem, ...]


def suffix(name: str) -> str:
    return PurePosixPath(name).suffix.lower()


def stem(name: str) -> str:
    """A name without its last suffix, so that `v1.0 front.png` keeps its dot."""
    return PurePosixPath(name).with_suffix("").as_posix()


def folded(name: str) -> str:
    """What a file system that minds neither case nor the form of accents makes of a name."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def shown(text: str) -> str:
    """Text that can be printed and hashed: what has no sign of its own is escaped."""
    return "".join(_escaped(sign) if _hides(sign) else sign for sign in text)


def is_picture(name: str) -> bool:
    return suffix(name) in (*EXTENSIONS, *FOREIGN)


def is_metadata(name: str) -> bool:
    return posixpath.basename(name) in METADATA


def is_sidecar(name: str) -> bool:
    return suffix(name) in SIDECARS


def survey(root: Path) -> Tree:
    """Every file below a folder; links to folders are refused, never entered."""
    errors: list[OSError] = []
    files: dict[str, Path] = {}
    problems: list[Problem] = []
    hidden = 0
    for path in _entries(root, errors=errors):
        name = path.relative_to(root).as_posix()
        if _is_hidden(name):
            hidden += is_picture(name)
        elif problem := _entry_problem(name, path):
            problems.append(problem)
        else:
            files[name] = path
    files = dict(sorted(files.items()))
    pictures = tuple(filter(is_picture, files))
    problems += [Problem(shown(str(error.filename)), f"{error.strerror}") for error in errors]
    problems += _twins(pictures)
    used = (name for name in files if _is_used(name))
    links = tuple(name for name in used if files[name].is_symlink())
    return Tree(files, pictures, links, hidden, tuple(problems))


def read_regular(path: Path, *, max_bytes: int) -> bytes:
    """A regular file's bytes, links followed; OSError for anything that it became since."""
    # Without O_NONBLOCK the opening of a pipe waits for a writer for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "is no regular file")
        if found.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"has more than {max_bytes} bytes")
        data = file.read(found.st_size + 1)  # makes room for as many as it is asked for
    if len(data) != found.st_size:
        raise OSError(errno.EBUSY, "changed while it was read")
    return data


def read_text(name: str, path: Path, *, max_bytes: int) -> str | Problem:
    """UTF-8 without byte-order mark; CRLF becomes LF: a caption is the same on any system."""
    try:
        text = read_regular(path, max_bytes=max_bytes).decode("utf-8")
    except OSError as error:
        return Problem(name, f"cannot be read ({error.strerror})")
    except UnicodeDecodeError as error:
        why = f"is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}"
        return Problem(name, why, remedy="save it as UTF-8")
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def _hides(sign: str) -> bool:
    return unicodedata.category(sign) in _UNPRINTABLE or sign in _TURNING


def _escaped(sign: str) -> str:
    """Python's escape; a byte that is not UTF-8 as that byte."""
    code = ord(sign)
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else ascii(sign)[1:-1]


def _is_used(name: str) -> bool:
    return is_picture(name) or is_sidecar(name) or is_metadata(name)


def _is_hidden(name: str) -> bool:
    parts = name.split("/")
    return parts[-1] == "Thumbs.db" or any(part[0] == "." or part == "__MACOSX" for part in parts)


def _entries(root: Path, *, errors: list[OSError]) -> Iterator[Path]:
    """Files, and links to folders, which are not entered."""
    for folder, folders, names in os.walk(root, onerror=errors.append):
        yield from (Path(folder, name) for name in names)
        yield from (Path(folder, name) for name in folders if os.path.islink(Path(folder, name)))


def _entry_problem(name: str, path: Path) -> Problem | None:
    if os.path.isdir(path):
        return Problem(shown(name), "is a link to a folder", "links to files", "link each picture")
    if not _is_used(name):
        return None
    if shown(name) != name:
        why = "has signs in its name that cannot be shown, or bytes that are not UTF-8"
        return Problem(shown(name), why, remedy=_remedy())
    if not os.path.exists(path):
        return Problem(name, "is a link to nothing", remedy="remove it or restore its target")
    if not os.path.isfile(path):
        return Problem(name, "is no regular file", remedy="move it out of the data set")
    return None


def _remedy() -> str:
    """Python told not to use UTF-8 takes every letter beyond ASCII for such bytes."""
    encoding = sys.getfilesystemencoding()
    return "rename it" if encoding == "utf-8" else f"names are read as {encoding}: set PYTHONUTF8=1"


def _twins(names: Iterable[str]) -> Iterator[Problem]:
    """Names that some systems take for one: a copy of the folder there would lose a picture."""
    first: dict[str, str] = {}
    for name in names:
        other = first.setdefault(folded(name), name)
        if other != name:
            why = f"differs from {other} only in case or in how accents are stored"
            yield Problem(f"{name} ({name!a})", why, remedy="rename one of them")
