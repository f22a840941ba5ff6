"""The lower bounds against the replays that they bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from bounds_of_several import steady_cycle_seconds
from bounds_oracle import DEEP, GPIPE, INTERLEAVED, PLAIN, ZERO_BUBBLE, order_of, ratios
from cost_fakes import Case, random_case

from hetplan.cost.bounds.closed_forms import (
    downstream_room_seconds,
    gpipe_bound_seconds,
    interval_room_seconds,
    interval_seconds,
    lower_bound_seconds,
    stage_bounds_seconds,
    wait_once_seconds,
)
from hetplan.cost.replay.kernel import replay_seconds
from hetplan.cost.replay.step import step_ends
from hetplan.cost.replay.times import PipelineTimes
from hetplan.cost.schedules import passes, warmup_depths

NAMES = {GPIPE: "gpipe", INTERLEAVED: "interleaved-1f1b", PLAIN: "1f1b", ZERO_BUBBLE: "zb-h1"}
KINDS = "FBW"


def bound_of(case: Case, rendezvous: bool) -> float:
    return lower_bound_seconds(*case.arguments(), rendezvous)


@pytest.mark.parametrize(
    ("schedule", "mean"),
    # Measured: 0.5, 2.2 and 0.03 %. A bound that had lost a part would be far off.
    [(PLAIN, 0.007), (DEEP, 0.026), (GPIPE, 0.001)],
)
def test_never_above_a_replay(schedule: int, mean: float) -> None:
    posting = (False, True)
    found = np.concatenate(
        [
            ratios(schedule, transfers, 7000 // len(posting), 11, held)
            for transfers in (0.0, 0.1, 1.0)
            for held in posting
        ]
    )
    assert len(found) >= 20_000
    assert found.min() > 1 - 1e-9
    assert found.mean() < 1 + mean


def test_orders_of_the_oracle_are_those_of_the_schedules() -> None:
    for schedule, name in NAMES.items():
        for stages in (1, 2, 3, 5):
            for m in (1, 2, 5, 7, 10):
                for chunks in (2, 3) if schedule == INTERLEAVED else (1,):
                    for s in range(stages):
                        depth = warmup_depths("1f1b", stages, m)[s]
                        if schedule == GPIPE:
                            depth = m
                        elif schedule == INTERLEAVED:
                            depth = 2 * (stages - 1 - s) + (chunks - 1) * stages + 1
                        order = order_of(schedule, s, stages, chunks, m, depth)
                        wanted = passes(
                            name,
                            stage=s,
                            num_stages=stages,
                            num_microbatches=m,
                            virtual_stages=chunks,
                        )
                        assert [(KINDS[kind], c, i) for kind, c, i in order] == [
                            (one.kind, one.chunk, one.microbatch) for one in wanted
                        ]


def test_each_of_the_five_is_the_best_one_somewhere() -> None:
    rng = np.random.default_rng(12)
    best = set()
    for transfers in (0.0, 0.1, 2.0) * 300:
        bounds = stage_bounds_seconds(*random_case(rng, transfers=transfers).arguments(), False)
        best.add(int(np.argmax(bounds.max(axis=0))))
    assert best == {0, 1, 2, 3, 4}


def test_close_to_the_replay_where_nothing_is_transferred() -> None:
    # Measured on such cases: 0.14 % on average.
    rng = np.random.default_rng(13)
    found = []
    for _ in range(1000):
        case = random_case(rng, transfers=0.0)
        case = replace(case, after=np.zeros_like(case.after))
        found.append(replay_seconds(*case.arguments(), False) / bound_of(case, False))
    assert np.mean(found) < 1.005


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


def bound_of_pipeline(times: PipelineTimes, rendezvous: bool) -> float:
    """By the bound of its schedule, as if no other message used its wires."""
    arguments = (
        times.forward[:, 0], times.backward[:, 0], times.send_forward, times.send_backward,
        times.wire_latency, times.rendezvous_extra,
    )  # fmt: skip
    m, after = times.num_microbatches, np.zeros(times.num_stages)
    if times.schedule == "gpipe":
        return float(gpipe_bound_seconds(*arguments, m, after, rendezvous))
    return float(lower_bound_seconds(*arguments, np.array(times.warmup), m, after, rendezvous))


def test_exact_for_gpipe() -> None:
    rng = np.random.default_rng(14)
    for _ in range(200):
        times = _pipeline("gpipe", int(rng.integers(1, 6)), int(rng.integers(1, 9)), rng)
        (ends,) = step_ends([times], rendezvous=False)
        assert bound_of_pipeline(times, False) == pytest.approx(float(ends.max()), rel=1e-12)


def test_a_long_step_grows_by_the_steady_cycle() -> None:
    rng = np.random.default_rng(15)
    for index in range(60):
        case = random_case(
            rng, transfers=(0.0, 0.3, 2.0)[index % 3], most_stages=6, plain=index % 2 == 0
        )
        cycle = steady_cycle_seconds(case)
        steps = [
            replay_seconds(*replace(case, num_microbatches=m).arguments(), False)
            for m in (1200, 2400)
        ]
        assert steps[1] - steps[0] == pytest.approx(1200 * cycle, rel=2e-3)


def test_shared_wires_several_pipelines_and_rendezvous_only_delay() -> None:
    rng = np.random.default_rng(16)
    for _ in range(40):
        shapes = [
            (str(rng.choice(["1f1b", "gpipe"])), int(rng.integers(1, 6)), int(rng.integers(1, 16)))
            for _ in range(int(rng.integers(1, 4)))
        ]
        for _ in range(10):
            wires, transfers = int(rng.integers(0, 3)), float(rng.choice([0.0, 0.1, 1.0]))
            pipelines = [
                _pipeline(name, stages, m, rng, transfers=transfers, wires=wires)
                for name, stages, m in shapes
            ]
            for rendezvous in (False, True):
                found = step_ends(pipelines, rendezvous=rendezvous)
                for times, ends in zip(pipelines, found, strict=True):
                    bound = bound_of_pipeline(times, rendezvous)
                    assert bound <= float(ends.max()) * (1 + 1e-9)


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


def _pipeline(
    schedule: str,
    stages: int,
    m: int,
    rng: np.random.Generator,
    *,
    transfers: float = 0.5,
    wires: int = 0,
) -> PipelineTimes:
    shape, hops = (stages, 1), stages - 1
    forward = rng.uniform(0.2, 1.0, shape)
    backward = forward * rng.uniform(0.8, 2.6, shape)
    scale = transfers * rng.choice([0.1, 1.0, 3.0], hops, p=[0.7, 0.2, 0.1])
    send_forward, send_backward, latency, extra, shared, shared_back = (
        rng.uniform(0.0, 1.0, (6, hops)) * scale
    )
    return PipelineTimes(
        schedule=schedule,
        num_microbatches=m,
        warmup=warmup_depths(schedule, stages, m),
        forward=forward,
        backward=backward,
        weight=np.zeros(shape),
        send_forward=send_forward,
        send_backward=send_backward,
        wire_latency=latency,
        rendezvous_extra=extra,
        link_forward=rng.integers(-1, wires, hops) if wires else np.full(hops, -1),
        link_backward=rng.integers(-1, wires, hops) if wires else np.full(hops, -1),
        shared_forward=shared,
        shared_backward=shared_back,
    )
