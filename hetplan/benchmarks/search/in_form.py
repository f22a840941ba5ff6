"""What is a chosen plan of hetplan in Sailor's form, and what does Sailor's formula say of it?"""

from __future__ import annotations

import math
from dataclasses import dataclass

from evaluation.sailor_plan_file import NAMES
from hetplan.benchmarks.search.sailor_cost import SailorPlan, SailorReplicas, SailorScore, score
from hetplan.benchmarks.search.sailor_files import SailorFiles
from hetplan.cluster.spec import Cluster
from hetplan.errors import InputError
from hetplan.plans.chosen import ChosenPlan

NAME_OF_KIND = dict(NAMES)


def in_form(chosen: ChosenPlan, cluster: Cluster) -> SailorPlan:
    """A plan of one pipeline with one microbatch size."""
    (pipeline,) = chosen.pipelines
    last = len(pipeline.stages) - 1
    stages = []
    layers = []
    for s, stage in enumerate(pipeline.stages):
        layers.append(sum(stage.layers) + (s == 0) + (s == last))
        row = []
        for part in stage.parts:
            island = cluster.island(part.island)
            row.append(
                SailorReplicas(
                    gpu=NAME_OF_KIND.get(island.device.kind, ""),
                    zone=island.region,
                    tp=part.shape.tp,
                    devices_per_node=island.devices_per_node,
                    count=part.shape.dp,
                )
            )
        stages.append(tuple(row))
    size = pipeline.stages[0].parts[0].shape.microbatch_size
    return SailorPlan(layers=tuple(layers), stages=tuple(stages), microbatch_size=size)


@dataclass(slots=True)
class Judge:
    """Sailor's formula for chosen plans; counts what it has looked at."""

    files: SailorFiles
    cluster: Cluster
    global_batch_size: int
    scored: int = 0

    def score(self, chosen: ChosenPlan) -> SailorScore | None:
        """None where the plan is disqualified or does not fit."""
        self.scored += 1
        try:
            found = score(in_form(chosen, self.cluster), self.files, self.global_batch_size)
        except InputError:
            return None
        return found if found.fits else None

    def seconds(self, chosen: ChosenPlan) -> float:
        """Infinite where `score` is None."""
        found = self.score(chosen)
        return math.inf if found is None else found.step_seconds
