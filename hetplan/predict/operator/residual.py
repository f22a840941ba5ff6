"""What measured shapes near the one asked for say beyond the physical law, and how far that holds.

    log seconds = log law + sum_i w_i r_i / (PRIOR_WEIGHT + sum_i w_i)
    w_i = exp(-d_i^2 / (2 reach^2)),  r_i = log(measured_i / law_i)
    d_i = distance to the i-th measured shape, in log2 of the sizes

A kernel average of the law's own errors (Nadaraya 1964, Watson 1964), drawn to 0 where nothing
near was measured: far from all measured shapes the law answers alone, so it cannot run away as a
tree or a polynomial does. Whether a law has one at all, and its reach, leaving out whole sizes
decides (`predict.operator_fit`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

REACHES = (0.25, 0.5, 1.0)
"""Doublings that are tried."""
# One neighbour at no distance moves the law half of the way to it: as much as a mean of one value
# of a spread that equals the prior's.
PRIOR_WEIGHT = 1.0

Point = tuple[float, ...]
"""log2 of the sizes of one shape."""


def point_of(batch: int, m: int, n: int, k: int) -> Point:
    """Where a shape lies."""
    return (math.log2(max(batch, 1)), math.log2(m), math.log2(n), math.log2(max(k, 1)))


def residual(
    point: Point, points: Sequence[Point], residuals: Sequence[float], reach: float
) -> float:
    """What to add to the law's log at this point."""
    total, weights = 0.0, PRIOR_WEIGHT
    scale = -0.5 / (reach * reach)
    for other, value in zip(points, residuals, strict=True):
        squared = sum((a - b) ** 2 for a, b in zip(point, other, strict=True))
        weight = math.exp(scale * squared)
        total += weight * value
        weights += weight
    return total / weights


def left_out_residuals(
    points: Sequence[Point],
    seen_residuals: Sequence[float],
    errors: Sequence[float],
    groups: Sequence[float],
    reach: float,
) -> tuple[float, ...]:
    """Errors of left-out rows after the residual that the rows of all other groups give.

    `seen_residuals` are the law's errors on rows it was fitted on, `errors` those on rows that it
    was not.
    """
    import numpy as np

    at = np.asarray(points, dtype=float)
    squared = ((at[:, None, :] - at[None, :, :]) ** 2).sum(axis=2)
    weights = np.exp(-0.5 / (reach * reach) * squared)
    names = np.asarray(groups)
    weights[names[:, None] == names[None, :]] = 0.0
    known = weights @ np.asarray(seen_residuals, dtype=float)
    corrected = np.asarray(errors, dtype=float) - known / (PRIOR_WEIGHT + weights.sum(axis=1))
    return tuple(float(error) for error in corrected)
