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

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from hetplan.cost.estimate_values import Component
from hetplan.errors import InputError
from hetplan.predict.predictor import (
    BY_OTHERS,
    DATASHEET,
    SAMPLES_OF,
    Prediction,
    SendLaw,
    is_extrapolation,
    is_link,
)


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


def seconds_of_parts(parts: Iterable[Part]) -> float:
    """Seconds of all parts together."""
    # Millions of parts: without the two properties.
    return sum([part.term.count * part.term.prediction.seconds for part in parts], 0.0)


def repeated(parts: Iterable[Part], count: float) -> tuple[Part, ...]:
    """Every part `count` times."""
    return tuple(
        [
            Part(
                component=part.component,
                term=part.term.times(count),
                hidden_seconds=part.hidden_seconds * count,
                computes=part.computes,
            )
            for part in parts
        ]
    )


def compute_seconds(parts: Iterable[Part]) -> float:
    """Seconds of the parts that the device computes."""
    return seconds_of_parts([part for part in parts if part.computes])


def as_recompute(parts: Iterable[Part]) -> Iterator[Part]:
    """The parts repeated in a backward pass: compute counts as recomputation."""
    for part in parts:
        if part.computes:
            yield Part(
                component=Component.RECOMPUTE,
                term=part.term,
                hidden_seconds=part.hidden_seconds,
                computes=True,
            )
        else:
            yield part


@contextmanager
def asking(what: str) -> Iterator[None]:
    """Put `what` in front of a predictor's faults: it says which figure it lacks, only its caller
    knows for what.
    """
    try:
        yield
    except InputError as error:
        faults = (replace(each, message=f"{what}: {each.message}") for each in error.faults)
        raise InputError(*faults) from error


EXTRAPOLATING = "extrapolating: "
_OTHERS = "operators that others measured (shipped profiles)"


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
    parts = prediction.parts if isinstance(prediction, Prediction) else ()
    names = [part.name.replace("_", " ") for part in parts if part.source == BY_OTHERS]
    if names:
        found.append(f"{cause}: {what}: {', '.join(names)} predicted from {_OTHERS}")
    elif prediction.source == BY_OTHERS:
        found.append(f"{cause}: predicted from {_OTHERS}")
    elif prediction.source == DATASHEET:
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
