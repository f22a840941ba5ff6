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
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class PeerFigure:
    """One tool's error on one data set."""

    tool: str
    mape: float
    source: str
    median: float | None = None
    note: str = ""
    """What one must know before comparing."""


_CALCULON = "calculon commit caa4b11 run on the rows' configurations"

PEERS: tuple[tuple[str, PeerFigure], ...] = (
    ("vtrain", PeerFigure("calculon", 0.153, _CALCULON, median=0.097)),
    (
        "vtrain",
        PeerFigure(
            "vTrain",
            0.1473,
            "vTrain, MICRO 2024, validation on multi-node systems",
            note="its own claim, on its own multi-node rows",
        ),
    ),
    (
        "sailor-clariden",
        PeerFigure(
            "Sailor",
            0.089,
            "Sailor's simulator, commit cf2c8e3, on sailor/validation",
            note="its simulator with these plans' own profiles",
        ),
    ),
    (
        "simumax",
        PeerFigure(
            "SimuMax",
            0.0562,
            "SimuMax 4dcaae5, docs/b200, predictions printed beside the runs",
            note="always low",
        ),
    ),
    (
        "korthikanti-table5",
        PeerFigure(
            "calculon",
            0.0365,
            "calculon commit caa4b11, validation of arXiv 2205.05198, table 5",
            note="its own validation set",
        ),
    ),
    ("megatron-sc21", PeerFigure("calculon", 0.103, _CALCULON)),
)
"""(beginning of the source, figure)."""

_SIMUMAX_PREDICTION = re.compile(r"simumax_pred_ms=([0-9.]+)")


def peers_of(rows: Sequence[RunRow]) -> tuple[PeerFigure, ...]:
    """The figures of a data set; of SimuMax, where rows carry its predictions, over those rows."""
    source = rows[0].source.lower()
    found = [figure for beginning, figure in PEERS if source.startswith(beginning)]
    printed = [
        abs(float(match[1]) / 1e3 / row.step_seconds - 1.0)
        for row in rows
        if row.step_seconds and (match := _SIMUMAX_PREDICTION.search(row.other))
    ]
    if printed:
        found = [each for each in found if each.tool != "SimuMax"]
        found.append(
            PeerFigure(
                tool="SimuMax",
                mape=statistics.fmean(printed),
                median=statistics.median(printed),
                note="its predictions, printed beside these runs",
                source="column other of the rows",
            )
        )
    return tuple(found)


def peer_words(figures: Sequence[PeerFigure]) -> str:
    """In one cell."""
    words = []
    for figure in figures:
        median = "" if figure.median is None else f" (median {figure.median:.1%})"
        note = f", {figure.note}" if figure.note else ""
        words.append(f"{figure.tool} {figure.mape:.1%}{median}{note}")
    return "; ".join(words)
