"""The bound of rows under split backward passes, against the replay of every cut."""

from __future__ import annotations

from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from random_cases import seeds

from hetplan.cost.replay.ends import step_ends
from hetplan.cost.replay.times import PipelineTimes
from hetplan.plans.v_schedules import is_v
from hetplan.search.split_backward import row_bound


def cuts(units: int, slots: int, chunks: int) -> list[tuple[int, ...]]:
    inner = combinations(range(1, units - slots * (chunks - 1)), slots - 1)
    edges = ((0, *each, units - slots * (chunks - 1)) for each in inner)
    return [tuple(b - a + chunks - 1 for a, b in pairwise(each)) for each in edges]


def step(
    schedule: str, cut: tuple[int, ...], m: int, forward: Any, backward: Any, weight: Any
) -> float:
    """Of stages without transfers; chunks as even as they can be, the first one more."""
    chunks = 2 if is_v(schedule) else 1
    units = np.array([[n // chunks + (c < n % chunks) for c in range(chunks)] for n in cut])
    hops = np.zeros(len(cut) * chunks - 1)
    alone = np.full(len(hops), -1, dtype=np.int64)
    times = PipelineTimes(
        schedule=schedule, num_microbatches=m, warmup=(1,) * len(cut),
        forward=units * forward[:, None], backward=units * (backward - weight)[:, None],
        weight=units * weight[:, None], send_forward=hops, send_backward=hops, wire_latency=hops,
        rendezvous_extra=hops, link_forward=alone, link_backward=alone, shared_forward=hops,
        shared_backward=hops,
    )  # fmt: skip
    return float(step_ends((times,), rendezvous=False)[0].max())


@pytest.mark.parametrize("seed", seeds(8))
@pytest.mark.parametrize("schedule", ["zb-h1", "zbv", "dualpipev"])
def test_no_cut_is_below_the_bound_of_its_row(schedule: str, seed: int) -> None:
    rng, near = np.random.default_rng(seed), []
    for _ in range(12):
        slots, chunks = int(rng.integers(2, 5)), 2 if is_v(schedule) else 1
        units = int(rng.integers(slots * chunks, slots * chunks + 4))
        m = int(rng.integers(1, 12)) + (2 * slots if schedule == "dualpipev" else 0)
        forward = rng.uniform(0.5, 1.0 + 1e-9, slots) if seed % 2 else np.ones(slots)
        backward = forward * rng.uniform(1.6, 2.4)
        weight = backward * rng.uniform(0.2, 0.5)
        table: Any = SimpleNamespace(
            forward=forward[None], backward=backward[None], num_microbatches=m, num_layers=units
        )
        bound = row_bound(table, schedule, range(slots))
        steps = [
            step(schedule, each, m, forward, backward, weight)
            for each in cuts(units, slots, chunks)
        ]
        assert bound <= min(steps) * (1 + 1e-9), (slots, units, m)
        near.append(bound / min(steps))
    assert np.mean(near) > 0.75
