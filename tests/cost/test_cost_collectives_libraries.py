"""What a trainer's communication library offers is what is priced unless all is asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from collectives_groups import Group, Populations, group, plain_cluster
from cost_fakes import Figures, link

from hetplan.cluster.spec import Transport
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
