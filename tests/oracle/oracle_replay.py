"""When does every stage of a pipeline leave it? A replay of the oracle's own.

A stage's program is a list of small operations: run a pass, post a send, post a receive, wait until
a message has left or has arrived. All trainers are written in these words (`plain_program`,
`batched_programs`, `early_programs`, `eager_program`) and one interpreter runs them. A message may
start when it was posted by its sender and, with rendezvous, `extra` after its receiver posted;
messages of one stage to another one leave one after the other in the order of their posts, each
holding the way for `send` seconds, and arrive `latency` later.

Virtual stage k = chunk * P + stage; hop k leads from k to k + 1, activations down, gradients up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from numba import njit

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

RUN, SEND, RECEIVE, LEFT, ARRIVED = range(5)
DOWN, UP = 0, 1

Step = tuple[int, int, int, int]
"""(RUN, direction of its result, chunk, microbatch) or (what, direction, hop, microbatch)."""


@dataclass(frozen=True)
class Program:
    """All stages' operations as arrays."""

    steps: Ints
    """[operations, 2]: what, and the message or the column of `seconds`."""
    first: Ints
    """[P + 1] where each stage's operations begin."""
    lane_of: Ints
    """[messages]"""
    lanes: Ints
    """Messages in the order in which they leave, lane by lane."""
    lane_first: Ints
    hop_of: Ints
    """[messages] 2 * hop + direction."""


def eager_order(stages: int, m: int, chunks: int, s: int, depth: int) -> list[tuple[int, int, int]]:
    """(direction, chunk, microbatch) of a stage's passes: DOWN is forward."""
    if chunks == 1:
        forward, back = [(0, i) for i in range(m)], [(0, i) for i in range(m)]
        first = min(depth, m)
    else:
        # Groups of P microbatches take turns on the chunks; those that are not there are left out.
        full = -(-m // stages) * stages
        forward = [
            (c, g + i) for g in range(0, full, stages) for c in range(chunks) for i in range(stages)
        ]
        back = [(chunks - 1 - c, i) for c, i in forward]
        first = min(2 * (stages - s - 1) + (chunks - 1) * stages + 1, len(forward))
    order = [(DOWN, *one) for one in forward[:first]]
    for at, one in enumerate(back):
        order.append((UP, *one))
        order += [(DOWN, *each) for each in forward[first + at : first + at + 1]]
    return [one for one in order if one[2] < m]


def _source(stages: int, chunks: int, s: int, one: tuple[int, int, int]) -> Step | None:
    """The message that a pass needs, as (_, direction, hop, microbatch)."""
    way, chunk, i = one
    k = chunk * stages + s
    if stages == 1:
        return None
    if way == DOWN:
        return (0, DOWN, k - 1, i) if k > 0 else None
    return (0, UP, k, i) if k < stages * chunks - 1 else None


def _result(stages: int, chunks: int, s: int, one: tuple[int, int, int]) -> Step | None:
    """The message that a pass makes."""
    way, chunk, i = one
    k = chunk * stages + s
    if stages == 1:
        return None
    if way == DOWN:
        return (0, DOWN, k, i) if k < stages * chunks - 1 else None
    return (0, UP, k - 1, i) if k > 0 else None


def _with(what: int, *messages: Step | None) -> Iterator[Step]:
    for message in messages:
        if message is not None:
            yield (what, *message[1:])


def _together(sent: list[Step | None], received: list[Step | None]) -> Iterator[Step]:
    """Everything posted, then everything waited for."""
    yield from _with(SEND, *sent)
    yield from _with(RECEIVE, *received)
    yield from _with(LEFT, *sent)
    yield from _with(ARRIVED, *received)


def eager_program(stages: int, m: int, chunks: int, s: int, depth: int) -> Iterator[Step]:
    """Sends cost nothing, receives are always posted."""
    for one in eager_order(stages, m, chunks, s, depth):
        yield from _with(ARRIVED, _source(stages, chunks, s, one))
        yield (RUN, *one)
        yield from _with(SEND, _result(stages, chunks, s, one))


def plain_program(stages: int, m: int, s: int, depth: int) -> Iterator[Step]:
    """1F1B with rendezvous sends.

    Warm-up and cool-down: the receive is posted before the pass; the send after it, and waited for
    after the next pass. Between: what was computed goes out and what is needed comes in together,
    and both are waited for.
    """
    order = eager_order(stages, m, 1, s, depth)
    depth = min(depth, m)
    alone = {*range(depth), *range(2 * m - depth + 1, 2 * m)}
    open_send: Step | None = None
    for at, one in enumerate(order):
        source, result = _source(stages, 1, s, one), _result(stages, 1, s, one)
        if at in alone:
            yield from _together([], [source])
        else:
            yield from _together([open_send], [source])
            open_send = None
        yield (RUN, *one)
        if at in alone:
            yield from _with(LEFT, open_send)
        open_send = result
        # A pass whose successor is not in the steady state posts its send at once.
        if at + 1 in alone or at + 1 == 2 * m:
            yield from _with(SEND, open_send)
    yield from _with(LEFT, open_send)


def batched_programs(stages: int, m: int, chunks: int) -> list[list[Step]]:
    """Megatron-LM's interleaving: everything is exchanged after a pass, or a pair, and waited for.

    What goes around the end of the pipeline is received when it was sent.
    """
    orders = [eager_order(stages, m, chunks, s, 0) for s in range(stages)]
    ways = [[[one for one in order if one[0] == way] for order in orders] for way in (DOWN, UP)]
    total = m * chunks

    def comes(way: int, s: int, k: int) -> Step | None:
        """What is received after pass k of this way (-1: before the first one)."""
        end = 0 if way == DOWN else stages - 1  # whose inputs come around
        if s != end:
            return _source(stages, chunks, s, ways[way][s][k + 1]) if k + 1 < total else None
        ago = k - (stages - 1)
        other = stages - 1 - end
        return _result(stages, chunks, other, ways[way][other][ago]) if ago >= 0 else None

    found = []
    for s, order in enumerate(orders):
        fore, back = ways[DOWN][s], ways[UP][s]
        first = next(at for at, one in enumerate(order) if one[0] == UP)
        # Where backward passes begin before all forward ones are done, a pair is (F, B).
        warm = first - 1 if first < total else total
        steps: list[Step] = []
        if s > 0:
            steps += _together([], [comes(DOWN, s, -1)])
        for k in range(warm):
            steps.append((RUN, *fore[k]))
            into = [comes(DOWN, s, k)]
            if k == warm - 1 and s < stages - 1:
                into.append(comes(UP, s, -1))
            steps += _together([_result(stages, chunks, s, fore[k])], into)
        for k in range(total - warm):
            pair = (fore[warm + k], back[k])
            steps += [(RUN, *one) for one in pair]
            steps += _together(
                [_result(stages, chunks, s, one) for one in pair],
                [comes(DOWN, s, warm + k), comes(UP, s, k)],
            )
        for k in range(total - warm, total):
            steps.append((RUN, *back[k]))
            steps += _together([_result(stages, chunks, s, back[k])], [comes(UP, s, k)])
        found.append(steps)
    return found


def early_programs(stages: int, m: int, chunks: int) -> list[list[Step]]:
    """torch's runtime of several chunks: receives posted when a round of turns has made the input,
    sends waited for at the end."""
    orders = [eager_order(stages, m, chunks, s, 0) for s in range(stages)]
    found: list[list[Step]] = [[] for _ in orders]
    sent: list[list[Step]] = [[] for _ in orders]
    there: set[Step] = set()
    done = [0] * stages
    while any(at < len(order) for at, order in zip(done, orders, strict=True)):
        for s, order in enumerate(orders):
            if done[s] == len(order):
                continue
            one = order[done[s]]
            source = _source(stages, chunks, s, one)
            if source is not None and source not in there:
                continue
            done[s] += 1
            found[s] += [*_with(ARRIVED, source), (RUN, *one)]
            result = _result(stages, chunks, s, one)
            if result is not None:
                goal = (s + (1 if one[0] == DOWN else -1)) % stages
                found[s] += _with(SEND, result)
                found[goal] += _with(RECEIVE, result)
                there.add(result)
                sent[s].append(result)
    for s in range(stages):
        found[s] += _with(LEFT, *sent[s])
    return found


@lru_cache(maxsize=20000)
def program(
    stages: int, m: int, chunks: int, depths: tuple[int, ...], rendezvous: bool, batched: bool
) -> Program:
    """The program of all stages; `depths` counts for one chunk only."""
    if not rendezvous or stages == 1:
        every = [[*eager_program(stages, m, chunks, s, depths[s])] for s in range(stages)]
    elif chunks == 1:
        every = [[*plain_program(stages, m, s, depths[s])] for s in range(stages)]
    elif batched and m % stages == 0:
        every = batched_programs(stages, m, chunks)
    else:
        every = early_programs(stages, m, chunks)
    hops = stages * chunks - 1
    lanes: dict[tuple[int, int], list[int]] = {}
    rows, first = [], [0]
    for s, steps in enumerate(every):
        for what, way, at, i in steps:
            if what == RUN:
                rows.append((RUN, way * chunks + at))
                continue
            message = (at * 2 + way) * m + i
            rows.append((what, message))
            if what == SEND:
                lanes.setdefault((s, (s + (1 if way == DOWN else -1)) % stages), []).append(message)
        first.append(len(rows))
    lane_of = np.zeros(max(1, 2 * hops * m), dtype=np.int64)
    for number, each in enumerate(lanes.values()):
        lane_of[each] = number
    return Program(
        np.array(rows, dtype=np.int64).reshape(-1, 2),
        np.array(first, dtype=np.int64),
        lane_of,
        np.array([one for each in lanes.values() for one in each] or [0], dtype=np.int64),
        np.cumsum([0, *map(len, lanes.values())], dtype=np.int64),
        np.arange(max(1, 2 * hops * m), dtype=np.int64) // m,
    )


@njit(cache=True)
def interpret(
    steps: Ints,
    first: Ints,
    lane_of: Ints,
    lanes: Ints,
    lane_first: Ints,
    hop_of: Ints,
    seconds: Floats,
    send: Floats,
    latency: Floats,
    extra: Floats,
    rendezvous: bool,
    ends: Floats,
) -> bool:
    """Write when every stage ends; False where stages wait for each other for ever.

    seconds: [P, 2 * chunks], forward passes of all chunks first. send: [2 * hops], by hop and
    direction; latency and extra: [hops].
    """
    stages, messages = len(first) - 1, len(lane_of)
    at = first[:-1].copy()
    sent, room, left = np.full((3, messages), -1.0)
    lane_at, lane_free = lane_first[:-1].copy(), np.zeros(max(1, len(lane_first) - 1))
    ends[:] = 0.0
    moved = True
    while moved:
        moved = False
        for s in range(stages):
            now = ends[s]
            while at[s] < first[s + 1]:
                what, which = steps[at[s], 0], steps[at[s], 1]
                if what == RUN:
                    now += seconds[s, which]
                elif what == SEND:
                    sent[which] = now
                elif what == RECEIVE:
                    room[which] = now
                else:
                    lane = lane_of[which]
                    while left[which] < 0 and lane_at[lane] < lane_first[lane + 1]:
                        one = lanes[lane_at[lane]]
                        if sent[one] < 0 or (rendezvous and room[one] < 0):
                            break
                        hop = hop_of[one]
                        start = max(sent[one], lane_free[lane])
                        if rendezvous:
                            start = max(start, room[one] + extra[hop // 2])
                        left[one] = lane_free[lane] = start + send[hop]
                        lane_at[lane] += 1
                    if left[which] < 0:
                        break
                    until = left[which]
                    if what == ARRIVED:
                        until += latency[hop_of[which] // 2]
                    now = max(now, until)
                at[s] += 1
                moved = True
            ends[s] = now
    return bool((at == first[1:]).all())


def pipeline_ends(
    run: Program, seconds: Floats, send: Floats, latency: Floats, extra: Floats, rendezvous: bool
) -> Floats | None:
    """When every stage leaves the pipeline; None where it never does."""
    ends = np.zeros(len(run.first) - 1)
    ok = interpret(
        run.steps,
        run.first,
        run.lane_of,
        run.lanes,
        run.lane_first,
        run.hop_of,
        seconds,
        send,
        latency,
        extra,
        rendezvous,
        ends,
    )
    return ends if ok else None
