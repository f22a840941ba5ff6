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
from dataclasses import dataclass, field, replace

from evaluation.search.sailor import (
    NAMES,
    SailorFiles,
    SailorPlan,
    SailorReplicas,
    SailorScore,
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
from hetplan.search.families.families import Families
from hetplan.search.families.family import Family
from hetplan.search.result import Inputs
from hetplan.search.single_solver import SingleSolver
from hetplan.search.solver import Best

NEVER_SECONDS = 1e5
"""Of a layer that was not profiled."""
_NOTHING_SECONDS = 1e-12
"""Of what Sailor charges nothing for; predictions are above 0."""
_NAMES = dict(NAMES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePredictor:
    """Sailor's measurements of one model."""

    files: SailorFiles

    def layer(self, device: DeviceKind, query: LayerQuery) -> Prediction:
        """Seconds of one pass of one layer, its tensor-parallel communication with it."""
        found = self.files.times.get((_NAMES.get(device.kind, ""), query.microbatch_size, query.tp))
        if found is None:
            return _said(NEVER_SECONDS)
        seconds = found.backward_seconds if query.is_backward else found.forward_seconds
        return _said(_of(query.layer, seconds))

    def optimizer_update(
        self, device: DeviceKind, optimizer: Optimizer, parameters: float, precision: Precision
    ) -> Prediction:
        """The profiled update, whatever the number of parameters: Sailor has one time of each."""
        gpu = _NAMES.get(device.kind, "")
        updates = [
            max(each.update_seconds)
            for (name, _, tp), each in self.files.times.items()
            if name == gpu and tp == 1
        ]
        return _said(max(updates, default=NEVER_SECONDS))

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
            return _said(_NOTHING_SECONDS)
        rounds = 2 if operation == LinkOperation.ALL_REDUCE else 1
        part = self._path_seconds(link, message_bytes / group_size)
        return _said(rounds * (group_size - 1) * part)

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


def _said(seconds: float) -> Prediction:
    return Prediction(seconds=seconds, log_halfwidth=0.0, source=MEASURED)


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
class SailorJudge:
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
class CandidatePool(Best):
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
class FamilySearch:
    """What came of it."""

    best: CandidatePool
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
    solvers: Sequence[SingleSolver],
    seed: int,
    *,
    parts: Container[int] = (),
    diverse: bool = False,
) -> FamilySearch:
    """Search, then prove. `parts`: solvers of what other solvers have as well.

    `diverse`: families are searched apart, so that each whose estimate is not far from the best
    plan has candidates of its own.
    """
    bounds = [float(solver.rough.bound_seconds) for solver in solvers]
    best = _candidate_pool(bounds, seed)
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
            alone = _candidate_pool(bounds, seed)
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
    return FamilySearch(
        best=best, searched=len(searched), proof_cpu_seconds=time.process_time() - begin
    )


def _candidate_pool(bounds: Sequence[float], seed: int) -> CandidatePool:
    return CandidatePool(
        gap=GAP, bounds=list(bounds), deadline=math.inf, progress=None, started=0.0, seed=seed
    )
