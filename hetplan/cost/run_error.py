"""A measured step beside its estimate, as calibration wants it."""

from __future__ import annotations

import math
from statistics import NormalDist

from hetplan.cluster.spec import Cluster
from hetplan.cost.estimate_values import Estimate
from hetplan.plans.plan import Plan
from hetplan.predict.calibration.factors import devices_of, regime_of
from hetplan.predict.calibration.values import (
    COMMUNICATION,
    COMPUTE,
    FIXED,
    RunError,
    RunPart,
)
from hetplan.predict.predictor import calibrated_cause, is_link
from hetplan.predict.regression import NORMAL_90

_NORMAL_80 = NormalDist().inv_cdf(0.9)  # deviations from the middle of a normal law to its p90
_ROUNDING = 1e-9  # of a step: what sums of its parts may be off


def run_error(
    estimate: Estimate,
    plan: Plan,
    cluster: Cluster,
    *,
    measured_seconds: float,
    cell: str,
    source: str,
) -> RunError:
    """The run's error by cause, for `predict.calibration.calibrate`.

    The estimate must be of a predictor without calibration, or factors are corrected twice. One of
    an older hetplan, which does not say what its step is made of, has one part that nothing moves.
    """
    parts = _parts(estimate)
    rest = estimate.step_seconds - sum(part.seconds for part in parts)
    if rest > _ROUNDING * estimate.step_seconds:
        parts += (RunPart(cause=FIXED, name=FIXED, seconds=rest, log_halfwidth=0.0),)
    return RunError(
        cell=cell,
        devices=devices_of(plan, cluster),
        regime=regime_of(plan, cluster),
        predicted_seconds=estimate.step_seconds,
        log_halfwidth=own_halfwidth(estimate),
        measured_seconds=measured_seconds,
        parts=parts,
        source=source,
    )


def _parts(estimate: Estimate) -> tuple[RunPart, ...]:
    """By what runs can correct: one part per device kind, one per link or class of links.

    Sources of errors within a part are independent of each other: squares add up.
    """
    seconds: dict[tuple[str, str], float] = {}
    squares: dict[tuple[str, str], float] = {}
    for each in estimate.causes:
        name = COMMUNICATION if is_link(each.cause) else COMPUTE
        key = calibrated_cause(each.cause), name
        seconds[key] = seconds.get(key, 0.0) + each.seconds
        squares[key] = squares.get(key, 0.0) + (each.seconds * each.log_halfwidth) ** 2
    return tuple(
        RunPart(
            cause=cause,
            name=name,
            seconds=taken,
            log_halfwidth=math.sqrt(squares[cause, name]) / taken,
        )
        for (cause, name), taken in sorted(seconds.items())
    )


def own_halfwidth(estimate: Estimate) -> float:
    """Half-width of the step's 90 % interval by the predictions alone, in the logarithm."""
    if estimate.own_log_halfwidth is not None:
        return estimate.own_log_halfwidth
    # An older estimate has p10 and p90 alone, from which a normal law gives p5 and p95.
    span = estimate.interval
    deviation = 0.5 * math.log(span.p90_seconds / span.p10_seconds) / _NORMAL_80
    return NORMAL_90 * deviation
