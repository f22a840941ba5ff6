"""What a time is made of: predicted parts, how often each counts, and whose error they share.

Costs keep their parts so that an estimate can carry the predictor's errors through the schedule.
What err together has one common log-factor, a source of errors (`Source`):

    parts of a prediction      one source per device kind and class of operators, passes together
    a layer's law as a whole   one per device kind and kind of layer, passes together
    datasheet figures          one per device kind
    links                      one per link

Different sources err independently of each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from hetplan.cost.estimate_values import Component
from hetplan.predict.predictor import DATASHEET, SAMPLES_OF, Prediction, SendLaw, is_link
from hetplan.predict.regression import NORMAL_90


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
        """The term `count` times."""
        return Term(
            what=self.what,
            cause=self.cause,
            count=self.count * count,
            prediction=self.prediction,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some of a pass's time, by what it is for."""

    component: Component
    term: Term
    hidden_seconds: float = 0.0
    """Communication of this part beside compute, not in the term."""
    computes: bool = False
    """The device computes for it."""

    @property
    def seconds(self) -> float:
        """What it adds to the pass."""
        return self.term.seconds


def seconds_of(terms: Iterable[Term]) -> float:
    """Sum of the central values."""
    return sum((term.seconds for term in terms), 0.0)


EXTRAPOLATING = "extrapolating: "
_OUTSIDE = re.compile(r" [<>] .* measured$")


@lru_cache(maxsize=1024)
def is_extrapolation(note: str) -> bool:
    """Whether a prediction's note says that a size was not measured, as in `hidden 16384 > 8192
    measured`; others tell what it was taken from.
    """
    return _OUTSIDE.search(note) is not None


def extrapolates(terms: Iterable[Term]) -> bool:
    """Whether any of these times is of a size that was not measured."""
    return any(
        is_extrapolation(note)
        for term in terms
        if term.prediction.extrapolating and term.seconds
        for note in term.prediction.extrapolating
    )


def notes(
    what: str, cause: str, prediction: Prediction | SendLaw, *, others_measured: bool = False
) -> tuple[str, ...]:
    """What a reader must know before trusting this prediction; empty where nothing.

    `others_measured`: something else about this device kind is no datasheet's.
    """
    # A colon ends a subject (`reports.plans.grouped`), so the text itself has none.
    found = [
        f"{cause}: {what}: {EXTRAPOLATING if is_extrapolation(outside) else ''}"
        f"{outside.replace(': ', ', ')}"
        for outside in prediction.extrapolating
    ]
    if prediction.source == DATASHEET:
        if others_measured and not is_link(cause):
            found.append(f"{cause}: {what}: predicted from datasheet figures")
        else:
            found.append(f"{cause}: {_unmeasured(what, cause)}")
    return tuple(found)


Source = tuple[str, str]
"""Cause and, of a device kind, the class of operators or kind of layer; whose errors are common."""

_PASSES = (" forward", " backward")


def sources_of(term: Term) -> tuple[tuple[Source, float, float], ...]:
    """(source, part of the term's seconds, half-width) of everything that is not certain."""
    prediction = term.prediction
    whole = sum(part.seconds for part in prediction.parts)
    if whole > 0:
        # Of a prediction that was scaled after it was made, the parts keep their proportions.
        scale = term.seconds / whole
        return tuple(
            ((term.cause, part.name), part.seconds * scale, part.log_halfwidth)
            for part in prediction.parts
        )
    name = ""
    if prediction.source != DATASHEET and not is_link(term.cause):
        name = term.what
        for end in _PASSES:
            name = name.removesuffix(end)
    return (((term.cause, name), term.seconds, prediction.log_halfwidth),)


def _unmeasured(what: str, cause: str) -> str:
    """Where a prediction without samples comes from."""
    if cause.startswith(SAMPLES_OF):
        return f"{what} was not measured, predicted from the cluster file's figures"
    if is_link(cause):
        return "predicted from the cluster file's figures, nothing was measured"
    return "predicted from datasheet figures, nothing was measured"


@lru_cache(maxsize=8)
def normal_quantiles(count: int) -> NDArray[np.float64]:
    """So many evenly spaced quantiles of the standard normal law; their sum is 0."""
    law = NormalDist()
    return np.array([law.inv_cdf((k + 0.5) / count) for k in range(count)])


class Draws:
    """Common log-factors, one per source of errors, `count` draws from a fixed seed.

    A Latin hypercube (McKay, Beckman and Conover 1979): every source takes `count` evenly spaced
    quantiles of its law, each once, in an order of its own. So no source has a mean other than 0,
    or a wrong width, by chance, and where one source dominates a step the step's quantiles are
    exact.
    """

    def __init__(self, sources: Sequence[Source], count: int, seed: int) -> None:
        order = np.random.default_rng(seed)
        quantiles = normal_quantiles(count) / NORMAL_90
        self._normal = [order.permutation(quantiles) for _ in sources]
        self._row = {source: index for index, source in enumerate(sources)}
        self._known: dict[tuple[Source, float], NDArray[np.float64]] = {}
        self._predicted: dict[int, tuple[Term, NDArray[np.float64]]] = {}
        self.count = count

    def factor(self, source: Source, log_halfwidth: float) -> NDArray[np.float64]:
        """Factor of a prediction of this source in each draw."""
        found = self._known.get((source, log_halfwidth))
        if found is None:
            found = np.exp(self._normal[self._row[source]] * log_halfwidth)
            self._known[source, log_halfwidth] = found
        return found

    def sample(self, terms: Iterable[Term]) -> NDArray[np.float64]:
        """Sum of the terms in each draw."""
        total = np.zeros(self.count)
        for term in terms:
            if term.prediction.log_halfwidth == 0:
                total += term.seconds
            elif term.seconds:
                total += term.seconds * self._relative(term)
        return total

    def _relative(self, term: Term) -> NDArray[np.float64]:
        """A term in each draw over its central value; kept by prediction, which terms share."""
        known = self._predicted.get(id(term.prediction))
        # The term is kept, so that no other prediction can get the number of this one.
        if known is not None and (known[0].cause, known[0].what) == (term.cause, term.what):
            return known[1]
        total = np.zeros(self.count)
        for source, seconds, log_halfwidth in sources_of(term):
            total += (seconds / term.seconds) * self.factor(source, log_halfwidth)
        self._predicted[id(term.prediction)] = term, total
        return total
