"""The training loss: per-sample means, weighted over the whole group (design 6)."""

from __future__ import annotations

from lib import shapes


def per_sample_loss(prediction: shapes.Prediction, target: shapes.Target) -> shapes.PerSample:
    """Mean squared error of each sample, in float32."""
    return (prediction.float() - target).square().mean(dim=(1, 2, 3))


def group_loss(
    losses: shapes.PerSample, weights: shapes.Weights, *, total_weight: float | shapes.Scalar
) -> shapes.Scalar:
    """A micro-batch's share of the group's loss; the shares of all micro-batches add up to it."""
    return (losses * weights).sum() / total_weight
