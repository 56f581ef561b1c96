"""Rows of metadata.jsonl and metadata.csv: which picture has which captions."""

import csv
import io
import json
import posixpath
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.errors import Problem
from lib.survey import MAX_METADATA_BYTES, METADATA, is_metadata, read_text, shown

CAPTION_FIELDS = ("text", "caption")
_FIELDS = f"file_name, and one of {', '.join(CAPTION_FIELDS)}"
_NEAR = re.compile(r"(?i:(metadata\.(json.*|csv.*|tsv|parquet|xlsx?)|captions?\.(jsonl?|csv)))")


@dataclass(frozen=True)
class Row:
    """One row: `subject` is its file and line, `name` the picture; None where it has no caption."""

    subject: str
    name: str
    captions: tuple[str, ...] | None


def is_near(name: str) -> bool:
    """Whether a name is nearly that of a metadata file."""
    base = posixpath.basename(name)
    return base not in METADATA and _NEAR.fullmatch(base) is not None


def rows(files: Mapping[str, Path]) -> Iterator[Row | Problem]:
    """The rows of all metadata files, or what is wrong with them."""
    by_folder: dict[str, list[str]] = defaultdict(list)
    for name in filter(is_metadata, files):
        by_folder[posixpath.dirname(name)].append(name)
    for names in by_folder.values():
        if len(names) > 1:
            yield Problem(names[0], f"lies beside {names[1]}", "one of the two", "remove one")
            continue
        (name,) = names
        text = read_text(name, files[name], max_bytes=MAX_METADATA_BYTES)
        if isinstance(text, Problem):
            yield text
        else:
            yield from (_csv_rows if name.endswith(".csv") else _json_rows)(name, text)


def _json_rows(metadata: str, text: str) -> Iterator[Row | Problem]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _json_row(line, subject=f"{metadata}:{number}", metadata=metadata)


def _json_row(line: str, *, subject: str, metadata: str) -> Row | Problem:
    try:
        row = json.loads(line, object_pairs_hook=_unrepeated)
    except (ValueError, RecursionError) as error:
        row = error if isinstance(error, _Repeated) else None
    if isinstance(row, _Repeated):
        return Problem(subject, f"has the field {shown(str(row))} twice", "each field once")
    if not isinstance(row, dict):
        return Problem(subject, "the line is not a JSON object", "one JSON object a line")
    file_name = row.get("file_name")
    fields = [field for field in CAPTION_FIELDS if field in row]
    if not isinstance(file_name, str) or len(fields) != 1:
        return Problem(subject, f"has the fields {shown(', '.join(row))}", _FIELDS)
    found = _captions(row[fields[0]])
    if isinstance(found, str):
        allowed = "a string, a list of different strings, or null for none"
        return Problem(subject, f"{fields[0]} {found}", allowed)
    return Row(subject, _picture(file_name, metadata), found)


class _Repeated(ValueError):
    """A JSON object that names a field twice; of two captions none is the right one."""


def _unrepeated(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _Repeated(name)
        found[name] = value
    return found


def _captions(value: Any) -> tuple[str, ...] | str | None:
    """The captions of a row, or in words what is wrong with them."""
    if value is None:
        return None
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        return "is no text"
    if not texts:
        return "is an empty list"
    if not all(isinstance(text, str) and _is_unicode(text) for text in texts):
        return "is no text" if len(texts) == 1 else "holds what is no text"
    stripped = tuple(text.strip() for text in texts)
    return "holds a caption twice" if len(set(stripped)) < len(stripped) else stripped


def _is_unicode(text: str) -> bool:
    """JSON can escape half of a pair, which no file can hold."""
    return text.encode("utf-8", "replace").decode("utf-8") == text


def _csv_rows(metadata: str, text: str) -> Iterator[Row | Problem]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] | None = None
    line = 1
    try:
        for fields in reader:
            subject, line = f"{metadata}:{line}", reader.line_num + 1
            if not fields:
                continue
            if header is None:
                header = fields
                if problem := _header_problem(header, subject=subject):
                    yield problem
                    return
            else:
                yield _csv_row(fields, header=header, subject=subject, metadata=metadata)
    except csv.Error as error:
        why = f"is no CSV from here on ({error})"
        yield Problem(f"{metadata}:{line}", why, remedy='quote as in "a ""red"" cat, sitting"')


def _header_problem(header: Sequence[str], *, subject: str) -> Problem | None:
    captions = [field for field in header if field in CAPTION_FIELDS]
    if header.count("file_name") == 1 and len(captions) == 1:
        return None
    why = f"has the columns {shown(', '.join(header))}"
    return Problem(subject, why, f"a header with {_FIELDS}; commas between")


def _csv_row(
    fields: Sequence[str], *, header: Sequence[str], subject: str, metadata: str
) -> Row | Problem:
    """A row of CSV, which has no word for null: an empty cell is an empty caption."""
    if len(fields) != len(header):
        why = f"has {len(fields)} fields, the header {len(header)}"
        return Problem(subject, why, remedy="quote a caption that holds a comma")
    row = dict(zip(header, fields, strict=True))
    (caption,) = (row[field] for field in CAPTION_FIELDS if field in row)
    return Row(subject, _picture(row["file_name"], metadata), (caption.strip(),))


def _picture(file_name: str, metadata: str) -> str:
    """A row's picture relative to the data set; both separators are known."""
    folder = posixpath.dirname(metadata)
    return posixpath.normpath(posixpath.join(folder, file_name.replace("\\", "/")))
