"""What a trainer's communication library offers is what is priced unless all is asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from collectives_groups import Group, Populations, group, plain_cluster
from cost_fakes import Figures, island, link
from counted_steps import steps_of

from hetplan.cluster.spec import Cluster, IslandLink, Transport
from hetplan.cost.collectives import Algorithm, CollectiveCost, collective, group_shape
from hetplan.cost.collectives.choose import OFFERED, offered
from hetplan.cost.collectives.shape import transport_of
from hetplan.profiling.samples import LinkOperation

PREDICTOR = Figures()
AR, A2A = LinkOperation.ALL_REDUCE, LinkOperation.ALL_TO_ALL
NODES: Populations = ((0, (8, 8, 8, 8)),)
REGIONS: Populations = ((0, (8, 8)), (0, (8, 8)), (1, (8, 8)))


def staged(places: Populations) -> Group:
    """Links between nodes, islands and regions by host memory."""
    plain = plain_cluster(places)
    slow = link(1e9, 1e-4, staged=True)
    return group(
        places,
        cluster=replace(
            plain,
            islands=tuple(replace(each, inter_node=slow) for each in plain.islands),
            within_region=slow,
            across_regions=slow,
        ),
    )


def cost(
    own: Group,
    message: float,
    operation: LinkOperation = AR,
    algorithm: Algorithm | None = None,
) -> CollectiveCost:
    return collective(own.cluster, own.shape, operation, message, PREDICTOR, algorithm=algorithm)


@pytest.mark.parametrize("message", [1e2, 1e5, 1e7, 1e9])
@pytest.mark.parametrize("places", [NODES, REGIONS, ((0, (8,)),), ((0, (3,)), (1, (5, 1)))])
@pytest.mark.parametrize("operation", list(OFFERED[Transport.DEVICE_DIRECT]))
def test_only_what_the_library_has_is_chosen(
    message: float, places: Populations, operation: LinkOperation
) -> None:
    for own in (group(places), staged(places)):
        found = cost(own, message, operation)
        assert found.algorithm in OFFERED[transport_of(own.cluster, own.shape)][operation]
        assert found.detail == "inside nodes, across" or found.algorithm is not Algorithm.TWO_LEVEL


def test_one_staged_link_gives_the_group_to_gloo() -> None:
    direct = group(REGIONS)
    assert transport_of(direct.cluster, direct.shape) is Transport.DEVICE_DIRECT
    across = replace(direct.cluster, across_regions=link(2e9, 5e-3, staged=True))
    assert transport_of(across, direct.shape) is Transport.HOST_STAGED
    assert offered(across, direct.shape, AR) == {Algorithm.RING}
    # Inside one node of the same cluster nothing is staged.
    inside = group_shape(across, range(8))
    assert transport_of(across, inside) is Transport.DEVICE_DIRECT
    assert offered(across, inside, AR) > {Algorithm.RING}


def test_what_the_rings_of_a_library_send_out_of_a_node() -> None:
    """2 (n - 1) / n S over all NICs of a node, by a ring per NIC; two-level sends less of it."""
    own = group(NODES)
    nodes, ranks, message = 4, 32, 1e12  # so much that latency is nothing
    (only,) = own.cluster.islands
    bandwidth = only.inter_node.bandwidth_bytes_per_second
    ring = collective(own.cluster, own.shape, AR, message, PREDICTOR, algorithm=Algorithm.RING)
    per_nic = 2 * (ranks - 1) / ranks * message / 8
    assert ring.seconds == pytest.approx(per_nic / bandwidth, rel=1e-3)
    by_node = cost(own, message, algorithm=Algorithm.TWO_LEVEL)
    across = max(term.seconds for term in by_node.terms)
    assert across == pytest.approx(2 * (nodes - 1) / nodes * message / 8 / bandwidth, rel=1e-3)


def exchange_of_islands(count: int) -> CollectiveCost:
    """All-to-all of that many islands of 8 devices in three regions."""
    cluster = Cluster(
        name="many",
        islands=tuple(
            replace(island(f"i{k:04}", nodes=1, devices_per_node=8), region=f"r{k % 3}")
            for k in range(count)
        ),
        within_region=link(5e9, 1e-4),
        across_regions=replace(link(2e9, 5e-3), shared_bandwidth_bytes_per_second=4e9),
    )
    return collective(cluster, group_shape(cluster, range(8 * count)), A2A, 1e9, PREDICTOR)


@pytest.mark.slow
def test_a_thousand_islands_exchange_without_a_look_at_every_pair() -> None:
    # Pairs of islands one at a time would take four times the steps for twice the islands.
    few, many = (steps_of(lambda n=n: exchange_of_islands(n)) for n in (150, 300))
    assert many < 2.1 * few
    found = exchange_of_islands(1000)
    # One region has 334 islands, the others 333: over a link of regions all of two exchange.
    assert found.algorithm is Algorithm.DIRECT
    senders = 8 * 333
    partners = 8 * 334
    slow = (partners + 8 * 333) * 1e9 / 8000 * senders / 4e9
    assert found.seconds == pytest.approx(slow, rel=0.3)
    assert sum(each.bytes for each in found.traffic) == pytest.approx(7999 * 1e9)


def test_islands_with_listed_links_are_looked_up_by_name() -> None:
    """Seven alike and one behind a slow link to another."""
    names = [f"i{k}" for k in range(8)]
    plain = Cluster(
        name="eight",
        islands=tuple(island(name, nodes=1, devices_per_node=4) for name in names),
        within_region=link(5e9, 1e-4),
    )
    shape = group_shape(plain, range(32))
    alike = collective(plain, shape, A2A, 1e9, PREDICTOR)
    slow = IslandLink(between=("i2", "i5"), link=link(1e7, 1e-4))
    listed = replace(plain, links=(slow,))
    found = collective(listed, shape, A2A, 1e9, PREDICTOR)
    # Four partners behind the slow link, 1e9 / 32 bytes to each, instead of over the fast one.
    more = 4 * 1e9 / 32 * (1 / 1e7 - 1 / 5e9)
    assert found.seconds - alike.seconds == pytest.approx(more, rel=1e-3)
