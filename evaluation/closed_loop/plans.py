"""Draw, price and choose the plans that the closed loop trains, before anything is trained.

The pool has many legal plans of target native, of every form, by a seed. Drawn are the hosts of
each stage of each pipeline (hosts of one island are alike), then layers, microbatches and
schedules: layers in proportion to the stages' speeds, evenly, or moved from there; microbatches of
several pipelines likewise. Forms are drawn equally often. Every plan passes `hetplan.plans.check`,
and the trainer runs it (`hetplan.plans.ranks`).

Chosen are the plan that the search found, the best plans of the pool, and others of it evenly by
predicted rank. Plans that are predicted to take many times longer than the best are left out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from evaluation.closed_loop.values import LoopPlan, LoopPlans
from hetplan.cluster.spec import Cluster
from hetplan.cost.step_model.draws import straggler_wait
from hetplan.cost.step_model.pricer import Pricer
from hetplan.errors import InputError
from hetplan.job.spec import Job
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.plans.build import chosen_of, plan_of
from hetplan.plans.check import check_plan
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, ChosenStage, Part, Shape
from hetplan.plans.pieces import own_depth
from hetplan.plans.plan import Plan, Schedule
from hetplan.plans.ranks import launch_faults
from hetplan.predict.predictor import LayerQuery, Predictor
from hetplan.profiling.pacing import Pace
from hetplan.profiling.samples import Phase

StageHosts = tuple[str, ...]
"""Islands of the hosts of a stage, sorted; an island twice where two of its hosts are there."""
PipelineHosts = tuple[StageHosts, ...]


def hosts_of(cluster: Cluster) -> tuple[str, ...]:
    """The island of every usable host; an InputError where hosts have several devices."""
    found: list[str] = []
    for island in cluster.islands:
        if island.devices_per_node != 1:
            raise InputError(
                f"island {island.name} has {island.devices_per_node} devices per node; the closed "
                "loop trains one rank per host: use a cluster with devices_per_node: 1"
            )
        found += [island.name] * len(island.usable_nodes)
    return tuple(found)


MICROBATCH_SIZES = frozenset({1, 2, 3, 4})
"""Of one rank."""
SAMPLES = (1, 2, 4)
"""Of a microbatch of a pipeline."""
FORMS = ("one pipeline", "early sends", "interleaved", "wide stages", "several pipelines")
_TRIES_IN_VAIN = 400
"""Draws in a row that were illegal or drawn before, after which there are hardly any others."""
_MAX_MOVED = 2
_EVENLY = 0.2
"""Part of the draws in which unlike hosts get equal parts."""


def draw_pool(
    model: ModelSpec,
    cluster: Cluster,
    job: Job,
    *,
    speeds: dict[str, float],
    seed: int,
    size: int,
    samples: Sequence[int] = SAMPLES,
) -> tuple[Plan, ...]:
    """Up to `size` different plans; equal arguments give equal pools.

    `speeds`: of a host of each island, in any unit. `samples`: of a pipeline's microbatch, which
    its stages' ranks share.
    """
    found: dict[str, Plan] = {}
    drawer = _Drawer(
        model=model,
        cluster=cluster,
        job=job,
        speeds=speeds,
        chance=random.Random(f"pool {seed}"),
        samples=tuple(samples),
    )
    number = in_vain = 0
    while len(found) < size and in_vain < _TRIES_IN_VAIN:
        drawn = drawer.draw(FORMS[number % len(FORMS)])
        number, in_vain = number + 1, in_vain + 1
        name = "" if drawn is None else name_of(drawn, cluster, model)
        if drawn is not None and name not in found:
            found[name] = drawn
            in_vain = 0
    return tuple(found.values())


def name_of(plan: Plan, cluster: Cluster, model: ModelSpec) -> str:
    """Stages in order with islands and layers, then what else tells the plan from others.

    `fast+slow(3:1)` is a stage whose ranks share each microbatch 3 to 1; `4/2` layers of two
    chunks; `2x16` is 16 microbatches of 2 samples.
    """
    chosen = chosen_of(plan, cluster, model)
    words = "; ".join(_pipeline_name(each) for each in chosen.pipelines)
    if plan.optimizer_shards > 1:
        words += ", sharded"
    return words + (", early sends" if chosen.early_sends else "")


def form_of(plan: Plan) -> str:
    """The form that a plan is of, one of `FORMS`."""
    if len(plan.pipelines) > 1:
        return "several pipelines"
    pipeline = plan.pipelines[0]
    if any(len(stage.replicas) > 1 or stage.replicas[0].dp > 1 for stage in pipeline.stages):
        return "wide stages"
    if pipeline.schedule.virtual_stages > 1:
        return "interleaved"
    return "early sends" if plan.overlap.send else "one pipeline"


def _pipeline_name(pipeline: ChosenPipeline) -> str:
    stages = " > ".join(_stage_name(stage) for stage in pipeline.stages)
    samples = sum(part.shape.samples for part in pipeline.stages[0].parts)
    own = [
        own_depth(
            pipeline.schedule.name,
            at,
            len(pipeline.stages),
            pipeline.num_microbatches,
            pipeline.schedule.virtual_stages,
        )
        for at in range(len(pipeline.stages))
    ]
    depths = [stage.warmup_depth for stage in pipeline.stages]
    deeper = "" if depths == own else f" depth {'/'.join(map(str, depths))}"
    return f"{stages} {samples}x{pipeline.num_microbatches}{deeper}"


def _stage_name(stage: ChosenStage) -> str:
    islands = "+".join(
        part.island if part.shape.dp == 1 else f"{part.island}*{part.shape.dp}"
        for part in stage.parts
    )
    if len(stage.parts) > 1:
        islands += f"({':'.join(str(part.shape.samples) for part in stage.parts)})"
    again = "" if stage.recompute == "none" else f" recompute {stage.recompute}"
    return f"{islands} {'/'.join(map(str, stage.layers))}{again}"


@dataclass(slots=True, kw_only=True)
class _Drawer:
    model: ModelSpec
    cluster: Cluster
    job: Job
    speeds: dict[str, float]
    chance: random.Random
    samples: tuple[int, ...]

    def draw(self, form: str) -> Plan | None:
        """A plan of this form; None where the draw is not legal."""
        structure = self._structure(form)
        samples = self.chance.choice(self.samples)
        if self.job.global_batch_size % samples:
            return None
        parts = [[self._parts(stage, samples) for stage in pipeline] for pipeline in structure]
        shares = self._shares(structure, self.job.global_batch_size // samples)
        pipelines = []
        for mine, count in zip(parts, shares, strict=True):
            made = [each for each in mine if each is not None]
            if len(made) < len(mine) or count < len(mine):
                return None
            pipeline = self._pipeline(form, made, count)
            if pipeline is None:
                return None
            pipelines.append(pipeline)
        chosen = ChosenPlan(pipelines=tuple(pipelines), early_sends=form == "early sends")
        try:
            plan = plan_of(self.model, self.cluster, self.job, chosen)
        except InputError:
            return None
        if check_plan(plan, self.model, self.cluster, self.job) or any(launch_faults(plan)):
            return None
        return plan

    def _structure(self, form: str) -> list[PipelineHosts]:
        """Some of the hosts in a random order, cut into pipelines and these into stages."""
        hosts = hosts_of(self.cluster)
        some = self.chance.sample(hosts, self.chance.randint(2, len(hosts)))
        pipelines = [some]
        if form == "several pipelines":
            pipelines = self._cut(some, at_least=2, most=len(some))
        if form not in ("several pipelines", "wide stages"):
            return [tuple((host,) for host in some)]
        return sorted(
            tuple(tuple(sorted(stage)) for stage in self._cut(mine, at_least=1, most=2))
            for mine in pipelines
        )

    def _cut(self, hosts: list[str], *, at_least: int, most: int) -> list[list[str]]:
        """Runs of at most so many hosts, and at least so many runs."""
        while True:
            ends = [at for at in range(1, len(hosts)) if self.chance.random() < 0.5]
            runs = [hosts[a:b] for a, b in pairwise((0, *ends, len(hosts)))]
            if len(runs) >= at_least and max(map(len, runs)) <= most:
                return runs

    def _parts(self, stage: StageHosts, samples: int) -> tuple[Part, ...] | None:
        """How the hosts of a stage share a microbatch; None where it has too few samples."""
        splits: list[tuple[int, ...]] = [(samples,)]
        if len(stage) > 1:
            splits = [(one, samples - one) for one in range(1, samples)]
            if stage[0] == stage[1]:
                splits = [split for split in splits if split[0] == split[1]]
        splits = [split for split in splits if MICROBATCH_SIZES.issuperset(split)]
        if not splits:
            return None
        split = self.chance.choice(splits)
        if len(stage) > 1 and stage[0] == stage[1]:
            shape = Shape(tp=1, dp=len(stage), microbatch_size=split[0])
            return (Part(island=stage[0], shape=shape),)
        return tuple(
            Part(island=island, shape=Shape(tp=1, dp=1, microbatch_size=size))
            for island, size in zip(stage, split, strict=True)
        )

    def _shares(self, structure: Sequence[PipelineHosts], microbatches: int) -> list[int]:
        """Microbatches of each pipeline, by its hosts' speeds, evenly, or moved from there."""
        weights = [self._speed(pipeline) for pipeline in structure]
        if self.chance.random() < _EVENLY:
            weights = [1.0] * len(weights)
        return self._moved(dealt_out(microbatches, weights), least=0)

    def _moved(self, counts: list[int], *, least: int) -> list[int]:
        """The same with up to two moved from one place to another."""
        for _ in range(self.chance.randrange(_MAX_MOVED + 1)):
            giver, taker = self.chance.randrange(len(counts)), self.chance.randrange(len(counts))
            if counts[giver] > least:
                counts[giver] -= 1
                counts[taker] += 1
        return counts

    def _speed(self, pipeline: PipelineHosts) -> float:
        return sum(self.speeds[island] for stage in pipeline for island in stage)

    def _pipeline(
        self, form: str, parts: Sequence[tuple[Part, ...]], count: int
    ) -> ChosenPipeline | None:
        chunks = self.chance.choice((2, 3)) if form == "interleaved" else 1
        layers = self._layers(parts, chunks)
        if layers is None or (chunks > 1 and (len(parts) < 2 or count % len(parts))):
            return None
        schedule = Schedule(
            name="1f1b" if chunks == 1 else "interleaved-1f1b", virtual_stages=chunks
        )
        more = self.chance.choice((0, 1, 2)) if form == "early sends" else 0
        return ChosenPipeline(
            stages=tuple(
                ChosenStage(
                    parts=mine,
                    layers=tuple(dealt_out(held, [1.0] * chunks)),
                    warmup_depth=_depth(schedule, at, len(parts), count, more),
                )
                for at, (mine, held) in enumerate(zip(parts, layers, strict=True))
            ),
            num_microbatches=count,
            schedule=schedule,
        )

    def _layers(self, parts: Sequence[tuple[Part, ...]], chunks: int) -> list[int] | None:
        """Transformer layers of each stage: by speed, evenly, or some moved from there."""
        total = self.model.num_layers
        if len(parts) * chunks > total:
            return None
        weights = [self._stage_speed(mine) for mine in parts]
        if self.chance.random() < _EVENLY:
            weights = [1.0] * len(parts)
        return self._moved(dealt_out(total, weights, least=chunks), least=chunks)

    def _stage_speed(self, parts: Sequence[Part]) -> float:
        """Samples a second and layer: all ranks of a stage wait for its slowest."""
        samples = sum(part.shape.samples for part in parts)
        return samples / max(
            part.shape.microbatch_size / self.speeds[part.island] for part in parts
        )


def _depth(schedule: Schedule, at: int, stages: int, count: int, more: int) -> int:
    own = own_depth(schedule.name, at, stages, count, schedule.virtual_stages)
    # The last stage computes what arrives at once: nothing is in flight behind it.
    return own if at == stages - 1 else min(count, own + more)


def dealt_out(total: int, weights: Sequence[float], *, least: int = 0) -> list[int]:
    """Whole numbers that add up to `total`, near the weights, each at least `least`.

    `total` must be at least `least` for each. Largest remainders; of equal ones the first.
    """
    whole = sum(weights)
    free = total - least * len(weights)
    wanted = [max(0.0, total * weight / whole - least) for weight in weights]
    scale = free / sum(wanted) if sum(wanted) else 0.0
    wanted = [each * scale for each in wanted]
    found = [int(each) for each in wanted]
    by_remainder = sorted(range(len(weights)), key=lambda at: found[at] - wanted[at])
    for at in by_remainder[: free - sum(found)]:
        found[at] += 1
    return [least + each for each in found]


POOL_SIZE = 600
"""Plans that are drawn; two seconds to price."""
MAX_LENGTH, SHORT_MAX_LENGTH = 4.0, 2.5
"""Times the best predicted step."""


def speeds_of(
    model: ModelSpec, cluster: Cluster, job: Job, predictor: Predictor
) -> dict[str, float]:
    """Transformer layers a second of a host of each island, forward and backward."""
    found = {}
    for island in cluster.islands:
        seconds = sum(
            predictor.layer(island.device, _transformer(model, job, 2, 1, is_backward)).seconds
            for is_backward in (False, True)
        )
        found[island.name] = 1.0 / seconds
    return found


def _transformer(
    model: ModelSpec, job: Job, microbatch_size: int, tp: int, is_backward: bool
) -> LayerQuery:
    return LayerQuery(
        model=model,
        layer=LayerKind.TRANSFORMER,
        microbatch_size=microbatch_size,
        sequence_length=job.sequence_length,
        tp=tp,
        precision=job.precision,
        is_backward=is_backward,
    )


def profile_excess(
    model: ModelSpec, cluster: Cluster, job: Job, predictor: Predictor, pace: Pace
) -> float:
    """Mean by which profiled passes of transformer layers lie above their pace; the worst kind."""
    worst = 0.0
    for device in {island.device.kind: island.device for island in cluster.islands}.values():
        excess = []
        for entry in pace.kind(device.kind).entries:
            if entry.layer == LayerKind.TRANSFORMER:
                is_backward = entry.phase == Phase.BACKWARD
                query = _transformer(model, job, entry.microbatch_size, entry.tp, is_backward)
                found = predictor.layer(device, query)
                excess.append(found.seconds / entry.seconds - 1.0)
        worst = max(worst, sum(excess) / len(excess))
    return worst


def loop_plan(
    pricer: Pricer, plan: Plan, cluster: Cluster, model: ModelSpec, *, searched: bool = False
) -> LoopPlan:
    """A plan with its price: that of `hetplan.cost.estimate`, without the interval."""
    step, costs = pricer.step(plan), pricer.costs(plan)
    return LoopPlan(
        name=name_of(plan, cluster, model),
        form=form_of(plan),
        plan=plan,
        predicted_seconds=step.step_seconds + straggler_wait(plan, costs, step),
        searched=searched,
    )


def price_pool(
    pricer: Pricer, pool: Sequence[Plan], cluster: Cluster, model: ModelSpec
) -> tuple[LoopPlan, ...]:
    """Those of the pool that can be priced, fastest first."""
    priced = []
    for plan in pool:
        try:
            priced.append(loop_plan(pricer, plan, cluster, model))
        except InputError:
            # Warm-up depths whose sends would wait for each other for ever.
            continue
    return tuple(sorted(priced, key=lambda each: (each.predicted_seconds, each.name)))


def choose(
    pool: Sequence[LoopPlan], searched: LoopPlan, *, plans: int, best: int, longest: float
) -> LoopPlans:
    """`plans` of the pool, fastest first in it, the searched one among them.

    `best`: how many of the best predicted ones; the others evenly by rank. `longest`: times the
    best predicted step that a plan may take.
    """
    others = [each for each in pool if each.name != searched.name]
    fastest = min(searched.predicted_seconds, others[0].predicted_seconds)
    kept = [each for each in others if each.predicted_seconds <= longest * fastest]
    best = min(best, plans - 1)
    taken, rest = kept[:best], kept[best:]
    count = min(plans - 1 - len(taken), len(rest))
    # The slowest of equal runs of rank.
    taken += [rest[(at + 1) * len(rest) // count - 1] for at in range(count)]
    found = sorted((searched, *taken), key=lambda each: each.predicted_seconds)
    return LoopPlans(plans=tuple(found), pool=len(pool), left_out_slow=len(others) - len(kept))
