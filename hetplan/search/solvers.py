"""Who searches which part of the space of a job."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from hetplan.cluster.spec import Cluster
from hetplan.job.spec import Job
from hetplan.plans.targets import target
from hetplan.search.costs.maker import SpaceMaker
from hetplan.search.families.family import Family
from hetplan.search.interleaved.solver import InterleavedSolver
from hetplan.search.single_solver import SingleSolver
from hetplan.search.solver import Solver


def solvers_of(
    families: Sequence[Family], maker: SpaceMaker, cluster: Cluster, job: Job
) -> tuple[Solver, ...]:
    """One per family, and one for plans of several pipelines where the target has them."""
    found: list[Solver] = []
    for family in families:
        if family.schedule == "1f1b":
            found.append(SingleSolver(len(found), family, maker))
        else:
            found.append(InterleavedSolver(len(found), family, maker))
    if target(job.target).several_pipelines and job.pin.pipelines != 1:
        several = _late("hetplan.search.several.solver", "SeveralSolver")
        if several is not None:
            found.append(several(len(found), families, maker, cluster, job))
    return tuple(found)


def _late(module: str, name: str) -> Any:
    if find_spec(module) is None:
        return None
    return getattr(import_module(module), name)
