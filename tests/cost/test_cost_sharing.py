"""Max-min shares: what defines them, laws, and a linear program as the oracle."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from counted_steps import counted_steps
from hypothesis import given, settings
from hypothesis import strategies as st
from network_clusters import clusters, two_regions
from scipy.optimize import linprog

from hetplan.cluster.catalogue import load_catalogue
from hetplan.cluster.load import load_cluster
from hetplan.cost.network.group_shares import Paths, fill, group_share, group_shares

steady = settings(derandomize=True, deadline=None, max_examples=200)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[int]], list[float]]:
    """(segments that each transfer crosses, capacities of the segments)."""
    count = draw(st.integers(1, 6))
    capacity = st.sampled_from([1.0, 2.0, 3.0, 7.5, 10.0])
    crossed = st.lists(st.integers(0, count - 1), min_size=1, max_size=3, unique=True)
    return (
        draw(st.lists(crossed, min_size=1, max_size=8)),
        draw(st.lists(capacity, min_size=count, max_size=count)),
    )


def rates_of(crossed: Sequence[Sequence[int]], capacities: Sequence[float]) -> tuple[float, ...]:
    """What `fill` gives to transfers that cross these segments, by segment number."""
    found = Paths(
        flow=np.repeat(np.arange(len(crossed)), [len(each) for each in crossed]),
        segment=np.array([segment for each in crossed for segment in each], dtype=np.int64),
        numbers=np.arange(len(capacities)),
        capacities=np.array(capacities, dtype=np.float64),
        num_flows=len(crossed),
    )
    return tuple(fill(found).tolist())


def water_filling(crossed: list[list[int]], capacities: list[float]) -> list[float]:
    """Largest common level by linear programs; who cannot rise above it is fixed there; repeat."""
    flows = range(len(crossed))
    fixed: dict[int, float] = {}

    def most(objective: list[float], level: float | None) -> float:
        """Variables: rates, then the level. Maximises the objective."""
        rows = [[float(s in each) for each in crossed] + [0.0] for s in range(len(capacities))]
        above = [[-float(f == flow) for f in flows] + [1.0] for flow in flows if flow not in fixed]
        bounds = [(fixed.get(flow, 0.0), fixed.get(flow)) for flow in flows]
        bounds.append((0.0, None) if level is None else (level, level))
        limits = [*capacities, *[0.0] * len(above)]
        found = linprog([-x for x in objective], A_ub=rows + above, b_ub=limits, bounds=bounds)
        assert found.status == 0
        return float(-found.fun)

    while len(fixed) < len(crossed):
        level = most([0.0 for _ in flows] + [1.0], None)
        for flow in set(flows) - set(fixed):
            one = [float(each == flow) for each in flows] + [0.0]
            if most(one, level * (1 - 1e-9)) <= level + 1e-6:
                fixed[flow] = level
    return [fixed[flow] for flow in flows]


@given(case=cases(), factor=st.floats(1e-3, 1e12), seed=st.integers(0, 99))
@settings(steady, max_examples=40)
def test_shares_are_those_of_linear_programs_scale_and_know_no_order(case, factor, seed):
    crossed, capacities = case
    rates = rates_of(crossed, capacities)
    assert rates == pytest.approx(water_filling(crossed, capacities), abs=1e-5)
    scaled = rates_of(crossed, [c * factor for c in capacities])
    assert scaled == pytest.approx([rate * factor for rate in rates], rel=1e-9)
    order = list(range(len(crossed)))
    random.Random(seed).shuffle(order)
    mixed = rates_of([crossed[n][::-1] for n in order], capacities)
    assert mixed == pytest.approx([rates[n] for n in order], rel=1e-9)


def test_groups_over_one_line_share_it():
    cluster = two_regions()
    # One group gets 10 GB/s, its port; four would need 40 of the line's 20 GB/s.
    groups = [(n, n + 16) for n in range(4)]
    assert group_share(cluster, groups[:1]) == 1.0
    assert group_share(cluster, groups[:2]) == 1.0
    found = group_shares(cluster, groups)
    assert [each.bytes_per_second for each in found] == pytest.approx([5e9] * 4)
    assert [each.share for each in found] == pytest.approx([0.5] * 4)
    # Groups of another island of the region meet on the same line; a wider line carries more.
    assert group_share(cluster, [*groups[:2], (8, 20), (9, 21)]) == pytest.approx(0.5)
    assert group_share(two_regions(line=4e10), groups) == 1.0


@given(cluster=clusters(), seed=st.integers(0, 10**6), count=st.integers(1, 6))
@settings(steady, max_examples=60)
def test_more_groups_never_help_the_slowest(cluster, seed, count):
    rng = random.Random(seed)
    devices = range(cluster.num_devices)
    groups = [rng.sample(devices, rng.randint(1, min(6, len(devices)))) for _ in range(count)]
    found = group_shares(cluster, groups)
    assert all(0 < each.share <= 1 for each in found)
    alone = [group_shares(cluster, [each])[0] for each in groups]
    for one, together in zip(alone, found, strict=True):
        assert one.bytes_per_second == pytest.approx(together.alone_bytes_per_second)
    slowest = min(each.bytes_per_second for each in found)
    fewer = group_shares(cluster, groups[:-1])
    assert slowest <= min((e.bytes_per_second for e in fewer), default=math.inf) * (1 + 1e-9)


def big_cluster():
    configs = Path(__file__).resolve().parents[2] / "configs" / "clusters"
    cluster = load_cluster(configs / "three-regions.yaml", load_catalogue())
    large = replace(cluster.islands[0], nodes=12_500, node_names=(), nodes_out=())
    return replace(cluster, islands=(large, *cluster.islands[1:]))


def test_ten_thousand_groups_of_100_000_devices_take_a_few_steps_each():
    cluster = big_cluster()
    rng = random.Random(1)
    mixed = list(range(100_000))
    rng.shuffle(mixed)
    placements = [
        [tuple(range(n % 8 + n // 8 * 80, n % 8 + n // 8 * 80 + 80, 8)) for n in range(10_000)],
        [tuple(range(10 * n, 10 * n + 10)) for n in range(10_000)],
        [tuple(mixed[10 * n : 10 * n + 10]) for n in range(10_000)],
    ]
    for groups in placements:
        found, steps = counted_steps(partial(group_shares, cluster, groups))
        assert len(found) == 10_000
        # Each against all others would take ten thousand each.
        assert steps < 10_000 * 100
    # On one rail groups do not meet; ten in a row meet where two groups have parts of one node.
    assert group_share(cluster, placements[0]) == 1.0
    halves = [each.share for each in group_shares(cluster, placements[1])]
    assert set(np.round(halves, 6)) <= {0.5, 1.0}
