"""The times of a plan's stages and hops, and when its stages leave their pipelines, by replay.

Everything that does not depend on where the layers are cut is made once and kept: units per
placement and recomputation (`hetplan.cost.step_model.units`), hops per pair of stages, reduction
groups per set of members, and once per placement of all stages what their groups leave each other
(`hetplan.cost.step_model.groups`). What is left per plan is adding up and the replay.

Whose rendezvous sends and receives a replay follows is a matter of the target and of the job's
trainer (`exchange_of`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hetplan.cost.arrays import Floats
from hetplan.cost.estimate_values import MemoryUse
from hetplan.cost.memory.device import weights_at
from hetplan.cost.replay.times import Exchange, PipelineTimes, StageTimes
from hetplan.cost.step_model.end_of_step import EndOfStep
from hetplan.cost.step_model.groups import (
    ALL_KEPT,
    Kept,
    Party,
    copies_of,
    holders_of,
    kept_by_reductions,
    kept_by_stages,
    shares_anything,
)
from hetplan.cost.step_model.hops import Hop, HopArrays, hop_arrays, hop_between
from hetplan.cost.step_model.overlap import beside, send_slowdowns
from hetplan.cost.step_model.units import Settings, Unit, make_unit, on_first_nodes
from hetplan.cost.terms import Part
from hetplan.job.spec import Job, Precision
from hetplan.job.trainer import trainer_settings
from hetplan.plans.pieces import experts_as_the_rest
from hetplan.plans.plan import (
    SPLIT_SCHEDULES,
    LayerRange,
    Pipeline,
    Plan,
    Recompute,
    ReductionGroup,
    Replica,
    Stage,
)
from hetplan.plans.targets import target
from hetplan.plans.v_schedules import is_v, stage_of, virtual_stage_of


@dataclass(slots=True)
class StageWork:
    """One stage of a plan: its units and the seconds of its chunks."""

    replicas: tuple[Replica, ...]
    units: tuple[Unit, ...]
    """Of the replicas; those that lie alike have the same."""
    unit: Unit
    """The slowest unit; the others wait for it."""
    ranges: tuple[tuple[int, int], ...]
    forward: tuple[float, ...]
    """Per chunk, one microbatch."""
    backward: tuple[float, ...]
    """With recomputation; where the schedule delays the gradients of the weights, without them."""
    weight: tuple[float, ...]
    parameters: float
    expert_parameters: float
    delays: tuple[tuple[float, float], ...] = ()
    """Per chunk, by how much sends lengthen (forward, backward); included in both."""

    @property
    def slowest(self) -> Replica:
        """The first replica of the slowest unit."""
        return self.replicas[self.units.index(self.unit)]


@dataclass(slots=True)
class PipelineWork:
    """One pipeline of a plan."""

    pipeline: Pipeline
    stages: list[StageWork]
    hops: HopArrays
    exchange: Exchange = Exchange.TORCH
    """The trainer whose order of sends and receives it follows."""
    site: int = 0
    """Of the pipelines that update together (`Plan.outer`)."""

    @property
    def is_plain(self) -> bool:
        """Whether it is 1F1B with one chunk per stage, both ways moving at once."""
        pipeline = self.pipeline
        one = pipeline.schedule.name == "1f1b" and len(pipeline.stages[0].chunks) == 1
        return one and self.exchange is not Exchange.DEEPSPEED

    @property
    def shares(self) -> bool:
        """Whether its groups or transfers slow each other, or those of other pipelines."""
        return self.hops.shares or any(
            unit.kept != ALL_KEPT or unit.pricer.groups.share
            for stage in self.stages
            for unit in stage.units
        )

    def plain_times(self) -> StageTimes:
        """For the replay of a pipeline that `is_plain`."""
        return self.times().plain()

    def times(self, factors: Floats | float = 1.0) -> PipelineTimes:
        """For the replay; hop times are scaled by `factors`."""
        return self.with_seconds(
            np.array([stage.forward for stage in self.stages]),
            np.array([stage.backward for stage in self.stages]),
            np.array([stage.weight for stage in self.stages]),
            factors,
        )

    def with_seconds(
        self,
        forward: Floats,
        backward: Floats,
        weight: Floats,
        factors: Floats | float = 1.0,
    ) -> PipelineTimes:
        """The pipeline with passes [stages, chunks], and its hop times scaled by `factors`."""
        pipeline, hops = self.pipeline, self.hops
        return PipelineTimes(
            schedule=pipeline.schedule.name,
            num_microbatches=pipeline.num_microbatches,
            warmup=tuple([stage.warmup_depth for stage in pipeline.stages]),
            forward=forward,
            backward=backward,
            weight=weight,
            send_forward=hops.send_forward * factors,
            send_backward=hops.send_backward * factors,
            wire_latency=hops.wire_latency * factors,
            rendezvous_extra=hops.rendezvous_extra * factors,
            link_forward=hops.link_forward,
            link_backward=hops.link_backward,
            shared_forward=hops.shared_forward * factors,
            shared_backward=hops.shared_backward * factors,
            exchange=self.exchange,
        )


def exchange_of(job: Job) -> Exchange:
    """Whose rendezvous sends the job's trainer has."""
    if trainer_settings(job).blocking_sends:
        return Exchange.DEEPSPEED
    return Exchange.MEGATRON if target(job.target).batched_interleaving else Exchange.TORCH


def sends_wait(plan: Plan) -> bool:
    """Whether a send holds its stage until the receiver is there."""
    return target(plan.target).rendezvous_sends and not plan.overlap.send


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """Weights that several stages, or the ranks of one, reduce together."""

    members: tuple[tuple[int, int, float], ...]
    """(pipeline, stage, parameters on one of its ranks)."""
    expert: bool
    end: EndOfStep
    """Treats all parameters as dense ones."""


_HopKey = tuple[tuple[Replica, ...], tuple[Replica, ...], bool, float]
_Units = list[list[tuple[Unit, ...]]]
"""Of every stage, by pipeline."""
_Kept = tuple[float, ...]


@dataclass(slots=True)
class PlanCosts:
    """What is kept between plans of the same settings."""

    settings: Settings
    units: dict[tuple[tuple[Replica, ...], Recompute], tuple[Unit, ...]] = field(
        default_factory=dict
    )
    alike: dict[tuple[Replica, Recompute, Kept], Unit] = field(default_factory=dict)
    """By the replica on the first nodes of its island."""
    hops: dict[_HopKey, Hop] = field(default_factory=dict)
    placed: dict[tuple[object, ...], tuple[_Units, tuple[HopArrays, ...]]] = field(
        default_factory=dict
    )
    turns: dict[tuple[object, ...], tuple[_Kept, ...]] = field(default_factory=dict)
    ends: dict[tuple[object, ...], EndOfStep] = field(default_factory=dict)
    norms: dict[tuple[tuple[int, HopArrays], ...], tuple[Part, ...]] = field(default_factory=dict)
    memory: dict[tuple[object, ...], MemoryUse] = field(default_factory=dict)

    def work(self, plan: Plan) -> list[PipelineWork]:
        """Every pipeline of the plan with its times."""
        units = [[self._units(stage) for stage in each.stages] for each in plan.pipelines]
        units, arrays = self._placed(plan, units)
        exchange, sites = exchange_of(self.settings.job), plan.site_of_pipeline
        found = [
            PipelineWork(
                pipeline,
                [
                    _stage(stage, held, delays=pipeline.schedule.name in SPLIT_SCHEDULES)
                    for stage, held in zip(pipeline.stages, units[p], strict=True)
                ],
                arrays[p],
                exchange,
                sites[p],
            )
            for p, pipeline in enumerate(plan.pipelines)
        ]
        if self.settings.overlap.send:
            for each in found:
                _beside_sends(each)
        return found

    def _units(self, stage: Stage) -> tuple[Unit, ...]:
        key = (stage.replicas, stage.recompute)
        found = self.units.get(key)
        if found is None:
            cluster = self.settings.cluster
            found = self.units[key] = tuple(
                self._unit(on_first_nodes(cluster, replica), stage.recompute)
                for replica in stage.replicas
            )
        return found

    def _unit(self, first: Replica, recompute: Recompute, kept: Kept = ALL_KEPT) -> Unit:
        """Of all replicas that lie as this one does on the first nodes of its island."""
        key = (first, recompute, kept)
        found = self.alike.get(key)
        if found is None:
            found = self.alike[key] = make_unit(self.settings, first, recompute, kept=kept)
        return found

    def _placed(self, plan: Plan, units: _Units) -> tuple[_Units, tuple[HopArrays, ...]]:
        """The units beside each other, and the hops between them."""
        key: tuple[object, ...] = tuple(
            (
                pipeline.schedule,
                *[(stage.replicas, stage.recompute) for stage in pipeline.stages],
                *[boundary.precision for boundary in pipeline.boundaries],
            )
            for pipeline in plan.pipelines
        )
        found = self.placed.get(key)
        if found is None:
            several = len(plan.pipelines) > 1
            hops = [self._hops(pipeline, nics=several) for pipeline in plan.pipelines]
            arrays = hop_arrays(hops, plan.pipelines)
            found = self.placed[key] = (self._together(plan, units), arrays)
        return found

    def _together(self, plan: Plan, units: _Units) -> _Units:
        """The units, slower where groups of other stages share a link with theirs."""
        settings = self.settings
        if not shares_anything(settings.cluster):
            return units
        replicas = [
            each for row in plan.pipelines for stage in row.stages for each in stage.replicas
        ]
        flat = [unit for row in units for held in row for unit in held]
        parties = [_party(*each) for each in zip(replicas, flat, strict=True)]
        kept = iter(kept_by_stages(settings.cluster, parties, settings.shards))
        return [
            [
                tuple(self._unit(each.replica, each.recompute, next(kept)) for each in held)
                for held in row
            ]
            for row in units
        ]

    def _hops(self, pipeline: Pipeline, *, nics: bool) -> tuple[Hop | None, ...]:
        stages, found = pipeline.stages, []
        count = len(stages) * len(stages[0].chunks)
        for k in range(count - 1):
            name = pipeline.schedule.name
            s, t = (stage_of(name, at, len(stages)) for at in (k, k + 1))
            # Back to the first stage, with virtual stages, no boundary says another format.
            own = self.settings.job.precision
            between = s < t or (is_v(name) and s != t)
            wire = Precision(pipeline.boundaries[min(s, t)].precision) if between else own
            scale = wire.bytes_per_element / own.bytes_per_element
            found.append(None if s == t else self.hop(stages[s], stages[t], nics=nics, scale=scale))
        return tuple(found)

    def hop(self, left: Stage, right: Stage, *, nics: bool, scale: float = 1.0) -> Hop:
        """Transfers from one stage to another.

        `nics`: with the NICs that they cross. `scale`: bytes on the wire over those in memory.
        """
        key = (left.replicas, right.replicas, nics, scale)
        found = self.hops.get(key)
        if found is None:
            settings = self.settings
            found = self.hops[key] = hop_between(
                settings.cluster,
                settings.model,
                settings.job,
                left.replicas,
                right.replicas,
                settings.predictor,
                nics=nics,
                scale=scale,
            )
        return found

    def reductions(
        self, asked: Sequence[ReductionGroup], work: Sequence[PipelineWork]
    ) -> tuple[Reduction, ...]:
        """Reduction groups of a plan, last layers first."""
        groups = sorted(asked, key=lambda each: -each.layers.start)
        apart = {group.layers for group in groups if group.expert}
        members = [_members(group, work, apart=group.layers in apart) for group in groups]
        replicas = [
            tuple(replica for p, s, _ in each for replica in work[p].stages[s].replicas)
            for each in members
        ]
        kept = self._turns(groups, replicas)
        return tuple(
            Reduction(
                members=held,
                expert=group.expert,
                end=self._end(group, whose, left, work[held[0][0]].stages[held[0][1]].unit),
            )
            for group, held, whose, left in zip(groups, members, replicas, kept, strict=True)
        )

    def _turns(
        self, groups: Sequence[ReductionGroup], replicas: Sequence[tuple[Replica, ...]]
    ) -> tuple[_Kept, ...]:
        """What the reduction groups of a plan leave each other."""
        key = tuple((whose, group.expert) for group, whose in zip(groups, replicas, strict=True))
        found = self.turns.get(key)
        if found is None:
            cluster, shards = self.settings.cluster, self.settings.shards
            each = [holders_of(whose, expert=expert) for whose, expert in key]
            first = [{replica.devices for replica in whose} for whose in replicas]
            found = self.turns[key] = kept_by_reductions(
                cluster,
                [(holders, copies_of(cluster, holders, shards)) for holders in each],
                shards,
                lambda one, two: first[one].isdisjoint(first[two]),
            )
        return found

    def _end(
        self, group: ReductionGroup, replicas: tuple[Replica, ...], kept: _Kept, first: Unit
    ) -> EndOfStep:
        key = (replicas, group.expert, group.precision, kept)
        found = self.ends.get(key)
        if found is None:
            settings = self.settings
            holders = holders_of(replicas, expert=group.expert)
            copies = copies_of(settings.cluster, holders, settings.shards).beside(kept)
            found = self.ends[key] = EndOfStep(
                known=settings.known,
                island=first.island,
                job=settings.job,
                reduction_precision=Precision(group.precision),
                dense=copies,
                experts=copies,
                sharding=settings.sharding,
                offload=settings.offload,
                predictor=settings.predictor,
            )
        return found


def _party(replica: Replica, unit: Unit) -> Party:
    apart = not experts_as_the_rest(unit.pricer.shape) and unit.expert_parameters[-1] > 0
    return Party(
        replica=replica,
        groups=unit.pricer.groups,
        dense=unit.end.dense,
        experts=unit.end.experts if apart else None,
    )


def _members(
    group: ReductionGroup, work: Sequence[PipelineWork], *, apart: bool
) -> tuple[tuple[int, int, float], ...]:
    """`apart`: the routed experts of these layers are reduced in a group of their own."""
    found, sites = [], work[-1].site > 0
    for p, pipeline in enumerate(work):
        for s, stage in enumerate(pipeline.stages):
            ranges = _common(stage.ranges, group.layers)
            if ranges and not (sites and not group.has(pipeline.pipeline.stages[s])):
                plain, experts = stage.unit.held(ranges)
                if apart and experts_as_the_rest(stage.unit.pricer.shape):
                    experts = _routed(stage.unit, ranges)
                    plain -= experts
                found.append((p, s, experts if group.expert else plain))
    return tuple(found)


def _routed(unit: Unit, ranges: Sequence[tuple[int, int]]) -> float:
    """Routed experts' weights on a rank that cuts them like the rest."""
    model, tp = unit.settings.model, unit.pricer.shape.tp
    return sum(
        weights_at(model, position, tp).routed
        for start, stop in ranges
        for position in range(start, stop)
    )


def _common(ranges: Sequence[tuple[int, int]], layers: LayerRange) -> tuple[tuple[int, int], ...]:
    both = ((max(start, layers.start), min(stop, layers.stop)) for start, stop in ranges)
    return tuple((start, stop) for start, stop in both if start < stop)


def _stage(stage: Stage, units: tuple[Unit, ...], *, delays: bool) -> StageWork:
    """`delays`: whether the schedule delays the gradients of the weights."""
    ranges = tuple([(chunk.start, chunk.stop) for chunk in stage.chunks])
    unit = units[0] if len(units) == 1 else max(units, key=lambda each: _whole(each, ranges))
    forward, backward, weight = [], [], []
    for start, stop in ranges:
        begin, end = unit.repeated_range(start, stop)
        forward.append(unit.forward[stop] - unit.forward[start])
        late = unit.weight[stop] - unit.weight[start] if delays else 0.0
        again = unit.again[end] - unit.again[begin] if end > begin else 0.0
        backward.append(unit.backward[stop] - unit.backward[start] - late + again)
        weight.append(late)
    parameters, experts = unit.held(ranges)
    return StageWork(
        stage.replicas,
        units,
        unit,
        ranges,
        tuple(forward),
        tuple(backward),
        tuple(weight),
        parameters,
        experts,
    )


def _beside_sends(work: PipelineWork) -> None:
    """Passes become longer by what transports that take compute units cost them.

    Activations in and out run beside forward passes, gradients beside backward ones.
    """
    if not any(hop.path.compute_share for hop in work.hops.hops):
        return
    row, count = work.hops.row, len(work.stages)
    for s, stage in enumerate(work.stages):
        delays = []
        for chunk in range(len(stage.ranges)):
            at = virtual_stage_of(work.pipeline.schedule.name, s, chunk, count)
            forward = backward = 0.0
            for hop in (*row[max(0, at - 1) : at], *row[at : at + 1]):
                if hop is not None:
                    slow = send_slowdowns(stage.unit.island.device, hop.path)
                    forward += beside(
                        hop.send_forward_seconds, stage.forward[chunk], slow
                    ).compute_delay_seconds
                    backward += beside(
                        hop.send_backward_seconds, stage.backward[chunk], slow
                    ).compute_delay_seconds
            delays.append((forward, backward))
        stage.delays = tuple(delays)
        stage.forward = tuple(a + b[0] for a, b in zip(stage.forward, delays, strict=True))
        stage.backward = tuple(a + b[1] for a, b in zip(stage.backward, delays, strict=True))


def _whole(unit: Unit, ranges: Sequence[tuple[int, int]]) -> float:
    return sum(
        each[stop] - each[start]
        for start, stop in ranges
        for each in (unit.forward, unit.backward, unit.again)
    )
