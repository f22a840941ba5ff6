"""What a trainer's log says about its steps, as frozen values in base units.

A logged step is what one metrics line says: the mean over the steps since the line before. What
happened in those steps besides training (a checkpoint, an evaluation) is kept as its marks; which
steps count is not decided here (`hetplan.launchers.compare_steps`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hetplan.errors import InputError


class Trainer(StrEnum):
    """Whose log it is."""

    MEGATRON = "megatron"
    """Megatron-LM and what prints its lines: FlagScale, Megatron-DeepSpeed, MindSpeed, Bridge."""
    TORCHTITAN = "torchtitan"
    DEEPSPEED = "deepspeed"
    NEMO = "nemo"
    NATIVE = "native"
    """hetplan's own run log."""


class Mark(StrEnum):
    """What a logged step holds besides training."""

    FIRST = "first of its start"
    """Compilation, connections and empty caches stand in it."""
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    SKIPPED = "skipped update"
    """An overflow or a loss that is no number: no update was made in one of the steps."""


class TimerRanks(StrEnum):
    """Whose time a timer is."""

    ALL = "all ranks"
    FIRST = "rank 0"
    LAST = "last rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedTimer:
    """Seconds of one step that one timer counted."""

    name: str
    """As the trainer prints it."""
    least_seconds: float
    """Of the ranks that ran it."""
    most_seconds: float
    ranks: TimerRanks = TimerRanks.ALL

    def __post_init__(self) -> None:
        if not 0 <= self.least_seconds <= self.most_seconds:
            raise InputError(
                f"timer {self.name} says {self.least_seconds} to {self.most_seconds} s; the least "
                "is at least 0 and not above the most"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """One metrics line."""

    iteration: int
    """The last optimizer step it counts, from 1."""
    seconds: float | None
    """Of one step; None where the trainer prints only rates."""
    attempt: int = 0
    """0, and one more after every restart."""
    tokens_per_second: float | None = None
    """Of one device."""
    samples_per_second: float | None = None
    """Sequences, of all devices."""
    global_batch_size: int | None = None
    """Sequences of one step."""
    peak_memory_bytes: float | None = None
    """Most on one device that the line tells of."""
    marks: tuple[Mark, ...] = ()
    timers: tuple[LoggedTimer, ...] = ()


class MemoryKind(StrEnum):
    """Which figure of torch's allocator a trainer logs."""

    ALLOCATED = "allocated"
    RESERVED = "reserved"
    PROCESS = "process growth"
    """hetplan's own trainer on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedFact:
    """One setting of the run that the log says, for the check that plan and log belong together."""

    name: str
    """`world_size`, `tp`, `pp`, `cp`, `ep`, `microbatch_size`, `global_batch_size`,
    `sequence_length`, `num_layers`, `hidden_size`."""
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLog:
    """One run's log, of one or several files."""

    trainer: Trainer
    files: tuple[str, ...]
    steps: tuple[LoggedStep, ...]
    """In the order in which they ran; restarts run some again."""
    facts: tuple[LoggedFact, ...] = ()
    peak_memory_bytes: float | None = None
    memory_kind: MemoryKind = MemoryKind.ALLOCATED
    warmup_steps: int | None = None
    """First steps that the log's timers, which are medians of the whole run, leave out; None where
    every step has timers of its own."""
    notes: tuple[str, ...] = ()
    """What was passed over, and what a reader must know of this trainer's figures."""
