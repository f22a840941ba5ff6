"""Sums by messages: bytes and times are those of the moves that the trainer makes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from collectives_groups import (
    Group,
    Populations,
    group,
    link_name,
    plain_cluster,
    populations,
    traffic,
)
from cost_fakes import Figures, link
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.cluster.spec import Cluster, Link, Transport
from hetplan.cost.collectives import Algorithm, collective
from hetplan.cost.collectives.direct_levels import (
    CHOICE_BYTES,
    CHUNK_BYTES,
    direct_sum,
    summed_by_messages,
)
from hetplan.cost.collectives.rings import ISLAND, NODE, Layout, layouts
from hetplan.cost.collectives.values import Asking
from hetplan.cost.network.segments import LinkName
from hetplan.predict.fit import FittedPredictor
from hetplan.profiling.samples import LinkOperation
from hetplan.runtime.communicator.levels import Move, phases

PREDICTOR = Figures()
ASKING = Asking(predictor=PREDICTOR, share=1.0)
COUNT = 10**6
"""Elements of a byte each: parts are cut to whole ones, which is one in a thousand at most."""
CLOSE = 2e-3
FEW = settings(max_examples=40, deadline=None)


def made(own: Group, layout: Layout) -> list[tuple[Move, ...]]:
    """What the trainer does where the layout is cut, among ranks in the order of the group."""
    levels = []
    for low, _ in layout.blocks[1:]:
        units = [
            (rank.region,)
            + ((rank.island,) if low <= ISLAND else ())
            + ((rank.node,) if low == NODE else ())
            for rank in own.ranks
        ]
        numbers = {unit: at for at, unit in enumerate(dict.fromkeys(units))}
        levels.append([numbers[unit] for unit in units])
    return [*phases(levels, len(own.ranks), COUNT)]


def by_link(own: Group, moves: list[tuple[Move, ...]]) -> dict[LinkName, float]:
    devices = list(own.device_of.values())
    found = defaultdict[LinkName, float](float)
    for phase in moves:
        for move in phase:
            name = link_name(own.cluster, devices[move.source], devices[move.target])
            found[name] += move.stop - move.start
    return dict(found)


def all_layouts(own: Group) -> list[Layout]:
    """One level and two: with more, parts that face each other in unlike regions are taken to be
    contiguous, which the trainer's are not.
    """
    return [each for each in layouts(own.cluster, own.shape, equal=True) if len(each.blocks) <= 2]


@FEW
@given(populations(), st.integers(0, 99))
def test_bytes_per_link_are_those_of_the_moves(found: Populations, seed: int) -> None:
    own = group(found, seed)
    for layout in all_layouts(own):
        cost = direct_sum(layout, float(COUNT), ASKING)
        moves = made(own, layout)
        assert traffic(cost) == pytest.approx(by_link(own, moves), rel=CLOSE)
        total = sum(traffic(cost).values())
        assert total == pytest.approx(2 * (own.shape.num_ranks - 1) * COUNT)
        assert cost.algorithm is (
            Algorithm.DIRECT if len(layout.blocks) == 1 else Algorithm.TWO_LEVEL
        )


@FEW
@given(populations(), st.integers(0, 99))
def test_a_phase_takes_as_long_as_its_busiest_device(found: Populations, seed: int) -> None:
    """Links of the cluster have no shared capacity here, so a device's own links are all it has."""
    own = group(found, seed)
    devices = list(own.device_of.values())
    small = CHUNK_BYTES - 1.0  # one chunk: phases follow each other
    for layout in all_layouts(own):
        expected = 0.0
        for phase in made(own, layout):
            near = defaultdict[int, float](float)
            far = defaultdict[tuple[int, str], float](float)
            inside = defaultdict[int, float](float)
            slow = 0.0
            for move in phase:
                one, two = devices[move.source], devices[move.target]
                ends = [own.cluster.island_of_device(each) for each in (one, two)]
                size = small * (move.stop - move.start) / COUNT
                if own.cluster.node_of_device(one) == own.cluster.node_of_device(two) and (
                    ends[0] is ends[1]
                ):
                    inside[one] += size / ends[0].intra_node.bandwidth_bytes_per_second
                    slow = max(slow, ends[0].intra_node.latency_seconds)
                    continue
                way = (
                    ends[0].inter_node
                    if ends[0] is ends[1]
                    else own.cluster.link_between(ends[0].name, ends[1].name)
                )
                slow = max(slow, way.latency_seconds)
                if ends[0].region == ends[1].region:
                    near[one] += size / way.bandwidth_bytes_per_second
                else:
                    far[one, ends[1].region] += size / way.bandwidth_bytes_per_second
            busiest = max([*near.values(), *far.values(), *inside.values()])
            expected += slow + busiest
        priced = direct_sum(layout, small, ASKING).seconds
        # The longest way and the busiest device need not be the same: never more than their sum.
        assert priced <= expected * (1 + CLOSE)
        assert priced >= 0.5 * expected


def staged(populations: Populations) -> Cluster:
    """The plain cluster, everything through the host's memory."""
    plain = plain_cluster(populations)

    def through_hosts(each: Link) -> Link:
        return replace(each, transport=Transport.HOST_STAGED)

    return replace(
        plain,
        islands=tuple(
            replace(
                each,
                intra_node=through_hosts(each.intra_node),
                inter_node=through_hosts(each.inter_node),
            )
            for each in plain.islands
        ),
        within_region=link(5e9, 1e-4, staged=True),
        across_regions=link(2.5e7, 5e-3, staged=True),
    )


def test_what_regions_share_is_shared() -> None:
    """Three senders get a third each of what one alone would have."""
    shape: Populations = ((0, (1, 1, 1)), (1, (1, 1, 1)))
    free = staged(shape)
    shared = replace(link(2.5e7, 5e-3, staged=True), shared_bandwidth_bytes_per_second=2.5e7)
    full = replace(free, across_regions=shared)
    seconds = []
    for cluster in (free, full):
        own = group(shape, 0, cluster)
        layout = summed_by_messages(cluster, own.shape)
        assert layout is not None
        seconds.append(direct_sum(layout, 1e6, ASKING).seconds)
    assert seconds[0] == pytest.approx(5e-3 + 1e6 / 3 / 2.5e7, rel=0.02)
    assert seconds[1] == pytest.approx(5e-3 + 1e6 / 2.5e7, rel=0.02)


@FEW
@given(populations(), st.integers(0, 99))
def test_what_is_taken_is_the_fastest_by_the_files_own_figures(
    found: Populations, seed: int
) -> None:
    cluster = staged(found)
    shape = group(found, seed, cluster).shape
    layout = summed_by_messages(cluster, shape)
    if len(shape.islands) == 1:
        assert layout is None
        return
    figures = FittedPredictor.datasheet_only()
    asking = Asking(predictor=figures, share=1.0)
    ring = collective(
        cluster,
        shape,
        LinkOperation.ALL_REDUCE,
        CHOICE_BYTES,
        figures,
        algorithm=Algorithm.RING,
    ).seconds
    others = [
        direct_sum(each, CHOICE_BYTES, asking).seconds
        for each in layouts(cluster, shape, equal=True)
    ]
    taken = ring if layout is None else direct_sum(layout, CHOICE_BYTES, asking).seconds
    assert taken == min(ring, *others)


@FEW
@given(populations(), st.integers(0, 99))
def test_a_price_never_falls_as_the_message_grows(found: Populations, seed: int) -> None:
    own = group(found, seed)
    for layout in layouts(own.cluster, own.shape, equal=True):
        prices = [direct_sum(layout, CHUNK_BYTES * at / 4, ASKING).seconds for at in range(50)]
        assert prices == sorted(prices)
