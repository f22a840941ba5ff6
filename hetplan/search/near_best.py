"""Which plans could be the best one, as far as one can tell by predictions that err?

The search gives the plan that is best if every prediction is right. Others are best if a
prediction is wrong. Here are the best plans of

1. every family of plans whose estimate comes near the best step, likeliest first;
2. the worlds in which every prediction of one device kind lies at an end of its interval;
3. the cluster without one of the islands that the best plan uses.

Each is the best plan that the family's solver finds, without a proof. `what_to_measure.near_best`
says which of them cannot be told from the best.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hetplan.cluster.spec import Cluster
from hetplan.errors import InputError
from hetplan.job.spec import Job
from hetplan.kernels import clock
from hetplan.model.spec import ModelSpec
from hetplan.plans.build import plan_of
from hetplan.plans.check import check_plan
from hetplan.plans.plan import Plan
from hetplan.predict.predictor import Predictor
from hetplan.search.costs.maker import SpaceMaker
from hetplan.search.families.allowed import allowed_cluster
from hetplan.search.families.families import Families
from hetplan.search.families.family import Family
from hetplan.search.forwarding_predictor import Shifted
from hetplan.search.solver import Best, OutOfTimeError
from hetplan.search.solvers import solvers_of

_MAX_RIVALS = 10  # families that are searched in the first world
_MAX_ELSEWHERE = 3  # and in each other one


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

    def families(self) -> Sequence[Family]:
        """Of its plans with one pipeline."""
        allowed = allowed_cluster(self.cluster, self.job)
        return Families(model=self.model, cluster=allowed, job=self.job).families()

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
    deadline = clock() + seconds
    world = _World(model=model, cluster=cluster, job=job, predictor=predictor)
    found: dict[Plan, None] = {}
    for other in _every(plan, world, deadline):
        if other != plan:
            found.setdefault(other)
    return tuple(found)


def _every(plan: Plan, world: _World, deadline: float) -> Iterator[Plan]:
    maker, islands = world.maker(), world.cluster.islands
    every = world.families()
    likeliest = _likeliest(maker, every, _MAX_RIVALS, deadline)
    yield from _best_of(maker, likeliest[:_MAX_ELSEWHERE], deadline)
    kinds = dict.fromkeys(island.device.kind for island in islands)
    if len(kinds) > 1:
        for kind in kinds:
            for sign in (-1.0, 1.0):
                moved = replace(world, predictor=Shifted(world.predictor, kind, sign)).maker()
                there = _likeliest(moved, likeliest, _MAX_ELSEWHERE, deadline)
                yield from _best_of(moved, there, deadline)
    if len(islands) > 1:
        for name in _islands(plan, world.cluster):
            other = world.without(name)
            without = other.maker()
            there = _likeliest(without, other.families(), _MAX_ELSEWHERE, deadline)
            yield from _best_of(without, there, deadline)
    yield from _best_of(maker, likeliest[_MAX_ELSEWHERE:], deadline)


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
    maker: SpaceMaker, families: Sequence[Family], most: int, deadline: float
) -> list[Family]:
    """Those with the shortest estimates, as far as the time allows a look at them."""
    entries: list[tuple[float, Family]] = []
    for family in families:
        if clock() > deadline:
            break
        try:
            known = maker.rough(family)
        except InputError:
            continue  # a kind without a figure for this precision, which the best plan leaves out
        if known.bound_seconds < math.inf:
            entries.append((known.estimate_seconds, family))
    entries.sort(key=lambda each: each[0])
    return [family for _, family in entries[:most]]


def _best_of(maker: SpaceMaker, families: Sequence[Family], deadline: float) -> Iterator[Plan]:
    """The best plan of each of these families."""
    for family in families:
        if clock() > deadline:
            return
        found = _searched(maker, family, deadline)
        if found is not None:
            yield found


def _searched(maker: SpaceMaker, family: Family, deadline: float) -> Plan | None:
    """The best plan that was found of this family; None where there is none or no time."""
    best = Best(
        gap=0.0,
        bounds=[0.0],
        deadline=deadline,
        progress=None,
        started=clock(),
        seed=maker.job.seed,
    )
    try:
        for solver in solvers_of((family,), maker, maker.cluster, _one_pipeline(maker.job)):
            solver.improve(best)
    except OutOfTimeError:
        pass
    if best.chosen is None:
        return None
    plan = plan_of(maker.model, maker.cluster, maker.job, best.chosen)
    return None if check_plan(plan, maker.model, maker.cluster, maker.job) else plan


def _one_pipeline(job: Job) -> Job:
    return replace(job, pin=replace(job.pin, pipelines=1))
