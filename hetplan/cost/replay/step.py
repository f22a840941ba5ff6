"""What happens when in one step over uneven stages: the definition of the schedule's cost.

The order of passes is `hetplan.cost.schedules`, what a stage posts and waits for is
`hetplan.cost.replay.programs`, and how messages move and share wires is
`hetplan.cost.replay.ends`, whose `step_ends` gives the ends alone. `replay_step` tells every pass
and every transfer of several pipelines.

Two meanings of sending. Eager: asynchronous on both sides. Rendezvous: a message starts when both
sides have posted, and the trainer's own waits hold stages up, torch 2.13's.

When a rendezvous sender's wait ends: gloo returns once the last byte is in the socket's buffer.
Measured with torch 2.13 over a 200 Mbit/s link (reno, tcp_wmem 4 MiB): 0.5 ms of a 6 ms transfer
for 256 KiB, 0.9 of 39 ms for 1 MiB, 56 of 171 ms for 4 MiB, 544 of 700 ms for 16 MiB. So "has left"
is right less the time of 3 to 4 MB on the wire; messages below that size cost their sender up to
one transfer too much where it has to wait. Device-direct transports wait until the data has left.

A fused pair moves both ways at once. With gloo that takes posting the receive before the send:
its notice that a receive is posted travels behind the data already queued on the same connection,
so where the send is posted first (torch's order) the later stage's data goes first and the other's
after it. Measured (as above, 2 stages, 8 microbatches): against this replay, torch's order takes 4
to 53 % longer, growing with the transfers' share; with receives posted first it is within 3 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from hetplan.cost.arrays import Floats
from hetplan.cost.replay.ends import Replayed, replayed
from hetplan.cost.replay.programs import DOWN, UP, Step, Wait, programs_of
from hetplan.cost.replay.times import PipelineTimes
from hetplan.plans.v_schedules import Pass, PassKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One pass of one microbatch through one chunk of a stage."""

    stage: int
    kind: PassKind
    chunk: int = 0
    microbatch: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One message over one hop: activations forward, gradients backward."""

    hop: int
    direction: Literal["forward", "backward"]
    microbatch: int
    start_seconds: float
    left_seconds: float
    """The sender's way is free again."""
    end_seconds: float
    """Arrived."""
    wire: int
    """Number of the shared wire it crosses, -1 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReplay:
    """One stage's step."""

    end_seconds: float
    """Its last pass has ended and, with rendezvous sends, its last message has left."""
    operations: tuple[Operation, ...]
    """In the order in which the stage runs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineReplay:
    """One pipeline's step."""

    end_seconds: float
    """Until its last stage has left it."""
    stages: tuple[StageReplay, ...]
    transfers: tuple[Transfer, ...]
    """In order of start, then hop, direction and microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReplay:
    """Several pipelines side by side; times count from the start of the step."""

    end_seconds: float
    pipelines: tuple[PipelineReplay, ...]


def replay_step(pipelines: Sequence[PipelineTimes], *, rendezvous: bool) -> StepReplay:
    """Every pass and every transfer of pipelines that may share wires, from equal numbers.

    InputError where a time is negative or not finite, or rendezvous sends make stages wait for each
    other in a circle.
    """
    for times in pipelines:
        times.check_seconds()
    whole = replayed(pipelines, rendezvous)
    found = tuple(_pipeline(times, whole, p, rendezvous) for p, times in enumerate(pipelines))
    return StepReplay(
        end_seconds=max((one.end_seconds for one in found), default=0.0), pipelines=found
    )


def without_transfers(times: PipelineTimes) -> PipelineTimes:
    """The same pipeline with instantaneous transfers."""
    nothing = np.zeros_like(times.wire_latency)
    alone = np.full(nothing.shape, -1, dtype=np.int64)
    return replace(
        times,
        send_forward=nothing,
        send_backward=nothing,
        wire_latency=nothing,
        rendezvous_extra=nothing,
        link_forward=alone,
        link_backward=alone,
        shared_forward=nothing,
        shared_backward=nothing,
    )


def _pipeline(times: PipelineTimes, whole: Replayed, p: int, rendezvous: bool) -> PipelineReplay:
    start, left = whole.start[p], whole.left[p]
    arrived = left + times.wire_latency[:, None]
    written = programs_of(times, rendezvous)
    wires = {DOWN: times.link_forward, UP: times.link_backward}
    transfers = [
        Transfer(
            hop=hop,
            direction="forward" if direction == DOWN else "backward",
            microbatch=microbatch,
            start_seconds=float(start[direction, hop, microbatch]),
            left_seconds=float(left[direction, hop, microbatch]),
            end_seconds=float(arrived[direction, hop, microbatch]),
            wire=int(wires[direction][hop]),
        )
        for direction, hop, microbatch in np.argwhere(start >= 0).tolist()
    ]
    transfers.sort(key=_place)
    return PipelineReplay(
        end_seconds=float(whole.ends[p].max()),
        stages=tuple(_stage(times, s, program, left, arrived) for s, program in enumerate(written)),
        transfers=tuple(transfers),
    )


def _place(one: Transfer) -> tuple[float, int, bool, int]:
    return one.start_seconds, one.hop, one.direction == "backward", one.microbatch


def _stage(
    times: PipelineTimes, s: int, program: Sequence[Step], left: Floats, arrived: Floats
) -> StageReplay:
    """The stage goes through its program; when messages move is known."""
    seconds = {"F": times.forward, "B": times.backward, "W": times.weight}
    now = 0.0
    operations = []
    for step in program:
        if isinstance(step, Wait):
            waits = [left[each] for each in step.sent] + [arrived[each] for each in step.received]
            now = max([now, *map(float, waits)])
        elif isinstance(step, Pass):
            start = now
            for part in step.kind:
                now += float(seconds[part][s, step.chunk])
            operations.append(
                Operation(
                    stage=s,
                    kind=step.kind,
                    chunk=step.chunk,
                    microbatch=step.microbatch,
                    start_seconds=start,
                    end_seconds=now,
                )
            )
    return StageReplay(end_seconds=now, operations=tuple(operations))
