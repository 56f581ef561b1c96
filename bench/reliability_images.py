"""Damaged pictures by the hundred thousand: how many are decoded, refused, and by what kind.

    python -m bench.reliability_images [--count 200000] [--first 0] [--jobs 2]

Prints one table; the exit code is 1 when a process died, hung, needed over 2 GB, or raised anything
but a refusal. Without a failure in N trials the rate is below 3/N with 95 % confidence.
"""

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from tests.reliability import images

PART = 2500
SHOWN_FAILURES = 10


def fuzzed(first: int, count: int, *, jobs: int) -> images.Outcome:
    """Every mutant of a range, in parts, each in a process of its own."""
    starts = range(first, first + count, PART)
    total = images.Outcome()
    with ThreadPoolExecutor(jobs) as threads:
        parts = threads.map(lambda n: images.fuzz(n, min(n + PART, first + count)), starts)
        for part in parts:
            total.counts += part.counts
            total.failures += part.failures
            print(f"{sum(total.counts.values())} of {count}", file=sys.stderr, flush=True)
    return total


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args()
    started = time.monotonic()
    outcome = fuzzed(asked.first, asked.count, jobs=asked.jobs)
    print("| outcome | mutants | share |\n|---|---|---|")
    for kind, count in outcome.counts.most_common():
        print(f"| {kind} | {count} | {count / asked.count:.2%} |")
    failed = len(outcome.failures)
    print(f"\n{asked.count} mutants, {failed} failures, {time.monotonic() - started:.0f} s")
    print("\n".join(outcome.failures[:SHOWN_FAILURES]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
