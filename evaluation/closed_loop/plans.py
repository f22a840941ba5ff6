"""Draw, price and choose the plans that the closed loop trains, before anything is trained.

The pool has legal plans of target native, of every form, drawn by a seed: the hosts of each stage
of each pipeline, then layers in proportion to the stages' speeds, evenly, or moved from there;
microbatches of several pipelines likewise; then the schedule. Forms are drawn equally often, so
that none fills the pool only because it has many plans. Every plan passes `hetplan.plans.check`,
and the trainer runs it (`hetplan.plans.ranks`).

Chosen are the best plans of the pool, the plan that the search returned, and one plan from each of
equally many strata of predicted rank, of the form that was taken least so far. Where fewer than the
wanted number stall (bubble or exposed communication) for a quarter of their step, plans of their
strata that do take their places. Plans that are predicted to take many times longer than the best
are left out.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from evaluation.closed_loop.values import MIN_STALLED_FRACTION, LoopPlan, LoopPlans
from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.spec import Cluster
from hetplan.cost.estimate_values import Component
from hetplan.cost.step_model.break_down import break_down
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
from hetplan.predict.predictor import LayerQuery
from hetplan.profiling.pacing import Pace
from hetplan.profiling.samples import Phase

StageHosts = tuple[str, ...]
"""Islands of the hosts of a stage, sorted; an island twice where two of its hosts are there."""
PipelineHosts = tuple[StageHosts, ...]

MICROBATCH_SIZES = (1, 2, 3, 4)
"""Microbatch sizes of one rank that are drawn."""
SAMPLES = (1, 2, 4)
"""Samples of a pipeline's microbatch that are drawn."""
FORMS = ("one pipeline", "early sends", "interleaved", "wide stages", "several pipelines")
_TRIES_IN_VAIN = 400
"""Draws in a row that were illegal or known, after which there are hardly any others."""
_MAX_MOVED_LAYERS = 2


def hosts_of(cluster: Cluster) -> tuple[str, ...]:
    """The island of every usable host; an InputError where hosts have several devices."""
    hosts: list[str] = []
    for island in cluster.islands:
        if island.devices_per_node != 1:
            raise InputError(
                f"island {island.name} has {island.devices_per_node} devices per node; the closed "
                "loop trains one rank per host: use a cluster with devices_per_node: 1"
            )
        hosts += [island.name] * len(island.usable_nodes)
    if len(hosts) < 2:
        raise InputError(f"{cluster.name} has {len(hosts)} hosts; the closed loop needs 2")
    return tuple(hosts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpace:
    """What the plans of a pool may be."""

    model: ModelSpec
    cluster: Cluster
    job: Job
    speeds: Mapping[str, float]
    """Speed of a host of each island, in any unit."""
    samples: Sequence[int] = SAMPLES
    """Samples of a pipeline's microbatch, which the ranks of a stage share."""
    microbatch_sizes: Sequence[int] = MICROBATCH_SIZES
    """Microbatch sizes of a rank."""
    max_microbatches: int | None = None
    """Of each pipeline."""
    only: Sequence[str] | None = None
    """Plans over all hosts of these islands; None: over two or more hosts of any."""
    single: bool = False
    """Plans of one pipeline."""


def draw_pool(space: PoolSpace, *, seed: int, size: int) -> tuple[Plan, ...]:
    """Up to `size` different plans; equal arguments give equal pools."""
    drawer = _Drawer(space, random.Random(f"pool {seed}"))
    forms = [form for form in FORMS if not (space.single and form == "several pipelines")]
    plans: dict[str, Plan] = {}
    number = in_vain = 0
    while len(plans) < size and in_vain < _TRIES_IN_VAIN:
        plan = drawer.draw(forms[number % len(forms)])
        number, in_vain = number + 1, in_vain + 1
        if plan is not None:
            name = name_of(plan, space.cluster, space.job, space.model)
            if name not in plans:
                plans[name] = plan
                in_vain = 0
    return tuple(plans.values())


def name_of(plan: Plan, cluster: Cluster, job: Job, model: ModelSpec) -> str:
    """Stages in order with islands and layers, then what else tells the plan from others.

    `fast+slow(3:1)` is a stage whose ranks share each microbatch 3 to 1; `4/2` layers of two
    chunks; `2x16` is 16 microbatches of 2 samples.
    """
    chosen = chosen_of(plan, cluster, job, model)
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
    again = "" if stage.recompute.words == "none" else f" recompute {stage.recompute.words}"
    return f"{islands} {'/'.join(map(str, stage.layers))}{again}"


class _Drawer:
    """Draws plans of a space, one after another."""

    def __init__(self, space: PoolSpace, chance: random.Random) -> None:
        self._space, self._chance = space, chance
        self._hosts = [
            host for host in hosts_of(space.cluster) if space.only is None or host in space.only
        ]

    def draw(self, form: str) -> Plan | None:
        """A plan, of this form where the hosts allow it; None where the draw is not legal."""
        space, job = self._space, self._space.job
        samples = self._chance.choice(space.samples)
        if job.global_batch_size % samples:
            return None
        structure = self._structure(form)
        shares = self._shares(structure, job.global_batch_size // samples)
        pipelines = []
        for stages, count in zip(structure, shares, strict=True):
            parts = [self._parts(stage, samples) for stage in stages]
            split = [part for part in parts if part is not None]
            too_many = space.max_microbatches is not None and count > space.max_microbatches
            if len(split) < len(parts) or count < len(stages) or too_many:
                return None
            pipeline = self._pipeline(form, split, count)
            if pipeline is None:
                return None
            pipelines.append(pipeline)
        chosen = ChosenPlan(pipelines=tuple(pipelines), early_sends=form == "early sends")
        try:
            plan = plan_of(space.model, space.cluster, job, chosen)
        except InputError:
            return None
        illegal = check_plan(plan, space.model, space.cluster, job) or any(launch_faults(plan))
        return None if illegal else plan

    def _structure(self, form: str) -> list[PipelineHosts]:
        """Hosts in random order, cut into pipelines and those into stages."""
        hosts, chance = self._hosts, self._chance
        count = len(hosts) if self._space.only is not None else chance.randint(2, len(hosts))
        taken = chance.sample(hosts, count)
        wide = form == "wide stages" or (form == "several pipelines" and chance.random() < 0.5)
        cuts = [0, count]
        if form == "several pipelines":
            cuts += chance.sample(range(1, count), chance.randint(min(1, count - 1), count - 1))
        cuts.sort()
        return [tuple(self._stages(taken[start:stop], wide=wide)) for start, stop in pairwise(cuts)]

    def _stages(self, hosts: Sequence[str], *, wide: bool) -> Iterator[StageHosts]:
        at = 0
        while at < len(hosts):
            size = self._chance.choice((1, 2)) if wide else 1
            yield tuple(sorted(hosts[at : at + size]))
            at += size

    def _parts(self, stage: StageHosts, samples: int) -> tuple[Part, ...] | None:
        """How the hosts of a stage share a microbatch; None where it has too few samples."""
        splits: list[tuple[int, ...]] = [(samples,)]
        if len(stage) > 1:
            splits = [(one, samples - one) for one in range(1, samples)]
            if stage[0] == stage[1]:
                splits = [split for split in splits if split[0] == split[1]]
        splits = [split for split in splits if set(split) <= set(self._space.microbatch_sizes)]
        if not splits:
            return None
        split = self._chance.choice(splits)
        if len(stage) > 1 and stage[0] == stage[1]:
            shape = Shape(tp=1, dp=len(stage), microbatch_size=split[0])
            return (Part(island=stage[0], shape=shape),)
        return tuple(
            Part(island=island, shape=Shape(tp=1, dp=1, microbatch_size=size))
            for island, size in zip(stage, split, strict=True)
        )

    def _shares(self, structure: Sequence[PipelineHosts], microbatches: int) -> list[int]:
        """Microbatches of each pipeline, by its hosts' speeds, evenly, or between the two."""
        speeds = self._space.speeds
        weights = [sum(speeds[host] for stage in stages for host in stage) for stages in structure]
        mean = sum(weights) / len(weights)
        evenly = self._chance.choice((0.0, 0.0, 0.0, 0.5, 1.0))
        weights = [weight * (1 - evenly) + mean * evenly for weight in weights]
        return self._moved(dealt_out(microbatches, weights), self._chance.choice((0, 0, 1, 2)))

    def _moved(self, counts: list[int], times: int, least: int = 0) -> list[int]:
        """The counts, after so many moves of one from anywhere to anywhere."""
        for _ in range(times):
            giver, taker = self._chance.randrange(len(counts)), self._chance.randrange(len(counts))
            if counts[giver] > least:
                counts[giver] -= 1
                counts[taker] += 1
        return counts

    def _pipeline(
        self, form: str, parts: Sequence[tuple[Part, ...]], count: int
    ) -> ChosenPipeline | None:
        chunks = self._chance.choice((2, 3)) if form == "interleaved" else 1
        layers = self._layers(parts, chunks)
        if layers is None or (chunks > 1 and (len(parts) < 2 or count % len(parts))):
            return None
        schedule = Schedule(
            name="1f1b" if chunks == 1 else "interleaved-1f1b", virtual_stages=chunks
        )
        more = self._chance.choice((0, 1, 2)) if form == "early sends" else 0
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
        total = self._space.model.num_layers
        if len(parts) * chunks > total:
            return None
        weights = [self._stage_speed(mine) for mine in parts]
        if self._chance.random() < 0.2:
            weights = [1.0] * len(parts)
        times = self._chance.randrange(_MAX_MOVED_LAYERS + 1)
        return self._moved(dealt_out(total, weights, least=chunks), times, least=chunks)

    def _stage_speed(self, parts: Sequence[Part]) -> float:
        """Samples a second and layer: all ranks of a stage wait for its slowest."""
        samples = sum(part.shape.samples for part in parts)
        return samples / max(
            part.shape.microbatch_size / self._space.speeds[part.island] for part in parts
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
    wanted = [share * scale for share in wanted]
    counts = [int(share) for share in wanted]
    by_remainder = sorted(range(len(weights)), key=lambda at: counts[at] - wanted[at])
    for at in by_remainder[: free - sum(counts)]:
        counts[at] += 1
    return [least + count for count in counts]


POOL_SIZE = 600
"""Plans that are drawn; two seconds to price."""
STALLED = frozenset(
    {
        Component.BUBBLE,
        Component.PIPELINE,
        Component.DATA_PARALLEL,
        Component.GATHERING,
        Component.EMBEDDING,
        Component.NORM,
        Component.OTHER_STAGES,
        Component.TENSOR_PARALLEL,
    }
)
"""What of a step's critical path is not compute or update."""
MAX_LENGTH, SHORT_MAX_LENGTH = 4.0, 2.5
"""Times the best predicted step."""


def speeds_of(pricer: Pricer) -> dict[str, float]:
    """Transformer layers a second of a host of each island, forward and backward."""
    return {
        island.name: 1.0
        / sum(_layer_seconds(pricer, island.device, 2, 1, back) for back in (False, True))
        for island in pricer.cluster.islands
    }


def _layer_seconds(
    pricer: Pricer, device: DeviceKind, microbatch_size: int, tp: int, is_backward: bool
) -> float:
    query = LayerQuery(
        model=pricer.model,
        layer=LayerKind.TRANSFORMER,
        microbatch_size=microbatch_size,
        sequence_length=pricer.job.sequence_length,
        tp=tp,
        precision=pricer.job.precision,
        is_backward=is_backward,
    )
    return pricer.predictor.layer(device, query).seconds


def profile_excess(pricer: Pricer, pace: Pace) -> float:
    """Mean by which profiled passes of transformer layers lie above their pace; the worst kind."""
    worst = 0.0
    for device in {each.device.kind: each.device for each in pricer.cluster.islands}.values():
        excess = []
        for entry in pace.kind(device.kind).entries:
            if entry.layer == LayerKind.TRANSFORMER:
                is_backward = entry.phase == Phase.BACKWARD
                size, tp = entry.microbatch_size, entry.tp
                profiled = _layer_seconds(pricer, device, size, tp, is_backward)
                excess.append(profiled / entry.seconds - 1.0)
        worst = max(worst, sum(excess) / len(excess))
    return worst


def loop_plan(pricer: Pricer, plan: Plan, *, searched: bool = False) -> LoopPlan:
    """A plan with its price: that of `hetplan.cost.estimate`, without the interval."""
    step, costs = pricer.step(plan), pricer.costs(plan)
    waiting = straggler_wait(plan, costs, step)
    seconds = step.step_seconds + waiting
    parts = break_down(plan, costs, step, waiting).critical
    return LoopPlan(
        name=name_of(plan, pricer.cluster, pricer.job, pricer.model),
        form=form_of(plan),
        plan=plan,
        predicted_seconds=seconds,
        stalled=sum(part.seconds for part in parts if part.component in STALLED) / seconds,
        searched=searched,
    )


def price_pool(pricer: Pricer, pool: Sequence[Plan]) -> tuple[LoopPlan, ...]:
    """The plans of the pool that can be priced, fastest first."""
    priced = []
    for plan in pool:
        # Not: warm-up depths whose sends would wait for each other for ever.
        with suppress(InputError):
            priced.append(loop_plan(pricer, plan))
    return tuple(sorted(priced, key=lambda plan: (plan.predicted_seconds, plan.name)))


def choose(
    pool: Sequence[LoopPlan],
    searched: LoopPlan,
    *,
    plans: int,
    best: int,
    stalled: int,
    longest: float,
    seed: int,
) -> LoopPlans:
    """`plans` of the pool, fastest first in it, the searched one among them.

    `best`: how many of the best predicted ones. `stalled`: how many at least have a quarter of
    their step in bubble or exposed communication, where the pool has so many. `longest`: times the
    best predicted step that a plan may take.
    """
    others = [each for each in pool if each.name != searched.name]
    fastest = min(searched.predicted_seconds, others[0].predicted_seconds)
    kept = [each for each in others if each.predicted_seconds <= longest * fastest]
    # The searched plan is one of the best ones, unless the pool has as many that are better.
    better = sum(each.predicted_seconds < searched.predicted_seconds for each in kept)
    number = min(len(kept), best - (1 if better < best else 0), plans - 1)
    taken, rest = kept[:number], kept[number:]
    strata = _strata(rest, plans - 1 - number)
    chance = random.Random(f"choice {seed}")
    forms = Counter(each.form for each in (searched, *taken))
    chosen: list[LoopPlan] = []
    for stratum in strata:
        chosen.append(_pick(stratum, forms, chance))
        forms[chosen[-1].form] += 1
    much = sum(_stalls_much(each) for each in (searched, *taken, *chosen))
    # From the slowest stratum on: slow plans are the ones that stall.
    for at in reversed(range(len(strata))):
        if much >= stalled:
            break
        able = [each for each in strata[at] if _stalls_much(each)]
        if able and not _stalls_much(chosen[at]):
            forms[chosen[at].form] -= 1
            chosen[at] = _pick(able, forms, chance)
            forms[chosen[at].form] += 1
            much += 1
    by_step = sorted((searched, *taken, *chosen), key=lambda plan: plan.predicted_seconds)
    return LoopPlans(plans=tuple(by_step), pool=len(pool), left_out_slow=len(others) - len(kept))


def _strata(rest: Sequence[LoopPlan], count: int) -> list[Sequence[LoopPlan]]:
    """Equal runs of predicted rank, none empty."""
    count = min(count, len(rest))
    return [rest[at * len(rest) // count : (at + 1) * len(rest) // count] for at in range(count)]


def _pick(stratum: Sequence[LoopPlan], forms: Mapping[str, int], chance: random.Random) -> LoopPlan:
    """One of the stratum, of a form that was taken least."""
    least = min(forms[each.form] for each in stratum)
    return chance.choice([each for each in stratum if forms[each.form] == least])


def _stalls_much(each: LoopPlan) -> bool:
    return each.stalled >= MIN_STALLED_FRACTION
