"""What a time is made of: predicted parts, how often each counts, and whose error they share.

Costs keep their parts so that an estimate can carry the predictor's errors through the schedule:
predictions about one device kind, or about one link, err together (one common log-factor), those
about different ones independently.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetplan.cluster.spec import Link
from hetplan.predict.predictor import Prediction, SendLaw
from hetplan.units import format_bandwidth, format_seconds

_SAMPLES_OF = "link "
# Two-sided 90 % interval of a normal variable: mean -+ 1.645 standard deviations.
NORMAL_90 = 1.6448536269514722


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """`count` times one predicted time."""

    what: str
    """What takes this time, as in `transformer layer forward`."""
    cause: str
    """Device kind or link whose prediction it is; terms of one cause err together."""
    count: float
    prediction: Prediction

    @property
    def seconds(self) -> float:
        """Central value."""
        return self.count * self.prediction.seconds

    def times(self, count: float) -> Term:
        """The same, this many times."""
        return Term(
            what=self.what,
            cause=self.cause,
            count=self.count * count,
            prediction=self.prediction,
        )


def seconds_of(terms: Iterable[Term]) -> float:
    """Sum of the central values."""
    return sum((term.seconds for term in terms), 0.0)


def link_cause(link: Link) -> str:
    """Name under which predictions about this link err together: its samples, or its figures."""
    if link.samples is not None:
        return f"{_SAMPLES_OF}{link.samples}"
    return (
        f"{link.transport.value} link of {format_bandwidth(link.goodput_bytes_per_second)}, "
        f"{format_seconds(link.latency_seconds)}"
    )


def notes(what: str, cause: str, prediction: Prediction | SendLaw) -> tuple[str, ...]:
    """What a reader must know before trusting this prediction; empty where nothing."""
    found = [f"{cause}: {what}: {outside}" for outside in prediction.extrapolating]
    if prediction.source == "datasheet":
        found.append(f"{cause}: {_unmeasured(what, cause)}")
    return tuple(found)


def _unmeasured(what: str, cause: str) -> str:
    """Where a prediction without samples comes from."""
    if cause.startswith(_SAMPLES_OF):
        return f"{what} was not measured, predicted from the cluster file's figures"
    if " " in cause:  # a link; kinds of devices are one word
        return "predicted from the cluster file's figures, nothing was measured"
    return "predicted from datasheet figures, nothing was measured"


class Draws:
    """Common log-factors, one column per cause, `count` draws from a fixed seed.

    Antithetic pairs: every draw stands beside its mirror image, so that no log-factor has a mean
    other than 0 by chance.
    """

    def __init__(self, causes: Sequence[str], count: int, seed: int) -> None:
        half = np.random.default_rng(seed).standard_normal((count // 2, len(causes)))
        self._normal = np.concatenate((half, -half))
        self._column = {cause: index for index, cause in enumerate(causes)}
        self.count = len(self._normal)

    def factor(self, cause: str, log_halfwidth: float) -> NDArray[np.float64]:
        """Factor of a prediction in each draw."""
        sigma = log_halfwidth / NORMAL_90
        factors: NDArray[np.float64] = np.exp(self._normal[:, self._column[cause]] * sigma)
        return factors

    def sample(self, terms: Iterable[Term]) -> NDArray[np.float64]:
        """Sum of the terms in each draw."""
        total = np.zeros(self.count)
        for term in terms:
            if term.prediction.log_halfwidth == 0:
                total += term.seconds
            elif term.seconds:
                total += term.seconds * self.factor(term.cause, term.prediction.log_halfwidth)
        return total
