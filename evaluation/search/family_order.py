"""The order in which families of a case are searched, the score of a plan, and hetplan's own cost.

First every family is searched, likeliest first; then those that their bound leaves open are
proven, lowest bound first, within a limit of work.

`ProfilePredictor` gives the cost model Sailor's profiles and fits. It looks up and fits nothing:
layers by (GPU, microbatch size, tp) as they were profiled, sends and reductions by the fits of the
path that a link's `samples` names. Profiled times hold the tensor-parallel communication, so
collectives inside a node cost nothing here. What was not profiled takes so long that no plan has
it: nothing is carried over from other sizes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace

from evaluation.search.sailor import (
    NAME_OF_KIND,
    SailorFiles,
    sailor_form,
    score,
)
from evaluation.search.sailor_tables import Tables
from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.spec import Cluster, Link
from hetplan.errors import InputError
from hetplan.job.spec import Optimizer, Precision
from hetplan.model.spec import LayerKind
from hetplan.plans.chosen import ChosenPlan
from hetplan.predict.predictor import MEASURED, LayerQuery, Prediction, SendLaw
from hetplan.profiling.samples import LinkOperation
from hetplan.search.one_f_one_b.solver import OneFOneBSolver
from hetplan.search.result import Inputs
from hetplan.search.solver import Best
from hetplan.search.space.families import Families
from hetplan.search.space.family import Family

NEVER_SECONDS = 1e5
"""Of a layer that was not profiled."""
_NOTHING_SECONDS = 1e-12
"""Of what Sailor charges nothing for; predictions are above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePredictor:
    """Sailor's measurements of one model."""

    files: SailorFiles

    def layer(self, device: DeviceKind, query: LayerQuery) -> Prediction:
        """Seconds of one pass of one layer, its tensor-parallel communication with it."""
        found = self.files.times.get(
            (NAME_OF_KIND.get(device.kind, ""), query.microbatch_size, query.tp)
        )
        if found is None:
            return _prediction(NEVER_SECONDS)
        seconds = found.backward_seconds if query.is_backward else found.forward_seconds
        return _prediction(_of(query.layer, seconds))

    def optimizer_update(
        self, device: DeviceKind, optimizer: Optimizer, parameters: float, precision: Precision
    ) -> Prediction:
        """The profiled update, whatever the number of parameters: Sailor has one time of each."""
        gpu = NAME_OF_KIND.get(device.kind, "")
        updates = [
            max(each.update_seconds)
            for (name, _, tp), each in self.files.times.items()
            if name == gpu and tp == 1
        ]
        return _prediction(max(updates, default=NEVER_SECONDS))

    def send(self, link: Link, message_bytes: float, *, nodes: int = 1) -> SendLaw:
        """By the fit of the link's path; a straight line through that message."""
        seconds = self._path_seconds(link, message_bytes)
        return SendLaw(
            rendezvous_latency_seconds=0.0,
            wire_latency_seconds=0.0,
            seconds_per_byte=seconds / message_bytes if message_bytes else 0.0,
            log_halfwidth=0.0,
            source=MEASURED,
        )

    def collective(
        self,
        link: Link,
        operation: str,
        group_size: int,
        message_bytes: float,
        *,
        nodes: int = 1,
        groups: int = 1,
    ) -> Prediction:
        """A ring over the link's path; nothing inside a node."""
        if group_size < 2 or not message_bytes or link.samples is None:
            return _prediction(_NOTHING_SECONDS)
        rounds = 2 if operation == LinkOperation.ALL_REDUCE else 1
        part = self._path_seconds(link, message_bytes / group_size)
        return _prediction(rounds * (group_size - 1) * part)

    def _path_seconds(self, link: Link, size_bytes: float) -> float:
        if not size_bytes:
            return 0.0
        if link.samples is None:
            return size_bytes / link.bandwidth_bytes_per_second
        zone, gpu, to_zone, to_gpu = link.samples.split(" ")
        fit = self.files.fit((zone, gpu, 1), (to_zone, to_gpu, 1))
        try:
            return fit.seconds(size_bytes)
        except InputError:
            # Below the sizes that were measured the parabola falls under zero.
            return size_bytes / link.bandwidth_bytes_per_second


def _of(layer: LayerKind, seconds: tuple[float, ...]) -> float:
    if layer is LayerKind.EMBEDDING:
        return seconds[0]
    if layer is LayerKind.HEAD:
        return seconds[-1]
    return sum(seconds[1:-1]) / len(seconds[1:-1])


def _prediction(seconds: float) -> Prediction:
    return Prediction(seconds=seconds, log_halfwidth=0.0, source=MEASURED)


@dataclass(slots=True)
class SailorJudge:
    """Sailor's formula for chosen plans; counts what it has looked at."""

    files: SailorFiles
    cluster: Cluster
    global_batch_size: int
    scored: int = 0

    def seconds(self, chosen: ChosenPlan) -> float:
        """Infinite where the plan is disqualified or does not fit."""
        self.scored += 1
        try:
            found = score(sailor_form(chosen, self.cluster), self.files, self.global_batch_size)
        except InputError:
            return math.inf
        return found.step_seconds if found.fits else math.inf


GAP = 0.01
"""Families within it need no proof; as `hetplan.job.spec.Job.gap`."""
_MAX_PROOF = 8e7
"""Work of all proofs together: subproblems times the fourth power of the family's meshes, about
12 ns each (measured with 9, 25 and 51 meshes)."""
_MAX_PROVEN = 36
"""Meshes of a family that is proven: one subproblem takes 20 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilySearch:
    """What came of it."""

    best: Best
    families: int
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


def search_families(
    solvers: Sequence[OneFOneBSolver], seed: int, *, parts: Container[int]
) -> FamilySearch:
    """Search, then prove. `parts`: solvers of what other solvers have as well."""
    bounds = [float(solver.order_free.bound_seconds) for solver in solvers]
    best = Best(
        gap=GAP, bounds=list(bounds), deadline=math.inf, progress=None, started=0.0, seed=seed
    )
    order = sorted(
        (solver.order_free.estimate_seconds, solver.index)
        for solver in solvers
        if solver.order_free.bound_seconds < math.inf
    )
    searched = 0
    for _, at in order:
        if best.open(at):
            solvers[at].improve(best)
            searched += 1
    for _, at in order:
        if at in parts:
            best.bounds[at] = math.inf
    begin = time.process_time()
    spent = 0.0
    for _, at in sorted((best.bounds[at], at) for _, at in order):
        meshes, before = len(solvers[at].family.meshes), best.explored
        if spent >= _MAX_PROOF or best.chosen is None:
            break
        if best.open(at) and meshes <= _MAX_PROVEN:
            solvers[at].prove(best)
            spent += float(best.explored - before) * meshes**4
    return FamilySearch(
        best=best,
        families=sum(at not in parts for at in range(len(solvers))),
        searched=searched,
        proof_cpu_seconds=time.process_time() - begin,
    )
