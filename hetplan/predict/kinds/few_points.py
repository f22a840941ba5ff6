"""What a few measured points of a kind say beyond what is assumed of it without any.

A law needs three points of different work. With fewer the prior answers: the kind's own operators,
other kinds' laws (`related`), or the datasheet. How far a kind lies from its prior is a part that
all its sizes share, and a part of each size of its own. In logarithms, with r_i = log(measured_i /
prior_i) and both parts normal,

    r_i = d + e_i,   d ~ N(0, tau^2),   e_i ~ N(0, sigma^2)
    mean of d = sum r_i * tau^2 / (n tau^2 + sigma^2),   variance of d = 1 / (1/tau^2 + n/sigma^2)
    seconds = prior * exp(mean of d),  half-width = 1.645 sqrt(variance of d + sigma^2)

(Gelman et al., Bayesian Data Analysis, 3rd edition, section 2.5). A point scales the prior and does
nothing else: a regression on one or two points is far worse than the prior that they correct (on
published layers of seven kinds 24 to 26 % against 9 %). A further point never widens the interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from hetplan.cluster.devices import DeviceKind
from hetplan.errors import InputError
from hetplan.job.spec import Precision
from hetplan.predict.calibration.values import corrected
from hetplan.predict.kinds.layers import ends_of
from hetplan.predict.kinds.operators import MIN_POINTS, probes
from hetplan.predict.kinds.related import Related
from hetplan.predict.laws import LayerLaw
from hetplan.predict.layer.answer import measured_itself
from hetplan.predict.operator.answer import DeviceOperators, index_operators
from hetplan.predict.operator.values import OperatorLaw, OperatorTerm
from hetplan.predict.predictor import LayerQuery, Prediction
from hetplan.predict.regression import NORMAL_90

# Layers of published kinds, each chip left out: 16-bit sums of operators (6 kinds) and whole
# float32 layers (7). By analysis of variance over kinds and passes tau^2 / (tau^2 + sigma^2) is
# .70. A point leaves sqrt(1 - s^2) of the errors; by what it left s is .80 (.75 and .85).
# Between the two: test_predict_related_reference computes both, and with a point 100 % of its rows
# are inside the interval.
SHARED_VARIANCE = 0.77
"""Part of a prior's variance that all sizes of a kind share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """How far a kind lies from its prior, after its measured points."""

    log_mean: float
    log_halfwidth: float
    """Half-width of a prediction that was multiplied by exp(log_mean)."""


def shift(log_ratios: Sequence[float], log_halfwidth: float) -> Shift:
    """The shift by log(measured / prior) of each point and the prior's own half-width."""
    variance = (log_halfwidth / NORMAL_90) ** 2
    shared = SHARED_VARIANCE * variance
    single = variance - shared
    if not log_ratios or variance <= 0:
        return Shift(log_mean=0.0, log_halfwidth=log_halfwidth)
    count = len(log_ratios)
    left = 1.0 / (1.0 / shared + count / single)
    mean = sum(log_ratios) * shared / (count * shared + single)
    return Shift(log_mean=mean, log_halfwidth=NORMAL_90 * math.sqrt(left + single))


Answer = Callable[[LayerQuery], Prediction]
"""One pass of a layer on one kind, by everything but laws of its own whole layers."""


def with_prior(own: Prediction, law: LayerLaw, query: LayerQuery, prior: Answer) -> Prediction:
    """The law's own answer; where it has one or two points the prior, shifted to them.

    A law of more points is not second-guessed far from them either: what a trainer ran when its
    layers were measured is in the law, and in the prior only by assumption.
    """
    if law.points >= MIN_POINTS or measured_itself(law, query):
        return own
    shifted = _shifted_prior(law, query, prior)
    if shifted is None:
        return own
    return replace(shifted, extrapolating=(*shifted.extrapolating, *own.extrapolating))


def _shifted_prior(law: LayerLaw, query: LayerQuery, prior: Answer) -> Prediction | None:
    """The prior times what the law's points say; None where nothing else is known of its kind."""
    try:
        assumed = prior(query)
        ratios = [
            math.log(size.seconds / prior(size.query).seconds)
            for size in ends_of(law, query.kernels)
        ]
    except InputError:
        return None  # a kind without a datasheet, such as a CPU
    # One point of a range with two ends is one point.
    shifted = shift(ratios[: law.points], assumed.log_halfwidth)
    count = f"{law.points} point{'s' if law.points > 1 else ''} measured"
    note = f"{law.device} {law.layer} {law.phase}: {count}, which scale the rest"
    return replace(
        corrected(assumed, math.exp(shifted.log_mean)),
        log_halfwidth=shifted.log_halfwidth,
        extrapolating=(note, *assumed.extrapolating),
    )


class OwnOperators:
    """Operators of each kind by its own laws; those of one or two points shift what others lend."""

    def __init__(self, laws: Sequence[OperatorLaw], related: Related) -> None:
        self._laws = tuple(laws)
        self._few = {(law.device, law.precision) for law in laws if law.points < MIN_POINTS}
        self._measured = index_operators(laws)
        self._related = related
        self._shifted = cache(self._with_shifted_laws)

    def of(self, device: DeviceKind, precision: Precision) -> DeviceOperators | None:
        """Laws of this kind and precision; None where no operator was measured."""
        key = (device.kind, precision.value)
        return self._shifted(device, precision) if key in self._few else self._measured.get(key)

    def _with_shifted_laws(self, device: DeviceKind, precision: Precision) -> DeviceOperators:
        key = (device.kind, precision.value)
        related = self._related.lent(device, precision)
        lent = () if related is None else related.laws
        return index_operators(
            _shifted_law(law, lent) if law.points < MIN_POINTS else law
            for law in self._laws
            if (law.device, law.precision) == key
        )[key]


def _shifted_law(law: OperatorLaw, lent: Sequence[OperatorLaw]) -> OperatorLaw:
    """The lent law of this class and pass, shifted to the points; itself where none is lent."""
    same = [each for each in lent if (each.operator, each.phase) == (law.operator, law.phase)]
    if not same:
        return law
    ratios = [math.log(own / other) for own, other in _times(law, same[0]) if own > 0 and other > 0]
    if not ratios:
        return same[0]
    moved = shift([statistics.fmean(ratios)] * law.points, same[0].log_halfwidth)
    factor = math.exp(moved.log_mean)
    return replace(
        same[0],
        terms=tuple(
            OperatorTerm(column=term.column, coefficient=term.coefficient * factor)
            for term in same[0].terms
        ),
        log_halfwidth=moved.log_halfwidth,
        shapes=(),
        residual=None,
        calibration=f"{same[0].calibration}, moved to {law.points} measured",
    )


def _times(law: OperatorLaw, lent: OperatorLaw) -> list[tuple[float, float]]:
    """Measured seconds and those of the lent law, where the shapes are known; else both laws'."""
    if law.shapes:
        return [(shape.seconds, lent.seconds(shape.operator(law.operator))) for shape in law.shapes]
    return [(law.seconds(op), lent.seconds(op)) for op in probes(law.operator)]
