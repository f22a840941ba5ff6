"""What happens when in one 1F1B step over uneven stages: the definition of the schedule's cost.

Stage s runs min(warmup[s], m) forward passes, then a backward and a forward pass in turn, then
the backward passes left; m microbatches. Stage and boundary times may all differ. Two meanings of
sending, chosen by `rendezvous`:

eager: a transfer is asynchronous on both sides. Each direction of a boundary carries one message
at a time (full duplex, in order); a message that is ready at r leaves the wire at
l = max(r, wire free) + send_*[s] and has arrived at l + wire_latency[s].

rendezvous: stages post and wait as torch.distributed.pipelining.Schedule1F1B (torch 2.13) does.
Every receive is posted just before the operation that needs it. A send of the warm-up or the
cool-down is posted after its operation and waited for after the next one; in the steady state a
stage posts "send what I computed, receive what I need" over one boundary together and waits for
both. A message leaves the wire at
l = max(sender posted, receiver posted + rendezvous_extra[s], wire free) + send_*[s], has arrived
at l + wire_latency[s], and the sender's wait ends at l. Schedule1F1B itself always has
warmup[s] = stages - s.

When the sender's wait ends: gloo returns once the last byte is in the socket's buffer. Measured
with torch 2.13 over a 200 Mbit/s link (reno, tcp_wmem 4 MiB): 0.5 ms of a 6 ms transfer for
256 KiB, 0.9 of 39 ms for 1 MiB, 56 of 171 ms for 4 MiB, 544 of 700 ms for 16 MiB. So l is right
less the time of 3 to 4 MB on the wire; messages below that size cost their sender up to one
send_* too much where it has to wait. Device-direct transports wait until the data has left.

A fused pair moves both ways at once. With gloo that takes posting the receive before the send:
its notice that a receive is posted travels behind the data already queued on the same connection,
so where the send is posted first (torch's order) the later stage's data goes first and the other's
after it. Measured (as above, 2 stages, 8 microbatches): against this replay, torch's order takes 4
to 53 % longer, growing with the transfers' share; with receives posted first it is within 3 %.

Not modelled: one physical link shared by several boundaries, and interleaved schedules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, TypeAlias

from hetplan.cost.replay_kernel import replay_seconds
from hetplan.errors import InputError

__all__ = ["Operation", "Replay", "replay", "replay_seconds"]

_Pass: TypeAlias = Literal["F", "B"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One forward or backward pass."""

    stage: int
    kind: _Pass
    microbatch: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """One step, operation by operation; times count from the start of the step."""

    step_seconds: float
    """Until every stage has reduced its gradients and updated its weights."""
    pipeline_seconds: float
    """Until every stage has left the pipeline."""
    operations: tuple[Operation, ...]
    """By stage, in the order in which the stage runs them."""
    end_seconds: tuple[float, ...]
    """When each stage leaves the pipeline: its last backward pass has ended and, with rendezvous
    sends, its last gradient has left."""
    busy_seconds: tuple[float, ...]
    """Forward and backward passes of each stage."""
    wait_seconds: tuple[float, ...]
    """Pipeline time less busy time."""
    peak_in_flight: tuple[int, ...]
    """Most microbatches of each stage whose forward has ended and backward has not."""


def replay(
    forward: Sequence[float],
    backward: Sequence[float],
    send_forward: Sequence[float],
    send_backward: Sequence[float],
    wire_latency: Sequence[float],
    rendezvous_extra: Sequence[float],
    warmup: Sequence[int],
    num_microbatches: int,
    after: Sequence[float],
    rendezvous: bool,
) -> Replay:
    """The step that `replay_seconds` times, with every operation.

    Arguments as there. InputError where lengths do not match, a depth is below 1 or grows
    downstream, or the depths make a rendezvous schedule wait for itself.
    """
    _check(
        (forward, backward, warmup, after),
        (send_forward, send_backward, wire_latency, rendezvous_extra),
        warmup,
        num_microbatches,
    )
    wires = [
        _Wire(send_forward, wire_latency, rendezvous_extra, rendezvous),
        _Wire(send_backward, wire_latency, rendezvous_extra, rendezvous),
    ]
    stages = [
        _Stage(
            s,
            list(
                _rendezvous_program(
                    s, len(forward), min(warmup[s], num_microbatches), num_microbatches
                )
                if rendezvous
                else _eager_program(
                    s, len(forward), min(warmup[s], num_microbatches), num_microbatches
                )
            ),
            forward[s],
            backward[s],
        )
        for s in range(len(forward))
    ]
    while any(stage.program for stage in stages):
        # A list, not a generator: every stage gets its turn.
        if not any([stage.run(wires) for stage in stages]):
            waiting = next(stage.index for stage in stages if stage.program)
            raise InputError(
                f"with rendezvous sends the warm-up depths {list(warmup)} make stage {waiting} "
                "wait for itself; let neighbouring stages differ by at most 1"
            )
    pipeline = max(stage.now for stage in stages)
    busy = tuple(num_microbatches * (f + b) for f, b in zip(forward, backward, strict=True))
    return Replay(
        step_seconds=max(stage.now + extra for stage, extra in zip(stages, after, strict=True)),
        pipeline_seconds=pipeline,
        operations=tuple(operation for stage in stages for operation in stage.operations),
        end_seconds=tuple(stage.now for stage in stages),
        busy_seconds=busy,
        wait_seconds=tuple(pipeline - seconds for seconds in busy),
        peak_in_flight=tuple(stage.peak_in_flight() for stage in stages),
    )


def _check(
    per_stage: Sequence[Sequence[float]],
    per_boundary: Sequence[Sequence[float]],
    warmup: Sequence[int],
    num_microbatches: int,
) -> None:
    num_stages = len(warmup)
    if num_microbatches < 1 or num_stages < 1:
        raise InputError(
            f"{num_stages} stages and {num_microbatches} microbatches; at least 1 each"
        )
    if any(len(values) != num_stages for values in per_stage) or any(
        len(values) != num_stages - 1 for values in per_boundary
    ):
        raise InputError(
            f"stage times must have {num_stages} entries and boundary times {num_stages - 1}, "
            f"not {[len(values) for values in (*per_stage, *per_boundary)]}"
        )
    if min(warmup) < 1 or any(left < right for left, right in pairwise(warmup)):
        raise InputError(
            f"warm-up depths {list(warmup)} must be at least 1 and not grow downstream"
        )


# What a stage does, in order. Messages are (direction, boundary, microbatch).
_Message: TypeAlias = tuple[int, int, int]
_DOWN, _UP = 0, 1


@dataclass(frozen=True, slots=True)
class _Compute:
    kind: _Pass
    microbatch: int


@dataclass(frozen=True, slots=True)
class _Send:
    message: _Message


@dataclass(frozen=True, slots=True)
class _Receive:
    message: _Message


@dataclass(frozen=True, slots=True)
class _Wait:
    sent: tuple[_Message, ...] = ()
    received: tuple[_Message, ...] = ()


_Step: TypeAlias = _Compute | _Send | _Receive | _Wait


def _eager_program(s: int, num_stages: int, w: int, m: int) -> Iterator[_Step]:
    order: list[tuple[_Pass, int]] = [("F", i) for i in range(w)]
    for i in range(m):
        order.append(("B", i))
        if w + i < m:
            order.append(("F", w + i))
    for kind, i in order:
        source = (_DOWN, s - 1, i) if kind == "F" else (_UP, s, i)
        goal = (_DOWN, s, i) if kind == "F" else (_UP, s - 1, i)
        if 0 <= source[1] < num_stages - 1:
            yield _Receive(source)
            yield _Wait(received=(source,))
        yield _Compute(kind, i)
        if 0 <= goal[1] < num_stages - 1:
            yield _Send(goal)


def _rendezvous_program(s: int, num_stages: int, w: int, m: int) -> Iterator[_Step]:
    """Schedule1F1B._step_microbatches, statement by statement."""

    def down(boundary: int, i: int) -> tuple[_Message, ...]:
        return ((_DOWN, boundary, i),) if 0 <= boundary < num_stages - 1 else ()

    def up(boundary: int, i: int) -> tuple[_Message, ...]:
        return ((_UP, boundary, i),) if 0 <= boundary < num_stages - 1 else ()

    def fused(sent: tuple[_Message, ...], received: tuple[_Message, ...]) -> Iterator[_Step]:
        yield from map(_Send, sent)
        yield from map(_Receive, received)
        yield _Wait(sent=sent, received=received)

    send_work: tuple[_Message, ...] = ()
    forward_sends: tuple[_Message, ...] = ()
    for i in range(w):
        yield from fused((), down(s - 1, i))
        yield _Compute("F", i)
        yield _Wait(sent=send_work)
        forward_sends = down(s, i)
        if i != w - 1:
            send_work = forward_sends
            yield from map(_Send, send_work)
    forwards, backwards = w, 0
    while True:
        yield from fused(forward_sends, up(s, backwards))
        yield _Compute("B", backwards)
        backward_sends = up(s - 1, backwards)
        backwards += 1
        if forwards == m:
            break
        yield from fused(backward_sends, down(s - 1, forwards))
        yield _Compute("F", forwards)
        forward_sends = down(s, forwards)
        forwards += 1
    send_work = backward_sends
    yield from map(_Send, send_work)
    while backwards < m:
        yield from fused((), up(s, backwards))
        yield _Compute("B", backwards)
        yield _Wait(sent=send_work)
        send_work = up(s - 1, backwards)
        yield from map(_Send, send_work)
        backwards += 1
    yield _Wait(sent=send_work)


@dataclass(slots=True)
class _Wire:
    """All boundaries in one direction: who has posted what, and which messages have moved."""

    occupied: Sequence[float]
    latency: Sequence[float]
    extra: Sequence[float]
    rendezvous: bool
    sent_at: dict[_Message, float] = field(default_factory=dict)
    receiving_at: dict[_Message, float] = field(default_factory=dict)
    free: dict[int, float] = field(default_factory=dict)
    left: dict[_Message, float] = field(default_factory=dict)
    arrived: dict[_Message, float] = field(default_factory=dict)

    def move(self, message: _Message) -> None:
        """Carry the message if everything it needs has been posted."""
        boundary = message[1]
        if message not in self.sent_at:
            return
        ready = self.sent_at[message]
        if self.rendezvous:
            if message not in self.receiving_at:
                return
            ready = max(ready, self.receiving_at[message] + self.extra[boundary])
        elif message in self.left:
            return
        self.left[message] = max(ready, self.free.get(boundary, 0.0)) + self.occupied[boundary]
        self.free[boundary] = self.left[message]
        self.arrived[message] = self.left[message] + self.latency[boundary]


@dataclass(slots=True)
class _Stage:
    index: int
    program: list[_Step]
    forward: float
    backward: float
    now: float = 0.0
    operations: list[Operation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.program.reverse()  # the next step is the last entry, cheap to pop

    def run(self, wires: list[_Wire]) -> bool:
        """Go on until a message is missing; whether anything was done."""
        moved = False
        while self.program:
            step = self.program[-1]
            if isinstance(step, _Wait):
                sent = [wires[message[0]].left.get(message) for message in step.sent]
                got = [wires[message[0]].arrived.get(message) for message in step.received]
                times = [time for time in (*sent, *got) if time is not None]
                if len(times) < len(sent) + len(got):
                    return moved
                self.now = max(self.now, *times) if times else self.now
            elif isinstance(step, _Compute):
                self._compute(step)
            else:
                wire = wires[step.message[0]]
                posted = wire.sent_at if isinstance(step, _Send) else wire.receiving_at
                posted[step.message] = self.now
                wire.move(step.message)
            self.program.pop()
            moved = True
        return moved

    def _compute(self, step: _Compute) -> None:
        end = self.now + (self.forward if step.kind == "F" else self.backward)
        self.operations.append(
            Operation(
                stage=self.index,
                kind=step.kind,
                microbatch=step.microbatch,
                start_seconds=self.now,
                end_seconds=end,
            )
        )
        self.now = end

    def peak_in_flight(self) -> int:
        """Most forward passes ahead of the backward passes."""
        ahead = peak = 0
        for operation in self.operations:
            ahead += 1 if operation.kind == "F" else -1
            peak = max(peak, ahead)
        return peak
