"""The warm way to a plan's step: what plans share is priced once and kept.

    pricer = Pricer(model, cluster, job, predictor)
    pricer.step(plan).step_seconds

Kept are the costs of single layers per placement, the transfers per pair of stages, collectives
per number of parameters, and memory per place in the pipeline and number of layers of each kind:
everything that two plans can have in common. Adding up, replay and composition are done for every
plan anew. `hetplan.cost.estimate` says the same of the plan, with break-down and interval; that
takes some hundred replays more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from hetplan.cluster.spec import Cluster
from hetplan.cost.arrays import Floats
from hetplan.cost.estimate_values import MemoryUse
from hetplan.cost.step_model.finite import check_finite, longest_part
from hetplan.cost.step_model.memory import stages_memory
from hetplan.cost.step_model.plan import PlanCosts
from hetplan.cost.step_model.step import Composed, compose
from hetplan.cost.step_model.units import settings_of
from hetplan.cost.step_model.work import PipelineWork, replayed_ends
from hetplan.errors import InputError
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.formats import reduction_formats
from hetplan.plans.plan import OverlapSettings, Plan, Sharding
from hetplan.predict.predictor import Predictor

_Settings = tuple[int, str, Sharding, int, float, OverlapSettings, tuple[str, ...], str | None]


@dataclass(frozen=True)
class StepCost:
    """One step of a plan."""

    step_seconds: float
    work: tuple[PipelineWork, ...]
    ends: tuple[Floats, ...]
    """When every stage leaves its pipeline."""
    composed: Composed
    memory: tuple[tuple[MemoryUse, ...], ...]
    """Of every stage, by pipeline."""

    @cached_property
    def pipeline_seconds(self) -> float:
        """Until every stage has left its pipeline."""
        return max(float(ends.max()) for ends in self.ends)


@dataclass(frozen=True, slots=True)
class Pricer:
    """Prices plans of one job on one cluster."""

    model: ModelSpec
    cluster: Cluster
    job: Job
    predictor: Predictor = field(repr=False)
    _known: dict[_Settings, PlanCosts] = field(default_factory=dict, repr=False, compare=False)

    def costs(self, plan: Plan) -> PlanCosts:
        """What is kept for plans with this one's settings."""
        key = (
            plan.padded_vocab_size,
            plan.target,
            plan.sharding,
            plan.optimizer_shards,
            plan.optimizer_offload,
            plan.overlap,
            reduction_formats(plan),
            plan.tied_embedding_precision,
        )
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = PlanCosts(
                settings_of(plan, self.model, self.cluster, self.job, self.predictor)
            )
        return found

    def step(self, plan: Plan) -> StepCost:
        """The step of a legal plan, its stages' times and memory; no interval.

        InputError where warm-up depths make rendezvous sends wait for themselves, and where the
        predictor lacks what the plan needs, and where a figure makes the step infinite.
        """
        costs = self.costs(plan)
        work = costs.work(plan)
        try:
            ends = replayed_ends(work, plan)
        except InputError:
            # The replay says only that a time is no number.
            check_finite(longest_part(costs, work)[0], costs, work)
            raise
        composed = compose(plan, costs, work, ends)
        check_finite(composed.step_seconds, costs, work)
        memory = tuple([stages_memory(costs, plan, pipeline) for pipeline in work])
        return StepCost(composed.step_seconds, tuple(work), ends, composed, memory)
