"""The lower bounds against the replays that they bound: one-sided, and close."""

from __future__ import annotations

import numpy as np
import pytest
from replay_cases import random_plain
from whole_bounds import stage_bounds_seconds

from hetplan.cost.bounds import (
    busy_seconds,
    downstream_room_seconds,
    interval_room_seconds,
    interval_seconds,
    wait_once_seconds,
)
from hetplan.cost.replay.kernel import StageTimes, replay_seconds


def test_never_above_a_replay_and_each_of_the_five_is_the_best_one_somewhere() -> None:
    rng = np.random.default_rng(12)
    ratios, best = [], set()
    for index in range(1500):
        times, after = random_plain(
            rng, transfers=(0.0, 0.1, 2.0)[index % 3], deeper=index % 2 == 1
        )
        for rendezvous in (False, True):
            bounds = stage_bounds_seconds(times, after, rendezvous)
            step = replay_seconds(times, after, rendezvous)
            assert bounds.max() <= step * (1 + 1e-9)
            ratios.append(step / bounds.max())
            best.add(int(np.argmax(bounds.max(axis=0))))
        upstream = 0.0
        for s, own in enumerate(times.forward + times.backward):
            assert busy_seconds(upstream, own, times.num_microbatches) <= step * (1 + 1e-9), s
            upstream += own
    # A bound that had lost a part would be far off.
    assert np.mean(ratios) < 1.03
    assert best == {0, 1, 2, 3, 4}


def test_exact_for_even_stages() -> None:
    for stages, m in ((1, 4), (4, 4), (5, 32)):
        none = np.zeros(stages - 1)
        times = StageTimes(
            np.full(stages, 1.0), np.full(stages, 2.0), *(none,) * 4, np.arange(stages, 0, -1), m
        )
        bounds = stage_bounds_seconds(times, np.full(stages, 0.5), False)
        assert bounds.max() == (m + stages - 1) * 3.0 + 0.5


def test_the_parts_that_the_search_uses_are_those_of_the_bound() -> None:
    rng = np.random.default_rng(19)
    for _ in range(300):
        case, _ = random_plain(rng, transfers=1.0)
        m, last = case.num_microbatches, len(case.forward) - 1
        bounds = stage_bounds_seconds(case, np.zeros(len(case.forward)), False)
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
