"""Figures of predictions: errors, rank correlation and coverage of intervals; peers' figures.

    error            predicted / measured - 1
    coverage         part of the measured values inside their 90 % interval; with n rows, a true
                     interval has between the 2.5 % and the 97.5 % point of Binomial(n, 0.9) inside
    width            (upper - lower) / predicted
    interval score   mean of ((u - l) + 2/a (l - x)+ + 2/a (x - u)+) / x with a = 0.1: Gneiting and
                     Raftery 2007, eq. 43, relative to the measured x, so that rows of all sizes
                     count alike; wide and wrong intervals both cost

Predictions beside measurements are frames with the columns `name`, `predicted_seconds`,
`measured_seconds` and `log_halfwidth`: the 90 % interval is predicted * exp(-+ log_halfwidth).
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas
from scipy.stats import binom

from evaluation.accuracy.rows import RunRow

ALPHA = 0.1
"""What a 90 % interval may miss."""
_BAND = 0.95  # of the binomial law: what `true if` says of a number of rows inside
_FEWEST_RANKS = 3


def judged(frame: pandas.DataFrame) -> pandas.DataFrame:
    """The same with what every row's interval and error are.

    `error`: predicted / measured - 1. `score`: interval score, relative to what was measured.
    """
    spread = np.exp(frame["log_halfwidth"])
    predicted, measured = frame["predicted_seconds"], frame["measured_seconds"]
    lower, upper = predicted / spread, predicted * spread
    if "least_seconds" in frame:  # as `estimate` cuts its draws
        lower = lower.clip(lower=np.minimum(frame["least_seconds"], predicted))
    missed = (lower - measured).clip(lower=0.0) + (measured - upper).clip(lower=0.0)
    return frame.assign(
        lower_seconds=lower,
        upper_seconds=upper,
        error=predicted / measured - 1.0,
        inside=(lower <= measured) & (measured <= upper),
        width=(upper - lower) / predicted,
        score=(upper - lower + 2.0 / ALPHA * missed) / measured,
    )


def errors_of(frame: pandas.DataFrame) -> dict[str, Any]:
    """All figures of some rows, at least one; fractions.

    `median` is of the absolute errors, `bias` the mean of the errors, `worst` the one farthest from
    0; `spearman` is None below 3 rows, or where all are equal; `least_inside` and `most_inside` are
    the 95 % binomial band of `inside` if the intervals are true.
    """
    rows = judged(frame)
    sizes = rows["error"].abs()
    worst = rows.iloc[int(sizes.to_numpy().argmax())]
    least, most = (
        binom.ppf(point, len(rows), 1 - ALPHA) for point in ((1 - _BAND) / 2, (1 + _BAND) / 2)
    )
    return {
        "rows": len(rows),
        "mape": float(sizes.mean()),
        "median": float(sizes.median()),
        "bias": float(rows["error"].mean()),
        "worst": float(worst["error"]),
        "worst_row": worst["name"],
        "spearman": rank_correlation(rows["predicted_seconds"], rows["measured_seconds"]),
        "inside": int(rows["inside"].sum()),
        "least_inside": int(least),
        "most_inside": int(most),
        "median_width": float(rows["width"].median()),
        "interval_score": float(rows["score"].mean()),
    }


def rank_correlation(left: pandas.Series[float], right: pandas.Series[float]) -> float | None:
    """Spearman's; None of fewer than 3 values, or where one side has only one rank."""
    if len(left) < _FEWEST_RANKS or left.nunique() == 1 or right.nunique() == 1:
        return None
    return float(left.rank().corr(right.rank()))


def band(errors: pandas.Series[Any]) -> str:
    """Between which parts of the rows are inside where intervals are true."""
    least, most = (errors[f"{which}_inside"] / errors["rows"] for which in ("least", "most"))
    return f"{least:.0%} to {most:.0%}"


PEERS = (
    ("vtrain", "calculon 15.3% (median 9.7%)"),  # calculon commit caa4b11 on the rows
    ("vtrain", "vTrain 14.7%, its own claim"),  # MICRO 2024, validation on multi-node systems
    # Sailor's simulator, commit cf2c8e3, on sailor/validation
    ("sailor-clariden", "Sailor 8.9%, its simulator with these plans' own profiles"),
    # calculon commit caa4b11, validation of arXiv 2205.05198, table 5
    ("korthikanti-table5", "calculon 3.6%, its own validation set"),
    ("megatron-sc21", "calculon 10.3%"),  # calculon commit caa4b11 on the rows
)
"""(beginning of the source, a tool's mean absolute error on its rows) as published or computed."""

_SIMUMAX_PREDICTION = r"simumax_pred_ms=([0-9.]+)"


def peers_of(rows: Sequence[RunRow]) -> str:
    """Peers' figures of a data set; SimuMax's over its predictions, where rows carry them."""
    source = rows[0].source.lower()
    found = [words for beginning, words in PEERS if source.startswith(beginning)]
    printed = [
        abs(float(match[1]) / 1e3 / row.step_seconds - 1.0)
        for row in rows
        if row.step_seconds and (match := re.search(_SIMUMAX_PREDICTION, row.other))
    ]
    if printed:
        found.append(f"SimuMax {statistics.fmean(printed):.1%}, printed beside these runs")
    return "; ".join(found)
