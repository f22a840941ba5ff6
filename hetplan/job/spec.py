"""What is asked: batch, sequence, precision, target and the limits of the search."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from hetplan.errors import InputError


class Precision(StrEnum):
    """Number format of weights, activations and matrix products."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def bytes_per_element(self) -> int:
        """4 for float32, 2 otherwise."""
        return 4 if self is Precision.FLOAT32 else 2


class Optimizer(StrEnum):
    """Update rule; it decides the optimizer state per parameter and the update's time."""

    ADAMW = "adamw"
    SGD = "sgd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """Choices the user has made; the search keeps them. None leaves a choice free."""

    tp: int | None = None
    dp: int | None = None
    pp: int | None = None
    microbatch_size: int | None = None
    recompute: bool | None = None
    embedding_on: str | None = None
    """Island (or device kind) that must hold the embedding, which is the first stage."""
    head_on: str | None = None
    """Island (or device kind) that must hold the head, which is the last stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forbids:
    """What the plan must not use."""

    islands: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    """Nodes as `island/number`, counted from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training job."""

    name: str
    global_batch_size: int
    """Sequences per optimizer step."""
    sequence_length: int
    precision: Precision
    optimizer: Optimizer
    target: str
    """Trainer that will run the plan; a key of `hetplan.plans.targets.TARGETS`."""
    gap: float = 0.01
    """Relative distance to the best plan at which the search may stop."""
    time_limit_seconds: float | None = None
    total_tokens: int | None = None
    """Length of the training run, for its duration; None leaves that out."""
    memory_reserve_fraction: float = 0.1
    """Part of a device's memory that plans leave free for fragmentation and communication."""
    seed: int = 0
    pin: Pins = field(default_factory=Pins)
    forbid: Forbids = field(default_factory=Forbids)

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "sequence_length"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.gap < 1:
            raise InputError(f"gap is {self.gap}; it is a fraction from 0 to below 1")
        if not 0 <= self.memory_reserve_fraction < 1:
            raise InputError(
                f"memory_reserve_fraction is {self.memory_reserve_fraction}; "
                "it is a fraction from 0 to below 1"
            )
