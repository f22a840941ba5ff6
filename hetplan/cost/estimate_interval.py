"""How wide is a step's interval: by the predictions' own errors, and by runs that checked them.

The draws (`priced.draws`) give the shape of the interval and its own width. Where a predictor has
been calibrated with measured runs (`predict.calibration`) the width is theirs: the logarithm of
every draw over the central step is stretched or shrunk until half of the way from p5 to p95 is what
conformal prediction asks for. Steps whose predictions are all certain get a normal law of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from hetplan.cluster.spec import Cluster
from hetplan.cost.arrays import Floats
from hetplan.cost.estimate_values import CauseSeconds, Interval
from hetplan.cost.priced.draws import SourcePart
from hetplan.cost.terms import NORMAL_90, normal_quantiles
from hetplan.plans.plan import Plan
from hetplan.predict.calibration.factors import devices_of, regime_of
from hetplan.predict.calibration.values import (
    COMMUNICATION,
    COMPUTE,
    Calibration,
    CauseFactor,
)
from hetplan.predict.predictor import Predictor, calibrated_cause, is_link

_QUANTILES = (0.05, 0.1, 0.9, 0.95)
"""Hazen's (1914), in which draw k of n stands for (k + 1/2) / n, as the draws were made."""


@runtime_checkable
class Calibrated(Protocol):
    """A predictor that measured runs have something to say about."""

    @property
    def calibration(self) -> Calibration | None:
        """None where no run has."""
        ...


@dataclass(frozen=True, slots=True)
class StepCalibration:
    """What measured runs say about a plan's step."""

    calibration: Calibration | None = None
    devices: tuple[str, ...] = ()
    regime: str = ""
    factors: tuple[CauseFactor, ...] = ()
    """Of the calibration, those that multiply a prediction of this step."""

    def halfwidth(self, own: float) -> tuple[float, str]:
        """(half-width of the 90 % interval, what it stands on)."""
        if self.calibration is not None:
            found = self.calibration.width(self.devices, self.regime, own)
            if found is not None:
                return found.log_halfwidth, found.note
        own_errors = "interval by the predictions' own errors"
        if self.factors:
            return own, f"{own_errors}; measured runs corrected them, and checked no interval"
        return own, f"{own_errors}; no measured run has checked it"

    @property
    def warnings(self) -> tuple[str, ...]:
        """What runs changed in this step, and runs like it that nothing explains."""
        if self.calibration is None:
            return ()
        tail = self.calibration.tail(self.devices, self.regime)
        return (*map(_words, self.factors), *(() if tail is None else (tail.note,)))


def _words(factor: CauseFactor) -> str:
    """As in `cpu compute x 0.97, corrected by 8 measured runs`."""
    runs = "1 measured run" if factor.runs == 1 else f"{factor.runs} measured runs"
    return f"{factor.cause} {factor.name} x {factor.factor:.3g}, corrected by {runs}"


def step_calibration(
    predictor: Predictor, plan: Plan, cluster: Cluster, causes: Iterable[str]
) -> StepCalibration:
    """What the predictor's runs say about this plan's step, which rests on these causes."""
    found = predictor.calibration if isinstance(predictor, Calibrated) else None
    if found is None:
        return StepCalibration()
    corrected = {
        (calibrated_cause(each), COMMUNICATION if is_link(each) else COMPUTE) for each in causes
    }
    return StepCalibration(
        calibration=found,
        devices=devices_of(plan, cluster),
        regime=regime_of(plan, cluster),
        factors=tuple(
            each
            for each in found.factors
            if each.factor != 1.0 and (each.cause, each.name) in corrected
        ),
    )


@dataclass(frozen=True, slots=True)
class StepSpan:
    """A step's interval."""

    interval: Interval
    p5_seconds: float
    p95_seconds: float
    own_log_halfwidth: float
    note: str


def span_of(steps: Floats, central: float, known: StepCalibration) -> StepSpan:
    """The interval of a step of `central` seconds from its draws."""
    logs, own, note = scaled_logs(steps, central, known)
    p5, p10, p90, p95 = (
        float(each) for each in central * np.exp(np.quantile(logs, _QUANTILES, method="hazen"))
    )
    mean = central * float(np.mean(np.exp(logs)))
    return StepSpan(
        interval=Interval(p10_seconds=p10, mean_seconds=mean, p90_seconds=p90),
        p5_seconds=p5,
        p95_seconds=p95,
        own_log_halfwidth=own,
        note=note,
    )


def scaled_logs(steps: Floats, central: float, known: StepCalibration) -> tuple[Floats, float, str]:
    """(logarithms of the draws over `central` as wide as runs say, own half-width, note)."""
    logs = np.log(steps / central)
    low, high = np.quantile(logs, (_QUANTILES[0], _QUANTILES[-1]), method="hazen")
    own = max(0.0, 0.5 * float(high - low))
    wanted, note = known.halfwidth(own)
    if wanted != own:
        even = normal_quantiles(len(logs)) * (wanted / NORMAL_90)
        logs = logs * (wanted / own) if own > _CERTAIN else even
    return logs, own, note


_CERTAIN = 1e-6
"""Half-widths below it are rounding; they have no shape to keep."""


def causes_of(parts: Sequence[SourcePart], step_seconds: float) -> tuple[CauseSeconds, ...]:
    """What the step is made of, largest first; scaled so that all add up to `step_seconds`."""
    whole = math.fsum(part.seconds for part in parts)
    if whole <= 0:
        return ()
    found = [
        CauseSeconds(
            cause=part.source[0],
            part=part.source[1],
            seconds=part.seconds * step_seconds / whole,
            log_halfwidth=part.log_halfwidth,
        )
        for part in parts
        if part.seconds > 0
    ]
    return tuple(sorted(found, key=lambda each: (-each.seconds, each.cause, each.part)))
