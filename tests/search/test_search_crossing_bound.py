"""The bound that knows boundaries between islands is never above the best plan, often near it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from search_costs_cases import regions_cluster, unlike_model
from search_jobs import job

from hetplan.cluster.spec import Cluster
from hetplan.predict.fit import fit_populations
from hetplan.search.bounds.crossing_bound import joined, tree
from hetplan.search.solver import Best
from hetplan.search.solvers import solver_of
from hetplan.search.space.allowed import allowed_cluster
from hetplan.search.space.families import Families
from hetplan.search.table_maker import TableMaker

PREDICTOR = fit_populations(())


def slowed(cluster: Cluster, seconds: float) -> Cluster:
    """The same with so long and slow a way between regions."""
    link = cluster.across_regions
    assert link is not None
    rate = link.bandwidth_bytes_per_second * min(1.0, 1e-3 / seconds)
    return replace(
        cluster,
        across_regions=replace(link, latency_seconds=seconds, bandwidth_bytes_per_second=rate),
    )


@pytest.mark.parametrize(
    "target",
    [pytest.param(each, marks=pytest.mark.slow) for each in ("megatron", "flagscale", "native")],
)
def test_no_best_plan_of_a_family_is_below(target: str) -> None:
    """All plans of small families are listed; some families the rough bound is far below."""
    seen, sharpened, near = 0, 0, 0.0
    for seed in range(8):
        rng = np.random.default_rng(seed)
        cluster = slowed(
            regions_cluster(rng, [0, 1, 0] if seed % 2 else [0, 1]), 10.0 ** -(seed % 4)
        )
        model, asked = unlike_model("dense", 6, tied=False), job(8, target=target)
        asked = replace(asked, pin=replace(asked.pin, pipelines=1))
        maker = TableMaker(model=model, cluster=cluster, job=asked, predictor=PREDICTOR)
        families = Families(
            model=model, cluster=allowed_cluster(cluster, asked), job=asked
        ).families()
        for at in rng.permutation(len(families))[:6].tolist():
            family = families[at]
            order_free = maker.order_free(family).bound_seconds
            best = Best(bounds=[0.0])
            for solver in (solver_of(0, family, maker),):
                # Without the sharper bound, which is asked where there is a plan only.
                solver.improve(best)
            if best.chosen is None:
                continue
            crossing = maker.crossing_bound(family)
            assert order_free <= crossing <= best.seconds
            seen += 1
            sharpened += crossing > 1.05 * order_free
            near = max(near, crossing / best.seconds)
    assert seen > 10
    assert sharpened > 0
    assert near > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("target", ["megatron", "torchtitan"])
def test_no_best_interleaved_plan_is_below(target: str) -> None:
    """Of families with several chunks; batched sends make every boundary count N times."""
    seen = sharpened = 0
    near = 0.0
    for seed in range(10):
        rng = np.random.default_rng(seed)
        cluster = slowed(
            regions_cluster(rng, [0, 1, 0] if seed % 2 else [0, 1]), 10.0 ** -(seed % 5)
        )
        model, asked = unlike_model("dense", 8, tied=False), job(12, target=target)
        asked = replace(asked, pin=replace(asked.pin, pipelines=1))
        maker = TableMaker(model=model, cluster=cluster, job=asked, predictor=PREDICTOR)
        families = [
            family
            for family in Families(
                model=model, cluster=allowed_cluster(cluster, asked), job=asked
            ).families()
            if family.virtual_stages > 1 and maker.order_free(family).bound_seconds < math.inf
        ]
        for at in rng.permutation(len(families))[:8].tolist():
            family = families[at]
            best = Best(bounds=[0.0])
            solver = solver_of(0, family, maker)
            solver.improve(best)
            if best.chosen is None:
                continue
            order_free, crossing = (
                maker.order_free(family).bound_seconds,
                maker.crossing_bound(family),
            )
            assert order_free <= crossing <= best.seconds
            for enough in (0.5 * crossing, 0.98 * crossing, 1.5 * crossing):
                assert min(enough, crossing) * (1 - 2e-3) <= maker.crossing_bound(family, enough)
                assert maker.crossing_bound(family, enough) <= best.seconds
            seen += 1
            sharpened += crossing > 1.2 * order_free
            near = max(near, crossing / best.seconds)
    assert seen > 20
    assert sharpened > 3
    assert near > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("target", ["megatron", "native"])
def test_alike_families_share_a_bound_that_is_above_none_of_theirs(target: str) -> None:
    """Of jobs with experts; some bound is near, and both kinds of schedule are among them."""
    seen = {True: 0, False: 0}
    near = 0.0
    for seed in range(2):
        rng = np.random.default_rng([7, seed])
        cluster = slowed(regions_cluster(rng, [0, 1]), 10.0 ** -(seed + 1))
        model, asked = unlike_model("experts", 6, tied=False), job(8, target=target)
        asked = replace(asked, pin=replace(asked.pin, pipelines=1))
        maker = TableMaker(model=model, cluster=cluster, job=asked, predictor=PREDICTOR)
        families = maker.families
        for at in rng.permutation(len(families))[:14].tolist():
            family = families[at]
            loosest = families.loosest(family)
            own = maker.crossing_bound(family)
            if loosest is family or own == math.inf:
                continue
            assert families.loosest(replace(family)) is loosest
            shared = maker._crossing_bound.of_all(loosest, math.inf)
            assert shared <= own * (1.0 + 2e-3)
            best = Best(bounds=[0.0], gap=0.0)
            solver = solver_of(0, family, maker)
            solver.improve(best)
            if best.chosen is None:
                continue
            for part in (0.3, 0.9, 1.0):
                assert maker.crossing_bound(family, part * own) <= best.seconds
            solver.prove(best)  # by what alike families share first
            assert best.bounds[0] <= best.seconds * (1.0 + 1e-9)
            assert shared <= best.seconds
            seen[family.virtual_stages > 1] += 1
            near = max(near, shared / best.seconds)
    assert seen[False] > 3
    assert near > 0.3


def test_islands_are_joined_where_any_set_of_them_is() -> None:
    """Against all sets, one by one; regions that cannot be reached are among them."""
    answers = {True: 0, False: 0}
    for seed in range(400):
        rng = np.random.default_rng([31, seed])
        count = int(rng.integers(1, 7))
        room = np.floor(rng.uniform(0.0, 30.0, count)) * (rng.random(count) < 0.85)
        region = rng.integers(0, 3, count)
        far = region[:, None] != region[None, :]
        loss = np.where(far, rng.uniform(0.0, 30.0, far.shape), rng.uniform(0.0, 3.0, far.shape))
        loss = np.where(far & (rng.random(far.shape) < 0.4 * (seed % 2)), np.inf, loss)
        loss = np.maximum(loss, loss.T)
        need = float(rng.uniform(0.2, 1.0) * room.sum()) + 1e-6
        found = False
        some = np.flatnonzero(room > 0.0)
        for mask in range(1, 1 << len(some)):
            chosen = some[[at for at in range(len(some)) if mask >> at & 1]]
            spare = float(room[chosen].sum()) - need
            found = found or (spare >= 0.0 and tree(loss, chosen, spare) < np.inf)
        assert joined(room, loss, need) == found
        answers[found] += 1
    assert min(answers.values()) > 50


def test_no_room_is_joined_where_none_is_needed() -> None:
    """What the ends of the pipeline hold may be all that is needed."""
    none, apart = np.zeros(3), np.full((3, 3), np.inf)
    assert joined(none, apart, -1.0)
    assert not joined(none, apart, 1.0)
