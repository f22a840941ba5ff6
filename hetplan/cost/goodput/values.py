"""What is known about a whole run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hetplan.cost.goodput.startup import StartUp

SECONDS_PER_DAY = 86400.0


class Cause(StrEnum):
    """Why a run takes longer than its steps."""

    START_UP = "first start-up"
    SAVING = "saving checkpoints"
    LOST_WORK = "work done again after failures"
    DETECTION = "noticing failures"
    RESTART = "starting again after failures"
    FAILOVER = "slower backup paths"


FAILURES = (Cause.LOST_WORK, Cause.DETECTION, Cause.RESTART, Cause.FAILOVER)
"""What failures cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostSeconds:
    """What one cause adds to the run."""

    cause: Cause
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFailures:
    """All parts of one sort that the plan uses."""

    part: str
    """A device kind, or host, NIC, link, line."""
    count: int
    failures_per_second: float
    """Of all of them together."""
    assumed: bool
    """Whether the rate is a default, not the job's."""
    falls_back: bool
    """Whether a backup path takes over; otherwise the run starts again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint of the plan."""

    saved_bytes: float
    """Every weight and its optimizer state once."""
    read_bytes: float
    """What a restart reads: every rank's shards, or one copy."""
    save_seconds: float
    """For which training waits at every save."""
    delay_seconds: float
    """From then until it counts."""
    load_seconds: float
    """Reading it at a restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherInterval:
    """The run with another checkpoint interval."""

    interval_steps: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """A whole run: its expected time, and where it goes."""

    total_tokens: int
    work_seconds: float
    """Of its steps alone."""
    seconds: float
    """All of it; infinite where failures come faster than the run recovers."""
    low_seconds: float
    """The same at the ends of the step's interval; the low end has `start_up.least`."""
    high_seconds: float
    share: str
    """`90 %`: how often a step lies within that interval."""
    lost: tuple[LostSeconds, ...]
    """They and `work_seconds` add up to `seconds`; empty where that is infinite."""
    parts: tuple[PartFailures, ...]
    start_up: StartUp
    checkpoint: Checkpoint
    recovery_seconds: float
    """From a failure to the first step after it."""
    interval_steps: int
    """From one checkpoint to the next."""
    best_interval_steps: int
    """Which makes the run shortest: Young's and Daly's optimum in whole steps."""
    others: tuple[OtherInterval, ...]
    """Half and twice the best interval, where they are possible; empty where none is saved."""
    other_failover_seconds: float
    """The run with failover where the job has none, and without where it has it."""
    from_peers: bool
    """Whether a restart copies the lost state from other hosts, and repeats one step."""
    notes: tuple[str, ...]
    """What is assumed, and what of the job could not be had."""

    @property
    def tokens_per_day(self) -> float:
        """Of the run with all that it loses."""
        return self.total_tokens / self.seconds * SECONDS_PER_DAY

    @property
    def lost_share(self) -> float:
        """Part of the run that is not spent in steps."""
        return 1.0 - self.work_seconds / self.seconds

    @property
    def restarts(self) -> float:
        """Failures in the whole run after which it starts again."""
        rate = sum(each.failures_per_second for each in self.parts if not each.falls_back)
        return rate * self.seconds

    def lost_to(self, *causes: Cause) -> float:
        """Seconds that these causes add."""
        return sum(each.seconds for each in self.lost if each.cause in causes)
