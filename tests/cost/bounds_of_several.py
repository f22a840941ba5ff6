"""Bounds that tests hold replays to: several pipelines that share wires, and a long step's growth.

Pipelines that share wires only delay each other: each one's bound holds for the step, and so does
the time in which a wire can serve the messages of all (`evaluation.cost.step_bounds`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from cost_fakes import Case

from evaluation.cost.step_bounds import (
    chain_seconds,
    endings_seconds,
    pipeline_bound_seconds,
    shared_wire_seconds,
    without_sharing,
)
from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.replay.times import PipelineTimes


def step_bound_seconds(
    pipelines: Sequence[PipelineTimes],
    *,
    rendezvous: bool,
    after: Sequence[Floats] | None = None,
) -> float:
    """Seconds in which these pipelines, with the wires that they share, cannot all be done.

    after: per pipeline and stage, seconds that follow its last pass; none where left out.
    """
    tails = [np.zeros(times.num_stages) for times in pipelines] if after is None else after
    hops = [without_sharing(times) for times in pipelines]
    best = max(
        pipeline_bound_seconds(times, rendezvous=rendezvous, after=tail)
        for times, tail in zip(pipelines, tails, strict=True)
    )
    wires = sorted({int(wire) for times in pipelines for wire in _wires(times) if wire >= 0})
    if not wires:
        return best
    crossings = [
        _crossings(times, sends, tail)
        for times, sends, tail in zip(pipelines, hops, tails, strict=True)
    ]
    every = np.concatenate(crossings, axis=1)
    for wire in wires:
        mine = every[:, every[0] == wire]
        bound = shared_wire_seconds(mine[1], mine[2], mine[3].astype(np.int64), mine[4])
        best = max(best, float(bound))
    return best


def _wires(times: PipelineTimes) -> Ints:
    return np.concatenate((times.link_forward, times.link_backward))


def _crossings(times: PipelineTimes, sends: tuple[Floats, Floats, Floats], after: Floats) -> Floats:
    """[5, 2 hops] wire, earliest, occupied, messages and remaining of `shared_wire_seconds`."""
    num_stages, m = times.num_stages, times.num_microbatches
    hops = len(times.link_forward)
    way = chain_seconds(times.forward, times.backward, *sends)
    sigma = float(way[0, -1] + times.backward[-1, -1] + way[1, -1])
    split = times.schedule == "zb-h1"
    ending = endings_seconds(
        way[1],
        times.weight if split else np.zeros_like(times.weight),
        np.arange(num_stages) * int(split),
        m,
        after,
    )
    crossings = np.empty((5, 2 * hops))
    crossings[0] = _wires(times)
    if num_stages == 1:
        crossings[0] = -1.0  # neighbours on one stage exchange nothing
    crossings[1] = np.concatenate((way[0, :-1], sigma - way[1, 1:]))
    crossings[2] = np.concatenate((times.shared_forward, times.shared_backward))
    crossings[3] = m
    below = ending[np.minimum(np.arange(hops), num_stages - 1)]
    crossings[4] = np.concatenate((sigma - way[0, :-1] + ending[-1], way[1, 1:] + below))
    crossings[4] -= crossings[2]
    return crossings


def steady_cycle_seconds(case: Case) -> float:
    """What one more microbatch costs a long 1F1B step with eager sends.

    The largest of a stage's passes, a send, and a round trip from stage s to a stage j > s and back
    over the W_s - W_j + 1 microbatches that it gets further: in the long run the step grows by
    exactly that, because a simple circuit of the graph of events crosses from forward to backward
    passes once only.
    """
    forward, backward, send_forward, send_backward, latency, _, warmup = case.arguments()[:7]
    hop = np.concatenate(([0.0], send_forward + latency))
    back = np.concatenate((send_backward + latency, [0.0]))
    cycle = max(float((forward + backward).max()), *send_forward, *send_backward, 0.0)
    for s in range(len(forward)):
        circuit = forward[s] + backward[s] + back[s]
        for j in range(s + 1, len(forward)):
            whole = circuit + hop[j] + forward[j] + backward[j]
            cycle = max(cycle, float(whole) / (warmup[s] - warmup[j] + 1))
            circuit += hop[j] + forward[j] + back[j] + backward[j]
    return cycle
