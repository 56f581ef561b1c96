"""Confidence intervals of paired differences."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """The mean difference of paired losses with its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.4f} (95 % interval {self.low:+.4f} to {self.high:+.4f})"


def change(before: Sequence[float], after: Sequence[float]) -> Change | None:
    """Of each picture's loss; None for a single picture, which has no spread.

    Student's t on the paired differences, its quantile by the expansion of Hill (1970).
    """
    count = len(before)
    if count < 2:
        return None
    differences = [b - a for a, b in zip(before, after, strict=True)]
    mean = math.fsum(differences) / count
    variance = math.fsum((d - mean) ** 2 for d in differences) / (count - 1)
    half = t_quantile(count - 1) * math.sqrt(variance / count)
    return Change(mean, mean - half, mean + half)


def t_quantile(freedom: int) -> float:
    """Student's t at 97.5 %: exact for 1 and 2 degrees of freedom, else within 1 %."""
    if freedom <= 2:
        return (12.7062, 4.3027)[freedom - 1]
    z, n = 1.959964, freedom
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )
