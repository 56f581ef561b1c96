"""What the store survives, in figures: kills, crashes, power cuts, bad disks, damage, crowds, size.

    python -m bench.reliability [--only T1 T1c ...] [--count N] [--minutes M] [--scratch FOLDER]

Prints progress, then one table. Without a failure in N trials the rate of failures is below 3/N
with 95 % confidence, if trials are alike and independent. `--count` is for each row; `--minutes`
ends a row early. The exit code is 1 when any trial failed.
"""

import argparse
import os
import sys
import tempfile
import time

# Before the libraries are there: tiny tensors gain nothing from threads, and notices are noise.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench import reliability_rows as rows
from bench import reliability_scale as scale

LOOK_SECONDS = 15
SHOWN_FAILURES = 5


@dataclass(frozen=True)
class Found:
    """One row of the table."""

    test: str
    what: str
    trials: int
    failures: int
    seconds: float

    def line(self) -> str:
        bound = "-" if self.failures or not self.trials else f"< {3 / self.trials:.2%}"
        counts = f"{self.trials} | {self.failures} | {bound}"
        return f"| {self.test} | {self.what} | {counts} | {self.seconds:.0f} |"


def tried(
    test: str, what: str, trials: Iterator[list[str]], *, minutes: float, total: int
) -> Found:
    """Go through a row's trials, telling how far it is and what fails."""
    began = looked = time.monotonic()
    count = failures = 0
    for wrong in trials:
        count += 1
        failures += bool(wrong)
        if wrong and failures <= SHOWN_FAILURES:
            print(f"{test} {what}: FAILED: {wrong}", flush=True)
        now = time.monotonic()
        if now - looked > LOOK_SECONDS:
            looked = now
            print(f"{test} {what}: {count} of {total}, {failures} failed", flush=True)
        if now - began > 60 * minutes:
            break
    found = Found(test, what, count, failures, time.monotonic() - began)
    print(found.line(), flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=(*rows.ROWS, "scale"), default=[])
    parser.add_argument("--count", type=int, help="trials of each row, instead of the full ones")
    parser.add_argument("--minutes", type=float, default=1e9, help="at most, for each row")
    parser.add_argument("--scratch", type=Path, help="a folder on the disk to be tried")
    asked = parser.parse_args()
    found: list[Found] = []
    tables: list[str] = []
    with tempfile.TemporaryDirectory(dir=asked.scratch) as folder:
        scratch = Path(folder)
        chosen = [name for name in rows.ROWS if not asked.only or name in asked.only]
        made = rows.Made(scratch)
        for name in chosen:
            for row in rows.ROWS[name](made, asked.count):
                trials = row.trials()
                found.append(tried(name, row.what, trials, minutes=asked.minutes, total=row.count))
        if not asked.only or "scale" in asked.only:
            tables.append(scale.table(scratch, count=asked.count or scale.ENTRIES))
    if found:
        print("\n| test | what | trials | failures | bound | seconds |\n|---|---|--:|--:|--:|--:|")
        print("\n".join(row.line() for row in found))
    print("\n".join(tables))
    return int(any(row.failures for row in found))


if __name__ == "__main__":
    sys.exit(main())
