"""What an elastic run is made of: phases, each one plan on some hosts, and why each ended."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from enum import StrEnum

from hetplan.errors import InputError
from hetplan.runtime.measured import StepRecord

SCHEMA = "hetplan.elastic/1"


class Ended(StrEnum):
    """Why a phase ended."""

    FINISHED = "finished"
    """All steps of the run are done."""
    GREW = "grew"
    """Hosts came back: it saved a checkpoint at a step boundary and left."""
    FAULT = "fault"
    """A rank, a host or a link failed, and the launcher ended the others."""
    INTERRUPTED = "interrupted"


class Grow(StrEnum):
    """When a run leaves a phase for hosts that came back."""

    WORTH = "worth"
    """When the larger cluster's plan is predicted to be faster and the restart pays."""
    ALWAYS = "always"
    """Whenever the larger cluster's plan uses one of them."""
    NEVER = "never"
    """Only after a fault, when all is planned again anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What an elastic run does about faults and about hosts that come back."""

    max_restarts: int = 3
    """Restarts in a row without a new checkpoint, after which it gives up."""
    grow: Grow = Grow.WORTH
    wait_seconds: float = 0.0
    """How long hosts are waited for where no plan fits those that are left."""
    answers_needed: int = 3
    """Probes in a row that a host which was gone answers before it is used again."""
    answer_seconds: float = 1.0
    """From one probe of a host that has answered to the next."""
    silence_seconds: float = 5.0
    """From one probe of a host that does not answer to the next."""
    least_gain: float = 0.02
    """Part of the predicted step by which a larger cluster must be faster to grow for it."""

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise InputError(f"max-restarts is {self.max_restarts}; it must be at least 0")
        if not self.wait_seconds >= 0:
            raise InputError(f"wait-for-hosts is {self.wait_seconds} s; it must be at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How one phase ended, as the world that ran it tells."""

    ended: Ended
    steps: tuple[StepRecord, ...]
    """Those that were finished, with the numbers that they have in the whole run."""
    start_seconds: float | None
    """From its start to the end of its first step; None where it finished none."""
    message: str = ""
    """Of a fault: what happened where."""
    blamed: tuple[str, ...] = ()
    """Of a fault: the hosts that it names; two where a link between them failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One plan on some hosts, from its start to its end."""

    hosts: tuple[str, ...]
    """Those that held a rank."""
    first_step: int
    """Steps that were done when it began: its first step has this number."""
    steps_done: int
    """Steps of the whole run that were done when it ended, those included that were lost."""
    checkpoint_step: int
    """Steps in the last good checkpoint when it had ended; 0: there is none."""
    ended: Ended
    reason: str
    """In words; of a phase that finished, what failed after its last checkpoint was saved, if
    anything did."""
    predicted_step_seconds: float
    median_step_seconds: float | None
    """None where it finished no step."""
    start_seconds: float | None
    """From its start to the end of its first step; None where it finished none."""
    seconds: float

    @property
    def lost_steps(self) -> int:
        """Steps that must be trained again, as no checkpoint has them."""
        return max(0, self.steps_done - self.checkpoint_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All phases of an elastic run, and the steps that the last of them to train each gave."""

    phases: tuple[Phase, ...] = ()
    steps: tuple[StepRecord, ...] = ()
    """By their numbers; of a step that was trained again, the last time counts."""


def median_seconds(steps: tuple[StepRecord, ...]) -> float | None:
    """Of the steps but the first, which opens connections; of that one where there is no other."""
    counted = [step.seconds for step in steps[1:]] or [step.seconds for step in steps]
    return statistics.median(counted) if counted else None


def merged_steps(
    known: tuple[StepRecord, ...], more: tuple[StepRecord, ...]
) -> tuple[StepRecord, ...]:
    """Steps by number; where both have a step, that of `more`."""
    found = {step.step: step for step in (*known, *more)}
    return tuple(found[number] for number in sorted(found))
