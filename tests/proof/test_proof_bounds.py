"""No plan is ever below a limit under which the proof excludes its family: random plans of every
target and axis, priced apart from the product (`tests/oracle`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from oracle_instances import Listed
from oracle_optimum import Found, chosen_plan
from oracle_price import Prices
from oracle_space import SmallSpace
from random_cases import seeds
from search_jobs import cluster, island, job, model
from test_oracle_price import _own, _some

from hetplan.cluster.spec import Cluster
from hetplan.plans.chosen import ChosenPlan, ChosenStage
from hetplan.predict.fit import FittedPredictor
from hetplan.proof import orders
from hetplan.proof.closed_form import ClosedForm, several_pipelines_bound
from hetplan.search.search import search
from hetplan.search.space.allowed import allowed_cluster
from hetplan.search.space.families import Families
from hetplan.search.space.family import Family, Mesh
from hetplan.search.space.stage_pricer import StagePricer
from hetplan.search.space.stage_tables import StageTables

ABOVE = 1.0 + 1e-7
BLOCKS = 10
SAMPLE = 60


def _has(family: Family, chosen: ChosenPlan, cluster: Cluster) -> bool:
    """Whether a family has this plan."""
    pipeline = chosen.pipelines[0]
    schedule = pipeline.schedule
    names = [island.name for island in cluster.islands]

    def same(mesh: Mesh, stage: ChosenStage) -> bool:
        parts = [(names[at], shape) for at, shape in zip(mesh.islands, mesh.shapes, strict=True)]
        return sorted(parts, key=str) == sorted(
            ((part.island, part.shape) for part in stage.parts), key=str
        )

    return (
        (family.schedule, family.virtual_stages) == (schedule.name, schedule.virtual_stages)
        and family.num_microbatches == pipeline.num_microbatches
        and (family.sharding, family.early_sends) == (chosen.sharding, chosen.early_sends)
        and family.offload == chosen.optimizer_offload
        and all(stage.recompute in family.recompute for stage in pipeline.stages)
        and all(any(same(mesh, stage) for mesh in family.meshes) for stage in pipeline.stages)
    )


def _judged(one: Listed) -> tuple[int, int]:
    """(plans, of them several pipelines) that were held against the proof."""
    made = one.instance()
    predictor = FittedPredictor.datasheet_only()
    space = SmallSpace(made.model, made.cluster, made.job)
    prices = Prices(made.model, made.cluster, made.job, predictor)
    cluster = allowed_cluster(made.cluster, made.job)
    families = Families(model=made.model, cluster=cluster, job=made.job).families()
    pricer = StagePricer(model=made.model, cluster=cluster, job=made.job, predictor=predictor)
    tables, random = StageTables(pricer), np.random.default_rng(one.seed)
    plans: list[Found] = _some(space, prices, random)
    singles = several = 0
    for found in plans:
        step = prices.plan(found.pipelines, found.state)
        if not step.fits or not np.isfinite(step.seconds):
            continue
        chosen = chosen_plan(space, found.pipelines, found.rows, found.state)
        limit = step.seconds * ABOVE
        if len(chosen.pipelines) > 1:
            several += 1
            assert several_pipelines_bound(pricer) <= limit, (one.number, chosen)
            continue
        mine = [each for each in families if _has(each, chosen, cluster)]
        singles += len(mine)
        for family in mine:
            form = ClosedForm.of(pricer, family)
            assert form.has_room, (one.number, chosen)
            assert not form.excludes(family, limit), (one.number, chosen)
            assert not orders.excludes(tables, form, family, limit), (one.number, chosen)
    return singles, several


@pytest.mark.parametrize("trainer", ["native", "torchtitan", "megatron"])
def test_no_stage_holds_more_units_than_the_closed_form_has_room_for(trainer: str) -> None:
    """First and last stages have fewer messages, and may have room for more than middle ones."""
    small = replace(model(4), vocab_size=64)
    tight = cluster(island("a", gigabytes=1.3), island("b", gigabytes=1.1))
    asked = replace(job(64), target=trainer)
    pricer = StagePricer(
        model=small, cluster=tight, job=asked, predictor=FittedPredictor.datasheet_only()
    )
    tables, held = StageTables(pricer), 0
    for family in Families(model=small, cluster=tight, job=asked).families():
        if family.virtual_stages == 1:
            form, table = ClosedForm.of(pricer, family), tables.of(family)
            places = min(form.places, table.most_layers.shape[3] - 1)
            most = table.most_layers[..., 1 : places + 1].max(axis=1)
            assert (most <= form.holds[..., :places]).all()
            held += int(most.sum())
    assert held > 0


def test_a_mesh_of_any_speed_holds_what_it_can() -> None:
    """Quotients beyond the integers are units enough."""
    small, asked = model(4), replace(job(8), target="flagscale")
    apart = cluster(island("a", teraflops=1e30), island("b", kind="slow", teraflops=1e-17))
    predictor = FittedPredictor.datasheet_only()
    pricer = StagePricer(model=small, cluster=apart, job=asked, predictor=predictor)
    step = search(small, apart, replace(asked, gap=0.0), predictor).estimate.step_seconds
    forms = [
        (family, ClosedForm.of(pricer, family))
        for family in Families(model=small, cluster=apart, job=asked).families()
    ]
    assert not all(form.excludes(family, step * ABOVE) for family, form in forms)


@pytest.mark.parametrize("block", seeds(BLOCKS))
def test_no_plan_is_below_what_the_proof_excludes(block: int) -> None:
    rows = [row for row in _own() if row.plans <= 400]
    counts = [_judged(row) for row in rows[:: len(rows) // SAMPLE][:SAMPLE][block::BLOCKS]]
    assert sum(singles for singles, _ in counts) > 0


@pytest.mark.slow
@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_plan_of_any_listed_job_is_below_what_the_proof_excludes(block: int) -> None:
    counts = [_judged(row) for row in _own()[block :: 2 * BLOCKS]]
    assert sum(singles for singles, _ in counts) > 100
