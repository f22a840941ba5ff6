"""From flows of columns to a legal plan whose pipelines are done together.

Layers, recomputation and shapes come with the columns; how many microbatches each pipeline gets
is decided on the plan's own times. A pipeline p with G_p sequences per microbatch needs seconds
T_p(m), which never falls with m. Wanted are whole m_p >= least_p with the sum of m_p G_p equal to
the batch, and the least largest T_p(m_p). Exact: of all values that T_p(m) takes the least is found
by bisection at which a sum of multiples, none above what each pipeline does in that time, is the
batch.

"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from hetplan.cluster.spec import Cluster
from hetplan.cost.arrays import Floats
from hetplan.cost.replay.times import pipeline_ends
from hetplan.cost.step_model.plan import PipelineWork, sends_wait
from hetplan.cost.step_model.pricer import StepCost
from hetplan.errors import InputError
from hetplan.job.spec import Job, Pins
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan
from hetplan.plans.plan import RecomputeGranularity, Schedule, Sharding
from hetplan.plans.targets import target
from hetplan.search.multi_pipeline.columns import Flow
from hetplan.search.multi_pipeline.stage_options import PartOptions
from hetplan.search.space.allowed import matches
from hetplan.search.space.family import Mesh
from hetplan.search.space.plan_evaluator import PlanEvaluator, fits
from hetplan.search.space.stage_pricer import StagePricer


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One pipeline's part in the problem."""

    sequences: int
    """Of a microbatch, over all data-parallel ranks."""
    least: int
    """Fewest microbatches that it can run."""
    seconds: Callable[[int], float]
    """Of so many microbatches; must not fall."""


def balanced(shares: Sequence[Share], batch: int) -> tuple[int, ...] | None:
    """Microbatches of every pipeline; None where no numbers add up to the batch."""
    most = [batch // share.sequences for share in shares]
    known: list[dict[int, float]] = [{} for _ in shares]

    def seconds(p: int, count: int) -> float:
        if count not in known[p]:
            known[p][count] = shares[p].seconds(count)
        return known[p][count]

    def within(limit: float) -> tuple[int, ...] | None:
        highest = []
        for p, share in enumerate(shares):
            low, high = share.least - 1, most[p]
            while low < high:
                middle = (low + high + 1) // 2
                if seconds(p, middle) <= limit:
                    low = middle
                else:
                    high = middle - 1
            if low < share.least:
                return None
            highest.append(low)
        return _adds_up(shares, highest, batch)

    if any(high < share.least for high, share in zip(most, shares, strict=True)):
        return None
    best = _adds_up(shares, most, batch)
    if best is None:
        return None
    while True:
        # The longest pipeline of what was found must get fewer: the next smaller value.
        limit = max(seconds(p, count) for p, count in enumerate(best))
        low, high = _floor(shares, batch, seconds), limit
        better = None
        for _ in range(50):
            middle = 0.5 * (low + high)
            found = within(middle)
            if found is None:
                low = middle
            else:
                better = found
                high = max(seconds(p, count) for p, count in enumerate(found))
            if high - low <= 1e-9 * high:
                break
        if better is None or high >= limit:
            return best
        best = better


def _floor(shares: Sequence[Share], batch: int, seconds: Callable[[int, int], float]) -> float:
    """No numbers that add up take less: every pipeline with its fewest."""
    return max(seconds(p, share.least) for p, share in enumerate(shares)) * (1 - 1e-9)


def _adds_up(shares: Sequence[Share], most: Sequence[int], batch: int) -> tuple[int, ...] | None:
    """Numbers between least and most whose sequences add up to the batch; as many as possible for
    the first pipelines. A program over the pipelines and the sequences that are still missing.
    """
    missing = batch - sum(share.least * share.sequences for share in shares)
    if missing < 0:
        return None
    # reached[p]: bits of what pipelines p and later can take.
    reached = [1]
    mask = (1 << (missing + 1)) - 1
    for share, high in zip(reversed(shares), reversed(most), strict=True):
        bits, left, step = reached[-1], high - share.least, 1
        while left > 0:
            take = min(step, left)
            bits |= (bits << (take * share.sequences)) & mask
            left -= take
            step *= 2
        reached.append(bits)
    reached.reverse()
    if not reached[0] >> missing & 1:
        return None
    found = []
    for p, (share, high) in enumerate(zip(shares, most, strict=True)):
        count = min(high - share.least, missing // share.sequences)
        while not reached[p + 1] >> (missing - count * share.sequences) & 1:
            count -= 1
        found.append(share.least + count)
        missing -= count * share.sequences
    return tuple(found)


def keeps_pins(chosen: ChosenPlan, cluster: Cluster, job: Job) -> bool:
    """Whether every choice that the job pins is as it says."""
    pin, pipelines = job.pin, chosen.pipelines
    stages = [stage for pipeline in pipelines for stage in pipeline.stages]
    shapes = {part.shape for stage in stages for part in stage.parts}
    has: dict[str, set[object]] = {
        "pipelines": {len(pipelines)},
        "pp": {len(each.stages) for each in pipelines},
        "virtual_stages": {each.schedule.virtual_stages for each in pipelines},
        "dp": {sum(part.shape.dp for part in stage.parts) for stage in stages},
        "tp": {shape.tp for shape in shapes},
        "cp": {shape.cp for shape in shapes},
        "ep": {shape.ep for shape in shapes},
        "microbatch_size": {shape.microbatch_size for shape in shapes},
        "sequence_parallel": {shape.sequence_parallel for shape in shapes if shape.tp > 1},
    }
    for name, values in has.items():
        if getattr(pin, name) is not None and not values <= {getattr(pin, name)}:
            return False
    if pin.recompute is not None:
        wanted = RecomputeGranularity.FULL if pin.recompute else RecomputeGranularity.NONE
        if any(stage.recompute is not wanted for stage in stages):
            return False
    if pin.same_degrees and (len(shapes) > 1 or any(len(stage.parts) > 1 for stage in stages)):
        return False
    ends = [(each.stages[0], pin.embedding_on) for each in pipelines]
    ends += [(each.stages[-1], pin.head_on) for each in pipelines]
    if not all(matches(cluster.island(p.island), place) for end, place in ends for p in end.parts):
        return False
    return _keeps_sharding(chosen, pin) and _keeps_depth(chosen, pin)


def _keeps_sharding(chosen: ChosenPlan, pin: Pins) -> bool:
    """Where every stage has one copy of its weights there is nothing to shard, as pinned or not."""
    several = any(
        sum(part.shape.dp * part.shape.cp for part in stage.parts) > 1
        for pipeline in chosen.pipelines
        for stage in pipeline.stages
    )
    shards = chosen.sharding is Sharding.OPTIMIZER
    return pin.sharded_optimizer in (None, shards) or (not several and not shards)


def _keeps_depth(chosen: ChosenPlan, pin: Pins) -> bool:
    if pin.depth is None:
        return True
    if chosen.early_sends != (pin.depth > 0):
        return False
    return all(
        stage.warmup_depth <= min(len(each.stages) - s + pin.depth, each.num_microbatches)
        for each in chosen.pipelines
        for s, stage in enumerate(each.stages)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedPlan:
    """A whole plan and what it costs."""

    chosen: ChosenPlan
    seconds: float


def _pipeline_of(placed: StagePricer, options: PartOptions, flow: Flow) -> ChosenPipeline:
    column, m = flow.column, flow.microbatches
    count = len(column.options)
    names, stages = [island.name for island in placed.cluster.islands], []
    for s, (island, o) in enumerate(zip(column.islands, column.options, strict=True)):
        option = options.options[o]
        shape = replace(option.shape, dp=flow.flow // option.shape.microbatch_size)
        mesh = Mesh(islands=(island,), shapes=(shape,), max_stages=1)
        layers = placed.units.layers(column.layers[s], first=s == 0, last=s == count - 1)
        stages.append(mesh.stage(names, (layers,), option.recompute, min(count - s, m)))
    return ChosenPipeline(stages=tuple(stages), num_microbatches=m, schedule=Schedule(name="1f1b"))


@dataclass(slots=True)
class Assembler:
    """Prices whole plans of one job; keeps what plans share."""

    evaluator: PlanEvaluator
    layers_per_unit: int
    replays: int = 0

    def priced(self, chosen: ChosenPlan) -> StepCost | None:
        """Its step; None where it is no legal plan, breaks a pin or does not fit."""
        evaluator = self.evaluator
        if not keeps_pins(chosen, evaluator.cluster, evaluator.job):
            return None
        plan = evaluator.legal(chosen)
        if plan is None:
            return None
        self.replays += 1
        try:
            cost = evaluator.pricer.step(plan)
        except InputError:
            # Warm-up depths that make rendezvous sends wait for themselves.
            return None
        return cost if fits(cost) else None

    def whole(self, chosen: ChosenPlan) -> PricedPlan | None:
        """The plan with its step."""
        cost = self.priced(chosen)
        return None if cost is None else PricedPlan(chosen=chosen, seconds=cost.step_seconds)

    def balanced(self, chosen: ChosenPlan) -> ChosenPlan | None:
        """The same with the microbatches dealt out so that all pipelines end together."""
        job = self.evaluator.job
        try:
            plan = self.evaluator.place(chosen)
        except InputError:
            return None
        work = self.evaluator.pricer.costs(plan).work(plan)
        enough = not target(job.target).fewer_microbatches_than_stages
        shares = [
            Share(
                sequences=sum(part.shape.samples for part in pipeline.stages[0].parts),
                least=len(pipeline.stages) if enough else 1,
                seconds=partial(_unshared_seconds, each, rendezvous=sends_wait(plan)),
            )
            for pipeline, each in zip(chosen.pipelines, work, strict=True)
        ]
        counts = balanced(shares, job.global_batch_size)
        if counts is None:
            return None
        return replace(
            chosen,
            pipelines=tuple(
                with_microbatches(pipeline, count)
                for pipeline, count in zip(chosen.pipelines, counts, strict=True)
            ),
        )


def _unshared_seconds(work: PipelineWork, num_microbatches: int, *, rendezvous: bool) -> float:
    return float(unshared_ends(work, num_microbatches, rendezvous=rendezvous).max())


def with_microbatches(pipeline: ChosenPipeline, count: int) -> ChosenPipeline:
    """The same with so many microbatches and the schedule's own depths."""
    stages = len(pipeline.stages)
    return replace(
        pipeline,
        num_microbatches=count,
        stages=tuple(
            replace(stage, warmup_depth=min(stages - s, count))
            for s, stage in enumerate(pipeline.stages)
        ),
    )


def unshared_ends(work: PipelineWork, num_microbatches: int, *, rendezvous: bool) -> Floats:
    """[P] when the stages of one pipeline end, as if it had its links for itself."""
    depths = np.arange(len(work.stages), 0, -1)
    times = work.plain_times()._replace(warmup=depths, num_microbatches=num_microbatches)
    return pipeline_ends(times, rendezvous)


def plan_of_flows(
    placed: StagePricer, options: PartOptions, flows: Sequence[Flow], sharding: Sharding
) -> ChosenPlan:
    """All flows as pipelines."""
    return ChosenPlan(
        pipelines=tuple(_pipeline_of(placed, options, flow) for flow in flows), sharding=sharding
    )
