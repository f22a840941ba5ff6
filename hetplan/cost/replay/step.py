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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from hetplan.cost.replay.ends import Replayed, replayed
from hetplan.cost.replay.programs import DOWN, Message, Step, Wait, programs
from hetplan.cost.replay.times import PipelineTimes
from hetplan.cost.schedules import Pass, PassKind, peak_in_flight


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
    """One stage's step; busy, exposed and bubble add up to the end of its pipeline."""

    end_seconds: float
    """Its last pass has ended and, with rendezvous sends, its last message has left."""
    busy_seconds: float
    """All its passes."""
    wait_seconds: float
    """End of its pipeline less busy."""
    exposed_seconds: float
    """Waiting that transfers cause: of every wait, the part from the moment at which both sides had
    posted all that the stage waits for. Had the transfers taken no time from then on, the wait
    would have ended there."""
    bubble_seconds: float
    """The rest of the waiting: other stages had not made, or not asked for, what it waits for."""
    peak_in_flight: int
    """Most passes at once (chunk by chunk) whose forward has ended and backward has not."""
    operations: tuple[Operation, ...]
    """In the order in which the stage runs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineReplay:
    """One pipeline's step."""

    end_seconds: float
    """Until its last stage has left it."""
    instant_seconds: float
    """The same with instantaneous transfers; the difference is what all transfers cost."""
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
    found = tuple(
        _pipeline(times, _Messages(times, whole, p), rendezvous)
        for p, times in enumerate(pipelines)
    )
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


class _Messages:
    """When the messages of one pipeline move."""

    def __init__(self, times: PipelineTimes, whole: Replayed, p: int) -> None:
        self.ends = whole.ends[p]
        self.ready = np.maximum(whole.sent[p], whole.room[p])
        """Both sides have posted."""
        self.start, self.left = whole.start[p], whole.left[p]
        self.arrived = self.left + times.wire_latency[:, None]

    def until(self, step: Wait) -> Iterator[tuple[float, float]]:
        """(when it is over, when it could have moved) of all that a step waits for."""
        for messages, over in ((step.sent, self.left), (step.received, self.arrived)):
            for message in messages:
                yield float(over[message]), float(self.ready[message])


def _pipeline(times: PipelineTimes, messages: _Messages, rendezvous: bool) -> PipelineReplay:
    end = float(messages.ends.max())
    instant = replayed((without_transfers(times),), rendezvous).ends[0]
    written = programs(
        times.schedule,
        times.num_stages,
        times.num_microbatches,
        times.virtual_stages,
        times.warmup,
        rendezvous,
        times.exchange,
    )
    moved: list[Message] = [
        tuple(each)
        for each in np.argwhere(messages.start >= 0).tolist()  # type: ignore[misc]
    ]
    # By start, then hop, direction and microbatch.
    moved.sort(key=lambda each: (messages.start[each], each[1], each[0], each[2]))
    return PipelineReplay(
        end_seconds=end,
        instant_seconds=float(instant.max()),
        stages=tuple(_stage(times, s, program, messages, end) for s, program in enumerate(written)),
        transfers=tuple(_transfer(times, messages, each) for each in moved),
    )


def _transfer(times: PipelineTimes, messages: _Messages, message: Message) -> Transfer:
    direction, hop, microbatch = message
    return Transfer(
        hop=hop,
        direction="forward" if direction == DOWN else "backward",
        microbatch=microbatch,
        start_seconds=float(messages.start[message]),
        left_seconds=float(messages.left[message]),
        end_seconds=float(messages.arrived[message]),
        wire=int((times.link_forward if direction == DOWN else times.link_backward)[hop]),
    )


def _stage(
    times: PipelineTimes, s: int, program: Sequence[Step], messages: _Messages, end: float
) -> StageReplay:
    """The stage goes through its program; when messages move is known."""
    seconds = {"F": times.forward, "B": times.backward, "W": times.weight}
    now = exposed = 0.0
    operations = []
    for step in program:
        if isinstance(step, Wait):
            until = list(messages.until(step))
            over = max((each for each, _ in until), default=0.0)
            if over > now:
                exposed += max(0.0, over - max(now, *(ready for _, ready in until)))
                now = over
        elif isinstance(step, Pass):
            start, now = now, now + float(seconds[step.kind][s, step.chunk])
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
    kinds = {one.kind for one in operations}
    busy = times.num_microbatches * sum(
        float(seconds[kind][s, chunk])
        for kind in seconds
        if kind in kinds
        for chunk in range(times.virtual_stages)
    )
    return StageReplay(
        end_seconds=now,
        busy_seconds=busy,
        wait_seconds=end - busy,
        exposed_seconds=exposed,
        bubble_seconds=max(0.0, end - busy - exposed),
        peak_in_flight=peak_in_flight([step for step in program if isinstance(step, Pass)]),
        operations=tuple(operations),
    )
