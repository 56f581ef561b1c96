"""How two predictions become one: the families' guidance rules (arXiv:2207.12598)."""

from __future__ import annotations

from lib import shapes


def classifier_free(
    conditional: shapes.Prediction, unconditional: shapes.Prediction, *, scale: float
) -> shapes.Prediction:
    """u + s (c - u): scale 1 is the conditional prediction."""
    c, u = conditional.float(), unconditional.float()
    return u + scale * (c - u)


def beyond_conditional(
    conditional: shapes.Prediction, unconditional: shapes.Prediction, *, scale: float
) -> shapes.Prediction:
    """c + s (c - u): scale 0 is the conditional prediction."""
    c, u = conditional.float(), unconditional.float()
    return c + scale * (c - u)
