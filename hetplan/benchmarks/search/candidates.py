"""Which plans does hetplan's search offer in Sailor's form, and which is best by Sailor's cost?

The families of the search (`hetplan.search.families`) are taken apart until every plan of a part is
one in Sailor's form: one microbatch size and dp for all stages, one tp per island. A bound by
Sailor's cost (`_bound`) says which parts are worth a look, lowest first; in each the search's own
solver finds the best plan by hetplan's cost, whose layers are then moved between neighbours as long
as Sailor's cost falls. So Sailor's cost chooses, and the plans are the search's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product

from hetplan.benchmarks.search.rows import FEW_ROOMS
from hetplan.benchmarks.search.sailor_cost import (
    SailorPlan,
    SailorReplicas,
    SailorScore,
    score,
)
from hetplan.benchmarks.search.sailor_files import SailorFiles
from hetplan.cluster.spec import Cluster
from hetplan.emitters.sailor import NAMES
from hetplan.errors import InputError
from hetplan.plans.chosen import ChosenPlan, ChosenStage
from hetplan.predict.predictor import Predictor
from hetplan.search.costs.maker import SpaceMaker
from hetplan.search.families.allowed import allowed_cluster
from hetplan.search.families.families import Families
from hetplan.search.families.family import Family, Mesh
from hetplan.search.result import Inputs
from hetplan.search.single_solver import SingleSolver
from hetplan.search.solver import Best

_NAMES = dict(NAMES)
_WORTH_MOVING = 1.08
"""A plan further above the best by Sailor's cost is left as it is: a heuristic. Over the peer cases
moving layers gained at most 4 %."""
_MOST_PARTS = 24
"""Parts that are searched, lowest bound first: about 10 ms each (measured)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best plan by Sailor's cost, and what it took."""

    chosen: ChosenPlan
    score: SailorScore
    families: int
    """Parts of families in Sailor's form."""
    searched: int
    """Of those, the ones whose bound by Sailor's cost left them open."""
    scored: int
    """Plans that Sailor's cost looked at."""


@dataclass(slots=True)
class _Judge:
    """Sailor's cost of chosen plans."""

    files: SailorFiles
    cluster: Cluster
    global_batch_size: int
    scored: int = 0

    def score(self, chosen: ChosenPlan) -> SailorScore | None:
        """None where the plan is disqualified or does not fit."""
        self.scored += 1
        try:
            found = score(_in_form(chosen, self.cluster), self.files, self.global_batch_size)
        except InputError:
            return None
        return found if found.fits else None


def best_plan(
    inputs: Inputs, predictor: Predictor, files: SailorFiles, below_seconds: float = math.inf
) -> Found | None:
    """Over the parts of all families that may have a plan below `below_seconds`."""
    cluster = allowed_cluster(inputs.cluster, inputs.job)
    maker = SpaceMaker(model=inputs.model, cluster=cluster, job=inputs.job, predictor=predictor)
    families = Families(model=inputs.model, cluster=cluster, job=inputs.job).families()
    judge = _Judge(files=files, cluster=cluster, global_batch_size=inputs.job.global_batch_size)
    parts = sorted(
        ((_bound(part, judge), at, part) for at, part in enumerate(_parts(families, judge))),
        key=lambda each: each[:2],
    )
    best: tuple[SailorScore, ChosenPlan] | None = None
    searched = 0
    for bound, _, part in parts:
        least = below_seconds if best is None else min(below_seconds, best[0].step_seconds)
        if bound >= least or searched == _MOST_PARTS:
            break
        searched += 1
        for chosen in _offered(part, maker):
            start = judge.score(chosen)
            if best is not None and (
                start is None or start.step_seconds > _WORTH_MOVING * best[0].step_seconds
            ):
                continue
            found = _refined(chosen, start, judge)
            if found is not None and (best is None or found[0].step_seconds < best[0].step_seconds):
                best = found
    if best is None:
        return None
    return Found(
        chosen=best[1],
        score=best[0],
        families=len(parts),
        searched=searched,
        scored=judge.scored,
    )


def _parts(families: Sequence[Family], judge: _Judge) -> Iterator[Family]:
    """Families whose plans all have Sailor's form; of an island one tp or none."""
    for family in families:
        sizes = {shape.microbatch_size for mesh in family.meshes for shape in mesh.shapes}
        for size in sorted(sizes):
            meshes = [mesh for mesh in family.meshes if _profiled(mesh, size, judge)]
            by_islands: dict[tuple[int, ...], list[Mesh | None]] = {}
            for mesh in meshes:
                by_islands.setdefault(mesh.islands, [None]).append(mesh)
            alone = [choices for islands, choices in by_islands.items() if len(islands) == 1]
            for choice in _choices(alone):
                kept = tuple(mesh for mesh in choice if mesh is not None)
                if kept:
                    yield replace(family, meshes=kept)
            for islands, choices in by_islands.items():
                if len(islands) > 1:
                    for whole in choices:
                        if whole is not None:
                            yield replace(family, meshes=(whole,))


def _choices(alone: list[list[Mesh | None]]) -> Iterator[tuple[Mesh | None, ...]]:
    """A mesh of every island or none; of many islands those of one tp."""
    if len(alone) <= FEW_ROOMS:
        yield from product(*alone)
        return
    found = {mesh.shapes[0].tp for choices in alone for mesh in choices if mesh is not None}
    for tp in sorted(found):
        yield tuple(
            next((mesh for mesh in choices if mesh is not None and mesh.shapes[0].tp == tp), None)
            for choices in alone
        )


def _profiled(mesh: Mesh, microbatch_size: int, judge: _Judge) -> bool:
    return all(
        shape.microbatch_size == microbatch_size
        and (_gpu(judge.cluster, island), microbatch_size, shape.tp) in judge.files.times
        for island, shape in zip(mesh.islands, mesh.shapes, strict=True)
    )


def _gpu(cluster: Cluster, island: int) -> str:
    return _NAMES.get(cluster.islands[island].device.kind, "")


def _bound(part: Family, judge: _Judge) -> float:
    """No plan of the part has a shorter step by Sailor's cost.

    At a tick K a stage of mesh i holds at most K / t_i transformer layers (t_i the least seconds of
    one), so K is at least (layers) / sum_i (stages of i / t_i); all N ticks but one take K, and the
    first microbatch passes every layer. Sends and reductions are left out.
    """
    layers = judge.files.num_layers - 2
    rate, least = 0.0, math.inf
    for mesh in part.meshes:
        each = max(
            _layer_seconds(judge, island, shape.microbatch_size, shape.tp)
            for island, shape in zip(mesh.islands, mesh.shapes, strict=True)
        )
        rate += mesh.max_stages / each
        least = min(least, each)
    return (part.num_microbatches - 1) * max(layers / rate, least) + layers * least


def _layer_seconds(judge: _Judge, island: int, microbatch_size: int, tp: int) -> float:
    times = judge.files.times[_gpu(judge.cluster, island), microbatch_size, tp]
    return min(
        forward + backward
        for forward, backward in zip(
            times.forward_seconds[1:-1], times.backward_seconds[1:-1], strict=True
        )
    )


def _offered(part: Family, maker: SpaceMaker) -> Iterator[ChosenPlan]:
    """The solver's plans of this part, each once."""
    solver = SingleSolver(0, part, maker)
    rough = solver.rough
    if rough.bound_seconds == math.inf:
        return
    best = Best(
        gap=0.0,
        bounds=[rough.bound_seconds],
        deadline=math.inf,
        progress=None,
        started=0.0,
        seed=maker.job.seed,
    )
    solver.improve(best)
    yield from dict.fromkeys(offer.chosen for offer in reversed(best.offers))


def _in_form(chosen: ChosenPlan, cluster: Cluster) -> SailorPlan:
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
                    gpu=_NAMES.get(island.device.kind, ""),
                    zone=island.region,
                    tp=part.shape.tp,
                    devices_per_node=island.devices_per_node,
                    count=part.shape.dp,
                )
            )
        stages.append(tuple(row))
    size = pipeline.stages[0].parts[0].shape.microbatch_size
    return SailorPlan(layers=tuple(layers), stages=tuple(stages), microbatch_size=size)


def _refined(
    chosen: ChosenPlan, start: SailorScore | None, judge: _Judge
) -> tuple[SailorScore, ChosenPlan] | None:
    """Layers moved one by one from stage to stage while Sailor's cost falls."""
    best = None if start is None else (start, chosen)
    now, seconds = chosen, math.inf if start is None else start.step_seconds
    while True:
        tried: list[tuple[float, int, SailorScore, ChosenPlan]] = []
        for moved in _moves(now):
            found = judge.score(moved)
            if found is not None:
                tried.append((found.step_seconds, len(tried), found, moved))
        if not tried:
            return best
        step, _, found, moved = min(tried, key=lambda each: each[:2])
        if step >= seconds:
            return best
        best, now, seconds = (found, moved), moved, step


def _moves(chosen: ChosenPlan) -> Iterator[ChosenPlan]:
    (pipeline,) = chosen.pipelines
    for giver, taker in permutations(range(len(pipeline.stages)), 2):
        if sum(pipeline.stages[giver].layers) > 1:
            stages = list(pipeline.stages)
            stages[giver] = _with(stages[giver], -1)
            stages[taker] = _with(stages[taker], 1)
            yield replace(chosen, pipelines=(replace(pipeline, stages=tuple(stages)),))


def _with(stage: ChosenStage, more: int) -> ChosenStage:
    return replace(stage, layers=(stage.layers[0] + more,))
