"""Stages whose parts are of unlike kinds: spaces are below the plans, and near where it is sure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from search_costs_cases import chosen, fits, roles
from search_jobs import cluster, island, job, model
from synthetic_plans import Row, step_of

from hetplan.cluster.spec import Cluster
from hetplan.cost.step_model.pricer import Pricer, StepCost
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.build import plan_of
from hetplan.predict.fit import fit_populations
from hetplan.search.space.allowed import allowed_cluster
from hetplan.search.space.families import Families
from hetplan.search.space.family import Family
from hetplan.search.space.stage_table import MIDDLE, StageTable
from hetplan.search.table_maker import TableMaker

PREDICTOR = fit_populations(())
VOCABULARIES = (4000, 4001)
"""One that every tp divides, and one that plans of several tps pad further than each of them."""


def question(seed: int, target: str, vocabulary: int) -> tuple[ModelSpec, Cluster, Job]:
    """One island computes faster, the other one communicates faster."""
    rng = np.random.default_rng(seed)
    islands = [
        island(
            f"i{k}",
            kind=f"kind{k}",
            teraflops=float(teraflops * rng.uniform(0.6, 1.6)),
            gigabytes=64.0,
            nodes=3,
            per_node=4,
            gigabytes_per_second=float(speed * rng.uniform(0.6, 1.6)),
        )
        for k, (teraflops, speed) in enumerate([(60.0, 40.0), (150.0, 2.5)])
    ]
    if seed == 11:
        # Stages of a node leave each other a part of its switches.
        islands = [replace(each, switch_of_device=(0, 0, 1, 1)) for each in islands]
    return (
        replace(model(8), vocab_size=vocabulary),
        cluster(*islands),
        job(int(rng.choice([12, 24])), target=target),
    )


def mixed(family: Family) -> list[int]:
    return [at for at, mesh in enumerate(family.meshes) if len(mesh.islands) > 1]


def drawn(rng: np.random.Generator, space: StageTable, mesh: int) -> Row:
    """A pipeline of this mesh alone."""
    most = min(int(space.max_stages[mesh]), space.num_layers, space.stage_limit)
    count = int(rng.integers(1, most + 1))
    cuts = np.sort(rng.choice(np.arange(1, space.num_layers), count - 1, replace=False))
    units = np.diff([0, *cuts.tolist(), space.num_layers])
    return Row(
        meshes=(mesh,) * count,
        variants=tuple(rng.integers(0, len(space.forward), count).tolist()),
        units=tuple(int(each) for each in units),
        extra=(0,) * count,
    )


def turned(maker: TableMaker, family: Family, mesh: int) -> bool:
    """Whether recomputation makes another part the slowest."""
    one = family.meshes[mesh]
    passes = [
        maker.stage_pricer.passes(at, shape, family.recompute)
        for at, shape in zip(one.islands, one.shapes, strict=True)
    ]
    slowest = np.argmax([each.forward + each.backward for each in passes], axis=0)
    return len(set(slowest.tolist())) > 1


def pairs(
    maker: TableMaker, families: Sequence[Family], rng: np.random.Generator
) -> list[tuple[Family, int]]:
    """Some meshes of unlike parts, about half of them such that turn."""
    every = [(family, mesh) for family in families for mesh in mixed(family)]
    some = [every[at] for at in rng.permutation(len(every))[:300].tolist()]
    turning = [each for each in some if turned(maker, *each)]
    assert turning
    return turning[:8] + [each for each in some if each not in turning][:8]


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("target", ["native", "any"])
def test_the_part_that_is_waited_for_counts_by_recomputation(target: str, vocabulary: int) -> None:
    priced = 0
    for seed in (3, 11, 18):
        one, islands, asked = question(seed, target, vocabulary)
        allowed = allowed_cluster(islands, asked)
        found = Families(model=one, cluster=allowed, job=asked).families()
        maker = TableMaker(model=one, cluster=islands, job=asked, predictor=PREDICTOR)
        pricer = Pricer(one, islands, asked, PREDICTOR)
        rng = np.random.default_rng(seed)
        for family, mesh in pairs(maker, [each for each in found if plain(each)], rng):
            space = maker.space(family)
            slots = drawn(rng, space, mesh)
            if not fits(space, slots):
                continue
            step = pricer.step(plan_of(one, islands, asked, chosen(family, space, islands, slots)))
            assert step_of(space, slots) <= step.step_seconds * (1 + 1e-9)
            assert maker.order_free(family).bound_seconds <= step.step_seconds
            assert maker.crossing_bound(family) <= step.step_seconds
            priced += 1
            if not islands.islands[0].switch_of_device:
                middle_stages_cost_what_they_cost(space, mesh, slots, step)
    assert priced > 30


def plain(family: Family) -> bool:
    return family.virtual_stages == 1 and len(family.recompute) > 1


def middle_stages_cost_what_they_cost(
    space: StageTable, mesh: int, slots: Row, step: StepCost
) -> None:
    """There is no vocabulary that could be padded."""
    for s, role in enumerate(roles(len(slots.units))):
        if role == MIDDLE:
            v, n, stage = slots.variants[s], slots.units[s], step.work[0].stages[s]
            assert not space.extra_forward[role, v, mesh]
            assert not space.extra_backward[role, v, mesh]
            assert sum(stage.forward) == pytest.approx(n * space.forward[v, mesh], rel=1e-9)
            assert sum(stage.backward) == pytest.approx(n * space.backward[v, mesh], rel=1e-9)
