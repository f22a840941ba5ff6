"""A row of slots fits, and takes, what the price of its plan says."""

from __future__ import annotations

import random
from functools import lru_cache

import numpy as np
import pytest
from random_cases import seeds
from random_chosen import random_chosen
from search_jobs import cluster, island, job, model

from hetplan.cluster.spec import Cluster
from hetplan.cost.step_model.pricer import Pricer, StepCost
from hetplan.job.spec import Job
from hetplan.job.trainer import trainer_settings
from hetplan.model.spec import ModelSpec
from hetplan.plans.build import plan_of
from hetplan.plans.chosen import ChosenPlan
from hetplan.predict.fit import FittedPredictor
from hetplan.search.interleaved.rows import row_of
from hetplan.search.space.families import Families
from hetplan.search.space.family import Family
from hetplan.search.space.row import NEVER
from hetplan.search.table_maker import Kept, TableMaker

_INTERLEAVED = "interleaved-1f1b"
PREDICTOR = FittedPredictor.datasheet_only()


def question(seed: int) -> tuple[ModelSpec, Cluster, Job]:
    """Two or three islands with room for several stages, 8 to 14 layers, memory that binds."""
    rng = np.random.default_rng(seed)
    islands = [
        island(
            f"i{at}",
            kind=f"kind{at}",
            teraflops=float(rng.uniform(30, 200)),
            gigabytes=float(rng.choice([0.3, 0.5, 1.2, 16.0])),
            nodes=int(rng.integers(1, 4)),
            per_node=int(rng.choice([1, 2, 4])),
            gigabytes_per_second=float(rng.choice([0.5, 5.0, 50.0])),
        )
        for at in range(int(rng.integers(2, 4)))
    ]
    return (
        model(int(rng.integers(8, 15)), tied=bool(rng.random() < 0.25)),
        cluster(*islands, gigabytes_per_second=float(rng.choice([0.2, 2.0, 20.0]))),
        job(int(rng.choice([12, 24])), target=str(rng.choice(["torchtitan", "megatron"]))),
    )


@lru_cache(maxsize=64)
def plans(seed: int, number: int) -> list[tuple[Family, ChosenPlan, StepCost, TableMaker]]:
    """Random interleaved plans with their prices."""
    spec, where, asked = question(seed)
    draw = random.Random(seed)
    maker = TableMaker(model=spec, cluster=where, job=asked, predictor=PREDICTOR)
    families = [
        each
        for each in Families(model=spec, cluster=where, job=asked).families()
        if each.schedule == _INTERLEAVED
    ]
    pricer = Pricer(spec, where, asked, PREDICTOR)
    found = []
    for _ in range(40 * number):
        if len(found) == number or not families:
            break
        family = draw.choice(families)
        chosen = random_chosen(draw, family, spec, where, asked)
        if chosen is None:
            continue
        (pipeline,) = chosen.pipelines
        if len(pipeline.stages) < 3 or pipeline.num_microbatches % len(pipeline.stages):
            continue
        # One recomputation for all, as these families have.
        found.append((family, chosen, pricer.step(plan_of(spec, where, asked, chosen)), maker))
    return found


@pytest.mark.parametrize("seed", seeds(16))
def test_row_is_priced_as_its_plan(seed: int) -> None:
    for family, chosen, price, maker in plans(seed, 6):
        space = maker.unchunked_space(family)
        (pipeline,) = chosen.pipelines
        names = [
            tuple(maker.island_names[island] for island in mesh.islands) for mesh in family.meshes
        ]
        mesh = tuple(
            names.index(tuple(part.island for part in stage.parts)) for stage in pipeline.stages
        )
        units = np.array([sum(stage.layers) for stage in pipeline.stages])
        variant = np.array([family.recompute.index(stage.recompute) for stage in pipeline.stages])
        most = maker.chunk_memory(family).most_units(mesh)
        use = price.memory[0]
        for s, (n, v) in enumerate(zip(units, variant, strict=True)):
            assert (n <= most[s, v]) == (use[s].total_bytes <= use[s].available_bytes), (s, n)
        row = row_of(space, mesh, most, family.virtual_stages, maker.exchange)
        fits = all(each.total_bytes <= each.available_bytes for each in use)
        seconds = row.seconds(variant, units)
        assert (seconds < NEVER) == fits
        if fits and trainer_settings(maker.job).overlap_grad_reduce:
            # How much of a reduction is hidden depends on the chunks: the row has the most.
            assert 0.7 * price.step_seconds < seconds <= price.step_seconds * (1 + 1e-9)
        elif fits:
            assert seconds == pytest.approx(price.step_seconds, rel=1e-9)


def test_random_plans_are_many_and_memory_binds() -> None:
    """What the test above draws: enough plans, some of which fit and some not."""
    found = [price for seed in range(16) for *_, price, _ in plans(seed, 6)]
    fit = [
        all(each.total_bytes <= each.available_bytes for each in price.memory[0]) for price in found
    ]
    assert len(found) > 60
    assert 10 < sum(fit) < len(fit) - 10


def test_values_are_kept_while_there_is_room() -> None:
    kept, made = Kept(100), []

    def value(key: int, size: int) -> object:
        return kept.value(key, size, lambda: made.append(key) or key)  # type: ignore[func-returns-value]

    assert [value(key, 40) for key in (1, 2, 1, 3, 2, 1)] == [1, 2, 1, 3, 2, 1]
    assert made == [1, 2, 3, 1]
    assert value(4, 101) is None
    assert value(5, 100) == 5
    assert value(3, 1) == 3
    assert made == [1, 2, 3, 1, 5, 3]
