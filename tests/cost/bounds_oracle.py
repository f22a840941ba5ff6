"""A replay of its own for the tests of the bounds: stages work through their passes in turn.

Written apart from `hetplan.cost`: orders of passes by their own rules, times pass by pass. Eager
sends; `posting` makes every receive wait for the stage's previous pass and `extra` more. What one
stage sends to another leaves in the order in which it was made.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from hetplan.cost.bounds.closed_forms import (
    gpipe_bound_seconds,
    lower_bound_seconds,
)
from hetplan.cost.replay.kernel import replay_seconds

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PLAIN, DEEP, GPIPE, INTERLEAVED, ZERO_BUBBLE = range(5)
F, B, W = range(3)


@njit(cache=True)
def order_of(schedule: int, s: int, stages: int, chunks: int, m: int, depth: int) -> Ints:
    """[passes, 3]: kind, chunk, microbatch of stage s in its order."""
    total = m * chunks
    order = np.empty(((3 if schedule == ZERO_BUBBLE else 2) * total, 3), np.int64)
    groups = (m + stages - 1) // stages
    whole = groups * stages * chunks  # with the microbatches that would fill the last group
    ahead = np.empty((whole, 2), np.int64)  # forward passes
    at = 0
    for group in range(groups):
        for chunk in range(chunks):
            for i in range(group * stages, (group + 1) * stages):
                ahead[at, 0], ahead[at, 1] = chunk, i
                at += 1
    at = forwards = backwards = weights = 0
    while backwards < whole:
        if forwards < min(depth + backwards, whole):
            if ahead[forwards, 1] < m:
                order[at, 0], order[at, 1], order[at, 2] = F, ahead[forwards, 0], ahead[forwards, 1]
                at += 1
            forwards += 1
            continue
        backwards += 1
        if ahead[backwards - 1, 1] >= m:
            continue
        order[at, 0] = B
        order[at, 1] = chunks - 1 - ahead[backwards - 1, 0]
        order[at, 2] = ahead[backwards - 1, 1]
        at += 1
        if schedule == ZERO_BUBBLE and backwards > s:
            order[at, 0], order[at, 1], order[at, 2] = W, 0, weights
            weights += 1
            at += 1
    while at < order.shape[0]:
        order[at, 0], order[at, 1], order[at, 2] = W, 0, weights
        weights += 1
        at += 1
    return order


@njit(cache=True)
def step_of(
    schedule: int,
    m: int,
    depth: Ints,
    forward: Floats,
    backward: Floats,
    weight: Floats,
    sends: Floats,
    latency: Floats,
    extra: Floats,
    posting: bool,
    after: Floats,
) -> float:
    """Seconds until every stage is done and `after` it; -1 where stages wait for each other."""
    stages, chunks = forward.shape
    last = stages * chunks - 1
    orders = [order_of(schedule, s, stages, chunks, m, depth[s]) for s in range(stages)]
    made = np.full((2, last + 1, m), -1.0)  # when a pass ended
    left = np.full((2, last + 1, m), -1.0)  # when what it made had left its stage
    free = np.zeros((stages, stages))
    now = np.zeros(stages)
    at = np.zeros(stages, np.int64)
    moved = True
    while moved:
        moved = False
        for s in range(stages):
            while at[s] < orders[s].shape[0]:
                kind, chunk, i = orders[s][at[s]]
                k = chunk * stages + s
                start = now[s]
                if kind != W:
                    source = k - 1 if kind == F else k + 1
                    if 0 <= source <= last:
                        if made[kind, source, i] < 0:
                            break
                        if stages > 1:
                            hop = min(k, source)
                            if posting:
                                u = source % stages
                                ready = max(made[kind, source, i], now[s] + extra[hop])
                                free[u, s] = max(ready, free[u, s]) + sends[kind, hop]
                                left[kind, source, i] = free[u, s]
                            start = max(start, left[kind, source, i] + latency[hop])
                    elif source > last:
                        start = max(start, made[F, k, i])
                times = forward if kind == F else backward if kind == B else weight
                now[s] = start + times[s, chunk]
                if kind != W:
                    made[kind, k, i] = now[s]
                    goal = k + 1 if kind == F else k - 1
                    if 0 <= goal <= last and stages > 1 and not posting:
                        u = goal % stages
                        free[s, u] = max(now[s], free[s, u]) + sends[kind, min(k, goal)]
                        left[kind, k, i] = free[s, u]
                at[s] += 1
                moved = True
    step = 0.0
    for s in range(stages):
        if at[s] < orders[s].shape[0]:
            return -1.0
        step = max(step, now[s] + after[s])
    return step


@njit(cache=True)
def seed(value: int) -> None:
    """Where `draw` begins; compiled code has a generator of its own."""
    np.random.seed(value)


@njit(cache=True)
def draw(
    schedule: int, transfers: float, posting: bool
) -> tuple[int, Ints, Floats, Floats, Floats, Floats, Floats, Floats, Floats]:
    """A random uneven case with up to 8 stages and 40 microbatches.

    Microbatches; depth; forward, backward, weight [stages, chunks]; sends [2, hops], latency,
    extra; after.
    """
    stages = np.random.randint(1, 9)
    chunks = np.random.randint(2, 5) if schedule == INTERLEAVED else 1
    m = np.random.randint(1, 41)
    even = np.random.random() < 0.2
    shape = (stages, chunks)
    forward = np.full(shape, 0.7) if even else np.random.uniform(0.2, 1.0, shape)
    backward = forward * (2.0 if even else np.random.uniform(0.8, 2.6))
    if not even:
        backward *= np.random.uniform(0.8, 1.25, shape)
    weight = backward * np.random.uniform(0.2, 0.8) * (schedule == ZERO_BUBBLE)
    backward -= weight
    hops = stages * chunks - 1
    # Wires of one kind, or short except for one, as between two regions.
    scale = np.full(hops, transfers)
    if hops > 0 and np.random.random() < 0.3:
        scale *= 0.1
        scale[np.random.randint(0, hops)] = 3 * transfers
    sends = np.random.uniform(0.0, 1.0, (2, hops)) * scale
    latency = np.random.uniform(0.0, 1.0, hops) * scale
    extra = np.random.uniform(0.0, 1.0, hops) * scale
    after = np.random.uniform(0.0, 1.0, stages) * np.random.randint(0, 3) ** 4  # none, short, long
    depth = np.empty(stages, np.int64)
    deeper = np.random.randint(1, 4)
    for s in range(stages - 1, -1, -1):
        if schedule == GPIPE:
            depth[s] = m
        elif schedule == INTERLEAVED:
            depth[s] = 2 * (stages - 1 - s) + (chunks - 1) * stages + 1
        elif schedule == DEEP:
            depth[s] = deeper
            # A rendezvous schedule waits for itself where depths differ by more than one.
            deeper += np.random.randint(0, 2 if posting else 4)
        else:
            depth[s] = min(stages - s, m)
    return m, depth, forward, backward, weight, sends, latency, extra, after


def ratios(schedule: int, transfers: float, cases: int, first: int, posting: bool) -> Floats:
    """Step over bound of random cases.

    1F1B with `posting` is the package's compiled replay, and so is every second case of it without:
    its sends are waited for too.
    """
    seed(first)
    found = np.empty(cases)
    for case in range(cases):
        m, depth, forward, backward, weight, sends, latency, extra, after = draw(
            schedule, transfers, posting
        )
        plain = (forward[:, 0].copy(), backward[:, 0].copy(), *sends, latency, extra)
        if schedule == GPIPE:
            bound = gpipe_bound_seconds(*plain, m, after, posting)
        else:
            bound = lower_bound_seconds(*plain, depth, m, after, posting)
        if schedule in (PLAIN, DEEP) and (posting or case % 2 == 0):
            step = replay_seconds(*plain, depth, m, after, posting)
        else:
            step = step_of(
                schedule, m, depth, forward, backward, weight, sends, latency, extra, posting, after
            )
        found[case] = step / bound
    return found
