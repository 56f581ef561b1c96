"""How a compiled block reduces rows: whole rows at once, which its own limit is too low for.

Norms and float8's scales reduce a token's numbers and then need them again. The compiler keeps up
to 1,024 in registers and reads longer rows twice or three times; tokens here have 3,072 to 6,144.
"""

from __future__ import annotations

from typing import Any

from torch._inductor.choices import InductorChoices
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V

LONGEST = 8192


class WholeRows(InductorChoices):
    """The compiler's choices but for rows up to a length."""

    def uuid(self) -> str:
        """By which compiled blocks that are kept are told from those of other choices."""
        return f"rows of {LONGEST}"

    @staticmethod
    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        """Whether a row is kept in registers."""
        whole = features.get_reduction_hint() == ReductionHint.INNER and not cooperative_reduction
        if whole and V.graph.sizevars.statically_known_leq(features.reduction_numel, LONGEST):
            return True
        own = InductorChoices.should_use_persistent_reduction
        return own(features, cooperative_reduction)
