"""A run as one value: everything that its worker processes need to know."""

from __future__ import annotations

from dataclasses import dataclass, field

from hetplan.errors import InputError
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import Plan
from hetplan.profiling.pacing import Pace
from hetplan.runtime.communicator.levels import GroupSum

MAX_TIMEOUT_SECONDS = 365 * 86400.0
"""Clocks of connections count in nanoseconds of 64 bits; nobody waits longer."""
SCHEMA = "hetplan.training/1"
DEFAULT_KEEP = 2
"""One checkpoint to resume from while the next one is written, and one before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRequest:
    """What a run saves and resumes from; folders as text."""

    save: str = ""
    """Folder of the run's checkpoints; empty: none are saved."""
    save_every: int = 0
    """Steps from one checkpoint to the next; 0: one, at the end. The end always has one."""
    load: str = ""
    """A folder of checkpoints, whose last one is taken, or one checkpoint (always so in a
    `Training`: `hetplan.runtime.checkpoints.settle`); empty: the run begins anew."""
    keep: int = DEFAULT_KEEP
    """Checkpoints that stay; older ones are deleted when a newer one is complete. 0: all stay."""

    def __post_init__(self) -> None:
        if self.save_every < 0 or self.keep < 0:
            raise InputError(
                f"save_every is {self.save_every}, keep is {self.keep}; both must be at least 0"
            )
        if self.save_every and not self.save:
            raise InputError(
                f"a checkpoint every {self.save_every} steps needs a folder to save to (--save)"
            )

    def is_due(self, done: int, *, last: bool) -> bool:
        """Whether a checkpoint is saved after this many steps."""
        every = bool(self.save_every) and done % self.save_every == 0
        return bool(self.save) and (last or every)


NO_CHECKPOINTS = CheckpointRequest()
"""Nothing is saved, and the run begins anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A plan to be trained for some steps."""

    model: ModelSpec
    job: Job
    plan: Plan
    device_kinds: tuple[str, ...]
    """Device kind of each rank."""
    backend: str
    """torch device type of every rank: `cpu` or `cuda`."""
    pace: Pace | None
    """Nominal times of the kinds that are played; kinds that it lacks run at their own speed."""
    steps: int
    """Of the whole training; a run that goes on from a checkpoint trains what is left of them."""
    warmup_steps: int
    """First steps of the run that count in no median: connections are made and memory is allocated
    there."""
    timeout_seconds: float
    """A collective that takes longer ends the run."""
    checkpoints: CheckpointRequest = field(default_factory=CheckpointRequest)
    """What the run saves, and the one checkpoint that it goes on from."""
    sums: tuple[GroupSum, ...] = ()
    """Groups that sum level by level (`gradient_groups.sums_of`); others sum as their backend
    does."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 0 or self.steps <= self.warmup_steps:
            raise InputError(
                f"steps is {self.steps} with {self.warmup_steps} warm-up steps; at least one step "
                "must be left to measure"
            )
        if not 0 < self.timeout_seconds <= MAX_TIMEOUT_SECONDS:
            raise InputError(
                f"timeout is {self.timeout_seconds} s; it must be more than 0 and at most "
                f"{MAX_TIMEOUT_SECONDS:g} (a year)"
            )
