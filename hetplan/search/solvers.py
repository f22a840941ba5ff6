"""Who searches which part of the space of a job."""

from __future__ import annotations

from collections.abc import Sequence

from hetplan.cluster.spec import Cluster
from hetplan.job.spec import Job
from hetplan.plans.targets import target
from hetplan.search.costs.maker import SpaceMaker
from hetplan.search.families.family import Family
from hetplan.search.interleaved.solver import InterleavedSolver
from hetplan.search.several.solver import SeveralSolver
from hetplan.search.single.solver import SingleSolver
from hetplan.search.solver import Solver


def solvers_of(
    families: Sequence[Family], maker: SpaceMaker, cluster: Cluster, job: Job
) -> tuple[Solver, ...]:
    """One per family, and one for plans of several pipelines where the target has them."""
    found: list[Solver] = []
    for family in families:
        kind = SingleSolver if family.schedule == "1f1b" else InterleavedSolver
        found.append(kind(len(found), family, maker))
    if target(job.target).several_pipelines and job.pin.pipelines != 1:
        found.append(SeveralSolver(len(found), families, maker, cluster, job))
    return tuple(found)


def words_of(solver: Solver) -> str:
    """A solver in words, for the journal."""
    family = getattr(solver, "family", None)
    if not isinstance(family, Family):
        return "several pipelines"
    shape = family.meshes[0].shapes[0]
    chunks = f" v {family.virtual_stages}" if family.virtual_stages > 1 else ""
    degrees = ""
    if all(mesh.shapes == (shape,) for mesh in family.meshes):
        more = "".join(
            f" {name} {value}" for name, value in (("cp", shape.cp), ("ep", shape.ep)) if value > 1
        )
        degrees = f" tp {shape.tp}{more} dp {shape.dp} microbatch size {shape.microbatch_size}"
    recompute = "/".join(each.value for each in family.recompute)
    return (
        f"{family.schedule}{chunks} tick {family.samples}{degrees} recompute {recompute} "
        f"sharding {family.sharding.value}"
    )
