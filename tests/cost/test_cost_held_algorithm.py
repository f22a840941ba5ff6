"""A library that is held to rings or trees (`trainer.collective_algorithm`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from collectives_groups import Populations, group, plain_cluster
from cost_fakes import Figures
from estimate_plans import CLUSTER, FREE, SHAPE, plan_of
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.cluster.spec import Link, Transport
from hetplan.cost.collectives import Algorithm, CollectiveCost, collective
from hetplan.cost.estimate import estimate
from hetplan.cost.network.segments import TrafficClass
from hetplan.cost.traffic import ledger
from hetplan.job.spec import CollectiveAlgorithm, TrainerOptions
from hetplan.predict.predictor import Prediction, Predictor
from hetplan.profiling.samples import LinkOperation

AR = LinkOperation.ALL_REDUCE
FOUR_NODES: Populations = ((0, (4, 4, 4, 4)),)
PLACES: tuple[Populations, ...] = (((0, (8,)),), ((0, (4, 4)),), FOUR_NODES, ((0, (4,)), (1, (4,))))


def cost(
    places: Populations,
    message: float,
    held: Algorithm | None,
    operation: LinkOperation = AR,
    predictor: Predictor | None = None,
    **forced: Algorithm,
) -> CollectiveCost:
    own = group(places)
    return collective(
        own.cluster,
        own.shape,
        operation,
        message,
        predictor or Figures(),
        held=held,
        **forced,  # type: ignore[arg-type]
    )


@settings(derandomize=True, deadline=None, max_examples=40)
@given(places=st.sampled_from(PLACES), message=st.floats(1.0, 1e11))
def test_a_held_library_takes_that_algorithm_and_a_free_one_the_cheaper(
    places: Populations, message: float
) -> None:
    ring, tree = (cost(places, message, each) for each in (Algorithm.RING, Algorithm.TREE))
    assert ring.seconds == cost(places, message, None, algorithm=Algorithm.RING).seconds
    free = cost(places, message, None)
    forced = cost(places, message, None, algorithm=Algorithm.TREE)
    assert tree.seconds == max(forced.seconds, free.seconds)
    assert free.seconds <= ring.seconds
    if places is FOUR_NODES:
        # Up to two nodes a free library takes rings.
        assert free.seconds == min(ring.seconds, tree.seconds)


def test_other_operations_and_staged_sums_have_one_algorithm() -> None:
    for operation in (LinkOperation.ALL_GATHER, LinkOperation.ALL_TO_ALL):
        times = {cost(FOUR_NODES, 1e6, each, operation).seconds for each in (None, *Algorithm)}
        assert len(times) == 1
    plain = plain_cluster(FOUR_NODES)
    staged = replace(
        plain,
        islands=tuple(
            replace(each, inter_node=replace(each.inter_node, transport=Transport.HOST_STAGED))
            for each in plain.islands
        ),
    )
    own = group(FOUR_NODES, cluster=staged)
    found = collective(own.cluster, own.shape, AR, 10.0, Figures(), held=Algorithm.TREE)
    assert found.algorithm is Algorithm.RING


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Figures):
    """Sums were measured on every link, sends on none."""

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
        return Prediction(seconds=7.0, log_halfwidth=0.1, source="measured")


@pytest.mark.parametrize("places", [((0, (8,)),), FOUR_NODES])
def test_what_was_measured_stays(places: Populations) -> None:
    found = [
        cost(places, 1e6, each, predictor=Measured())
        for each in (None, Algorithm.RING, Algorithm.TREE)
    ]
    assert {each.algorithm for each in found} == {Algorithm.RING}
    assert {each.seconds for each in found} == {7.0}


def test_steps_and_their_traffic_follow_the_job() -> None:
    plan = plan_of(tp=4)
    jobs = [
        replace(FREE, trainer=TrainerOptions(collective_algorithm=each))
        for each in (None, *CollectiveAlgorithm)
    ]
    free, ring, tree = (estimate(plan, SHAPE, CLUSTER, job, Figures()).step_seconds for job in jobs)
    assert free == ring
    assert tree >= ring  # a held tree is never cheaper than the free choice
    # Inside a node both send 2 (n - 1) S over its links.
    sent = [
        sum(
            each.bytes_per_step
            for each in ledger(plan, SHAPE, CLUSTER, job).entries
            if each.traffic is TrafficClass.TENSOR_PARALLEL
        )
        for job in jobs
    ]
    assert sent[0] > 0
    assert sent == [pytest.approx(sent[0])] * 3
