"""Training stopped or killed after every step, against the unbroken run, in every family (T8).

    python -m bench.reliability_resume [--families flux ...] [--variants 0 ...] [--count N]

A run has 12 steps, epochs of 3, and a checkpoint every 5. SIGTERM after each step k saves there,
SIGKILL leaves the checkpoint before; a new process in another folder then gives the same command.
Compared are the bytes of adapter, average and last checkpoint (so of the optimizer's state too),
and the loss, norm, rate and count that each step tells. `--count` is the trials of each row, by
chance, instead of all.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

# Before the libraries are there: tiny tensors gain nothing from threads, and notices are noise.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")

from lib import families
from tests.reliability import resumes

VARIANTS = list(resumes.VARIANTS)
HEAD = "| family | variant | stopped | killed | differ | seconds |\n|---|---|--:|--:|--:|--:|"


def row(family: str, variant: str, *, count: int, scratch: Path) -> tuple[str, int]:
    """One line of the table, and how many trials failed."""
    began, wrong = time.monotonic(), 0
    whole = resumes.whole_run(family, variant, scratch)
    cases = resumes.cases()
    chosen = sorted(random.Random(f"{family} {variant}").sample(cases, min(count, len(cases))))
    for sent, step in chosen:
        if found := resumes.trial(whole, sent, step=step):
            wrong += 1
            print(f"{family}, {variant}: FAILED: {found}", flush=True)
    stops = sum(sent == resumes.STOP for sent, _ in chosen)
    counts = f"{stops} | {len(chosen) - stops} | {wrong} | {time.monotonic() - began:.0f}"
    return f"| {family} | {variant} | {counts} |", wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", default=families.names())
    parser.add_argument("--variants", nargs="+", type=int, default=range(len(VARIANTS)))
    parser.add_argument("--count", type=int, default=sys.maxsize)
    asked = parser.parse_args()
    failed = 0
    print(HEAD, flush=True)
    for number, family in product(asked.variants, asked.families):
        with tempfile.TemporaryDirectory() as folder:
            line, wrong = row(family, VARIANTS[number], count=asked.count, scratch=Path(folder))
        failed += wrong
        print(line, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
