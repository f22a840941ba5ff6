"""Samples that cross unlike links between two stages (`hetplan.cost.step_model.pairs`)."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
from cost_fakes import Figures
from estimate_plans import FREE, SHAPE
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.spec import Cluster, Island, Link, RegionLink, Transport
from hetplan.cost.network.segments import SegmentKind
from hetplan.cost.step_model.hops import hop_between, received_bytes
from hetplan.cost.step_model.pairs import Entry, longest, runs_between, way
from hetplan.plans.plan import DeviceRange, Replica

Cut = list[tuple[int, int]]
"""(data-parallel ranks, samples of each) of every entry."""


def cut_of(total: int) -> st.SearchStrategy[Cut]:
    """Up to three entries that share so many samples."""
    edges = st.lists(st.integers(1, total - 1), max_size=2, unique=True).map(sorted)

    def divided(found: list[int]) -> st.SearchStrategy[Cut]:
        ends = [0, *found, total]
        sizes = [two - one for one, two in pairwise(ends)]
        return st.tuples(
            *(
                st.sampled_from([k for k in range(1, size + 1) if size % k == 0]).map(
                    lambda ranks, size=size: (ranks, size // ranks)
                )
                for size in sizes
            )
        ).map(list)

    return edges.flatmap(divided)


def entries(cut: Cut, devices: list[int]) -> list[Entry]:
    found, start = [], 0
    for at, (ranks, size) in enumerate(cut):
        stop = start + ranks * size
        found.append(Entry(start, stop, size, devices[at], 8.0 / devices[at]))
        start = stop
    return found


def by_sample(left: list[Entry], right: list[Entry], factor: dict[tuple[int, int], float]) -> float:
    """The same, one sample after the other."""
    sent: Counter[tuple[int, int]] = Counter()
    received: Counter[tuple[int, int]] = Counter()
    for sample in range(left[-1].stop):
        (i, one), (j, two) = (
            next((at, each) for at, each in enumerate(side) if each.start <= sample < each.stop)
            for side in (left, right)
        )
        size = two.sample_bytes * factor[i, j]
        sent[i, (sample - one.start) // one.microbatch_size] += (  # type: ignore[assignment]
            size * two.rank_devices / one.rank_devices
        )
        received[j, (sample - two.start) // two.microbatch_size] += size  # type: ignore[assignment]
    return max(*sent.values(), *received.values())


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    cuts=st.integers(2, 24).flatmap(lambda total: st.tuples(cut_of(total), cut_of(total))),
    devices=st.lists(st.sampled_from((1, 2, 4)), min_size=6, max_size=6),
    factors=st.lists(st.floats(0.1, 10.0), min_size=9, max_size=9),
)
def test_the_slowest_rank_is_that_of_single_samples(
    cuts: tuple[Cut, Cut], devices: list[int], factors: list[float]
) -> None:
    left, right = entries(cuts[0], devices[:3]), entries(cuts[1], devices[3:])
    runs = runs_between(left, right)
    assert sum(stop - start for _, _, start, stop in runs) == left[-1].stop
    ways = [way([(left[i], right[j], start, stop)]) for i, j, start, stop in runs]
    each = {(i, j): factors[3 * i + j] for i in range(len(left)) for j in range(len(right))}
    found = longest(ways, [each[i, j] for i, j, _, _ in runs])
    assert found == pytest.approx(by_sample(left, right, each))


KIND = DeviceKind(
    kind="one",
    vendor="generic",
    memory_bytes=1e9,
    peak_flops_per_second={},
    memory_bandwidth_bytes_per_second=1e9,
    provenance="measured",
    source="made up",
)
NEAR = Link(bandwidth_bytes_per_second=1e9, latency_seconds=1e-5, transport=Transport.DEVICE_DIRECT)
FAR = Link(
    bandwidth_bytes_per_second=1e8,
    latency_seconds=1e-2,
    transport=Transport.DEVICE_DIRECT,
    shared_bandwidth_bytes_per_second=1e8,
)


def two_regions() -> Cluster:
    """Devices 0 to 3 in the north, 4 to 6 in the south."""
    islands = [
        Island(
            name=region,
            region=region,
            device=KIND,
            nodes=nodes,
            devices_per_node=1,
            intra_node=NEAR,
            inter_node=NEAR,
            memory_bytes=1e9,
        )
        for region, nodes in (("north", 4), ("south", 3))
    ]
    return Cluster(
        name="two",
        islands=tuple(islands),
        region_links=(RegionLink(between=("north", "south"), link=FAR),),
    )


def part(start: int, count: int, size: int) -> Replica:
    return Replica(devices=(DeviceRange(start=start, count=count),), tp=1, microbatch_size=size)


def test_a_stage_in_two_regions_is_priced_pair_by_pair() -> None:
    left = (part(0, 1, 4),)
    right = (part(1, 1, 1), part(4, 3, 1))
    hop = hop_between(two_regions(), SHAPE, FREE, left, right, Figures())
    one = received_bytes(SHAPE, FREE, right[0])
    # The only sender sends one sample near, then three far, which share the link with nobody.
    near, far = (Figures().send(link, one).seconds_per_byte for link in (NEAR, FAR))
    assert hop.send_forward_seconds == pytest.approx(one * near + 3 * one * far)
    assert hop.send_backward_seconds == pytest.approx(one * near + 3 * one * far)
    assert hop.wire_latency_seconds == Figures().send(FAR, one).wire_latency_seconds
    (crossing,) = hop.forward_crosses
    assert (crossing.segment.kind, crossing.segment.place) == (SegmentKind.REGION_LINK, "north")
    assert crossing.seconds == pytest.approx(3 * one / 1e8)
    assert hop.backward_crosses[0].segment.place == "south"


def test_ranks_that_all_send_near_are_not_slowed_by_the_far_ones() -> None:
    # Four samples each way: two stay in each region.
    left, right = (part(0, 2, 1), part(4, 2, 1)), (part(2, 2, 1), part(6, 1, 2))
    hop = hop_between(two_regions(), SHAPE, FREE, left, right, Figures())
    one = received_bytes(SHAPE, FREE, left[0])
    near = Figures().send(NEAR, one).seconds_per_byte
    assert hop.send_forward_seconds == pytest.approx(2 * one * near)
    assert hop.wire_latency_seconds < 1e-3
    assert not hop.forward_crosses
    assert math.isfinite(hop.rendezvous_extra_seconds)
