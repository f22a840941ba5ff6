"""Mutations of legal plans: each breaks one rule, or returns None where the plan has nothing that
it could break.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from plans_of_many import Case

from hetplan.model.layers import Mlp
from hetplan.plans.plan import (
    DeviceRange,
    LayerRange,
    OverlapSettings,
    Pipeline,
    Plan,
    Recompute,
    RecomputeGranularity,
    RecomputeModule,
    Replica,
    Sharding,
    Stage,
    compress,
    expand,
)
from hetplan.plans.rules import Rule


def with_pipeline(plan: Plan, p: int, pipeline: Pipeline) -> Plan:
    return replace(plan, pipelines=(*plan.pipelines[:p], pipeline, *plan.pipelines[p + 1 :]))


def with_stage(plan: Plan, p: int, s: int, stage: Stage) -> Plan:
    pipeline = plan.pipelines[p]
    stages = (*pipeline.stages[:s], stage, *pipeline.stages[s + 1 :])
    return with_pipeline(plan, p, replace(pipeline, stages=stages))


def with_replica(plan: Plan, p: int, s: int, **changes: object) -> Plan:
    stage = plan.pipelines[p].stages[s]
    replica = replace(stage.replicas[0], **changes)  # type: ignore[arg-type]
    return with_stage(plan, p, s, replace(stage, replicas=(replica,)))


@dataclass(frozen=True)
class Spot:
    """A stage of a legal plan, and random choices for what is changed there."""

    case: Case
    p: int
    s: int
    draw: random.Random

    @property
    def plan(self) -> Plan:
        return self.case.plan

    @property
    def pipeline(self) -> Pipeline:
        return self.plan.pipelines[self.p]

    @property
    def stage(self) -> Stage:
        return self.pipeline.stages[self.s]

    @property
    def replica(self) -> Replica:
        return self.stage.replicas[0]

    @property
    def following(self) -> Stage | None:
        """The next stage of the pipeline."""
        return self.pipeline.stages[self.s + 1] if self.s + 1 < len(self.pipeline.stages) else None

    def with_pipeline(self, **changes: object) -> Plan:
        changed = replace(self.pipeline, **changes)  # type: ignore[arg-type]
        return with_pipeline(self.plan, self.p, changed)

    def with_schedule(self, **changes: object) -> Plan:
        return self.with_pipeline(schedule=replace(self.pipeline.schedule, **changes))  # type: ignore[arg-type]

    def with_stage(self, **changes: object) -> Plan:
        return with_stage(self.plan, self.p, self.s, replace(self.stage, **changes))  # type: ignore[arg-type]

    def with_replica(self, **changes: object) -> Plan:
        return with_replica(self.plan, self.p, self.s, **changes)

    def with_devices(self, devices: Sequence[int]) -> Plan:
        return self.with_replica(devices=compress(devices))

    def with_chunk(self, start: int, stop: int) -> Plan:
        return self.with_stage(chunks=(LayerRange(start=start, stop=stop), *self.stage.chunks[1:]))

    def with_recompute(self, granularity: str, **changes: object) -> Plan:
        asks = Recompute(granularity=RecomputeGranularity(granularity), **changes)  # type: ignore[arg-type]
        return self.with_stage(recompute=asks)

    def with_group(self, **changes: object) -> Plan | None:
        """The first reduction group changed."""
        if not self.plan.reduction_groups:
            return None
        first, *others = self.plan.reduction_groups
        changed = replace(first, **changes)  # type: ignore[arg-type]
        return replace(self.plan, reduction_groups=(changed, *others))


Mutation = Callable[[Spot], Plan | None]

OTHER_LINK = {"device-direct": "host-staged", "host-staged": "device-direct"}


def layer_twice(at: Spot) -> Plan | None:
    chunk = at.stage.chunks[0]
    if chunk.stop < len(at.case.model.layers):
        return at.with_chunk(chunk.start, chunk.stop + 1)
    return at.with_chunk(chunk.start - 1, chunk.stop) if chunk.start else None


def layer_missing(at: Spot) -> Plan | None:
    chunk = at.stage.chunks[0]
    return at.with_chunk(chunk.start, chunk.stop - 1) if chunk.stop - chunk.start > 2 else None


def stages_swapped(at: Spot) -> Plan | None:
    if at.following is None:
        return None
    swapped = at.with_stage(chunks=at.following.chunks)
    return with_stage(swapped, at.p, at.s + 1, replace(at.following, chunks=at.stage.chunks))


def stage_without_transformer(at: Spot) -> Plan | None:
    first = replace(at, s=0)
    if first.following is None or at.pipeline.schedule.virtual_stages > 1:
        return None
    chunk = LayerRange(start=1, stop=first.following.chunks[0].stop)
    plan = first.with_chunk(0, 1)
    return with_stage(plan, at.p, 1, replace(first.following, chunks=(chunk,)))


def device_in_two_stages(at: Spot) -> Plan | None:
    every = [(q, t) for q, each in enumerate(at.plan.pipelines) for t in range(len(each.stages))]
    q, t = at.draw.choice(every)
    if (q, t) == (at.p, at.s):
        return None
    taken = expand(at.plan.pipelines[q].stages[t].replicas[0].devices)
    return at.with_devices([*expand(at.replica.devices)[:-1], at.draw.choice(taken)])


def device_twice_in_a_stage(at: Spot) -> Plan | None:
    mine = expand(at.replica.devices)
    return at.with_devices([*mine[:-1], mine[0]]) if len(mine) > 1 else None


def no_such_device(at: Spot) -> Plan | None:
    last = at.case.cluster.num_devices - 1
    count = max(2, at.replica.num_devices)
    return at.with_replica(devices=(DeviceRange(start=last, count=count),))


def device_forgotten(at: Spot) -> Plan | None:
    unused = expand(at.plan.unused_devices)
    return replace(at.plan, unused_devices=compress(unused[1:])) if unused else None


def used_device_unused(at: Spot) -> Plan | None:
    if len(expand(at.plan.unused_devices)) + 1 > 8:
        return None
    mine = DeviceRange(start=expand(at.replica.devices)[0], count=1)
    return replace(at.plan, unused_devices=(*at.plan.unused_devices, mine))


def experts_of_a_dense_model(at: Spot) -> Plan | None:
    dense = isinstance(at.case.model.layer_runs[0].layer.mlp, Mlp)
    return at.with_replica(ep=2) if dense and at.replica.num_devices % 2 == 0 else None


def one_microbatch_more(at: Spot) -> Plan | None:
    if at.pipeline.schedule.name != "1f1b":
        return None  # its own warm-up depths would change as well
    return at.with_pipeline(num_microbatches=at.pipeline.num_microbatches + 1)


def depths_that_grow(at: Spot) -> Plan | None:
    if at.following is None:
        return None
    deeper = replace(at.following, warmup_depth=at.stage.warmup_depth + 1)
    return with_stage(at.plan, at.p, at.s + 1, deeper)


def modules_without_selection(at: Spot) -> Plan | None:
    return at.with_recompute(at.draw.choice(["full", "none"]), modules=(RecomputeModule.MLP,))


def boundary_missing(at: Spot) -> Plan | None:
    boundaries = at.pipeline.boundaries
    return at.with_pipeline(boundaries=boundaries[:-1]) if boundaries else None


def boundary_of_another_link(at: Spot) -> Plan | None:
    if not at.pipeline.boundaries:
        return None
    first, *others = at.pipeline.boundaries
    changes = [{"transport": OTHER_LINK[first.transport]}, {"precision": "int8"}]
    changed = replace(first, **at.draw.choice(changes))
    return at.with_pipeline(boundaries=(changed, *others))


def vocabulary_not_divided(at: Spot) -> Plan | None:
    if all(replica.tp == 1 for replica in at.plan.replicas):
        return None
    return replace(at.plan, padded_vocab_size=at.plan.padded_vocab_size + 1)


def group_missing(at: Spot) -> Plan | None:
    groups = list(at.plan.reduction_groups)
    if not groups:
        return None
    groups.pop(at.draw.randrange(len(groups)))
    return replace(at.plan, reduction_groups=tuple(groups))


def group_twice(at: Spot) -> Plan | None:
    groups = at.plan.reduction_groups
    return replace(at.plan, reduction_groups=(*groups, at.draw.choice(groups))) if groups else None


def group_of_other_degree(at: Spot) -> Plan | None:
    groups = at.plan.reduction_groups
    return at.with_group(degree=groups[0].degree + 1) if groups else None


def member_missing(at: Spot) -> Plan | None:
    groups = at.plan.reduction_groups
    return at.with_group(members=compress(expand(groups[0].members)[1:])) if groups else None


def group_of_another_link(at: Spot) -> Plan | None:
    groups = at.plan.reduction_groups
    return at.with_group(transport=OTHER_LINK[groups[0].transport]) if groups else None


def tied_forgotten(at: Spot) -> Plan | None:
    tied = at.plan.tied_embedding_devices
    return replace(at.plan, tied_embedding_devices=tied[1:]) if tied else None


def tied_without_need(at: Spot) -> Plan | None:
    if at.plan.tied_embedding_devices:
        return None
    return replace(at.plan, tied_embedding_devices=(DeviceRange(start=0, count=1),))


def unless(excluded: Callable[[Spot], bool], mutate: Callable[[Spot], Plan]) -> Mutation:
    """The mutation where it breaks something."""
    return lambda at: None if excluded(at) else mutate(at)


DEGREES = ("tp", "cp", "ep", "etp", "microbatch_size")
MUTATIONS: dict[str, tuple[Rule, Mutation]] = {
    "layer twice": (Rule.LAYERS_ONCE, layer_twice),
    "layer missing": (Rule.LAYERS_ONCE, layer_missing),
    "no such layer": (
        Rule.LAYERS_ONCE,
        lambda at: at.with_chunk(at.stage.chunks[0].start, len(at.case.model.layers) + 1),
    ),
    "stages swapped": (Rule.LAYERS_IN_ORDER, stages_swapped),
    "chunk too many": (
        Rule.CHUNKS,
        lambda at: at.with_schedule(virtual_stages=at.pipeline.schedule.virtual_stages + 1),
    ),
    "stage without transformer": (Rule.TRANSFORMER_LAYER, stage_without_transformer),
    "device in two stages": (Rule.DEVICES_ONCE, device_in_two_stages),
    "device twice in a stage": (Rule.DEVICES_ONCE, device_twice_in_a_stage),
    "no such device": (Rule.DEVICES_EXIST, no_such_device),
    "device forgotten": (Rule.DEVICES_COUNTED, device_forgotten),
    "used device unused": (Rule.DEVICES_COUNTED, used_device_unused),
    "degrees do not multiply": (
        Rule.DEGREES,
        lambda at: at.with_replica(tp=3 * at.replica.tp),
    ),
    "degree of zero": (Rule.DEGREES, lambda at: at.with_replica(**{at.draw.choice(DEGREES): 0})),
    "experts do not divide": (Rule.EXPERT_DEGREES, lambda at: at.with_replica(ep=3)),
    "experts of a dense model": (Rule.SLICES, experts_of_a_dense_model),
    "sequence parallel alone": (
        Rule.SEQUENCE_PARALLEL,
        unless(lambda at: at.replica.tp > 1, lambda at: at.with_replica(sequence_parallel=True)),
    ),
    "one microbatch more": (Rule.BATCH, one_microbatch_more),
    "stages of other batches": (
        Rule.BATCH,
        unless(
            lambda at: len(at.pipeline.stages) < 2,
            lambda at: at.with_replica(microbatch_size=2 * at.replica.microbatch_size),
        ),
    ),
    "unknown schedule": (Rule.SCHEDULE, lambda at: at.with_schedule(name="chimera")),
    "chunks without interleaving": (
        Rule.SCHEDULE,
        unless(
            lambda at: at.pipeline.schedule.virtual_stages == 1,
            lambda at: at.with_schedule(name="gpipe"),
        ),
    ),
    "depths that grow": (Rule.WARMUP, depths_that_grow),
    "no warmup": (
        Rule.WARMUP,
        lambda at: replace(at, s=len(at.pipeline.stages) - 1).with_stage(warmup_depth=0),
    ),
    "modules without selection": (Rule.RECOMPUTE, modules_without_selection),
    "selection of nothing": (Rule.RECOMPUTE, lambda at: at.with_recompute("selective")),
    "too many layers recomputed": (
        Rule.RECOMPUTE,
        lambda at: at.with_recompute("full", layers=at.draw.choice([0, 99])),
    ),
    "boundary missing": (Rule.BOUNDARIES, boundary_missing),
    "boundary of another link": (Rule.BOUNDARIES, boundary_of_another_link),
    "vocabulary too small": (
        Rule.VOCABULARY,
        lambda at: replace(at.plan, padded_vocab_size=at.case.model.vocab_size - 4),
    ),
    "vocabulary not divided": (Rule.VOCABULARY, vocabulary_not_divided),
    "more than all offloaded": (
        Rule.OFFLOAD,
        lambda at: replace(at.plan, optimizer_offload=at.draw.choice([-0.1, 1.5, float("nan")])),
    ),
    "nothing to gather": (
        Rule.OVERLAP,
        unless(
            lambda at: at.plan.sharding is not Sharding.NONE,
            lambda at: replace(at.plan, overlap=OverlapSettings(gathering=True)),
        ),
    ),
    "shards that do not divide": (
        Rule.SHARDING,
        lambda at: replace(at.plan, sharding=Sharding.OPTIMIZER, optimizer_shards=7),
    ),
    "shards without sharding": (
        Rule.SHARDING,
        lambda at: replace(at.plan, optimizer_shards=2 if at.plan.optimizer_shards == 1 else 1),
    ),
    "group missing": (Rule.REDUCTION, group_missing),
    "group twice": (Rule.REDUCTION, group_twice),
    "group of other degree": (Rule.REDUCTION, group_of_other_degree),
    "member missing": (Rule.REDUCTION, member_missing),
    "group of another link": (Rule.REDUCTION, group_of_another_link),
    "tied forgotten": (Rule.TIED, tied_forgotten),
    "tied without need": (Rule.TIED, tied_without_need),
    "another precision": (Rule.JOB, lambda at: replace(at.plan, precision="float16")),
    "unknown target": (Rule.JOB, lambda at: replace(at.plan, target="nobody")),
}
