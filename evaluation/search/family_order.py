"""In which order are the families of a case searched?

First every family, likeliest first; then those that their bound leaves open are asked for a proof,
lowest bound first, until that has been so much work.
"""

from __future__ import annotations

import math
import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, replace

from evaluation.search.sailor_tables import Tables
from hetplan.plans.chosen import ChosenPlan
from hetplan.search.families.families import Families
from hetplan.search.families.family import Family
from hetplan.search.result import Inputs
from hetplan.search.single_solver import SingleSolver
from hetplan.search.solver import Best

GAP = 0.01
"""Families within it need no proof; as `hetplan.job.spec.Job.gap`."""
_MAX_PROOF = 8e7
"""Work of all proofs together: subproblems times the fourth power of the family's meshes, about
12 ns each (measured with 9, 25 and 51 meshes)."""
_MAX_PROVEN = 36
"""Meshes of a family that is proven: one subproblem takes 20 ms."""
_FAR = 1.5
"""Families whose estimate is further above the best plan have no candidates."""
_MAX_MESHES = 250
"""Meshes of such families: 10 to 30 ms each under hetplan's own cost of unions (measured)."""
_NEAR = 1.1
"""Plans of a family this much above its best are still candidates."""


@dataclass(slots=True)
class Pool(Best):
    """The best plan, and every plan on the way whose price came near its family's best."""

    seen: dict[ChosenPlan, float] = field(default_factory=dict)

    def wanted(self, solver: int) -> float:
        """A little more than what the solver has."""
        return Best.wanted(self, solver) * _NEAR

    def offer(self, solver: int, chosen: ChosenPlan, seconds: float) -> bool:
        """Keep it as a candidate, and as the best if it is."""
        if seconds < math.inf:
            self.seen.setdefault(chosen, seconds)
        return seconds < Best.wanted(self, solver) and Best.offer(self, solver, chosen, seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Driven:
    """What came of it."""

    best: Pool
    searched: int
    """Families."""
    proof_cpu_seconds: float


def families_of(inputs: Inputs, tables: Tables) -> Iterator[Family]:
    """Families of this microbatch size, without meshes of a (microbatch size, tp) that was not
    profiled.
    """
    known = {
        (each.room, each.tp) for room in range(len(tables.rooms)) for each in tables.classes(room)
    }
    pin = replace(inputs.job.pin, microbatch_size=tables.microbatch_size)
    job = replace(inputs.job, pin=pin)
    every = Families(model=inputs.model, cluster=inputs.cluster, job=job)
    for family in every.families():
        kept = tuple(
            mesh
            for mesh in family.meshes
            if all(
                (island, shape.tp) in known
                for island, shape in zip(mesh.islands, mesh.shapes, strict=True)
            )
        )
        if kept:
            yield replace(family, meshes=kept)


def parts_of(family: Family) -> Iterator[Family]:
    """Plans of one tp for each of several, and those without unions of islands.

    A local search in few meshes finds what one in many passes by.
    """
    degrees = {mesh: {shape.tp for shape in mesh.shapes} for mesh in family.meshes}
    every = sorted({tp for found in degrees.values() for tp in found})
    found = [tuple(mesh for mesh in family.meshes if degrees[mesh] == {tp}) for tp in every]
    found.append(tuple(mesh for mesh in family.meshes if len(mesh.islands) == 1))
    for meshes in dict.fromkeys(found):
        if 0 < len(meshes) < len(family.meshes):
            yield replace(family, meshes=meshes)


def drive(
    solvers: Sequence[SingleSolver],
    seed: int,
    *,
    parts: Container[int] = (),
    diverse: bool = False,
) -> Driven:
    """Search, then prove. `parts`: solvers of what other solvers have as well.

    `diverse`: families are searched apart, so that each whose estimate is not far from the best
    plan has candidates of its own.
    """
    bounds = [float(solver.rough.bound_seconds) for solver in solvers]
    best = _pool(bounds, seed)
    order = sorted(
        (solver.rough.estimate_seconds, solver.index)
        for solver in solvers
        if solver.rough.bound_seconds < math.inf
    )
    searched: set[int] = set()
    room = _MAX_MESHES
    for estimate, at in order:
        if diverse and estimate < _FAR * best.seconds and room > 0:
            room -= len(solvers[at].family.meshes)
            alone = _pool(bounds, seed)
            solvers[at].improve(alone)
            for chosen, seconds in alone.seen.items():
                best.offer(at, chosen, seconds)
            searched.add(at)
        elif not diverse and best.open(at):
            solvers[at].improve(best)
            searched.add(at)
    for _, at in order:
        if at in parts:
            best.bounds[at] = math.inf
    begin = time.process_time()
    spent = 0.0
    for _, at in sorted((best.bounds[at], at) for _, at in order):
        meshes, before = len(solvers[at].family.meshes), best.explored
        if spent >= _MAX_PROOF or best.chosen is None:
            break
        if best.open(at) and meshes <= _MAX_PROVEN and (not diverse or at in searched):
            solvers[at].prove(best)
            spent += float(best.explored - before) * meshes**4
    return Driven(best=best, searched=len(searched), proof_cpu_seconds=time.process_time() - begin)


def _pool(bounds: Sequence[float], seed: int) -> Pool:
    return Pool(
        gap=GAP, bounds=list(bounds), deadline=math.inf, progress=None, started=0.0, seed=seed
    )
