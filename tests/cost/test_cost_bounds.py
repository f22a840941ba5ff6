"""The lower bounds against the replays that they bound: one-sided, and close."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cost_fakes import random_case
from whole_bounds import lower_bound_seconds, stage_bounds_seconds

from hetplan.cost.bounds import (
    busy_seconds,
    downstream_room_seconds,
    interval_room_seconds,
    interval_seconds,
    wait_once_seconds,
)
from hetplan.cost.replay.kernel import replay_seconds


def test_never_above_a_replay_and_each_of_the_five_is_the_best_one_somewhere() -> None:
    rng = np.random.default_rng(12)
    ratios, best = [], set()
    for index in range(1500):
        case = random_case(rng, transfers=(0.0, 0.1, 2.0)[index % 3], plain=index % 2 == 0)
        for rendezvous in (False, True):
            bounds = stage_bounds_seconds(*case.arguments(), rendezvous)
            bound = lower_bound_seconds(*case.arguments(), rendezvous)
            assert bound == bounds.max()
            step = replay_seconds(*case.arguments(), rendezvous)
            assert bound <= step * (1 + 1e-9)
            ratios.append(step / bound)
            best.add(int(np.argmax(bounds.max(axis=0))))
        upstream = 0.0
        for s, (forward, backward) in enumerate(zip(case.forward, case.backward, strict=True)):
            own = busy_seconds(upstream, forward + backward, case.num_microbatches)
            assert own <= step * (1 + 1e-9), s
            upstream += forward + backward
    # A bound that had lost a part would be far off.
    assert np.mean(ratios) < 1.03
    assert best == {0, 1, 2, 3, 4}


def test_exact_for_even_stages() -> None:
    for stages, m in ((1, 4), (4, 4), (5, 32)):
        none = np.zeros(stages - 1)
        bound = lower_bound_seconds(
            np.full(stages, 1.0),
            np.full(stages, 2.0),
            *(none,) * 4,
            np.arange(stages, 0, -1),
            m,
            np.full(stages, 0.5),
            False,
        )
        assert bound == (m + stages - 1) * 3.0 + 0.5


def test_the_parts_that_the_search_uses_are_those_of_the_bound() -> None:
    rng = np.random.default_rng(19)
    for _ in range(300):
        case = random_case(rng, transfers=1.0)
        case = replace(case, after=np.zeros_like(case.after))
        m, last = case.num_microbatches, len(case.forward) - 1
        bounds = stage_bounds_seconds(*case.arguments(), False)
        wires = np.append(case.send_forward + case.wire_latency, 0.0)
        wires_back = np.append(case.send_backward + case.wire_latency, 0.0)
        own = case.forward + case.backward
        sigma = own.sum() + wires.sum() + wires_back.sum()
        for s in range(last + 1):
            f, b, w = case.forward[s], case.backward[s], min(int(case.warmup[s]), m)
            waits = wait_once_seconds(f, b, m, w)
            assert sigma + waits == pytest.approx(bounds[s, 1])
            assert waits == pytest.approx(max((m - w) * f + (m - 1) * b, (m - 1) * f + (m - w) * b))
            downstream = own[s + 1 :].sum() + wires[s:].sum() + wires_back[s + 1 :].sum()
            trip = downstream + b + wires_back[s] + f
            trips = [(m - 1 - k * w) * (f + b) + k * trip for k in range(1, 1 + (m - 1) // w)]
            assert sigma + max(trips, default=-np.inf) == pytest.approx(bounds[s, 2])
            if trips:
                room = downstream_room_seconds(max(trips), f, b, b + wires_back[s], m, w)
                assert room == pytest.approx(downstream)
            if s < last:
                circuit = f + b + wires[s] + wires_back[s] + own[s + 1]
                turning = min(int(case.warmup[s + 1]), m)
                interval = interval_seconds(circuit, f, b, m, w, turning)
                assert sigma + interval <= bounds[s, 3] * (1 + 1e-12)
                limit = bounds[s, 3] - sigma
                room = interval_room_seconds(limit, circuit, f, b, b + wires_back[s], m, w, turning)
                assert room >= downstream * (1 - 1e-9)
