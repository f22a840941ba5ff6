"""Groups that share a node's PCIe switches: slower than the search has them; the bound holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from search_jobs import island, job, model

from hetplan.cluster.devices import HostInterface
from hetplan.cluster.spec import Cluster
from hetplan.cost.step_model.pricer import Pricer
from hetplan.job.spec import Pins
from hetplan.plans.chosen import Shape
from hetplan.predict.fit import FittedPredictor
from hetplan.search.result import SearchResult
from hetplan.search.search import search
from hetplan.search.space.stage_passes import _alone

PREDICTOR = FittedPredictor.datasheet_only()


def found(pins: Pins, *, switches: tuple[int, ...]) -> tuple[SearchResult, bool]:
    """One node of four devices on PCIe, whose devices' figure is what a switch's uplink carries."""
    host = HostInterface(pcie_generation=3, lanes=16)
    place = island("a", nodes=1, per_node=4)
    place = replace(
        place,
        device=replace(place.device, host=host),
        intra_node=replace(
            place.intra_node, bandwidth_bytes_per_second=host.bandwidth_bytes_per_second
        ),
        switch_of_device=switches,
    )
    cluster = Cluster(name="shared", islands=(place,))
    asked = replace(job(8, gap=0.001), pin=pins)
    result = search(model(6), cluster, asked, PREDICTOR)
    step = Pricer(model(6), cluster, asked, PREDICTOR).step(result.plan)
    return result, any(each.shares for each in step.work)


@pytest.mark.parametrize(
    "pins",
    [
        Pins(pp=2, tp=1, dp=2, microbatch_size=1),
        Pins(pp=2, tp=2, dp=1, microbatch_size=1),
        Pins(pp=1, tp=2, dp=2, microbatch_size=1),
    ],
)
def test_groups_that_share_switches_are_slower_and_the_bound_holds(pins: Pins) -> None:
    alone, free = found(pins, switches=(0, 0, 1, 1))
    together, shared = found(pins, switches=(0, 1, 0, 1))
    assert (free, shared) == (False, True)
    assert together.estimate.step_seconds > alone.estimate.step_seconds
    for result in (alone, together):
        certificate, step = result.certificate, result.estimate.step_seconds
        assert certificate is not None
        assert certificate.lower_bound_seconds <= step
        assert certificate.gap == pytest.approx(1 - certificate.lower_bound_seconds / step)


@pytest.mark.parametrize(
    ("parts", "cp", "dp", "alone"),
    [
        ((), 4, 1, True),
        ((), 2, 1, False),  # another stage is in its node
        ((2, 2), 2, 1, True),
        ((2, 2), 4, 1, False),  # its group crosses two nodes
        ((2, 2), 2, 2, True),
        ((4, 2), 2, 1, False),
    ],
)
def test_a_stage_on_parts_of_nodes_is_alone_where_it_fills_them(
    parts: tuple[int, ...], cp: int, dp: int, alone: bool
) -> None:
    place = replace(island("a", per_node=4), switch_of_device=(0, 0, 1, 1), node_parts=parts)
    assert _alone(place, Shape(tp=1, cp=cp, dp=dp, microbatch_size=1)) == alone
