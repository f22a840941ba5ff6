"""Whole plans: placed on devices, checked against every rule, priced with links that they share.

A space adds up what every stage and boundary costs alone. Plans cost more than that where

    a stage has unlike parts        now one, now another of them is the slowest
    stages have several tp          the vocabulary is padded for all of them
    devices share capacities        groups and transfers of different stages slow each other
    early sends take compute units  passes beside them are slower
    reductions run beside compute   another plan's compute hides more of them

Small spaces are closed all the same: their plans are priced whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from hetplan.cluster.spec import Cluster
from hetplan.cost.step_model.groups import shares_anything
from hetplan.cost.step_model.pricer import Pricer, StepCost
from hetplan.errors import InputError
from hetplan.job.spec import Job
from hetplan.job.trainer import trainer_settings
from hetplan.model.spec import ModelSpec
from hetplan.plans.build import plan_of
from hetplan.plans.check import check_plan
from hetplan.plans.chosen import ChosenPlan
from hetplan.plans.plan import Plan
from hetplan.predict.predictor import Predictor
from hetplan.search.space.family import Family, Mesh
from hetplan.search.space.stage_passes import alike_padded, part_passes
from hetplan.search.space.stage_pricer import StagePricer


@dataclass(frozen=True)
class PlanEvaluator:
    """Places, checks and prices whole plans of one job; one for each search."""

    model: ModelSpec
    cluster: Cluster
    job: Job
    predictor: Predictor = field(repr=False)
    _known: dict[ChosenPlan, float] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def pricer(self) -> Pricer:
        """Of the job's plans; keeps what they share."""
        return Pricer(self.model, self.cluster, self.job, self.predictor)

    def place(self, chosen: ChosenPlan) -> Plan:
        """The plan on devices; an InputError where they have no room."""
        return plan_of(self.model, self.cluster, self.job, chosen)

    def legal(self, chosen: ChosenPlan) -> Plan | None:
        """The plan on devices; None where they have no room or a rule is broken."""
        try:
            plan = self.place(chosen)
        except InputError:
            return None
        return None if check_plan(plan, self.model, self.cluster, self.job) else plan

    def seconds(self, chosen: ChosenPlan) -> float:
        """The step of a legal plan; infinite where it does not fit; kept."""
        found = self._known.get(chosen)
        if found is None:
            step = self.step(chosen)
            found = self._known[chosen] = step.step_seconds if fits(step) else math.inf
        return found

    def step(self, chosen: ChosenPlan) -> StepCost:
        """The step of a legal plan and its memory."""
        return self.pricer.step(self.place(chosen))


def fits(step: StepCost) -> bool:
    """Whether every stage fits into its devices' memory."""
    return all(use.fits for pipeline in step.memory for use in pipeline)


def is_exact(placed: StagePricer, family: Family) -> bool:
    """Whether the space of the family says what its plans cost, and not a little less."""
    if shares_anything(placed.cluster) or (family.early_sends and _slow_sends(placed.cluster)):
        return False
    several = any(len(mesh.shapes) > 1 for mesh in family.meshes)
    choices = len(family.recompute) > 1 or family.virtual_stages > 1 or several
    if choices and trainer_settings(placed.job).overlap_grad_reduce:
        return False  # how much is hidden depends on them
    return alike_padded(placed, family) and all(
        _alike_parts(placed, family, mesh) for mesh in family.meshes if len(mesh.islands) > 1
    )


def _slow_sends(cluster: Cluster) -> bool:
    """Whether some link's transfers take compute units of the passes beside them."""
    links = [entry.link for entry in cluster.links]
    links += [entry.link for entry in cluster.region_links]
    links += [each for each in (cluster.within_region, cluster.across_regions) if each]
    for island in cluster.islands:
        links += [island.intra_node, island.inter_node]
    return any(link.compute_share for link in links)


def _alike_parts(placed: StagePricer, family: Family, mesh: Mesh) -> bool:
    """Whether all parts take equally long, so that it does not matter who is the slowest."""
    first, *others = (part_passes(placed, family, mesh, part) for part in range(len(mesh.islands)))
    return all(np.array_equal(*pair) for each in others for pair in zip(first, each, strict=True))
