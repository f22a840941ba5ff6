"""What does the norm of all gradients cost: the sum of one number over all ranks of a plan.

The sum of the norms is one number per rank: a tree over the ranks of a stage, then over the stages
and the pipelines, up and down again: 2 (ceil(log2 ranks) inside + ceil(log2 stages) across) times
the latency of the slowest link of each kind; a second time in float16, for the overflow flag.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetplan.cluster.spec import Link
from hetplan.cost.estimate_values import Component
from hetplan.cost.step_model.plan import PlanCosts
from hetplan.cost.step_model.values import Part
from hetplan.cost.step_model.work import PipelineWork
from hetplan.cost.terms import Term
from hetplan.job.spec import Job, Precision
from hetplan.plans.build import neighbour_link, stage_link
from hetplan.predict.predictor import Prediction, Predictor, link_cause

SCALAR_BYTES = 4.0
"""One float32."""


def norm_parts(costs: PlanCosts, work: Sequence[PipelineWork]) -> tuple[Part, ...]:
    """The sum of one number over all ranks; kept for pipelines of the same placement."""
    key = tuple(id(pipeline.hops) for pipeline in work)
    found = costs.norms.get(key)
    if found is None:
        found = costs.norms[key] = _norm_parts(costs, work)
    return found


def _norm_parts(costs: PlanCosts, work: Sequence[PipelineWork]) -> tuple[Part, ...]:
    predictor, job = costs.settings.predictor, costs.settings.job
    stages = [stage for pipeline in work for stage in pipeline.stages]
    inside = [
        scalar_term(stage_link(unit.island, unit.replica.num_devices), predictor).times(
            norm_depth(sum(each.replica.num_devices for each in stage.units))
        )
        for stage in stages
        for unit in stage.units
    ]
    links = {hop.path for pipeline in work for hop in pipeline.hops.hops}
    first = stages[0].unit.replica.devices[0].start
    for pipeline in work[1:]:
        other = pipeline.stages[0].unit.replica.devices[0].start
        links.add(neighbour_link(costs.settings.cluster, (first,), (other,))[0])
    depth = norm_depth(len(stages))
    across = [scalar_term(link, predictor).times(depth) for link in links]
    rounds = norm_rounds(job)
    return tuple(
        Part(component=Component.NORM, term=max(terms, key=lambda each: each.seconds).times(rounds))
        for terms in (inside, across)
        if terms and max(each.seconds for each in terms) > 0
    )


def norm_depth(count: int) -> int:
    """Levels of a binary tree over so many."""
    return (count - 1).bit_length()


def norm_rounds(job: Job) -> float:
    """How often a number goes up and down the tree's levels."""
    return 4.0 if job.precision is Precision.FLOAT16 else 2.0


def scalar_term(link: Link, predictor: Predictor) -> Term:
    """One number over a link, its receiver waiting."""
    law = predictor.send(link, SCALAR_BYTES)
    prediction = Prediction(
        seconds=law.wire_latency_seconds + SCALAR_BYTES * law.seconds_per_byte,
        log_halfwidth=law.log_halfwidth,
        source=law.source,
        extrapolating=law.extrapolating,
    )
    return Term(what="gradient norm", cause=link_cause(link), count=1, prediction=prediction)
