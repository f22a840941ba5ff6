"""The ranks of a plan (`rank_rows`), and what `hetplan launch` does not run (`limits_of`).

Ranks count pipeline by pipeline, stage by stage, in each stage replica by replica in the order
(dp, cp, tp), tp fastest: with one pipeline Megatron-LM's default order tp-cp-ep-dp-pp.

Target native can be searched and priced for more than the reference trainer runs today. It runs
pipelines of any stages: unlike layers, degrees, microbatch sizes, islands, depths and chunks; the
optimizer sharded in one pipeline of a site. Each limit names the pins that avoid it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hetplan.cluster.hosts import place_of, written_node_name
from hetplan.cluster.spec import Cluster
from hetplan.errors import Fault
from hetplan.plans.formats import named_formats
from hetplan.plans.pieces import data_ranks
from hetplan.plans.plan import Pipeline, Plan, RecomputeGranularity, Sharding, Stage, expand


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """One rank of a plan."""

    rank: int
    device: int
    """Its number in the cluster."""
    island: str
    node: int
    """In its island."""
    node_name: str | None
    local: int
    """Device of the node."""
    pipeline: int
    stage: int
    dp: int
    """Position among all data-parallel ranks of the stage."""
    cp: int
    tp: int
    ep: int
    """Position among the ranks that share the experts, and below inside an expert."""
    etp: int


def rank_rows(plan: Plan, cluster: Cluster) -> Iterator[RankRow]:
    """Every rank in order."""
    rank = 0
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            first_dp = 0
            for replica in stage.replicas:
                for at, device in enumerate(expand(replica.devices)):
                    place = place_of(cluster, device)
                    slice_, tp = divmod(at, replica.tp)
                    dp, cp = divmod(slice_, replica.cp)
                    expert, etp = divmod(at, replica.etp)
                    yield RankRow(
                        rank=rank,
                        device=device,
                        island=place.island.name,
                        node=place.node,
                        node_name=written_node_name(cluster, device),
                        local=place.local,
                        pipeline=p,
                        stage=s,
                        dp=first_dp + dp,
                        cp=cp,
                        tp=tp,
                        ep=expert % replica.ep,
                        etp=etp,
                    )
                    rank += 1
                first_dp += replica.dp


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchLimit:
    """Something that `hetplan launch` does not run."""

    field: str
    """Place in the plan."""
    message: str
    pin: str = ""
    """Of a job that is planned without it, as in `pipelines: 1`; empty: no searched plan has it."""


def pins_line(found: list[LaunchLimit]) -> tuple[str, ...]:
    """One line that names the pins of all these; none where no pin helps."""
    pins = ", ".join(dict.fromkeys(each.pin for each in found if each.pin))
    return (f"plan again with pin: {{{pins}}}",) if pins else ()


def launch_faults(plan: Plan) -> Iterator[Fault]:
    """Why `hetplan launch` does not run a legal plan: `limits_of` with the pin in each message."""
    for each in limits_of(plan):
        hint = f" (in the job, pin: {{{each.pin}}})" if each.pin else ""
        yield Fault(field=each.field, message=f"{each.message}{hint}")


def limits_of(plan: Plan) -> Iterator[LaunchLimit]:
    """Everything in the plan that the trainer does not run."""
    for at, pipeline in enumerate(plan.pipelines):
        yield from _pipeline(f"pipelines[{at}]", pipeline, plan.precision)
        if not plan.overlap.send:
            yield from _depths(f"pipelines[{at}]", pipeline)
    lengths = {len(pipeline.stages) > 1 for pipeline in plan.pipelines}
    if plan.tied_embedding_devices and len(lengths) > 1:
        yield LaunchLimit(
            field="tied_embedding_devices",
            message="one pipeline has embedding and head on one stage and another does not; the "
            "trainer sums a tied matrix over pipelines that are alike in this",
            pin="pipelines: 1",
        )
    yield from _formats(plan)
    yield from _shards(plan)


def _formats(plan: Plan) -> Iterator[LaunchLimit]:
    for field, found in named_formats(plan):
        if found != plan.precision:
            yield LaunchLimit(
                field=field,
                message=f"{found}; the trainer keeps and sums gradients in the format of the "
                f"parameters, {plan.precision}",
            )


def _shards(plan: Plan) -> Iterator[LaunchLimit]:
    pin = "sharded_optimizer: false"
    if plan.optimizer_shards == 1:
        return
    if plan.sharding is not Sharding.OPTIMIZER:
        yield LaunchLimit(
            field="sharding",
            message=f"{plan.sharding}; the trainer shards the optimizer's state alone",
            pin=pin,
        )
    sites = (len(plan.pipelines),) if plan.outer is None else plan.outer.sites
    if max(sites) > 1:
        yield LaunchLimit(
            field="optimizer_shards",
            message=f"{plan.optimizer_shards} with {max(sites)} pipelines; the trainer "
            "shards the optimizer of one",
            pin=pin,
        )
        return
    for at, pipeline in enumerate(plan.pipelines):
        yield from _shared_stages(plan, f"pipelines[{at}]", pipeline.stages, pin)


def _shared_stages(
    plan: Plan, place: str, stages: Sequence[Stage], pin: str
) -> Iterator[LaunchLimit]:
    for index, stage in enumerate(stages):
        for degree in ("ep", "tp"):
            found = sorted({getattr(replica, degree) for replica in stage.replicas})
            if len(found) > 1:
                yield LaunchLimit(
                    field=f"{place}.stages[{index}].replicas",
                    message=f"{degree} {found} with a sharded optimizer; the trainer needs one "
                    f"{degree} per stage",
                    pin=pin,
                )
    ends = {(stage.replicas[0].tp, data_ranks(stage)) for stage in (stages[0], stages[-1])}
    if plan.tied_embedding_devices and len(ends) > 1:
        yield LaunchLimit(
            field="tied_embedding_devices",
            message=f"first and last stage have (tp, dp) {sorted(ends)} with a sharded optimizer; "
            "the trainer needs the same for both",
            pin=pin,
        )


def _pipeline(place: str, pipeline: Pipeline, precision: str) -> Iterator[LaunchLimit]:
    stages, count = pipeline.stages, pipeline.num_microbatches
    schedule = pipeline.schedule
    for index, stage in enumerate(stages):
        yield from _stage(f"{place}.stages[{index}]", stage, schedule.virtual_stages)
    if schedule.name not in ("1f1b", "interleaved-1f1b"):
        yield LaunchLimit(
            field=f"{place}.schedule",
            message=f"{schedule.name}; the trainer runs 1f1b and interleaved-1f1b",
        )
    if count < len(stages):
        yield LaunchLimit(
            field=f"{place}.num_microbatches",
            message=f"{count} for {len(stages)} stages; the trainer needs one per stage",
        )
    for boundary in pipeline.boundaries:
        if boundary.precision != precision:
            yield LaunchLimit(
                field=f"{place}.boundaries[{boundary.index}].precision",
                message=f"{boundary.precision}; the trainer sends what it computes, {precision}",
            )


def _depths(place: str, pipeline: Pipeline) -> Iterator[LaunchLimit]:
    """Stages that would wait for each other for ever (`hetplan.cost.replay.programs`)."""
    if pipeline.schedule.name != "1f1b":
        return
    depths = [stage.warmup_depth for stage in pipeline.stages]
    if any(left - right > 1 for left, right in pairwise(depths)):
        yield LaunchLimit(
            field=f"{place}.stages",
            message=f"warm-up depths {depths}; where sends wait for their receivers, those of "
            "neighbours may differ by one",
            pin="depth: 0",
        )


def _stage(place: str, stage: Stage, virtual_stages: int) -> Iterator[LaunchLimit]:
    if len(stage.chunks) != virtual_stages:
        yield LaunchLimit(
            field=f"{place}.chunks",
            message=f"{len(stage.chunks)} layer ranges; the schedule has {virtual_stages} virtual "
            "stages",
        )
    recompute = stage.recompute
    if recompute.granularity is RecomputeGranularity.SELECTIVE or recompute.layers is not None:
        yield LaunchLimit(
            field=f"{place}.recompute",
            message="the trainer recomputes all transformer layers of a stage or none",
        )
    for at, replica in enumerate(stage.replicas):
        if replica.cp != 1 or replica.sequence_parallel:
            yield LaunchLimit(
                field=f"{place}.replicas[{at}]",
                message="the trainer has no context or sequence parallelism; use cp 1",
            )
