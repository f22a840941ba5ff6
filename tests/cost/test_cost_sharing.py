"""Max-min shares: what defines them, laws, and a linear program as the oracle."""

import itertools
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
from hetplan.cost.network.group_shares import (
    ActiveGroup,
    Pattern,
    StepPhase,
    active_in,
    group_share,
    group_shares,
    phase_shares,
)
from hetplan.cost.network.max_min import Flow, fill, shares
from hetplan.cost.network.paths import Paths
from hetplan.cost.network.segments import TrafficClass, capacity, segments
from hetplan.errors import InputError

steady = settings(derandomize=True, deadline=None, max_examples=200)
DP = TrafficClass.DATA_PARALLEL


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[int]], list[float], list[float], list[float]]:
    """(crossed, capacities, demands, weights); every transfer crosses something or is limited."""
    count = draw(st.integers(1, 6))
    capacities = draw(
        st.lists(st.sampled_from([1.0, 2.0, 3.0, 7.5, 10.0]), min_size=count, max_size=count)
    )
    flows = draw(st.integers(1, 8))
    crossed = [
        draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=3, unique=True))
        for _ in range(flows)
    ]
    demands = [draw(st.sampled_from([math.inf, math.inf, 0.0, 0.3, 1.0])) for _ in range(flows)]
    weights = [draw(st.sampled_from([1.0, 1.0, 2.0, 0.5])) for _ in range(flows)]
    return crossed, capacities, demands, weights


def max_min_shares(
    crossed: Sequence[Sequence[int]],
    capacities: Sequence[float],
    demands: Sequence[float] | None = None,
    weights: Sequence[float] | None = None,
) -> tuple[float, ...]:
    """What `fill` gives to transfers that cross these segments, by segment number."""
    count = len(crossed)
    found = Paths(
        flow=np.repeat(np.arange(count, dtype=np.int64), [len(each) for each in crossed]),
        segment=np.array([segment for each in crossed for segment in each], dtype=np.int64),
        capacities=np.array(capacities, dtype=np.float64),
        num_flows=count,
    )
    rates = fill(
        found,
        np.full(count, math.inf) if demands is None else np.array(demands, dtype=np.float64),
        np.ones(count) if weights is None else np.array(weights, dtype=np.float64),
    )
    return tuple(rates.tolist())


def loads(crossed: list[list[int]], rates: tuple[float, ...], count: int) -> list[float]:
    return [
        math.fsum(rate for each, rate in zip(crossed, rates, strict=True) if segment in each)
        for segment in range(count)
    ]


@given(case=cases())
@steady
def test_shares_are_feasible_and_everyone_has_a_bottleneck(case):
    crossed, capacities, demands, weights = case
    rates = max_min_shares(crossed, capacities, demands, weights)
    load = loads(crossed, rates, len(capacities))
    assert all(x <= c * (1 + 1e-9) for x, c in zip(load, capacities, strict=True))
    for flow, rate in enumerate(rates):
        assert 0 <= rate <= demands[flow]
        if rate >= demands[flow] * (1 - 1e-9):
            continue
        # A full segment on which none has more per weight.
        assert any(
            load[segment] >= capacities[segment] * (1 - 1e-9)
            and all(
                rates[other] / weights[other] <= rate / weights[flow] * (1 + 1e-9)
                for other in range(len(rates))
                if segment in crossed[other]
            )
            for segment in crossed[flow]
        )


def water_filling(
    case: tuple[list[list[int]], list[float], list[float], list[float]],
) -> list[float]:
    """Largest common level by linear programs; who cannot rise above it is fixed there; repeat."""
    crossed, capacities, demands, weights = case
    flows, count = len(crossed), len(capacities)
    fixed: dict[int, float] = {}

    def most(objective: list[float], level: float | None) -> float:
        """Variables: rates, then the level. Maximises the objective."""
        rows = [[float(s in each) for each in crossed] + [0.0] for s in range(count)]
        limits = list(capacities)
        for flow in range(flows):
            if flow not in fixed:  # level * weight <= rate
                row = [0.0] * (flows + 1)
                row[flow], row[flows] = -1.0, weights[flow]
                rows.append(row)
                limits.append(0.0)
        bounds: list[tuple[float, float | None]] = [
            (fixed[f], fixed[f]) if f in fixed else (0.0, min(demands[f], 1e3))
            for f in range(flows)
        ]
        bounds.append((0.0, None) if level is None else (level, level))
        found = linprog([-each for each in objective], A_ub=rows, b_ub=limits, bounds=bounds)
        assert found.status == 0
        return float(-found.fun)

    while len(fixed) < flows:
        level = most([0.0] * flows + [1.0], None)
        stuck = []
        for flow in set(range(flows)) - set(fixed):
            objective = [float(each == flow) for each in range(flows)] + [0.0]
            if most(objective, level * (1 - 1e-9)) <= level * weights[flow] + 1e-6:
                stuck.append(flow)
        assert stuck
        for flow in stuck:
            fixed[flow] = level * weights[flow]
    return [fixed[flow] for flow in range(flows)]


@given(case=cases())
@settings(steady, max_examples=40)
def test_shares_are_those_of_linear_programs(case):
    assert max_min_shares(*case) == pytest.approx(water_filling(case), abs=1e-5)


@given(case=cases(), factor=st.floats(1e-3, 1e12), seed=st.integers(0, 99))
@steady
def test_shares_scale_and_do_not_depend_on_the_order(case, factor, seed):
    crossed, capacities, demands, weights = case
    rates = max_min_shares(*case)
    scaled = max_min_shares(
        crossed, [c * factor for c in capacities], [d * factor for d in demands], weights
    )
    assert scaled == pytest.approx([rate * factor for rate in rates], rel=1e-9)
    order = list(range(len(crossed)))
    random.Random(seed).shuffle(order)
    mixed = max_min_shares(
        [crossed[n][::-1] for n in order],
        capacities,
        [demands[n] for n in order],
        [weights[n] for n in order],
    )
    assert mixed == pytest.approx([rates[n] for n in order], rel=1e-9)
    # A weight of 3 is three transfers.
    triple = max_min_shares(crossed, capacities, None, [3.0, *[1.0] * (len(crossed) - 1)])
    three = max_min_shares([crossed[0]] * 2 + crossed, capacities)
    assert triple[0] == pytest.approx(sum(three[:3]))
    assert triple[1:] == pytest.approx(three[3:])


def test_shares_by_hand():
    # Bertsekas and Gallager's kind of example: the first link is full at 1/2 each, so the second
    # leaves 3/2 for the one that crosses it alone.
    assert max_min_shares([[0], [0, 1], [1]], [1.0, 2.0]) == pytest.approx((0.5, 0.5, 1.5))
    assert max_min_shares([[0], [0]], [1.0], demands=[0.2, math.inf]) == pytest.approx((0.2, 0.8))
    assert max_min_shares([], [1.0]) == ()
    assert max_min_shares([[]], [1.0]) == (math.inf,)
    assert max_min_shares([[], [0, 1]], [math.inf, 2.0]) == (math.inf, 2.0)
    assert max_min_shares([[0], [0, 1]], [math.inf, 2.0]) == (math.inf, 2.0)
    assert max_min_shares([[0, 0]], [1.0]) == (0.5,)


@given(cluster=clusters(), data=st.data())
@settings(steady, max_examples=100)
def test_flows_of_a_cluster_share_its_segments(cluster, data):
    device = st.integers(0, cluster.num_devices - 1)
    pairs = data.draw(st.lists(st.tuples(device, st.none() | device), min_size=1, max_size=12))
    flows = [Flow(source=one, target=two, traffic=DP) for one, two in pairs]
    crossed = [segments(cluster, *pair) for pair in pairs]
    numbers = {each: n for n, each in enumerate(dict.fromkeys(itertools.chain(*crossed)))}
    expected = max_min_shares(
        [[numbers[each] for each in one] for one in crossed],
        [capacity(cluster, each) for each in numbers],
    )
    assert shares(cluster, flows) == pytest.approx(expected)


def test_storage_traffic_competes_for_the_nic():
    cluster = two_regions()
    collective = Flow(source=0, target=4, traffic=DP)
    write = Flow(source=0, target=None, traffic=TrafficClass.CHECKPOINT)
    read = Flow(source=None, target=0, traffic=TrafficClass.DATA)
    assert shares(cluster, [collective, read]) == pytest.approx((1e10, 1e10))  # full duplex
    assert shares(cluster, [collective, write]) == pytest.approx((5e9, 5e9))
    slow = replace(write, demand_bytes_per_second=1e9)
    assert shares(cluster, [collective, slow]) == pytest.approx((9e9, 1e9))
    heavy = replace(collective, weight=3.0)
    assert shares(cluster, [heavy, write]) == pytest.approx((7.5e9, 2.5e9))


def test_groups_that_only_use_their_shares_do_not_slow_each_other():
    cluster = two_regions()
    columns = [(n, n + 4) for n in range(4)]  # one NIC each
    assert group_share(cluster, columns) == 1.0
    nodes = [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert group_share(cluster, nodes, TrafficClass.TENSOR_PARALLEL) == 1.0


def test_groups_over_one_line_share_it():
    cluster = two_regions()
    # One group gets 10 GB/s, its port; four would need 40 of the line's 20 GB/s.
    groups = [(n, n + 16) for n in range(4)]
    assert group_share(cluster, groups[:1]) == 1.0
    assert group_share(cluster, groups[:2]) == 1.0
    found = group_shares(cluster, [ActiveGroup(devices=each, traffic=DP) for each in groups])
    assert [each.bytes_per_second for each in found] == pytest.approx([5e9] * 4)
    assert [each.share for each in found] == pytest.approx([0.5] * 4)
    # Groups of another island of the region meet on the same line.
    assert group_share(cluster, [*groups[:2], (8, 20), (9, 21)]) == pytest.approx(0.5)
    # A wider line, or one direction only, carries more.
    assert group_share(two_regions(line=4e10), groups) == 1.0
    assert group_share(cluster, groups, pattern=Pattern.CHAIN) == pytest.approx(0.5)
    back = [tuple(reversed(each)) for each in groups[2:]]
    assert group_share(cluster, [*groups[:2], *back], pattern=Pattern.CHAIN) == 1.0


def test_a_group_that_crosses_rails_needs_the_fabric_and_a_lane_of_another():
    cluster = two_regions()
    found = group_shares(
        cluster,
        [
            ActiveGroup(devices=(0, 5), traffic=DP, pattern=Pattern.CHAIN),  # leaves by NIC 1
            ActiveGroup(devices=(1, 5), traffic=DP, pattern=Pattern.CHAIN),
        ],
    )
    assert [each.share for each in found] == pytest.approx([0.5, 0.5])


def test_devices_that_do_not_exist_are_refused():
    for devices in ((0, 24), (-1, 3), (5, 99)):
        with pytest.raises(InputError):
            group_share(two_regions(), [devices])


def test_lanes_fold_where_nodes_have_unequal_numbers():
    cluster = two_regions()
    # Three devices in one node, one in the next: one lane between them.
    found = group_shares(cluster, [ActiveGroup(devices=(0, 1, 2, 4), traffic=DP)])
    assert found[0].bytes_per_second == pytest.approx(1e10)


def test_an_exchange_divides_a_devices_rate_among_its_peers():
    cluster = two_regions()
    group = ActiveGroup(
        devices=(0, 1, 2, 3), traffic=TrafficClass.EXPERT_PARALLEL, pattern=Pattern.EXCHANGE
    )
    assert group_shares(cluster, [group])[0].bytes_per_second == pytest.approx(1e11 / 3)
    everyone = replace(group, devices=tuple(range(24)))
    assert group_shares(cluster, [everyone])[0].share == 1.0


def test_of_many_peers_some_stand_for_all(monkeypatch):
    cluster = two_regions()
    groups = [
        ActiveGroup(devices=devices, traffic=TrafficClass.EXPERT_PARALLEL, pattern=Pattern.EXCHANGE)
        for devices in (tuple(range(24)), tuple(range(0, 24, 2)), (3,))
    ]
    exact = group_shares(cluster, groups)
    monkeypatch.setattr("hetplan.cost.network.group_shares._MAX_PEERS", 8)
    near = group_shares(cluster, groups)
    for one, two in zip(exact, near, strict=True):
        assert two.share == pytest.approx(one.share, rel=0.15)
    assert exact[2].share == near[2].share == 1.0
    assert math.isinf(exact[2].bytes_per_second)  # nobody to send to
    assert group_shares(cluster, groups[2:]) == exact[2:]


def test_phases_bring_together_what_is_active():
    cluster = two_regions()
    chains = [
        ActiveGroup(devices=(n, n + 16), traffic=TrafficClass.PIPELINE, pattern=Pattern.CHAIN)
        for n in range(2)
    ]
    rings = [ActiveGroup(devices=(n, n + 16), traffic=DP) for n in (2, 3)]
    during = phase_shares(cluster, [*chains, *rings], StepPhase.MICROBATCHES)
    assert [each and each.share for each in during] == [1.0, 1.0, None, None]
    together = phase_shares(cluster, [*chains, *rings], StepPhase.OVERLAP)
    assert [each and each.share for each in together] == pytest.approx([0.5] * 4)
    after = phase_shares(cluster, [*chains, *rings], StepPhase.END_OF_STEP)
    assert [each and each.share for each in after] == [None, None, 1.0, 1.0]
    assert set(active_in(StepPhase.OVERLAP)) == set(TrafficClass)
    assert phase_shares(cluster, [], StepPhase.OVERLAP) == ()


@given(cluster=clusters(), seed=st.integers(0, 10**6), count=st.integers(1, 6))
@settings(steady, max_examples=60)
def test_more_groups_never_help_the_slowest(cluster, seed, count):
    rng = random.Random(seed)
    groups = [
        ActiveGroup(
            devices=tuple(
                rng.sample(range(cluster.num_devices), rng.randint(1, min(6, cluster.num_devices)))
            ),
            traffic=DP,
            pattern=rng.choice(tuple(Pattern)),
        )
        for _ in range(count)
    ]
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
        active = [ActiveGroup(devices=each, traffic=DP) for each in groups]
        found, steps = counted_steps(partial(group_shares, cluster, active))
        assert len(found) == 10_000
        # Each against all others would take ten thousand each.
        assert steps < 10_000 * 100
    # On one rail groups do not meet; ten in a row meet where two groups have parts of one node.
    assert group_share(cluster, placements[0]) == 1.0
    halves = np.array(
        [
            each.share
            for each in group_shares(
                cluster, [ActiveGroup(devices=each, traffic=DP) for each in placements[1]]
            )
        ]
    )
    assert set(np.round(halves, 6)) <= {0.5, 1.0}
