"""Is there any plan at all? Memory, divisibility, pins and the target; no time is minimised.

A family has a plan if one row of stages holds all layers: the program over orders of meshes answers
that exactly for plain 1F1B (`OrderProgram.least` without a limit). Interleaved families are asked
of their own solver, which may leave it open; then `uncertain` says so, and a plan is assumed, so
that no conflict is claimed that was not seen. Plans of several pipelines count where one is found:
what has none but those is rare (one copy needs less than several).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetplan.errors import InputError
from hetplan.job.check import check_job_against
from hetplan.kernels import clock
from hetplan.plans.build import check_model
from hetplan.predict.predictor import Predictor
from hetplan.search.costs.maker import SpaceMaker
from hetplan.search.families.allowed import allowed_cluster, mesh_matches
from hetplan.search.families.families import Families
from hetplan.search.families.family import Family
from hetplan.search.interleaved.solver import InterleavedSolver
from hetplan.search.reasons.constraints import Question
from hetplan.search.single.inequalities import NONE
from hetplan.search.single.orders import OrderProgram
from hetplan.search.single_solver import SingleSolver
from hetplan.search.solver import Best, Solver
from hetplan.search.solvers import solvers_of

_MAX_TRIED = 200
"""Families whose rough memory fits and whose exact one is asked before the question stays open."""


@dataclass(slots=True)
class Feasible:
    """Says whether a question has a plan."""

    predictor: Predictor
    uncertain: bool = False
    """Whether some answer was assumed: a plan where none was found and none was excluded."""

    def __call__(self, asked: Question) -> bool:
        """Whether a plan exists; False where the question contradicts itself."""
        if check_job_against(asked.job, asked.model, asked.cluster):
            return False
        try:
            check_model(asked.model, asked.job)
            return self._any(asked)
        except InputError:
            # A device kind without a figure for this precision, a model that cannot be cut.
            return False

    def _any(self, asked: Question) -> bool:
        model, job = asked.model, asked.job
        cluster = allowed_cluster(asked.cluster, job)
        maker = SpaceMaker(model=model, cluster=cluster, job=job, predictor=self.predictor)
        families = Families(model=model, cluster=cluster, job=job).families()
        solvers = solvers_of(families, maker, cluster, job)
        tried = 0
        for solver in solvers:
            if solver.index < len(families) and not _ends_meet(families[solver.index], asked):
                continue
            if solver.rough.bound_seconds == math.inf:
                continue
            if tried == _MAX_TRIED:
                self.uncertain = True
                return True
            tried += 1
            if self._has_plan(solver, len(solvers), job.seed):
                return True
        return False

    def _has_plan(self, solver: Solver, count: int, seed: int) -> bool:
        if isinstance(solver, SingleSolver):
            return OrderProgram(solver.space).least(NONE, keep=False) < NONE
        best = Best(
            gap=0.0,
            bounds=[math.inf] * count,
            deadline=math.inf,
            progress=None,
            started=clock(),
            seed=seed,
        )
        best.bounds[solver.index] = solver.rough.bound_seconds
        solver.improve(best)
        if best.chosen is not None or not isinstance(solver, InterleavedSolver):
            return best.chosen is not None
        solver.prove(best)
        if best.chosen is None and best.bounds[solver.index] < math.inf:
            self.uncertain = True
            return True
        return best.chosen is not None


def _ends_meet(family: Family, asked: Question) -> bool:
    """Whether pins of the first stage, the last stage and their number leave meshes for them."""
    pin, cluster = asked.job.pin, asked.cluster
    first = [mesh_matches(mesh, cluster, pin.embedding_on) for mesh in family.meshes]
    last = [mesh_matches(mesh, cluster, pin.head_on) for mesh in family.meshes]
    if pin.pp == 1:
        return any(a and b for a, b in zip(first, last, strict=True))
    return any(first) and any(last)
