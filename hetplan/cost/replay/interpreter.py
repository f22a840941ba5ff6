"""When does every stage of several pipelines end: the compiled interpreter of stages' programs.

It computes what `hetplan.cost.replay.events` defines, from programs written as integers (see
`hetplan.cost.replay.ends`), without keeping what happened on the way. A property test holds the two
equal, bit by bit.

A step is a row of three numbers: what to do, with which pass or message, over which hop.
  COMPUTE   duration number
  SEND      message number, way
  RECEIVE   message number, way
  ARRIVED   message number, way: wait until it is there
  LEFT      message number, way: wait until it has left
A way is one direction of one hop of one pipeline; a lane all that one stage sends to another one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetplan.cost.arrays import Floats, Ints
from hetplan.kernels import kernel

COMPUTE, SEND, RECEIVE, ARRIVED, LEFT = 0, 1, 2, 3, 4

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
def interpreted_ends(
    programs: Programs,
    times: WayTimes,
    seconds: Floats,
    num_messages: int,
    num_wires: int,
    rendezvous: bool,
) -> Floats:
    """End of every stage under either kind of sends, wires shared or not; -1 for a stage that
    waits for itself.
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
    # When each message was posted by its sender and its receiver, and has left; -1 before.
    sent, room = np.full(num_messages, -1.0), np.full(num_messages, -1.0)
    left = np.full(num_messages, -1.0)
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
    return now


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
