"""The compiled replay: when every stage ends, and when every message moves.

Every stage runs its program (`hetplan.cost.replay.programs`). A message may start when it has been
posted by its sender and, with rendezvous sends, rendezvous_extra after its receiver has. Messages
from one stage to another leave one after the other in the order in which the sender posts them:
both directions at once, chunks one behind the other. A message that starts at t has left at
t + send and has arrived wire_latency later.

A shared wire serves one message at a time, whoever is ready first. A message that takes the wire at
t occupies it for shared seconds and has left at t + max(send, shared). It is ready when it may
start and the messages before it, from the same stage to the same stage, have left. Equally ready:
the lower pipeline first, then the lower sending stage, then the lower receiving stage.

Serving in order of readiness takes care in a simulation, because a message that is found later may
be ready earlier. So all stages run until each waits for a message, and only then the pending
message that was ready first takes its wire: whatever is posted later is ready later.

Programs depend only on shapes (schedule, stages, chunks, microbatches, depths); they are written as
integers once per shape and kept. A step of a program is a row of three numbers: what to do, with
which pass or message, over which way.
  COMPUTE   duration number
  SEND      message number, way
  RECEIVE   message number, way
  ARRIVED   message number, way: wait until it is there
  LEFT      message number, way: wait until it has left
A way is one direction of one hop of one pipeline; a lane all that one stage sends to another one.
Pipelines that share no wire are run one by one, 1F1B with one chunk by a kernel of its own
(`hetplan.cost.replay.times`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.replay.programs import DOWN, Message, Send, Wait, ends_of_hop, programs
from hetplan.cost.replay.times import Exchange, PipelineTimes, pipeline_ends
from hetplan.errors import InputError
from hetplan.kernels import kernel
from hetplan.plans.v_schedules import Pass

COMPUTE, SEND, RECEIVE, ARRIVED, LEFT = 0, 1, 2, 3, 4

_Shape: TypeAlias = tuple[str, int, int, int, tuple[int, ...] | None, Exchange]
"""Schedule, stages, microbatches, chunks per stage, depths (1f1b only), exchange."""


def step_ends(pipelines: Sequence[PipelineTimes], *, rendezvous: bool) -> tuple[Floats, ...]:
    """End of every stage of every pipeline, in seconds.

    InputError where rendezvous sends make stages wait for each other in a circle. Negative times
    are not looked for.
    """
    if not any(times.shares for times in pipelines):
        return tuple(_alone(p, times, rendezvous) for p, times in enumerate(pipelines))
    return replayed(pipelines, rendezvous).ends


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replayed:
    """Everything that a replay of several pipelines says, by pipeline."""

    ends: tuple[Floats, ...]
    """Of every stage."""
    start: tuple[Floats, ...]
    """[direction, hop, microbatch] when a message took its way; -1 where there is none."""
    left: tuple[Floats, ...]
    """When it had left."""


def replayed(
    pipelines: Sequence[PipelineTimes], rendezvous: bool, *, in_python: bool = False
) -> Replayed:
    """`step_ends` by the general interpreter, whatever is shared, with every message.

    `in_python`: never compiled, which is slow and needs no compiler to be trusted.
    """
    run = interpret.function if in_python else interpret
    ends, messages = _interpreted(pipelines, rendezvous, run)
    shapes = [(2, len(t.send_forward), t.num_microbatches) for t in pipelines]
    stops = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
    start, left = (tuple(map(np.reshape, np.split(each, stops), shapes)) for each in messages)
    checked = [_checked(p, *each) for p, each in enumerate(zip(pipelines, ends, strict=True))]
    return Replayed(ends=tuple(checked), start=start, left=left)


def _interpreted(
    pipelines: Sequence[PipelineTimes],
    rendezvous: bool,
    run: Callable[..., tuple[Floats, Floats, Floats]] | None = None,
) -> tuple[list[Floats], list[Floats]]:
    """(ends of the stages by pipeline, -1 for one that waits for itself; times of all messages)."""
    code = _compiled(tuple(map(_shape, pipelines)), rendezvous)
    wire, num_wires = _dense(
        np.concatenate([part for t in pipelines for part in (t.link_forward, t.link_backward)])
    )
    ends, *messages = (run or interpret)(
        code.programs,
        WayTimes(
            send=_both([(t.send_forward, t.send_backward) for t in pipelines]),
            latency=_both([(t.wire_latency, t.wire_latency) for t in pipelines]),
            extra=_both([(t.rendezvous_extra, t.rendezvous_extra) for t in pipelines]),
            wire=wire,
            shared=_both([(t.shared_forward, t.shared_backward) for t in pipelines]),
        ),
        _seconds(pipelines),
        code.num_messages,
        num_wires,
        rendezvous,
    )
    stops = np.cumsum([times.num_stages for times in pipelines])[:-1]
    return np.split(ends, stops), messages


def _alone(index: int, times: PipelineTimes, rendezvous: bool) -> Floats:
    if times.schedule == "1f1b" and times.exchange is not Exchange.DEEPSPEED:
        ends: Floats = pipeline_ends(times.plain(), rendezvous)
        # Infinite where neighbouring depths differ by more than that kernel can order.
        if not np.isinf(ends[0]):
            return _checked(index, times, ends)
    if rendezvous:
        return _checked(index, times, _interpreted((times,), rendezvous)[0][0])
    code = _compiled((_shape(times),), rendezvous)
    return _checked(
        index,
        times,
        eager_ends(
            code.programs,
            code.num_messages,
            _seconds((times,)),
            np.concatenate((times.send_forward, times.send_backward)),
            np.concatenate((times.wire_latency, times.wire_latency)),
        ),
    )


def _checked(index: int, times: PipelineTimes, ends: Floats) -> Floats:
    if not ends.min() >= 0:  # a number that is none as well
        times.check_seconds()
        depths = [int(depth) for depth in times.warmup]
        raise InputError(
            f"with rendezvous sends the warm-up depths {depths} make stage {int(np.argmin(ends))} "
            f"wait for itself (pipeline {index}); let neighbouring stages differ by at most 1"
        )
    return ends


def _shape(times: PipelineTimes) -> _Shape:
    return (
        times.schedule,
        times.num_stages,
        times.num_microbatches,
        times.virtual_stages,
        times.warmup if times.schedule == "1f1b" else None,
        times.exchange,
    )


def _seconds(pipelines: Sequence[PipelineTimes]) -> Floats:
    return np.concatenate(
        [part.ravel() for t in pipelines for part in (t.forward, t.backward, t.weight)]
    )


def _both(pairs: Sequence[tuple[Floats, Floats]]) -> Floats:
    """By way: activations of every hop of the first pipeline, then gradients, then the next."""
    return np.concatenate([part for pair in pairs for part in pair])


def _dense(wire: Ints) -> tuple[Ints, int]:
    """Wires numbered from 0 without gaps, and how many there are."""
    known = np.unique(wire[wire >= 0])
    return np.where(wire >= 0, np.searchsorted(known, wire), -1), len(known)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Code:
    """Programs of several pipelines as integers."""

    programs: Programs
    num_messages: int


_KINDS = {"F": 0, "B": 1, "W": 2}


@lru_cache(maxsize=64)  # 16 x 64 takes 150 KB, 64 x 512 about 5 MB
def _compiled(shapes: tuple[_Shape, ...], rendezvous: bool) -> _Code:
    writer = _Writer()
    for shape in shapes:
        writer.add(shape, rendezvous)
    return writer.code()


@dataclass(slots=True)
class _Writer:
    """Programs while they are written, pipeline after pipeline."""

    rows: list[tuple[int, int, int]] = field(default_factory=list)
    first: list[int] = field(default_factory=lambda: [0])
    sources: list[int] = field(default_factory=list)
    """Sending stage of each way."""
    targets: list[int] = field(default_factory=list)
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)
    """(message, way) in the order in which they are sent, by sending and receiving stage."""
    durations: int = 0
    messages: int = 0

    def add(self, shape: _Shape, rendezvous: bool) -> None:
        """The stages of one more pipeline."""
        schedule, num_stages, m, v, depths, exchange = shape
        base, hops, ways = len(self.first) - 1, num_stages * v - 1, len(self.sources)
        for way in range(2 * hops):
            source, target = ends_of_hop((way // hops, way % hops, 0), num_stages, schedule)
            self.sources.append(base + source)
            self.targets.append(base + target)
        before = self.messages

        def number(message: Message) -> tuple[int, int]:
            way = (0 if message[0] == DOWN else hops) + message[1]
            return before + way * m + message[2], ways + way

        written = programs(schedule, num_stages, m, v, depths, rendezvous, exchange)
        for stage, program in enumerate(written):
            for step in program:
                if isinstance(step, Pass):
                    for part in step.kind:
                        kind = _KINDS[part] * num_stages * v
                        duration = self.durations + kind + stage * v + step.chunk
                        self.rows.append((COMPUTE, duration, 0))
                elif isinstance(step, Wait):
                    self.rows.extend((LEFT, *number(message)) for message in step.sent)
                    self.rows.extend((ARRIVED, *number(message)) for message in step.received)
                elif isinstance(step, Send):
                    what, way = number(step.message)
                    lane = self.sources[way], self.targets[way]
                    self.lanes.setdefault(lane, []).append((what, way))
                    self.rows.append((SEND, what, way))
                else:
                    self.rows.append((RECEIVE, *number(step.message)))
            self.first.append(len(self.rows))
        self.durations += 3 * num_stages * v
        self.messages += 2 * hops * m

    def code(self) -> _Code:
        """Everything that was written, as arrays."""
        places = sorted(self.lanes)
        queues = [self.lanes[place] for place in places]
        number_of = {place: at for at, place in enumerate(places)}
        ends = zip(self.sources, self.targets, strict=True)
        numbers = Programs(
            rows=np.array(self.rows, dtype=np.int32).reshape(-1, 3),
            first=np.array(self.first, dtype=np.int64),
            source=np.array(self.sources, dtype=np.int64),
            target=np.array(self.targets, dtype=np.int64),
            lane=np.array([number_of.get(place, -1) for place in ends], dtype=np.int64),
            queue=np.array([what for queue in queues for what, _ in queue], dtype=np.int64),
            queue_first=np.array([0, *np.cumsum([len(queue) for queue in queues])], dtype=np.int64),
            queue_way=np.array([way for queue in queues for _, way in queue], dtype=np.int64),
        )
        return _Code(programs=numbers, num_messages=self.messages)


Rows = NDArray[np.int32]


class Programs(NamedTuple):
    """Programs of every stage of every pipeline. (A tuple with names: numba takes no dataclass.)"""

    rows: Rows
    first: Ints
    """rows[first[s]:first[s + 1]] is the program of stage s."""
    source: Ints
    """Sending stage of each way."""
    target: Ints
    lane: Ints
    """Of each way."""
    queue: Ints
    """queue[queue_first[l]:queue_first[l + 1]] are the messages of lane l as they are sent."""
    queue_first: Ints
    queue_way: Ints
    """Way of each message of `queue`."""


class WayTimes(NamedTuple):
    """Seconds by way, see `hetplan.cost.replay.times`."""

    send: Floats
    latency: Floats
    extra: Floats
    wire: Ints
    """Number of the shared wire, from 0 without gaps; -1 for none."""
    shared: Floats


@kernel
def eager_ends(
    programs: Programs, num_messages: int, seconds: Floats, send: Floats, latency: Floats
) -> Floats:
    """End of every stage where sends are eager and no wire is shared; -1 for a stage that waits
    for itself.
    """
    rows, first, target, lane = programs.rows, programs.first, programs.target, programs.lane
    num_stages = first.shape[0] - 1
    now = np.zeros(num_stages)
    at = first[:-1].copy()
    arrived = np.full(num_messages, -1.0)
    free = np.zeros(programs.queue_first.shape[0] - 1)
    waits_for = np.full(num_stages, -1)
    stack = np.arange(num_stages)[::-1].copy()
    depth = num_stages
    while depth > 0:
        depth -= 1
        s = stack[depth]
        clock = now[s]
        position = at[s]
        while position < first[s + 1]:
            kind = rows[position, 0]
            what = rows[position, 1]
            if kind == COMPUTE:
                clock += seconds[what]
            elif kind == SEND:
                way = rows[position, 2]
                left = max(clock, free[lane[way]]) + send[way]
                free[lane[way]] = left
                arrived[what] = left + latency[way]
                if waits_for[target[way]] == what:
                    waits_for[target[way]] = -1
                    stack[depth] = target[way]
                    depth += 1
            else:
                if arrived[what] < 0.0:
                    waits_for[s] = what
                    break
                clock = max(clock, arrived[what])
            position += 1
        now[s] = clock
        at[s] = position
    for s in range(num_stages):
        if at[s] < first[s + 1]:
            now[s] = -1.0
    return now


@kernel
def interpret(
    programs: Programs,
    times: WayTimes,
    seconds: Floats,
    num_messages: int,
    num_wires: int,
    rendezvous: bool,
) -> tuple[Floats, Floats, Floats]:
    """(ends of the stages, -1 for one that waits for itself; when each message took its way; when
    it had left) under either kind of sends, wires shared or not.
    """
    # One long function, and arrays by themselves: numba counts references to every array that a
    # call or a tuple passes on, which takes 10 times as long as the work (measured).
    rows, first, source, target, lane_of, queue, queue_first, queue_way = programs
    send, latency, extra, wire_of, shared = times
    num_stages = first.shape[0] - 1
    num_lanes = queue_first.shape[0] - 1
    now = np.zeros(num_stages)
    at = first[:-1].copy()
    waits_for = np.full(num_stages, -1)  # message, -1 for none
    # Of each message; -1 before.
    sent, room = np.full(num_messages, -1.0), np.full(num_messages, -1.0)
    taken, left = np.full(num_messages, -1.0), np.full(num_messages, -1.0)
    head = queue_first[:-1].copy()  # first message of each lane that has not left
    free = np.zeros(num_lanes)
    wire_free = np.zeros(num_wires)
    # Lanes whose first message is ready for a shared wire: a binary heap by (ready_at, lane).
    heap, ready_at, pending = np.empty(num_lanes, np.int64), np.zeros(num_lanes), 0
    stack, depth = np.arange(num_stages)[::-1].copy(), num_stages  # stages that can go on
    s, lane, take_wire = -1, -1, False
    while True:
        if lane < 0 and depth > 0:
            depth -= 1
            s = stack[depth]
        elif lane < 0 and pending > 0:
            s, lane, take_wire = -1, heap[0], True
            pending -= 1
            heap[0] = heap[pending]
            _sink(heap, ready_at, pending)
        elif lane < 0:
            break
        # Let go what the lane may send: all that needs no shared wire, and one that was chosen.
        while lane >= 0 and head[lane] < queue_first[lane + 1]:
            message, way = queue[head[lane]], queue_way[head[lane]]
            if sent[message] < 0.0 or (rendezvous and room[message] < 0.0):
                break
            start = max(sent[message], free[lane])
            if rendezvous:
                start = max(start, room[message] + extra[way])
            occupied, wire = send[way], wire_of[way]
            if wire >= 0:
                if not take_wire:
                    heap[pending], ready_at[lane] = lane, start
                    _rise(heap, ready_at, pending)
                    pending += 1
                    break
                take_wire = False
                start = max(start, wire_free[wire])
                wire_free[wire] = start + shared[way]
                occupied = max(occupied, shared[way])
            taken[message] = start
            left[message] = free[lane] = start + occupied
            head[lane] += 1
            for stage in (source[way], target[way]):
                if waits_for[stage] == message:
                    waits_for[stage] = -1
                    stack[depth] = stage
                    depth += 1
        lane = -1
        if s < 0:
            continue
        # The stage's program, up to a wait or until a lane may have something to send.
        position, clock = at[s], now[s]
        while position < first[s + 1] and lane < 0:
            kind = rows[position, 0]
            what = rows[position, 1]
            if kind == COMPUTE:
                clock += seconds[what]
            elif kind == SEND or kind == RECEIVE:  # noqa: SIM109 (numba searches a tuple slowly)
                if kind == SEND:
                    sent[what] = clock
                else:
                    room[what] = clock
                lane = lane_of[rows[position, 2]]
                # Only the first message of a lane can leave, and each side posts it once.
                if queue[head[lane]] != what:
                    lane = -1
            else:
                until = left[what]
                if until < 0.0:
                    waits_for[s] = what
                    break
                if kind == ARRIVED:
                    until += latency[rows[position, 2]]
                clock = max(clock, until)
            position += 1
        at[s], now[s] = position, clock
    for s in range(num_stages):
        if at[s] < first[s + 1]:
            now[s] = -1.0
    return now, taken, left


@kernel
def _before(ready_at: Floats, one: int, other: int) -> bool:
    return bool(
        ready_at[one] < ready_at[other] or (ready_at[one] == ready_at[other] and one < other)
    )


@kernel
def _rise(heap: Ints, ready_at: Floats, place: int) -> None:
    while place > 0:
        above = (place - 1) // 2
        if not _before(ready_at, heap[place], heap[above]):
            return
        heap[place], heap[above] = heap[above], heap[place]
        place = above


@kernel
def _sink(heap: Ints, ready_at: Floats, size: int) -> None:
    place = 0
    while 2 * place + 1 < size:
        below = 2 * place + 1
        if below + 1 < size and _before(ready_at, heap[below + 1], heap[below]):
            below += 1
        if not _before(ready_at, heap[below], heap[place]):
            return
        heap[place], heap[below] = heap[below], heap[place]
        place = below
