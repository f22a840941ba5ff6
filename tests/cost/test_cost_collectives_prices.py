"""Times of collectives: closed forms, counted runs with clocks, what is chosen, what is refused."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest
from collectives_counted import Machine, Rank, chained
from collectives_groups import (
    Group,
    Populations,
    equal_halves,
    group,
    link_name,
    plain_cluster,
    populations,
)
from cost_fakes import Figures, LinearPredictor, island, link
from counted_steps import counted_steps
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.cluster.spec import Cluster, Link, RegionLink
from hetplan.cost.collectives import (
    Algorithm,
    CollectiveCost,
    collective,
    group_shape,
)
from hetplan.cost.collectives.rings import chains, rings
from hetplan.cost.collectives.values import Asking
from hetplan.cost.network.segments import LinkName, LinkScope, between_islands
from hetplan.errors import InputError
from hetplan.predict.predictor import Prediction, SendLaw
from hetplan.profiling.samples import LinkOperation

PREDICTOR = Figures()
ASKING = Asking(predictor=PREDICTOR, share=1.0)
AR, RS, AG = (
    LinkOperation.ALL_REDUCE,
    LinkOperation.REDUCE_SCATTER,
    LinkOperation.ALL_GATHER,
)
A2A = LinkOperation.ALL_TO_ALL
FEW = settings(max_examples=25, deadline=None)


def link_of(cluster: Cluster, name: LinkName) -> Link:
    """The link of this name, as one device finds it; not for storage."""
    if name.scope is LinkScope.NODE:
        return cluster.island(name.left).intra_node
    return cluster.link_between(name.left, name.right)


def cost(
    own: Group,
    operation: LinkOperation,
    message: float,
    algorithm: Algorithm | None = None,
    **more: object,
) -> CollectiveCost:
    return collective(
        own.cluster,
        own.shape,
        operation,
        message,
        PREDICTOR,
        algorithm=algorithm,
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("ranks", [2, 8])
def test_an_exchange_inside_a_node(ranks: int) -> None:
    """Each of n - 1 messages waits 10 us, at 100 GB/s."""
    share = (ranks - 1) / ranks
    found = cost(group(((0, (ranks,)),)), A2A, 1e9, Algorithm.DIRECT).seconds
    assert found == pytest.approx((ranks - 1) * 1e-5 + share * 1e9 / 100e9)


def test_trees_reach_the_bandwidth_term_keep_few_latencies_and_take_the_best_chunks() -> None:
    """2 S beta for large messages, 2 log2(n) alpha and a meeting for small ones, in one node."""
    own = group(((0, (8,)),))
    alpha, beta = 1e-5, 1 / 100e9
    found = cost(own, AR, 1e12, Algorithm.TREE).seconds
    assert 2 * 1e12 * beta < found < 1.01 * 2 * 1e12 * beta
    assert cost(own, AR, 1.0, Algorithm.TREE).seconds == pytest.approx(7 * alpha, rel=1e-3)
    # Against the formula over every number of chunks, 5 ranks.
    for message in (1e4, 1e6, 1e8):
        whole = message * beta
        best = alpha + min(
            4 * (alpha + whole / k) + (k - 1) * (alpha + 2 * whole / k) for k in range(1, 400)
        )
        found = cost(group(((0, (5,)),)), AR, message, Algorithm.TREE).seconds
        assert found == pytest.approx(best)


def test_a_shared_link_is_divided_among_the_lanes() -> None:
    narrow = replace(link(2e9, 5e-3), shared_bandwidth_bytes_per_second=3e9)
    places: Populations = ((0, (4,)), (1, (4,)))
    free = group(places)
    tight = group(places, cluster=replace(plain_cluster(places), across_regions=narrow))
    message = 4e9
    # S in each direction over 3 GB/s instead of 4 * 2 GB/s.
    form = Algorithm.TWO_LEVEL
    more = cost(tight, AR, message, form).seconds - cost(free, AR, message, form).seconds
    assert more == pytest.approx(message / 3e9 - message / 8e9)


def clock(own: Group, world: Machine, phases: Sequence[Sequence[range]], message: float) -> float:
    """Seconds of a counted run: every port sends what a step asks of it, rings of one phase run at
    the same time, a phase starts when all have ended the one before.
    """
    total = 0.0
    for phase in phases:
        total += max(
            (
                sum(_step(own, world.steps[at], message / world.total) for at in span)
                for span in phase
            ),
            default=0.0,
        )
    return total


def _step(own: Group, loads: dict[tuple[Rank, Rank], int], message: float) -> float:
    ports: dict[tuple[Rank, bool, Link], int] = defaultdict(int)
    for (source, target), part in loads.items():
        name = link_name(own.cluster, own.device_of[source], own.device_of[target])
        over = link_of(own.cluster, name)
        ports[source, True, over] += part
        ports[target, False, over] += part
    return max(
        over.latency_seconds + part * message / over.bandwidth_bytes_per_second
        for (_, _, over), part in ports.items()
    )


@settings(max_examples=12, deadline=None)
@given(
    st.tuples(populations(), st.just(False)) | st.tuples(equal_halves(), st.just(True)),
    st.sampled_from((AR, RS, AG)),
    st.sampled_from((1e3, 1e7, 1e10)),
)
def test_rings_take_what_a_counted_run_takes(
    case: tuple[Populations, bool], operation: LinkOperation, message: float
) -> None:
    """Equal groups: exactly. Unequal: at least; the device with most to do in a step counts."""
    found, equal = case
    own = group(found)
    costs = rings(own.cluster, own.shape, operation, message, ASKING)
    for each, blocks in zip(costs, chains(own.shape), strict=True):
        world, phases = chained(own.ranks, blocks, operation=operation.value)
        counted = clock(own, world, phases, message)
        assert each.seconds >= counted * (1 - 1e-9)
        if equal:
            assert each.seconds == pytest.approx(counted)


@FEW
@given(
    populations(),
    st.sampled_from([AR, RS, AG, A2A]),
    st.floats(1e2, 1e11),
    st.floats(1, 10),
    st.floats(1, 10),
    st.sampled_from([None, *Algorithm]),
)
def test_faster_links_smaller_messages_and_more_share_are_never_slower(
    found: Populations,
    operation: LinkOperation,
    message: float,
    bandwidth: float,
    latency: float,
    algorithm: Algorithm | None,
) -> None:
    own = group(found)
    try:
        before = cost(own, operation, message, algorithm, share=0.5)
    except InputError:
        return
    assert cost(own, operation, message, algorithm).seconds <= before.seconds * (1 + 1e-12)
    less = cost(own, operation, message / bandwidth, algorithm, share=0.5)
    assert less.seconds <= before.seconds * (1 + 1e-12)
    better = replace(own.cluster, within_region=_faster(link(5e9, 1e-4), bandwidth, latency))
    better = replace(better, across_regions=_faster(link(2e9, 5e-3), bandwidth, latency))
    after = cost(replace(own, cluster=better), operation, message, algorithm, share=0.5)
    assert after.seconds <= before.seconds * (1 + 1e-12)


def _faster(found: Link, bandwidth: float, latency: float) -> Link:
    return replace(
        found,
        bandwidth_bytes_per_second=found.bandwidth_bytes_per_second * bandwidth,
        latency_seconds=found.latency_seconds / latency,
    )


def test_groups_beside_this_one_do_not_slow_links_inside_a_node_that_it_leaves() -> None:
    own = group(((0, (4, 4)),))
    alone = cost(own, AR, 1e9, Algorithm.TWO_LEVEL)
    beside = cost(own, AR, 1e9, Algorithm.TWO_LEVEL, share=0.5)
    assert [term.seconds for term in beside.terms[::2]] == [t.seconds for t in alone.terms[::2]]
    assert beside.terms[1].seconds > 1.5 * alone.terms[1].seconds
    inside = group(((0, (4,)),))
    assert cost(inside, AR, 1e9, share=0.5).seconds > 1.9 * cost(inside, AR, 1e9).seconds


@pytest.mark.parametrize("slow", [(0, 1), (0, 2), (1, 2), (1, 3), (2, 3), (0, 3)])
def test_a_ring_of_four_regions_goes_around_a_slow_pair(slow: tuple[int, int]) -> None:
    """Which two of four regions are far apart makes no difference: no ring needs that link."""
    places: Populations = tuple((region, (2,)) for region in range(4))
    plain = plain_cluster(places)
    far = RegionLink(between=(f"r{slow[0]}", f"r{slow[1]}"), link=link(1e6, 1.0))
    own = group(places, cluster=replace(plain, region_links=(far,)))
    for algorithm in (Algorithm.RING, Algorithm.TWO_LEVEL):
        found = cost(own, AR, 1e9, algorithm)
        assert found.seconds == cost(group(places), AR, 1e9, algorithm).seconds
        crossed = {each.link for each in found.traffic if each.link.scope is LinkScope.ISLANDS}
        assert between_islands(f"i{slow[0]:02}", f"i{slow[1]:02}") not in crossed
        assert len(crossed) == 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(LinearPredictor):
    """Collectives of some links were measured, sends of none."""

    seconds: float

    def collective(
        self,
        link: Link,
        operation: str,
        group_size: int,
        message_bytes: float,
        *,
        nodes: int = 1,
        groups: int = 1,
    ) -> Prediction:
        if link.samples is None:
            return PREDICTOR.collective(link, operation, group_size, message_bytes, nodes=nodes)
        return Prediction(
            seconds=self.seconds + message_bytes * 1e-9, log_halfwidth=0.1, source="measured"
        )

    def send(self, link: Link, message_bytes: float, *, nodes: int = 1) -> SendLaw:
        return PREDICTOR.send(replace(link, samples=None), message_bytes)


def test_no_law_beats_a_measured_curve() -> None:
    places: Populations = ((0, (4,)),)
    plain = plain_cluster(places)
    (only,) = plain.islands
    measured = replace(only, intra_node=replace(only.intra_node, samples="fabric"))
    own = group(places, cluster=replace(plain, islands=(measured,)))
    slow = Measured(seconds=5.0)
    found = collective(own.cluster, own.shape, AR, 1e6, slow)
    assert found.algorithm is Algorithm.RING
    assert found.seconds == 5.0 + 1e-3
    assert found.terms[0].cause == "link fabric"
    assert found.terms[0].prediction.log_halfwidth == 0.1
    forced = collective(own.cluster, own.shape, AR, 1e6, slow, algorithm=Algorithm.TREE)
    assert forced.seconds < 1


def test_a_measured_curve_is_asked_for_more_bytes_where_lanes_share_the_link() -> None:
    places: Populations = ((0, (2,)), (1, (2,)))
    tight = replace(link(2e9), samples="wan", shared_bandwidth_bytes_per_second=2e9)
    own = group(places, cluster=replace(plain_cluster(places), across_regions=tight))
    found = collective(
        own.cluster, own.shape, AR, 8e6, Measured(seconds=0.0), algorithm=Algorithm.TWO_LEVEL
    )
    # Two lanes of S / 2, each with half of the capacity: as long as S.
    assert found.terms[1].seconds == pytest.approx(8e6 * 1e-9)


@pytest.mark.parametrize(
    ("places", "operation", "algorithm", "said"),
    [
        (((0, (4,)),), AR, Algorithm.TWO_LEVEL, "ranks on two levels"),
        (((0, (4,)),), RS, Algorithm.TREE, "choose from ring, two-level"),
        (((0, (2,)),), LinkOperation.SEND_RECV, None, "it has no price"),
    ],
)
def test_refused(
    places: Populations, operation: LinkOperation, algorithm: Algorithm | None, said: str
) -> None:
    with pytest.raises(InputError, match=said):
        cost(group(places), operation, 1e6, algorithm)


@pytest.mark.parametrize(
    ("message", "share", "said"),
    [
        (-1.0, 1.0, "message_bytes is -1"),
        (1.0, math.nan, "share is nan"),
    ],
)
def test_numbers_out_of_range(message: float, share: float, said: str) -> None:
    with pytest.raises(InputError, match=said):
        cost(group(((0, (4,)),)), AR, message, share=share)


def test_131072_ranks_are_priced_by_their_populations() -> None:
    cluster = Cluster(
        name="huge",
        islands=tuple(island(f"i{k}", nodes=2048, devices_per_node=8) for k in range(8)),
        within_region=link(5e9, 1e-3),
    )
    shape = group_shape(cluster, range(131072))
    assert [len(each.nodes) for each in shape.islands] == [1] * 8
    for operation in (AR, RS, AG, A2A):
        price = partial(collective, cluster, shape, operation, 1e9, PREDICTOR)
        found, steps = counted_steps(price)
        assert steps < 131072  # fewer than one for each rank
        assert sum(each.bytes for each in found.traffic) > 131071 * 1e9 * 0.9
