"""Where a space's numbers are only lower values, what does a plan cost?

A space adds up what every stage and boundary costs alone. Plans cost more than that where

    a stage has unlike parts        now one, now another of them is the slowest
    stages have several tp          the vocabulary is padded for all of them
    devices share capacities        groups and transfers of different stages slow each other
    early sends take compute units  passes beside them are slower

Small spaces are closed all the same: their plans are priced whole
(`hetplan.cost.step_model.pricer`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from hetplan.cost.step_model.groups import shares_anything
from hetplan.cost.step_model.pricer import Pricer
from hetplan.plans.build import plan_of
from hetplan.plans.chosen import ChosenPlan
from hetplan.search.costs.placed import Placed
from hetplan.search.costs.stages import alike_padded
from hetplan.search.families.family import Family, Mesh


@dataclass(frozen=True, kw_only=True)
class Whole:
    """Prices plans of one job as they are placed; keeps what it has priced."""

    placed: Placed
    _known: dict[ChosenPlan, float] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def _pricer(self) -> Pricer:
        placed = self.placed
        return Pricer(placed.model, placed.cluster, placed.job, placed.predictor)

    def seconds(self, chosen: ChosenPlan) -> float:
        """The step of the plan; infinite where it does not fit. InputError as of `plan_of`."""
        found = self._known.get(chosen)
        if found is None:
            placed = self.placed
            plan = plan_of(placed.model, placed.cluster, placed.job, chosen)
            step = self._pricer.step(plan)
            fits = all(use.fits for pipeline in step.memory for use in pipeline)
            found = self._known[chosen] = step.step_seconds if fits else math.inf
        return found

    def exact(self, family: Family) -> bool:
        """Whether the space of the family says what its plans cost, and not a little less."""
        if shares_anything(self.placed.cluster):
            return False
        if family.early_sends and self._slow_sends:
            return False
        return alike_padded(self.placed, family) and all(
            self._alike_parts(family, mesh) for mesh in family.meshes if len(mesh.islands) > 1
        )

    @cached_property
    def _slow_sends(self) -> bool:
        cluster = self.placed.cluster
        links = [entry.link for entry in cluster.links]
        links += [entry.link for entry in cluster.region_links]
        links += [each for each in (cluster.within_region, cluster.across_regions) if each]
        for island in cluster.islands:
            links += [island.intra_node, island.inter_node]
        return any(link.compute_share for link in links)

    def _alike_parts(self, family: Family, mesh: Mesh) -> bool:
        """Whether all parts take equally long, so that it does not matter who is the slowest."""
        parts = [
            self.placed.passes(island, shape, family.recompute)
            for island, shape in zip(mesh.islands, mesh.shapes, strict=True)
        ]
        first = parts[0]
        return all(
            np.array_equal(getattr(first, name), getattr(other, name))
            for other in parts[1:]
            for name in ("forward", "backward", "extra_forward", "extra_backward")
        )
