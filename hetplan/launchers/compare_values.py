"""What a comparison of a run with its plan says, as frozen values with a JSON form."""

from __future__ import annotations

from dataclasses import dataclass

from hetplan.cost.estimate_values import Interval

SCHEMA = "hetplan.comparison/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Logged steps that do not count, for one reason."""

    reason: str
    count: int
    iterations: str
    """Which, as in `1, 10, 20`; the first of many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpread:
    """The logged steps that count."""

    count: int
    """Metrics lines; each may be the mean of several steps."""
    median_seconds: float
    p10_seconds: float
    p90_seconds: float
    iterations: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerRow:
    """One of the trainer's timers beside what the plan predicts for the same ranks."""

    timer: str
    quantity: str
    """What it counts, a `compare_timers.Quantity` value; empty where the plan predicts nothing
    of the kind."""
    ranks: str
    """Whose times: all ranks' least and most, or one rank's."""
    measured_least_seconds: float
    """Medians over the steps that count."""
    measured_most_seconds: float
    predicted_least_seconds: float | None
    predicted_most_seconds: float | None
    note: str
    """What the timer does not tell apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRow:
    """A part of the step; parts add up to the step on both sides."""

    part: str
    components: tuple[str, ...]
    """Components of the estimate that it holds (`Component` values)."""
    predicted_seconds: float
    measured_seconds: float
    note: str = ""

    @property
    def difference_seconds(self) -> float:
        """Measured less predicted."""
        return self.measured_seconds - self.predicted_seconds

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where nothing was predicted."""
        return self.measured_seconds / self.predicted_seconds if self.predicted_seconds else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """The part that is off most, in seconds of the step."""

    part: str
    difference_seconds: float
    """Measured less predicted."""
    meaning: str
    """What it usually is."""
    measure: str
    """Which measurement to repeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """The fullest device's memory."""

    kind: str
    """Which figure, a `MemoryKind` value."""
    measured_bytes: float
    predicted_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A run beside its plan."""

    trainer: str
    files: tuple[str, ...]
    model: str
    cluster: str
    measured: StepSpread
    left_out: tuple[LeftOut, ...]
    predicted_step_seconds: float
    predicted_interval: Interval
    timers: tuple[TimerRow, ...]
    parts: tuple[PartRow, ...]
    """Empty where the log has no timers."""
    culprit: Culprit | None
    """None without timers, and where nothing is off beyond the run's own spread."""
    memory: MemoryRow | None
    notes: tuple[str, ...]

    @property
    def relative_error(self) -> float:
        """Prediction over measurement, less 1: positive where the run was faster than predicted."""
        return self.predicted_step_seconds / self.measured.median_seconds - 1.0

    @property
    def inside_interval(self) -> bool:
        """Whether the measured median lies between the predicted p10 and p90."""
        interval = self.predicted_interval
        return interval.p10_seconds <= self.measured.median_seconds <= interval.p90_seconds
