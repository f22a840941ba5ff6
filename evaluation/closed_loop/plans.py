"""Draw, price and choose the plans that the closed loop trains, before anything is trained.

The pool has many legal plans of target native, of every form, by a seed. A structure says which
islands' hosts stand in which stage of which pipeline; hosts of one island are alike. For a
structure layers, microbatches and schedules are drawn: layers in proportion to the stages' speeds,
evenly, or moved from there; microbatches of several pipelines likewise. Forms are drawn equally
often, so that none fills the pool only because there are many plans of it. Every plan passes
`hetplan.plans.check`, and the trainer runs it (`hetplan.plans.ranks`).

Chosen are the best plans of the pool, the plan that the search found, and from each of equally many
strata of predicted rank one, of the form that was taken least so far. Where fewer than the wanted
number stall (bubble or exposed communication) for a quarter of their step, others of their strata
that do take their places. Plans that are predicted to take many times longer than the best are left
out of the pool.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from evaluation.closed_loop.values import (
    MIN_STALLED_FRACTION,
    LoopPlan,
    LoopPlans,
)
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
from hetplan.predict.predictor import LayerQuery, Predictor
from hetplan.profiling.pacing import Pace
from hetplan.profiling.samples import Phase

StageHosts = tuple[str, ...]
"""Islands of the hosts of a stage, sorted; an island twice where two of its hosts are there."""
PipelineHosts = tuple[StageHosts, ...]
Structure = tuple[PipelineHosts, ...]
MAX_HOSTS_PER_STAGE = 2
MAX_HOSTS = 6
"""Of a cluster whose structures are all listed: there are thousands with six."""


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
    if not 2 <= len(found) <= MAX_HOSTS:
        raise InputError(
            f"{cluster.name} has {len(found)} hosts; the closed loop takes 2 to {MAX_HOSTS}"
        )
    return tuple(found)


def structures(hosts: Sequence[str], *, least_hosts: int = 2) -> tuple[Structure, ...]:
    """Every structure over at least so many of these hosts, in a fixed order."""
    found: dict[Structure, None] = {}
    for some in _choices(tuple(sorted(hosts))):
        if len(some) < least_hosts:
            continue
        for blocks in _partitions(some):
            for structure in _products([_pipelines(block) for block in blocks]):
                found.setdefault(tuple(sorted(structure)), None)
    return tuple(sorted(found))


def _choices(hosts: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Every choice of some of the hosts; alike ones once."""
    counts = sorted(Counter(hosts).items())

    def go(at: int, taken: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if at == len(counts):
            yield taken
            return
        name, count = counts[at]
        for number in range(count + 1):
            yield from go(at + 1, (*taken, *([name] * number)))

    yield from go(0, ())


@lru_cache(maxsize=256)
def _partitions(hosts: tuple[str, ...]) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Every way to deal the hosts out to pipelines; the order of pipelines does not matter."""
    if not hosts:
        return ((),)
    first, rest = hosts[0], hosts[1:]
    found: dict[tuple[tuple[str, ...], ...], None] = {}
    for others in _partitions(rest):
        for at in range(len(others)):
            joined = tuple(sorted((first, *others[at])))
            found[tuple(sorted((*others[:at], joined, *others[at + 1 :])))] = None
        found[tuple(sorted(((first,), *others)))] = None
    return tuple(found)


@lru_cache(maxsize=256)
def _pipelines(hosts: tuple[str, ...]) -> tuple[PipelineHosts, ...]:
    """Every order of stages of one or two hosts each that has all of these hosts."""
    if not hosts:
        return ((),)
    found: dict[PipelineHosts, None] = {}
    for stage in dict.fromkeys(
        tuple(sorted(some)) for some in _choices(hosts) if 1 <= len(some) <= MAX_HOSTS_PER_STAGE
    ):
        left = tuple(sorted((Counter(hosts) - Counter(stage)).elements()))
        for rest in _pipelines(left):
            found[stage, *rest] = None
    return tuple(found)


def _products(options: Sequence[Sequence[PipelineHosts]]) -> Iterator[Structure]:
    if not options:
        yield ()
        return
    for first in options[0]:
        for rest in _products(options[1:]):
            yield (first, *rest)


MICROBATCH_SIZES = (1, 2, 3, 4)
"""Of one rank."""
SAMPLES = (1, 2, 4)
"""Of a microbatch of a pipeline."""
FORMS = ("one pipeline", "early sends", "interleaved", "wide stages", "several pipelines")
_TRIES_IN_VAIN = 400
"""Draws in a row that were illegal or drawn before, after which there are hardly any others."""
_MAX_MOVED_LAYERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """A legal plan of the pool."""

    name: str
    form: str
    plan: Plan


def draw_pool(
    model: ModelSpec,
    cluster: Cluster,
    job: Job,
    *,
    speeds: dict[str, float],
    seed: int,
    size: int,
    most_microbatches: int | None = None,
    samples: Sequence[int] = SAMPLES,
    microbatch_sizes: Sequence[int] = MICROBATCH_SIZES,
    only: Sequence[str] | None = None,
    single: bool = False,
) -> tuple[PoolPlan, ...]:
    """Up to `size` different plans; equal arguments give equal pools.

    `speeds`: of a host of each island, in any unit. `most_microbatches`: of each pipeline.
    `samples`: of a pipeline's microbatch, which its stages' ranks share; `microbatch_sizes`: of a
    rank. `only`: plans over all hosts of these islands. `single`: of one pipeline.
    """
    hosts = [host for host in hosts_of(cluster) if only is None or host in only]
    found_structures = structures(hosts, least_hosts=2 if only is None else len(hosts))
    by_form = _by_form([each for each in found_structures if not single or len(each) == 1])
    chance = random.Random(f"pool {seed}")
    found: dict[str, PoolPlan] = {}
    drawer = _Drawer(
        model=model,
        cluster=cluster,
        job=job,
        speeds=speeds,
        chance=chance,
        most_microbatches=most_microbatches,
        samples=tuple(samples),
        microbatch_sizes=frozenset(microbatch_sizes),
    )
    forms = [form for form in FORMS if by_form[form]]
    number = in_vain = 0
    while forms and len(found) < size and in_vain < _TRIES_IN_VAIN:
        form = forms[number % len(forms)]
        drawn = drawer.draw(form, chance.choice(by_form[form]))
        number, in_vain = number + 1, in_vain + 1
        if drawn is not None and drawn.name not in found:
            found[drawn.name] = drawn
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


def _by_form(found: Sequence[Structure]) -> dict[str, list[Structure]]:
    by_form: dict[str, list[Structure]] = {form: [] for form in FORMS}
    for structure in found:
        wide = any(len(stage) > 1 for pipeline in structure for stage in pipeline)
        if len(structure) > 1:
            by_form["several pipelines"].append(structure)
        elif wide:
            by_form["wide stages"].append(structure)
        else:
            for form in ("one pipeline", "early sends", "interleaved"):
                by_form[form].append(structure)
    return by_form


@dataclass(slots=True, kw_only=True)
class _Drawer:
    model: ModelSpec
    cluster: Cluster
    job: Job
    speeds: dict[str, float]
    chance: random.Random
    most_microbatches: int | None
    samples: tuple[int, ...]
    microbatch_sizes: frozenset[int]

    def draw(self, form: str, structure: Structure) -> PoolPlan | None:
        """A plan of this form and structure; None where the draw is not legal."""
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
            if self.most_microbatches is not None and count > self.most_microbatches:
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
        return PoolPlan(name=name_of(plan, self.cluster, self.model), form=form_of(plan), plan=plan)

    def _parts(self, stage: StageHosts, samples: int) -> tuple[Part, ...] | None:
        """How the hosts of a stage share a microbatch; None where it has too few samples."""
        splits: list[tuple[int, ...]] = [(samples,)]
        if len(stage) > 1:
            splits = [(one, samples - one) for one in range(1, samples)]
            if stage[0] == stage[1]:
                splits = [split for split in splits if split[0] == split[1]]
        splits = [split for split in splits if self.microbatch_sizes.issuperset(split)]
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

    def _shares(self, structure: Structure, microbatches: int) -> list[int]:
        """Microbatches of each pipeline, by its hosts' speeds, evenly, or between the two."""
        weights = [self._speed(pipeline) for pipeline in structure]
        mean = sum(weights) / len(weights)
        evenly = self.chance.choice((0.0, 0.0, 0.0, 0.5, 1.0))
        weights = [weight * (1 - evenly) + mean * evenly for weight in weights]
        found = dealt_out(microbatches, weights)
        for _ in range(self.chance.choice((0, 0, 1, 2))):
            giver, taker = self.chance.randrange(len(found)), self.chance.randrange(len(found))
            if found[giver]:
                found[giver] -= 1
                found[taker] += 1
        return found

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
        if self.chance.random() < 0.2:
            weights = [1.0] * len(parts)
        found = dealt_out(total, weights, least=chunks)
        for _ in range(self.chance.randrange(_MAX_MOVED_LAYERS + 1)):
            giver, taker = self.chance.randrange(len(parts)), self.chance.randrange(len(parts))
            if found[giver] > chunks:
                found[giver] -= 1
                found[taker] += 1
        return found

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


def at_most(plan: Plan, microbatches: int) -> bool:
    """Whether no pipeline of the plan has more microbatches."""
    return all(pipeline.num_microbatches <= microbatches for pipeline in plan.pipelines)


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
    waiting = straggler_wait(plan, costs, step)
    seconds = step.step_seconds + waiting
    parts = break_down(plan, costs, step, waiting).critical
    return LoopPlan(
        name=name_of(plan, cluster, model),
        form=form_of(plan),
        plan=plan,
        predicted_seconds=seconds,
        stalled=sum(each.seconds for each in parts if each.component in STALLED) / seconds,
        searched=searched,
    )


def price_pool(
    pricer: Pricer, pool: Sequence[PoolPlan], cluster: Cluster, model: ModelSpec
) -> tuple[LoopPlan, ...]:
    """Those of the pool that can be priced, fastest first."""
    priced = []
    for drawn in pool:
        try:
            priced.append(loop_plan(pricer, drawn.plan, cluster, model))
        except InputError:
            # Warm-up depths whose sends would wait for each other for ever.
            continue
    return tuple(sorted(priced, key=lambda each: (each.predicted_seconds, each.name)))


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
    found = sorted((searched, *taken, *chosen), key=lambda each: each.predicted_seconds)
    return LoopPlans(plans=tuple(found), pool=len(pool), left_out_slow=len(others) - len(kept))


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
