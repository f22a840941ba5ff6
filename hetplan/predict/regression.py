"""Non-negative regression on relative error, its errors on unseen sizes, its interval; tables.

Coefficients minimise the sum over rows of |log(measured / predicted)|, found by reweighted
non-negative least squares (Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23).
The first step has relative errors. Each further one linearises around the last predictions p0:
log(p / y) = log(p0 / y) + p / p0 - 1, and divides every row by the root of its last |log error|,
which turns squares into absolute values: one slow row cannot pull the fit away.

Intervals: the rank of split conformal prediction (Lei et al., arXiv 1604.04173): of n absolute log
errors on rows that one fit did not see, the ceil((n + 1) * coverage)-th smallest bounds that of a
new, exchangeable row with the given probability. Here every group of rows was left out of a fit of
its own and the prediction is by the fit of all rows, so the coverage is about the stated one and
not guaranteed (cross-conformal prediction: Barber et al., arXiv 1905.02928, section 4). Rows beyond
the measured sizes are not exchangeable; callers widen the interval there.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence

COVERAGE = 0.9
"""Probability that every interval of this package aims at."""
NORMAL_90 = 1.6448536269514722
"""Standard deviations of a normal law from its middle to an end of its 90 % interval."""
MIN_CALIBRATION_ROWS = 9
"""Fewest errors that have a finite 90 % half-width: ceil((n + 1) * 0.9) <= n from n = 9 on."""
# Errors below 1 % are timing noise; without a floor a row that is met exactly would weigh
# infinitely much in the next step.
_MIN_RESIDUAL = 0.01
# The sum of errors settles to 4 digits within 10 steps on the measured layers of six devices.
_REWEIGHTING_STEPS = 20
# A prediction below a thousandth of what was measured counts as that, so that logarithms exist.
_MIN_RATIO = 1e-3

# Columns count as independent when the smallest singular value of the rows (each divided by its
# time, columns brought to equal length) is at least this part of the largest. Rows are measured to
# about 1 %, so a direction a thousand times weaker than the others is noise.
_INDEPENDENT = 1e-3

Rows = Sequence[Sequence[float]]
"""One sequence of column values per measurement."""


def predict(coefficients: Sequence[float], row: Sequence[float]) -> float:
    """The fitted sum for one row."""
    return sum(c * x for c, x in zip(coefficients, row, strict=True))


def log_ratio(measured: float, predicted: float) -> float:
    """log(measured / predicted), finite for a prediction of zero."""
    return math.log(measured / max(predicted, _MIN_RATIO * measured))


def fit_nonnegative(
    rows: Rows,
    seconds: Sequence[float],
    *,
    importance: Sequence[float] | None = None,
    centre: Sequence[float] = (),
    weight: float = 0.0,
) -> tuple[float, ...]:
    """Coefficients >= 0, one per column, with the least sum of absolute log errors found.

    `importance` is what each row counts in that sum; None: all alike. `seconds` must be positive.
    `centre`: positive values that the coefficients are held near, with this part of the rows' mean
    power for the square of each relative distance (ridge regression); empty: nothing holds them.
    Columns may be linearly dependent; the split among them is then one of many that predict the
    same.
    """
    import numpy as np
    from scipy.optimize import nnls

    measured = np.asarray(seconds, dtype=float)
    matrix = np.asarray(rows, dtype=float)
    # Column norms differ by 15 orders of magnitude (1 and operations), which nnls cannot stand.
    scale = 1.0 / np.asarray(centre) if len(centre) else np.abs(matrix).max(axis=0)
    scale[scale == 0] = 1.0
    matrix = matrix / scale
    counts = np.ones(len(measured)) if importance is None else np.asarray(importance, dtype=float)
    around, target, weights = measured, np.ones(len(measured)), np.sqrt(counts)
    best = np.zeros(matrix.shape[1])
    least = math.inf
    for _ in range(_REWEIGHTING_STEPS):
        weighted, aims = matrix * (weights / around)[:, None], target * weights
        if len(centre):
            pull = math.sqrt(weight * float((weighted**2).mean()) * len(measured))
            weighted = np.vstack([weighted, pull * np.eye(len(centre))])
            aims = np.append(aims, np.full(len(centre), pull))
        scaled, _ = nnls(weighted, aims, maxiter=1000)
        around = np.maximum(matrix @ scaled, _MIN_RATIO * measured)
        errors = np.log(measured / around)
        total = float((counts * np.abs(errors)).sum())
        # A step may miss the minimum; the best that was seen counts.
        if total < least:
            best, least = scaled, total
        # Below -1 the linearised target would ask for a negative time.
        target = 1.0 + np.maximum(errors, -0.9)
        weights = np.sqrt(counts) / np.sqrt(np.maximum(np.abs(errors), _MIN_RESIDUAL))
    return tuple(float(c) for c in best / scale)


def independent(rows: Rows, seconds: Sequence[float]) -> bool:
    """Whether the rows can tell their columns apart."""
    import numpy as np

    matrix = np.asarray(rows, dtype=float) / np.asarray(seconds, dtype=float)[:, None]
    length = np.linalg.norm(matrix, axis=0)
    if len(matrix) < matrix.shape[1] or not length.all():
        return False
    singular = np.linalg.svd(matrix / length, compute_uv=False)
    return bool(singular[-1] >= _INDEPENDENT * singular[0])


def left_out_errors(
    rows: Rows,
    seconds: Sequence[float],
    groups: Sequence[Hashable],
    *,
    fit: Callable[[Rows, Sequence[float]], tuple[float, ...]] = fit_nonnegative,
) -> tuple[float, ...]:
    """log(measured / predicted) of every row by a fit that saw no row of its group.

    One fit per group; at least two groups are needed.
    """
    errors = [0.0] * len(rows)
    for left_out in dict.fromkeys(groups):
        seen = [index for index, group in enumerate(groups) if group != left_out]
        coefficients = fit([rows[i] for i in seen], [seconds[i] for i in seen])
        for index, group in enumerate(groups):
            if group == left_out:
                errors[index] = log_ratio(seconds[index], predict(coefficients, rows[index]))
    return tuple(errors)


def conformal_halfwidth(errors: Sequence[float]) -> float | None:
    """Half-width that about 90 % of new rows keep to; None with fewer than 9 errors."""
    rank = math.ceil((len(errors) + 1) * COVERAGE)
    if rank > len(errors):
        return None
    return sorted(abs(error) for error in errors)[rank - 1]


_T_QUANTILES = {
    4.0: 2.1318467863266495,
    5.0: 2.0150483733330233,
    6.0: 1.9431802805153042,
    7.0: 1.8945786050900062,
    8.0: 1.8595480375308973,
    9.0: 1.833112932656237,
    10.0: 1.8124611228116756,
    11.0: 1.7958848187040433,
    12.0: 1.782287555649319,
    13.0: 1.7709333959868725,
    14.0: 1.761310135774891,
    15.0: 1.753050355692572,
    16.0: 1.7458836762762495,
}
"""95 % points by degrees of freedom, as scipy has them, whose import takes a tenth of a second."""


def t_quantile(freedom: float) -> float:
    """95 % point of Student's t."""
    if freedom in _T_QUANTILES:
        return _T_QUANTILES[freedom]
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.95))


def slope(sizes: Sequence[float], seconds: Sequence[float], size: float) -> float:
    """Seconds per further unit of size by a table of rising sizes and times."""
    if len(sizes) == 1:
        # Latency and bandwidth cannot be told apart: all of it is taken to grow with size.
        return seconds[0] / sizes[0]
    # The right end of the segment that holds the size, or of the nearest one.
    right = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
    rate = (seconds[right] - seconds[right - 1]) / (sizes[right] - sizes[right - 1])
    if size > sizes[-1] and rate == 0.0:
        # A flat end is noise: bytes cost what they cost over the whole table.
        rate = (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0]) or seconds[-1] / sizes[-1]
    return rate


def interpolate(sizes: Sequence[float], seconds: Sequence[float], size: float) -> float:
    """Time at this size by a table, linear between its sizes; non-decreasing and never negative."""
    if size > sizes[-1]:
        return seconds[-1] + (size - sizes[-1]) * slope(sizes, seconds, size)
    if size <= sizes[0]:
        if len(sizes) == 1:
            # Down from the only size nothing is known about the bytes' part: an upper bound.
            return seconds[0]
        # The first segment's line, unless that would make an empty message take less than nothing.
        least = min(slope(sizes, seconds, size), seconds[0] / sizes[0])
        return seconds[0] - (sizes[0] - size) * least
    right = bisect_left(sizes, size)
    if sizes[right] == size:
        return seconds[right]
    part = (size - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
    return seconds[right - 1] + part * (seconds[right] - seconds[right - 1])
