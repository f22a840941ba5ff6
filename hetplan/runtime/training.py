"""What a run is asked to do: everything that its worker processes need to know, as one value."""

from __future__ import annotations

from dataclasses import dataclass, field

from hetplan.errors import InputError
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import Plan
from hetplan.profiling.pacing import Pace
from hetplan.runtime.checkpoints import CheckpointRequest
from hetplan.runtime.communicator.levels import GroupSum

MAX_TIMEOUT_SECONDS = 365 * 86400.0
"""Clocks of connections count in nanoseconds of 64 bits; nobody waits longer."""
SCHEMA = "hetplan.training/1"


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
    """Groups that sum level by level (`hetplan.runtime.summing.sums_of`); others sum as their
    backend does."""

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
