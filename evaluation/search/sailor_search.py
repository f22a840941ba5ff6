"""Which plan does hetplan's search find when its cost is Sailor's formula?

The families of the search (`hetplan.search.families`), one microbatch size at a time so that every
plan is one in Sailor's form, its local search over rows of stages and its proofs
(`hetplan.search.single_solver`), on the numbers of `sailor_space`. Rows are cut into layers, and
priced, by the formula itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from evaluation.search.family_order import drive, families_of, parts_of
from evaluation.search.row_cuts import cut
from evaluation.search.rows import sends_of
from evaluation.search.sailor_cost import SailorScore
from evaluation.search.sailor_files import SailorFiles
from evaluation.search.sailor_predictor import ProfilePredictor
from evaluation.search.sailor_score import Judge
from evaluation.search.sailor_space import SailorMaker, has_paths
from evaluation.search.sailor_tables import Tables
from hetplan.plans.chosen import ChosenPlan
from hetplan.search.families.family import Family
from hetplan.search.families.space import Ints
from hetplan.search.result import Inputs
from hetplan.search.single_solver import SingleSolver
from hetplan.search.solver import Best

_FEW_MESHES = 12
"""Families of more are searched in parts as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """The best plan by Sailor's formula in the families of the search."""

    chosen: ChosenPlan
    score: SailorScore
    bound_seconds: float
    """No plan of the families is faster by the formula."""
    families: int
    searched: int
    scored: int
    proof_cpu_seconds: float


class SailorSolver(SingleSolver):
    """A family's solver whose rows are cut and priced by the formula."""

    def __init__(self, index: int, family: Family, maker: SailorMaker) -> None:
        super().__init__(index, family, maker)
        self._sailor = maker

    def improve(self, best: Best) -> None:
        """Pipelines of one stage, and what local search finds where stages have a path."""
        for m in range(len(self.family.meshes)):
            self.offer_row(np.array([m]), np.zeros(1, dtype=np.int64), best)
        if has_paths(self.space):
            super().improve(best)

    def offer_row(self, mesh: Ints, extra: Ints, best: Best) -> None:
        """Cut a row of slots by the formula and offer it."""
        meshes = [self.family.meshes[m] for m in mesh.tolist()]
        tables, last = self._sailor.tables, len(meshes) - 1
        stages = tuple(self._sailor.stage(each) for each in meshes)
        sends = sends_of(stages, tables)
        if not np.all(np.isfinite(sends)) or last >= self.space.num_layers:
            return
        ticks, reductions = tables.row(stages, sends)
        ends = np.zeros(len(meshes), dtype=np.int64)
        if cut(ticks, reductions, self.space.num_microbatches, ends) == math.inf:
            return
        units = np.diff(ends, prepend=0)
        units[0] -= 1
        units[last] -= 1
        chosen = self._ordered(mesh, units)
        best.replays += 1
        best.offer(self.index, chosen, self._sailor.whole_seconds(chosen))

    def _ordered(self, mesh: Ints, units: Ints) -> ChosenPlan:
        """The plan of a row, parts of its stages in the order of their ring."""
        found = self._chosen(mesh, np.zeros_like(mesh), units, np.zeros_like(mesh))
        (pipeline,) = found.pipelines
        stages = tuple(
            replace(
                stage,
                parts=tuple(
                    stage.parts[at] for at in self._sailor.part_order(self.family.meshes[m])
                ),
            )
            for stage, m in zip(pipeline.stages, mesh.tolist(), strict=True)
        )
        return replace(found, pipelines=(replace(pipeline, stages=stages),))

    def offer_cut(self, mesh: Ints, variant: Ints, units: Ints, extra: Ints, best: Best) -> float:
        """The row of it: `offer_row`."""
        self.offer_row(mesh, extra, best)
        return best.wanted(self.index)


def sailor_search(inputs: Inputs, files: SailorFiles, every: list[Tables]) -> Searched | None:
    """The best plan and a bound; None where no family has a plan that fits.

    `every`: tables of each microbatch size.
    """
    judge = Judge(
        files=files, cluster=inputs.cluster, global_batch_size=inputs.job.global_batch_size
    )
    solvers: list[SailorSolver] = []
    parts: set[int] = set()
    for tables in every:
        maker = SailorMaker(
            model=inputs.model, cluster=inputs.cluster, job=inputs.job,
            predictor=ProfilePredictor(files=files), tables=tables, price=judge.seconds,
        )  # fmt: skip
        for family in families_of(inputs, tables):
            solvers.append(SailorSolver(len(solvers), family, maker))
            if len(family.meshes) > _FEW_MESHES:
                for part in parts_of(family):
                    parts.add(len(solvers))
                    solvers.append(SailorSolver(len(solvers), part, maker))
    driven = drive(solvers, inputs.job.seed, parts=parts)
    best = driven.best
    found = None if best.chosen is None else judge.score(best.chosen)
    if best.chosen is None or found is None:
        return None
    return Searched(
        chosen=best.chosen,
        score=found,
        bound_seconds=best.lower_bound,
        families=len(solvers) - len(parts),
        searched=driven.searched,
        scored=judge.scored,
        proof_cpu_seconds=driven.proof_cpu_seconds,
    )
