"""Figures of predictions: errors, rank correlation and coverage of intervals; peers' figures.

    error            predicted / measured - 1
    coverage         part of the measured values inside their 90 % interval; with n rows, a true
                     interval has between the 2.5 % and the 97.5 % point of Binomial(n, 0.9) inside
    width            (upper - lower) / predicted
    interval score   mean of ((u - l) + 2/a (l - x)+ + 2/a (x - u)+) / x with a = 0.1: Gneiting and
                     Raftery 2007, eq. 43, relative to the measured x, so that rows of all sizes
                     count alike; wide and wrong intervals both cost

Rows that are marked suspect are in every figure of `Errors` that is given for all rows, and left
out of the second one: the tail of slow clusters is reported apart, not dropped.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from evaluation.accuracy.rows import RunRow

ALPHA = 0.1
"""What a 90 % interval may miss."""
_BAND = 0.95  # of the binomial law: what `true if` says of a number of rows inside


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One prediction beside what was measured; all three in one unit, above 0."""

    name: str
    predicted: float
    measured: float
    lower: float
    upper: float
    """Of the 90 % interval."""
    suspect: bool = False

    @classmethod
    def around(
        cls,
        name: str,
        predicted: float,
        log_halfwidth: float,
        measured: float,
        *,
        suspect: bool = False,
    ) -> Judged:
        """A prediction whose 90 % interval is predicted * exp(-+ log_halfwidth)."""
        spread = math.exp(log_halfwidth)
        return cls(
            name=name,
            predicted=predicted,
            measured=measured,
            lower=predicted / spread,
            upper=predicted * spread,
            suspect=suspect,
        )

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1.0

    @property
    def inside(self) -> bool:
        """Whether the interval holds what was measured."""
        return self.lower <= self.measured <= self.upper

    @property
    def score(self) -> float:
        """Interval score, relative to what was measured."""
        missed = max(0.0, self.lower - self.measured) + max(0.0, self.measured - self.upper)
        return (self.upper - self.lower + 2.0 / ALPHA * missed) / self.measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """All figures of some rows; fractions."""

    rows: int
    mape: float
    median: float
    """Of the absolute errors."""
    bias: float
    """Mean of the errors."""
    worst: float
    """The error that is farthest from 0."""
    worst_row: str
    spearman: float | None
    """None below 3 rows, or where all are equal."""
    inside: int
    """Rows inside their 90 % interval."""
    least_inside: int
    most_inside: int
    """The 95 % binomial band of `inside` if the intervals are true."""
    median_width: float
    interval_score: float

    @property
    def coverage(self) -> float:
        """Part of the rows inside."""
        return self.inside / self.rows


def errors_of(judged: Sequence[Judged]) -> Errors | None:
    """The figures of these rows; None of no rows."""
    if not judged:
        return None
    sizes = [abs(each.error) for each in judged]
    worst = max(judged, key=lambda each: abs(each.error))
    least, most = binomial_band(len(judged))
    return Errors(
        rows=len(judged),
        mape=statistics.fmean(sizes),
        median=statistics.median(sizes),
        bias=statistics.fmean(each.error for each in judged),
        worst=worst.error,
        worst_row=worst.name,
        spearman=None
        if len(judged) < 3
        else rank_correlation(
            [each.predicted for each in judged], [each.measured for each in judged]
        ),
        inside=sum(each.inside for each in judged),
        least_inside=least,
        most_inside=most,
        median_width=statistics.median(
            (each.upper - each.lower) / each.predicted for each in judged
        ),
        interval_score=statistics.fmean(each.score for each in judged),
    )


def binomial_band(rows: int, probability: float = 1.0 - ALPHA) -> tuple[int, int]:
    """How many of so many rows are inside with 95 % probability if each is with `probability`.

    The central interval: at most 2.5 % of the distribution below it, and at most 2.5 % above it.
    """
    tail, below, band = (1.0 - _BAND) / 2.0, 0.0, []
    for count in range(rows + 1):
        share = math.exp(
            math.lgamma(rows + 1)
            - math.lgamma(count + 1)
            - math.lgamma(rows - count + 1)
            + count * math.log(probability)
            + (rows - count) * math.log1p(-probability)
        )
        if below + share > tail and below < 1.0 - tail:
            band.append(count)
        below += share
    return band[0], band[-1]


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Spearman's, equal values with their mean rank; None where one side has only one rank."""
    one, two = _ranks(left), _ranks(right)
    if len(set(one)) == 1 or len(set(two)) == 1:
        return None
    return statistics.correlation(one, two)


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    at = 0
    while at < len(order):
        stop = at
        while stop < len(order) and values[order[stop]] == values[order[at]]:
            stop += 1
        for each in order[at:stop]:
            ranks[each] = (at + stop - 1) / 2.0
        at = stop
    return ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFigure:
    """One tool's error on one data set."""

    tool: str
    mape: float
    median: float | None = None
    note: str = ""
    """What one must know before comparing."""
    source: str


_CALCULON = "calculon commit caa4b11 run on the rows' configurations"

PEERS: tuple[tuple[str, PeerFigure], ...] = (
    (
        "vtrain",
        PeerFigure(tool="calculon", mape=0.153, median=0.097, source=_CALCULON),
    ),
    (
        "vtrain",
        PeerFigure(
            tool="vTrain",
            mape=0.1473,
            note="its own claim, on its own multi-node rows",
            source="vTrain, MICRO 2024, validation on multi-node systems",
        ),
    ),
    (
        "sailor-clariden",
        PeerFigure(
            tool="Sailor",
            mape=0.089,
            note="its simulator with these plans' own profiles",
            source="Sailor's simulator, commit cf2c8e3, on sailor/validation",
        ),
    ),
    (
        "simumax",
        PeerFigure(
            tool="SimuMax",
            mape=0.0562,
            note="always low",
            source="SimuMax 4dcaae5, docs/b200, predictions printed beside the runs",
        ),
    ),
    (
        "korthikanti-table5",
        PeerFigure(
            tool="calculon",
            mape=0.0365,
            note="its own validation set",
            source="calculon commit caa4b11, validation of arXiv 2205.05198, table 5",
        ),
    ),
    ("megatron-sc21", PeerFigure(tool="calculon", mape=0.103, source=_CALCULON)),
)
"""(beginning of the source, figure)."""

_SIMUMAX_PREDICTION = re.compile(r"simumax_pred_ms=([0-9.]+)")


def peers_of(rows: Sequence[RunRow]) -> tuple[PeerFigure, ...]:
    """The figures of a data set; of SimuMax, where rows carry its predictions, over those rows."""
    if not rows:
        return ()
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
