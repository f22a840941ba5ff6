"""Predictions times the factor that measured runs gave their cause."""

from __future__ import annotations

from dataclasses import replace

from hetplan.predict.calibration.values import COMMUNICATION, COMPUTE, Calibration
from hetplan.predict.predictor import Prediction, SendLaw, calibrated_cause, is_link


def factor_of(calibration: Calibration | None, cause: str) -> float:
    """What runs multiply predictions of this device kind or link by; 1 where they say nothing."""
    if calibration is None or not calibration.factors:
        return 1.0
    name = COMMUNICATION if is_link(cause) else COMPUTE
    return calibration.factor(calibrated_cause(cause), name)


def corrected(prediction: Prediction, factor: float) -> Prediction:
    """A prediction, parts included, that takes so many times as long."""
    if factor == 1.0:
        return prediction
    return replace(
        prediction,
        seconds=prediction.seconds * factor,
        parts=tuple(replace(part, seconds=part.seconds * factor) for part in prediction.parts),
    )


def corrected_law(law: SendLaw, factor: float) -> SendLaw:
    """A transfer that takes so many times as long."""
    if factor == 1.0:
        return law
    return replace(
        law,
        rendezvous_latency_seconds=law.rendezvous_latency_seconds * factor,
        wire_latency_seconds=law.wire_latency_seconds * factor,
        seconds_per_byte=law.seconds_per_byte * factor,
    )
