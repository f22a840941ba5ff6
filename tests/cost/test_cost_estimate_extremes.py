"""Estimates of figures that make no number, of unlike devices, and of very many pipelines."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
from cost_fakes import LinearPredictor, island, job, link
from estimate_plans import SHAPE, plan_of, wide_cluster

from hetplan.cluster.spec import Cluster
from hetplan.cost.estimate import estimate, estimate_with
from hetplan.cost.step_model.overlap import Slowdowns, in_buckets
from hetplan.cost.step_model.pricer import Pricer
from hetplan.errors import InputError
from hetplan.plans.plan import Plan
from hetplan.predict.fit import FittedPredictor

JOB = replace(job(), global_batch_size=32)


def plan_on(cluster: Cluster, sizes: Sequence[int], pipelines: int = 1) -> Plan:
    return plan_of(sizes, cluster=cluster, pipelines=pipelines, asked=JOB)


@pytest.mark.parametrize("datasheet", [False, True])
@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"intra_node": link(1e-300)}, "link of 1e-300 B/s"),
        ({"intra_node": link(1e9, 1e308)}, r"link of 1 GB/s"),
        ({"clock_ratio": 1e-320}, r"of fast .*island a, whose clock_ratio is 9\.99\S*e-321"),
        ({"clock_ratio": 1e-300}, r"of fast .*island a, whose clock_ratio is 1e-300"),
    ],
)
def test_a_step_that_is_no_number_names_what_made_it_so(
    changes: dict[str, object], cause: str, datasheet: bool
) -> None:
    own = replace(island("a"), **changes)  # type: ignore[arg-type]
    cluster = Cluster(name="odd", islands=(own,))
    predictor = FittedPredictor.datasheet_only() if datasheet else LinearPredictor()
    plan = plan_on(cluster, (2, 2))
    with pytest.raises(InputError, match=rf"the step takes \S+ s: .*{cause}.*; correct the"):
        estimate(plan, SHAPE, cluster, JOB, predictor)
    with pytest.raises(InputError, match=cause):
        Pricer(SHAPE, cluster, JOB, predictor).step(plan)


def unlike(spreads: tuple[float | None, float | None]) -> Cluster:
    base = wide_cluster()
    return replace(
        base,
        islands=tuple(
            replace(each, speed_spread=spread)
            for each, spread in zip(base.islands, spreads, strict=True)
        ),
    )


@pytest.mark.parametrize("halfwidth", [0.0, 0.1])
@pytest.mark.parametrize("spread", [0.02, 0.1, 0.3, 0.5])
@pytest.mark.parametrize("both", [False, True])
def test_a_step_of_unlike_devices_lies_in_its_own_interval(
    spread: float, both: bool, halfwidth: float
) -> None:
    cluster = unlike((spread, spread if both else None))
    predictor = LinearPredictor(halfwidth=halfwidth)
    plans = (
        plan_on(cluster, (8, 8)),
        plan_on(cluster, (32, 32)),
        plan_on(cluster, (1, 1), pipelines=32),
    )
    for plan in plans:
        found = estimate(plan, SHAPE, cluster, JOB, predictor)
        low, high = found.interval.p10_seconds, found.interval.p90_seconds
        assert low < found.step_seconds < high
        if not halfwidth:
            assert found.step_seconds == pytest.approx(found.interval.mean_seconds)
        assert found.step_seconds >= Pricer(SHAPE, cluster, JOB, predictor).step(plan).step_seconds
        for parts in (found.components, *(stage.components for stage in found.stages)):
            assert sum(each.seconds for each in parts) == pytest.approx(found.step_seconds)


def test_many_pipelines_take_work_in_proportion() -> None:
    def calls(pipelines: int) -> int:
        cluster = Cluster(name="many", islands=(island("a", nodes=2 * pipelines),))
        plan = plan_on(cluster, (1,) * 8, pipelines)
        pricer = Pricer(SHAPE, cluster, JOB, LinearPredictor(halfwidth=0.1))
        pricer.step(plan)
        made = 0

        def count(frame: object, event: str, _: object) -> None:
            nonlocal made
            made += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            estimate_with(pricer, plan)
        finally:
            sys.setprofile(None)
        return made

    calls(4)  # compiles
    few, many = calls(8), calls(64)
    # Eight times as many; 64 times as often where every stage looks at all pipelines.
    assert many < 12 * few


def test_a_plan_without_pipelines_is_refused() -> None:
    cluster = wide_cluster()
    plan = replace(plan_on(cluster, (8, 8)), pipelines=())
    with pytest.raises(InputError, match="at least one pipeline"):
        estimate(plan, SHAPE, cluster, JOB, LinearPredictor())


@pytest.mark.parametrize(
    "wrong", [(-1.0, 1.0, 2), (1.0, -1.0, 2), (1.0, 1.0, -2), (math.nan, 1.0, 2)]
)
def test_buckets_of_negative_times_are_refused(wrong: tuple[float, float, float]) -> None:
    with pytest.raises(InputError, match="none of these can be below 0"):
        in_buckets(*wrong, Slowdowns())
