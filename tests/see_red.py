"""Breaks the product as each field report tells, in a copy, and sees the report's tests fail.

    python tests/see_red.py [--area AREA] [F133 ...]

tests/field_reports.yaml says which tests re-create a report and which break turns them red.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

CHECKOUT = Path(__file__).resolve().parent.parent
TABLE = CHECKOUT / "tests" / "field_reports.yaml"
FAILED = re.compile(r"^FAILED ([^\[\s]+)(\[.*?\])?(?: - .*)?$", re.M)
TESTS_FAILED = 1  # pytest's exit code; nothing collected, or a broken file, has another

Row = Mapping[str, Any]


def chosen(area: str | None, numbers: Sequence[str]) -> dict[str, Row]:
    """The rows of an area, or with some numbers, or all."""
    areas = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    rows = {
        n: row for name, a in areas.items() if area in (None, name) for n, row in a["rows"].items()
    }
    return {number: row for number, row in rows.items() if not numbers or number in numbers}


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the files that git tracks or would track."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=CHECKOUT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory(prefix="see-red-") as folder:
        for name in filter(None, names.decode().split("\0")):
            if (CHECKOUT / name).is_file():
                target = Path(folder, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(CHECKOUT / name, target)
        yield Path(folder)


@contextmanager
def broken(copy: Path, breaks: Sequence[Mapping[str, str]]) -> Iterator[None]:
    """The copy with some texts replaced, and whole again after."""
    whole = {copy / one["file"]: (copy / one["file"]).read_text("utf-8") for one in breaks}
    try:
        for one in breaks:
            path = copy / one["file"]
            text = path.read_text("utf-8")
            if text.count(one["find"]) != 1:
                raise SystemExit(f"{one['file']}: not there exactly once: {one['find']!r}")
            path.write_text(text.replace(one["find"], one["replace"]), "utf-8")
        yield
    finally:
        for path, text in whole.items():
            path.write_text(text, "utf-8")


def tested(copy: Path, tests: Sequence[str], *options: str) -> tuple[int, set[str], str]:
    """Pytest's exit code, the tests that failed (without their parameters), what it said."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rf", *options]
    # Bytecode is told by seconds and size, and a break may change neither.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "500"}
    run = subprocess.run(
        [*command, *tests], cwd=copy, env=environment, capture_output=True, text=True
    )
    failed = {found[1] for found in FAILED.finditer(run.stdout)}
    return run.returncode, failed, run.stdout + run.stderr


def red(copy: Path, row: Row) -> list[str]:
    """What is wrong with a row: tests that its break does not turn red."""
    with broken(copy, row["breaks"]):
        code, failed, said = tested(copy, row["tests"], "--tb=no")
    if code != TESTS_FAILED:
        return [f"pytest ended with {code}: {said.strip().splitlines()[-1:]}"]
    return [f"stayed green: {test}" for test in row["tests"] if test.split("[")[0] not in failed]


def main() -> int:
    """See every chosen row red; the exit code is 1 when one is not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--area")
    parser.add_argument("numbers", nargs="*", metavar="F133")
    asked = parser.parse_args()
    rows = chosen(asked.area, asked.numbers)
    if not rows:
        parser.error("no such row")
    wrong = 0
    with copied() as copy:
        tests = sorted({test for row in rows.values() for test in row.get("tests", ())})
        code, _, said = tested(copy, tests, "-n", "2")
        if code:
            print(said)
            return 1
        print(f"{len(tests)} tests are green in an unbroken copy", flush=True)
        for number, row in rows.items():
            if "explained" in row:
                print(f"{number} explained: {row['explained']}")
                continue
            started = time.monotonic()
            problems = red(copy, row)
            wrong += bool(problems)
            took = f"{len(row['tests'])} tests, {time.monotonic() - started:.0f} s"
            print(f"{number} {'; '.join(problems) or 'red'} ({took})", flush=True)
    explained = sum("explained" in row for row in rows.values())
    print(f"{len(rows)} rows, {wrong} not red, {explained} explained ({explained / len(rows):.0%})")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
