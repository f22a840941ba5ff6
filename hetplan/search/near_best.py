"""Which plans could be the best one, as far as one can tell by predictions that err?

The search gives the plan that is best if every prediction is right. Others are best if a
prediction is wrong. Here are the best plans of

1. every combination of degrees whose estimate comes near the best step, likeliest first;
2. the worlds in which every prediction of one device kind lies at an end of its interval;
3. the cluster without one of the islands that the best plan uses.

Each is walked as in the search (`explore`), to a coarser gap. `what_to_measure.near_best` says
which of them cannot be told from the best.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hetplan.cluster.spec import Cluster
from hetplan.errors import InputError
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.build import StageChoice, build_plan
from hetplan.plans.check import check_plan
from hetplan.plans.plan import Plan
from hetplan.predict.predictor import Predictor
from hetplan.search.candidates import Candidate, allowed_cluster, enumerate_candidates
from hetplan.search.closing import close_by_model
from hetplan.search.explore import Best, CandidateWalk, OutOfTimeError, few_islands, rough
from hetplan.search.spaces import SpaceMaker
from hetplan.search.through import Moved

_GAP = 0.02  # of a rival's own search: below what any interval tells apart
_MOST_RIVALS = 10  # combinations of degrees that are walked in the first world
_MOST_ELSEWHERE = 3  # and in each other one
_SEED = 0  # any; fixed, so that equal inputs give equal plans


@dataclass(frozen=True, slots=True, kw_only=True)
class _World:
    """What a search asks, and by which predictions."""

    model: ModelSpec
    cluster: Cluster
    job: Job
    predictor: Predictor

    def maker(self) -> SpaceMaker:
        """Of the spaces of its candidates."""
        allowed = allowed_cluster(self.cluster, self.job)
        return SpaceMaker(model=self.model, cluster=allowed, job=self.job, predictor=self.predictor)

    def without(self, island: str) -> _World:
        """The same where this island is forbidden."""
        forbid = replace(self.job.forbid, islands=(*self.job.forbid.islands, island))
        return replace(self, job=replace(self.job, forbid=forbid))


def rivals(
    plan: Plan,
    model: ModelSpec,
    cluster: Cluster,
    job: Job,
    predictor: Predictor,
    *,
    seconds: float,
) -> tuple[Plan, ...]:
    """Plans that could be better than this best one; each once, none of them it.

    No search begins after so many `seconds`; what was found until then is given.
    """
    deadline = time.monotonic() + seconds
    world = _World(model=model, cluster=cluster, job=job, predictor=predictor)
    found: dict[Plan, None] = {}
    for other in _every(plan, world, deadline):
        if other != plan:
            found.setdefault(other)
    return tuple(found)


def _every(plan: Plan, world: _World, deadline: float) -> Iterator[Plan]:
    maker, islands = world.maker(), world.cluster.islands
    every = enumerate_candidates(world.model, maker.cluster, world.job)
    likeliest = _likeliest(maker, every, _MOST_RIVALS, deadline)
    yield from _best_of(maker, likeliest[:_MOST_ELSEWHERE], deadline)
    kinds = dict.fromkeys(island.device.kind for island in islands)
    if len(kinds) > 1:
        for kind in kinds:
            for sign in (-1.0, 1.0):
                moved = replace(world, predictor=Moved(world.predictor, kind, sign)).maker()
                there = _likeliest(moved, likeliest, _MOST_ELSEWHERE, deadline)
                yield from _best_of(moved, there, deadline)
    if len(islands) > 1:
        for name in _islands(plan, world.cluster):
            without = world.without(name).maker()
            every = enumerate_candidates(world.model, without.cluster, without.job)
            there = _likeliest(without, every, _MOST_ELSEWHERE, deadline)
            yield from _best_of(without, there, deadline)
    yield from _best_of(maker, likeliest[_MOST_ELSEWHERE:], deadline)


def _islands(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """Those that the plan uses, in its order."""
    return tuple(
        dict.fromkeys(
            cluster.island_of_device(replica.devices[0].start).name
            for pipeline in plan.pipelines
            for stage in pipeline.stages
            for replica in stage.replicas
        )
    )


def _likeliest(
    maker: SpaceMaker, candidates: Sequence[Candidate], most: int, deadline: float
) -> list[Candidate]:
    """Those with the shortest estimates, as far as the time allows a look at them."""
    entries: list[tuple[float, Candidate]] = []
    for candidate in candidates:
        if time.monotonic() > deadline:
            break
        try:
            known = rough(maker.outline(candidate))
        except InputError:
            continue  # a kind without a figure for this precision, which the best plan leaves out
        if known.bound_seconds < math.inf:
            entries.append((known.estimate_seconds, candidate))
    entries.sort(key=lambda each: (each[0], each[1].degrees))
    return [candidate for _, candidate in entries[:most]]


def _best_of(maker: SpaceMaker, candidates: Sequence[Candidate], deadline: float) -> Iterator[Plan]:
    """The best plan of each of these combinations of degrees."""
    for candidate in candidates:
        if time.monotonic() > deadline:
            return
        found = _walked(maker, candidate, deadline)
        if found is not None:
            yield found


def _walked(maker: SpaceMaker, candidate: Candidate, deadline: float) -> Plan | None:
    """The best plan of these degrees, near enough; None where there is none or no time."""
    space = maker.space(candidate)
    known = rough(space)
    best = Best(
        gap=_GAP,
        bounds=[known.bound_seconds],
        deadline=deadline,
        progress=None,
        started=time.monotonic(),
    )
    try:
        if few_islands(space):
            CandidateWalk(0, space, known, best).run()
        else:
            close_by_model(0, space, best, seed=_SEED)
    except OutOfTimeError:
        pass
    if best.candidate < 0:
        return None
    names = [island.name for island in candidate.islands]
    choices = [
        StageChoice(island=names[island], transformer_layers=layers)
        for island, layers in zip(best.slots, best.layers, strict=True)
    ]
    plan = build_plan(maker.model, maker.cluster, maker.job, choices, candidate.degrees)
    return None if check_plan(plan, maker.model, maker.cluster, maker.job) else plan
