"""Which legal plans of target native does a small cluster have? Many, of every form, by a seed.

For every structure (`structures`) layers, microbatches and schedules are drawn: layers in
proportion to the stages' speeds, evenly, or moved from there; microbatches of several pipelines
likewise.
Forms are drawn equally often, so that none fills the pool only because there are many plans of it.
Every plan passes `hetplan.plans.check`, and the trainer runs it (`hetplan.plans.ranks`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from hetplan.benchmarks.closed_loop.structures import (
    PipelineHosts,
    StageHosts,
    Structure,
    hosts_of,
    structures,
)
from hetplan.cluster.spec import Cluster
from hetplan.errors import InputError
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.build import chosen_of, plan_of
from hetplan.plans.check import check_plan
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, ChosenStage, Part, Shape
from hetplan.plans.pieces import own_depth
from hetplan.plans.plan import Plan, Schedule
from hetplan.plans.ranks import launch_faults

MICROBATCH_SIZES = (1, 2, 3, 4)
"""Of one rank."""
SAMPLES = (1, 2, 4)
"""Of a microbatch of a pipeline."""
FORMS = ("one pipeline", "early sends", "interleaved", "wide stages", "several pipelines")
_TRIES_IN_VAIN = 400
"""Draws in a row that were illegal or drawn before, after which there are hardly any others."""
_MAX_MOVED_LAYERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
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
) -> tuple[Drawn, ...]:
    """Up to `size` different plans; equal arguments give equal pools.

    `speeds`: of a host of each island, in any unit. `most_microbatches`: of each pipeline.
    `samples`: of a pipeline's microbatch, which its stages' ranks share; `microbatch_sizes`: of a
    rank. `only`: plans over all hosts of these islands. `single`: of one pipeline.
    """
    hosts = [host for host in hosts_of(cluster) if only is None or host in only]
    found_structures = structures(hosts, least_hosts=2 if only is None else len(hosts))
    by_form = _by_form([each for each in found_structures if not single or len(each) == 1])
    chance = random.Random(f"pool {seed}")
    found: dict[str, Drawn] = {}
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

    def draw(self, form: str, structure: Structure) -> Drawn | None:
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
        return Drawn(name=name_of(plan, self.cluster, self.model), form=form_of(plan), plan=plan)

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
