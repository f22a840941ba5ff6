"""What measured runs say about predictions of other runs, as frozen values that a file holds.

Two things come from runs. Factors on what was predicted about one device kind or one link, where
they made left-out runs better; and how far steps of a group of runs were from their prediction,
which is the width that the next step's interval gets (split conformal prediction).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hetplan.errors import InputError
from hetplan.predict.predictor import Prediction, SendLaw, calibrated_cause, is_link

COMPUTE = "compute"
"""Name of the part of a step that a device kind computes, recomputation included."""
COMMUNICATION = "communication"
"""Name of the part that collectives and transfers over one link take."""
FIXED = "fixed"
"""Name of the part that no prediction says, such as data loading; it is never corrected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPart:
    """The part of a predicted step that predictions of one cause and name say."""

    cause: str
    """Device kind, or link, as `predictor.calibrated_cause` names it."""
    name: str
    """`COMPUTE`, `COMMUNICATION` or `FIXED`."""
    seconds: float
    """What the step would lose without it, by its elasticity: all parts add up to the step."""
    log_halfwidth: float
    """Half-width of the 90 % interval of this part; 0 for what is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunError:
    """One measured step beside its prediction, without any calibration in it."""

    cell: str
    """Runs of one cell are left out together: alike in model and layout, as in `gpt-39B tp8 pp4`.
    """
    devices: tuple[str, ...]
    """Device kinds, sorted."""
    regime: str
    """One of `calibration.REGIMES`."""
    predicted_seconds: float
    log_halfwidth: float
    """Half-width of the prediction's own 90 % interval."""
    measured_seconds: float
    parts: tuple[RunPart, ...]
    source: str
    """Where the measurement is from: a data set's name or a log file."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.log_halfwidth) and self.log_halfwidth >= 0):
            raise InputError(
                f"log_halfwidth of run {self.cell} ({self.source}) is {self.log_halfwidth}; it is "
                "at least 0"
            )
        for name in ("predicted_seconds", "measured_seconds"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InputError(
                    f"{name} of run {self.cell} ({self.source}) is {value}; not above 0"
                )

    @property
    def log_error(self) -> float:
        """log(measured / predicted): above 0 where the run was slower than predicted."""
        return math.log(self.measured_seconds / self.predicted_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseFactor:
    """What to multiply predictions of one cause and name by."""

    cause: str
    name: str
    factor: float
    log_halfwidth: float
    """Half-width of the factor's 90 % interval."""
    runs: int
    """Runs in which the cause has a part."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise InputError(
                f"the factor of {self.cause} {self.name} is {self.factor}; not above 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBack:
    """Did factors from the other runs make a left-out run better? One cell left out at a time."""

    runs: int
    better: int
    """Runs whose |log error| fell."""
    median_before: float
    """Median of |log error|."""
    median_after: float
    mean_before: float
    mean_after: float
    accepted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInterval:
    """How wide 90 % intervals of steps of a group must be, by runs that were held back."""

    devices: tuple[str, ...]
    """Device kinds of the group; empty: any."""
    regime: str
    """Empty: any."""
    log_halfwidth: float
    """The conformal 90 % quantile of |log error| of the group's runs."""
    rows: int
    pooled: bool
    """Whether runs of other groups were taken in, because the group has too few."""
    scale: float | None = None
    """The same quantile of |log error| / half-width, where that gave the better intervals on
    left-out runs; None: `log_halfwidth` is used as it is."""
    least_log_halfwidth: float = 0.0
    """Median |log error|: no scaled interval is narrower than what half of the runs were off."""
    slow_runs: int = 0
    """Runs of the group that were left out as a slow tail. Runs that are left after a choice can
    show that predictions are worse than they say, not that they are better."""

    def halfwidth(self, own: float) -> float:
        """Half-width of a step whose predictions alone give `own`."""
        if self.scale is None or own <= 0:
            width = self.log_halfwidth
        else:
            width = max(self.scale * own, self.least_log_halfwidth)
        return max(width, own) if self.slow_runs else width


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowTail:
    """Runs that were slower than anything in their configuration explains."""

    devices: tuple[str, ...]
    regime: str
    runs: int
    slow: int
    least: float
    """Measured over predicted, less 1, of the slow run that is least slow."""
    most: float

    @property
    def note(self) -> str:
        """In words."""
        where = self.regime or "every size"
        return (
            f"slow cluster tail: {self.slow / self.runs * 100:.0f} % of {self.runs} runs of "
            f"{where} were {self.least * 100:.0f} to {self.most * 100:.0f} % slower than their "
            "configuration explains; the interval is of the others"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWidth:
    """Half-width of the 90 % interval of one step, and what it stands on."""

    log_halfwidth: float
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Everything that runs say about predictions of other runs."""

    factors: tuple[CauseFactor, ...]
    """Empty where they were refused, or nothing was to correct."""
    held_back: HeldBack | None
    """None where there were too few runs to judge any factor."""
    intervals: tuple[GroupInterval, ...]
    tails: tuple[SlowTail, ...]
    runs: int
    sources: tuple[str, ...]
    """Sources of the runs, sorted."""
    notes: tuple[str, ...]

    def factor(self, cause: str, name: str) -> float:
        """What to multiply a prediction by; 1 where runs say nothing."""
        fitted = (each for each in self.factors if (each.cause, each.name) == (cause, name))
        return next((each.factor for each in fitted), 1.0)

    def group(self, devices: tuple[str, ...], regime: str) -> GroupInterval | None:
        """The narrowest group with intervals that holds these; None where none does."""
        groups = {(group.devices, group.regime): group for group in self.intervals}
        wider = ((devices, regime), (devices, ""), ((), regime), ((), ""))
        return next((groups[key] for key in wider if key in groups), None)

    def tail(self, devices: tuple[str, ...], regime: str) -> SlowTail | None:
        """The slow tail among runs like these, where one was seen."""
        tails = {tail.devices: tail for tail in self.tails if tail.regime == regime}
        return tails.get(devices) or tails.get(())

    def width(self, devices: tuple[str, ...], regime: str, own: float) -> StepWidth | None:
        """The interval of a step whose predictions alone give half-width `own`; None where no run
        says anything about it.
        """
        group = self.group(devices, regime)
        if group is None:
            return None
        kinds = ", ".join(group.devices) or "any device kind"
        place = group.regime or "any size"
        note = f"interval by {group.rows} measured runs of {kinds}, {place}"
        if group.pooled:
            note += f": pooled, too few are of {', '.join(devices)}, {regime}"
        return StepWidth(log_halfwidth=group.halfwidth(own), note=note)


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
