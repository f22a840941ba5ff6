"""What a replay needs to know of one pipeline: its schedule and how long everything takes.

Virtual stage k is chunk k // P of stage k % P; hop k leads from virtual stage k to k + 1. P stages,
v chunks on each.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.replay.kernel import StageTimes
from hetplan.cost.schedules import check_shape
from hetplan.errors import InputError

_SECONDS = (
    "forward",
    "backward",
    "weight",
    "send_forward",
    "send_backward",
    "wire_latency",
    "rendezvous_extra",
    "shared_forward",
    "shared_backward",
)


class Exchange(StrEnum):
    """Trainers whose rendezvous sends and receives are known (`hetplan.cost.replay.programs`)."""

    TORCH = "torch"
    MEGATRON = "megatron"
    """As torch's but for interleaving."""
    DEEPSPEED = "deepspeed"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineTimes:
    """Seconds of every pass and transfer of one pipeline.

    Stage arrays are [P, v], hop arrays [P * v - 1]; float64, int64 where they count.
    """

    schedule: str
    """One of `hetplan.plans.plan.SCHEDULES`."""
    num_microbatches: int
    warmup: tuple[int, ...]
    """Forward passes of each stage before its first backward pass; read for 1f1b only."""
    forward: Floats
    backward: Floats
    """Whole backward pass; where the schedule splits it (zb-h1), the part for the inputs."""
    weight: Floats
    """Gradients of the weights; read only where the schedule splits the backward pass."""
    send_forward: Floats
    """How long one message of this hop occupies the sender's way to the receiver."""
    send_backward: Floats
    wire_latency: Floats
    """From the moment a message has left until it has arrived."""
    rendezvous_extra: Floats
    """How much later a message starts because the receiver's notice has to travel first."""
    link_forward: Ints
    """Number of the shared wire that this hop's activations cross, -1 for none."""
    link_backward: Ints
    shared_forward: Floats
    """How long one message of this hop occupies the shared wire."""
    shared_backward: Floats
    exchange: Exchange = Exchange.TORCH
    """Whose order of sends and receives, where sends are rendezvous."""

    def __post_init__(self) -> None:
        if self.forward.ndim != 2:
            raise InputError(
                f"forward times have shape {self.forward.shape}; give one row per stage and one "
                "column per virtual stage"
            )
        num_stages, chunks = self.forward.shape
        check_shape(self.schedule, num_stages, self.num_microbatches, chunks, self.warmup)
        if self.backward.shape != self.forward.shape or self.weight.shape != self.forward.shape:
            raise InputError(
                f"backward and weight times have shapes {self.backward.shape} and "
                f"{self.weight.shape}; forward times have {self.forward.shape}"
            )
        for values in self._hop_arrays():
            if values.shape != (num_stages * chunks - 1,):
                raise InputError(
                    f"an array of hops has shape {values.shape}; {num_stages} stages of {chunks} "
                    f"virtual stages have {num_stages * chunks - 1} hops"
                )

    def _hop_arrays(self) -> tuple[Floats | Ints, ...]:
        return (
            self.send_forward,
            self.send_backward,
            self.wire_latency,
            self.rendezvous_extra,
            self.link_forward,
            self.link_backward,
            self.shared_forward,
            self.shared_backward,
        )

    def check_seconds(self) -> None:
        """InputError where a time is negative, infinite or not a number.

        A pass over every array, so it is left to those who keep every event; `step_ends` looks only
        where no end comes out.
        """
        for name in _SECONDS:
            values: Floats = getattr(self, name)
            if not (np.isfinite(values).all() and (values >= 0).all()):
                raise InputError(
                    f"{name} times hold {values[~(np.isfinite(values) & (values >= 0))][0]}; every "
                    "time is a finite number of seconds, 0 or more"
                )

    def plain(self) -> StageTimes:
        """What the replay of 1F1B with one chunk per stage takes; shared wires are left out."""
        return StageTimes(
            self.forward[:, 0],
            self.backward[:, 0],
            self.send_forward,
            self.send_backward,
            self.wire_latency,
            self.rendezvous_extra,
            np.array(self.warmup, dtype=np.int64),
            self.num_microbatches,
        )

    @property
    def num_stages(self) -> int:
        """Stages, P."""
        return int(self.forward.shape[0])

    @property
    def virtual_stages(self) -> int:
        """Chunks of each stage, v."""
        return int(self.forward.shape[1])

    @property
    def shares(self) -> bool:
        """Whether any hop crosses a shared wire."""
        return bool((self.link_forward >= 0).any() or (self.link_backward >= 0).any())
