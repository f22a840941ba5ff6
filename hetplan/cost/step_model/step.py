"""How long a step takes once its pipelines' ends are known: reduction, norm, update, gathering.

For every stage s of every pipeline, with `end` from the replay:

    arrive = end + slow-down of the last backward pass + reduction that is left + tied matrix
    step   = max(arrive + update + gathering)                          without clipping
    step   = max(arrive) + sum of the norms + max(update + gathering)  with clipping

and the job's data loading on top. The norm of all gradients is a barrier: nobody updates before all
have reduced. Groups of several pipelines reduce their pieces of layers last ones first, each when
all of its members are there. Where the trainer overlaps, reduction hides behind the backward pass
of the last microbatch, and gathering behind the first microbatch's forward pass of the next step
(`hetplan.cost.step_model.overlap`); with virtual stages, behind those of a chunk's whole group of
microbatches. The tied matrix is summed by the first and the last stage, each after its own
reduction; neither waits for the other before that.

Of local steps (`Plan.outer`) every site has a norm of its own; here all sites wait for the longest,
which is never too short. What averaging adds (`hetplan.cost.local_steps`) comes to every stage's
arrival.

The sum of the norms is one number per rank: a tree over the ranks of a stage, then over the stages
and the pipelines, up and down again: 2 (ceil(log2 ranks) inside + ceil(log2 stages) across) times
the latency of the slowest link of each kind; a second time in float16, for the overflow flag.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.cluster.spec import Cluster, Link
from hetplan.cost.arrays import Floats
from hetplan.cost.estimate_values import Component
from hetplan.cost.local_steps import outer_parts
from hetplan.cost.step_model.end_of_step import EndOfStep, clips_gradients, tied_embedding_parts
from hetplan.cost.step_model.overlap import (
    Overlap,
    bucket_count,
    gathering_of_chunks,
    in_buckets,
    not_overlapped,
    reduction_of_chunks,
    slowdowns,
)
from hetplan.cost.step_model.plan import PipelineWork, PlanCosts, StageWork
from hetplan.cost.step_model.units import Settings
from hetplan.cost.terms import Part, Term, repeated, seconds_of_parts
from hetplan.job.spec import Job, Precision
from hetplan.plans.build import neighbour_link
from hetplan.plans.formats import reduction_formats
from hetplan.plans.plan import Pipeline, Plan, Replica
from hetplan.predict.predictor import Prediction, Predictor, link_cause

SCALAR_BYTES = 4.0
"""One float32."""


def norm_parts(costs: PlanCosts, work: Sequence[PipelineWork]) -> tuple[Part, ...]:
    """The sum of one number over all ranks; kept for pipelines of the same placement."""
    key = tuple((pipeline.site, pipeline.hops) for pipeline in work)
    parts = costs.norms.get(key)
    if parts is None:
        sites = dict.fromkeys(pipeline.site for pipeline in work)
        found = [_norm_parts(costs.settings, [p for p in work if p.site == s]) for s in sites]
        parts = costs.norms[key] = max(found, key=seconds_of_parts)
    return parts


def _norm_parts(settings: Settings, work: Sequence[PipelineWork]) -> tuple[Part, ...]:
    """The sum inside the slowest stage, and the one across stages and pipelines."""
    predictor = settings.predictor
    stages = [stage for pipeline in work for stage in pipeline.stages]
    inside = [
        scalar_term(_link_within(settings.cluster, unit.replica), predictor).times(
            norm_depth(sum(each.replica.num_devices for each in stage.units))
        )
        for stage in stages
        for unit in stage.units
    ]
    # The devices of each pipeline that meet those of the others.
    leads = [pipeline.stages[0].slowest.devices[0].start for pipeline in work]
    meeting = {neighbour_link(settings.cluster, leads[:1], (lead,))[0] for lead in leads[1:]}
    links = {hop.path for pipeline in work for hop in pipeline.hops.hops}
    depth = norm_depth(len(stages))
    across = [scalar_term(link, predictor).times(depth) for link in {*links, *meeting}]
    rounds = norm_rounds(settings.job)
    return tuple(
        Part(component=Component.NORM, term=max(terms, key=lambda each: each.seconds).times(rounds))
        for terms in (inside, across)
        if terms and max(each.seconds for each in terms) > 0
    )


def _link_within(cluster: Cluster, replica: Replica) -> Link:
    """The link between a replica's devices: inside the node that has all, or between nodes."""
    ends = [each for part in replica.devices for each in (part.start, part.last)]
    return neighbour_link(cluster, ends, ends)[0]


def norm_depth(count: int) -> int:
    """Levels of a binary tree over this many."""
    return (count - 1).bit_length()


def norm_rounds(job: Job) -> float:
    """How often a number goes up and down the tree's levels."""
    return 4.0 if job.precision is Precision.FLOAT16 else 2.0


def scalar_term(link: Link, predictor: Predictor) -> Term:
    """One number over a link, its receiver waiting."""
    law = predictor.send(link, SCALAR_BYTES)
    prediction = Prediction(
        seconds=law.wire_latency_seconds + SCALAR_BYTES * law.seconds_per_byte,
        log_halfwidth=law.log_halfwidth,
        source=law.source,
        extrapolating=law.extrapolating,
    )
    return Term(what="gradient norm", cause=link_cause(link), count=1, prediction=prediction)


_Counts = tuple[float, float]
"""Parameters on one rank, those of routed experts apart."""


@dataclass(slots=True)
class StageEnd:
    """One stage after its last pass, seconds."""

    stage: StageWork
    end: float
    """When it leaves the pipeline."""
    reduction: Overlap
    gathering: Overlap
    update: float
    own: float
    """Parameters whose state one of its ranks keeps."""
    groups: tuple[tuple[EndOfStep, _Counts, _Counts], ...]
    """Whom it reduces with, (parameters that the group's largest member sends, its own)."""
    waits: float = 0.0
    """For others that reduce with it."""
    tied: tuple[Part, ...] = ()
    """Sum of a tied matrix's gradients."""
    embedding: float = 0.0
    """Seconds of that."""
    outer: tuple[Part, ...] = ()
    """What averaging the sites adds to a step."""
    averaging: float = 0.0
    """Seconds of that."""

    @property
    def arrives(self) -> float:
        """When all of its gradients are reduced."""
        added = self.reduction.exposed_seconds + self.reduction.compute_delay_seconds
        return self.end + self.waits + self.embedding + self.averaging + added

    @property
    def leaves(self) -> float:
        """What it takes from there on."""
        return self.update + self.gathering.exposed_seconds + self.gathering.compute_delay_seconds

    @property
    def updates(self) -> tuple[Part, ...]:
        """Predicted parts of the update."""
        held = self.stage.parameters + self.stage.expert_parameters
        return self.stage.unit.end.update_of(self.own, held)

    @property
    def parts(self) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
        """Predicted parts before and after the norm of all gradients, as far as exposed."""
        reduced = [part for end, sent, _ in self.groups for part in end.reduction(*sent)]
        gathered = [part for end, _, held in self.groups for part in end.gathering(*held)]
        return (
            (*_scaled(reduced, self.reduction.added_seconds), *self.tied, *self.outer),
            (*self.updates, *_scaled(gathered, self.gathering.added_seconds)),
        )


def _scaled(parts: Sequence[Part], seconds: float) -> tuple[Part, ...]:
    """The parts, all shortened or lengthened alike until they take so long."""
    whole = seconds_of_parts(parts)
    if seconds == whole:
        return tuple(parts)
    return repeated(parts, seconds / whole) if whole else ()


@dataclass(frozen=True, slots=True)
class Composed:
    """A whole step."""

    step_seconds: float
    stages: Sequence[Sequence[StageEnd]]
    """By pipeline."""
    norm_seconds: float
    barrier: bool
    last_to_arrive: tuple[int, int]
    """(pipeline, stage) on the critical path before the barrier, or on all of it."""
    last_to_leave: tuple[int, int]


_NONE = not_overlapped(0.0)


def compose(
    plan: Plan, costs: PlanCosts, work: Sequence[PipelineWork], ends: Sequence[Floats]
) -> Composed:
    """The step of these pipelines."""
    if _is_alone(plan, work):
        stages: Sequence[list[StageEnd]] = (_alone(costs, work[0], ends[0].tolist()),)
    else:
        stages = _together(plan, costs, work, ends)
    if costs.settings.model.tied_embeddings:
        for p, pipeline in enumerate(work):
            tied = tied_parts(costs.settings, pipeline)
            for s in {0, len(pipeline.stages) - 1}:
                stages[p][s].tied = tied
                stages[p][s].embedding = seconds_of_parts(tied)
    barrier = clips_gradients(costs.settings.job)
    norm = seconds_of_parts(norm_parts(costs, work)) if barrier else 0.0
    loading = costs.settings.job.data_loading_seconds
    stage_ends = [stage for row in stages for stage in row]
    places = [(p, s) for p, row in enumerate(stages) for s in range(len(row))]
    arrive = np.array([stage.arrives for stage in stage_ends])
    leave = np.array([stage.leaves for stage in stage_ends])
    step = float(step_of_stages(arrive, leave, norm, barrier=barrier)) + loading
    if plan.outer is not None:
        added = outer_parts(plan.outer, costs, work, stage_ends, step)
        averaging = seconds_of_parts(added)
        for stage in stage_ends:
            stage.outer, stage.averaging = added, averaging
        step, arrive = step + averaging, arrive + averaging
    if barrier:
        first = _waited_for(stages, places[arrive.argmax()], leaving=False)
        return Composed(step, stages, norm, True, first, places[leave.argmax()])
    only = _waited_for(stages, places[(arrive + leave).argmax()], leaving=True)
    return Composed(step, stages, 0.0, False, only, only)


def step_of_stages(arrive: Floats, leave: Floats, norm: Floats | float, *, barrier: bool) -> Floats:
    """The formula at the top of this file, data loading left out; stages are the last axis, and
    one step or many draws of it the others.
    """
    if barrier:
        steps: Floats = arrive.max(axis=-1) + norm + leave.max(axis=-1)
    else:
        steps = (arrive + leave).max(axis=-1)
    return steps


def _waited_for(
    stages: Sequence[Sequence[StageEnd]], last: tuple[int, int], *, leaving: bool
) -> tuple[int, int]:
    """Of all stages that are last together, the one that waited least: the others' cause."""
    if not stages[last[0]][last[1]].waits:
        return last

    def done(stage: StageEnd) -> float:
        return stage.arrives + stage.leaves * leaving

    when = done(stages[last[0]][last[1]]) * (1 - 1e-12)  # sums in another order
    together = [
        (stage.waits, p, s)
        for p, row in enumerate(stages)
        for s, stage in enumerate(row)
        if done(stage) >= when
    ]
    _, p, s = min(together)
    return p, s


def _is_alone(plan: Plan, work: Sequence[PipelineWork]) -> bool:
    """Whether every stage reduces with nobody else, and all of it in one format."""
    one = len(work) == 1 and all(len(stage.units) == 1 for stage in work[0].stages)
    return one and len(reduction_formats(plan)) <= 1


def _alone(costs: PlanCosts, work: PipelineWork, ends: Sequence[float]) -> list[StageEnd]:
    """Stages that reduce with nobody else."""
    overlap = costs.settings.overlap
    found = []
    for stage, end in zip(work.stages, ends, strict=True):
        counts = stage.parameters, stage.expert_parameters
        seconds = stage.unit.end.seconds(*counts)
        reduction, gathering = seconds.alone
        if overlap.reduction and seconds.reduction:
            reduction = reduction_beside(stage, seconds.reduction, work.pipeline)
        if overlap.gathering and seconds.gathering:
            gathering = gathering_beside(stage, seconds.gathering, work.pipeline)
        groups = ((stage.unit.end, counts, counts),)
        found.append(
            StageEnd(stage, end, reduction, gathering, seconds.update, seconds.own, groups)
        )
    return found


def reduction_beside(stage: StageWork, seconds: float, pipeline: Pipeline) -> Overlap:
    """Reduction beside the backward pass of the last microbatch, or of a chunk's last group."""
    if not _takes_turns(pipeline):
        return _buckets(stage, seconds, sum(stage.backward) + sum(stage.weight))
    parts, buckets = _of_chunks(stage)
    return reduction_of_chunks(
        [part * seconds for part in reversed(parts)],
        stage.backward[::-1],
        slowdowns(stage.unit.island.device),
        buckets=buckets,
        # The last group has what is left.
        microbatches_per_group=(pipeline.num_microbatches - 1) % len(pipeline.stages) + 1,
    )


def gathering_beside(stage: StageWork, seconds: float, pipeline: Pipeline) -> Overlap:
    """Gathering beside the forward pass of the first microbatch, or of a chunk's first group."""
    if not _takes_turns(pipeline):
        return _buckets(stage, seconds, sum(stage.forward))
    parts, buckets = _of_chunks(stage)
    return gathering_of_chunks(
        [part * seconds for part in parts],
        stage.forward,
        slowdowns(stage.unit.island.device),
        buckets=buckets,
        microbatches_per_group=min(pipeline.num_microbatches, len(pipeline.stages)),
    )


def _takes_turns(pipeline: Pipeline) -> bool:
    """Whether groups of microbatches go through one chunk of a stage after the other."""
    schedule = pipeline.schedule
    return schedule.name == "interleaved-1f1b" and schedule.virtual_stages > 1


def _of_chunks(stage: StageWork) -> tuple[list[float], int]:
    """(part of the stage's parameters in every chunk, buckets of the largest)."""
    replica = stage.unit.replica
    held = [sum(stage.unit.held((each,))) for each in stage.ranges]
    whole = sum(held) or 1.0
    count = bucket_count(max(held), replica.dp * replica.cp)
    return [each / whole for each in held], count


def _buckets(
    stage: StageWork, seconds: float, compute: float, parameters: float | None = None
) -> Overlap:
    """Of so many parameters, else all of the stage's."""
    count = stage.parameters + stage.expert_parameters if parameters is None else parameters
    replica = stage.unit.replica
    buckets = bucket_count(count, replica.dp * replica.cp)
    return in_buckets(seconds, compute, buckets, slowdowns(stage.unit.island.device))


def _together(
    plan: Plan, costs: PlanCosts, work: Sequence[PipelineWork], ends: Sequence[Floats]
) -> tuple[list[StageEnd], ...]:
    """Stages of several pipelines, or of several replica entries, whose groups wait for members."""
    overlap = costs.settings.overlap
    now = [each.tolist() for each in ends]
    rows = tuple(
        [
            StageEnd(stage, end, _NONE, _NONE, 0.0, stage.parameters + stage.expert_parameters, ())
            for stage, end in zip(pipeline.stages, now[p], strict=True)
        ]
        for p, pipeline in enumerate(work)
    )
    spent = [[0.0] * len(each) for each in now]
    gathered = [[0.0] * len(each) for each in now]
    for group in costs.reductions(plan.reduction_groups, work):
        most = max((count for _, _, count in group.members), default=0.0)
        seconds = group.end.seconds(most).reduction
        start = max((now[p][s] for p, s, _ in group.members), default=0.0)
        for p, s, count in group.members:
            end = rows[p][s]
            part = not_overlapped(seconds)
            if overlap.reduction:
                part = _shared_buckets(end.stage, seconds, count)
            spent[p][s] += part.added_seconds
            end.reduction = end.reduction + part
            now[p][s] = start + part.added_seconds
            gathered[p][s] += group.end.seconds(count).gathering
            end.groups += ((group.end, (most, 0.0), (count, 0.0)),)
            end.own += group.end.own(count) - count
    for p, row in enumerate(rows):
        for s, end in enumerate(row):
            end.waits = max(0.0, now[p][s] - end.end - spent[p][s])
            end.update = seconds_of_parts(end.updates)
            end.gathering = not_overlapped(gathered[p][s])
            if overlap.gathering:
                end.gathering = gathering_beside(end.stage, gathered[p][s], work[p].pipeline)
    return rows


def _shared_buckets(stage: StageWork, seconds: float, count: float) -> Overlap:
    """One of several groups: the backward pass of its part of the stage's weights hides it."""
    held = stage.parameters + stage.expert_parameters
    compute = (sum(stage.backward) + sum(stage.weight)) * (count / held if held else 0.0)
    return _buckets(stage, seconds, compute, count)


def tied_parts(settings: Settings, pipeline: PipelineWork) -> tuple[Part, ...]:
    """The sum of a tied matrix's gradients between first and last stage."""
    if len(pipeline.pipeline.ends) == 1:
        return ()
    first, last = pipeline.stages[0].unit, pipeline.stages[-1].unit
    # A rank of the stage with the fewest slices sums with every one that holds a part of its own.
    tp = min(first.replica.tp, last.replica.tp)
    senders = min(first.replica.num_devices, last.replica.num_devices)
    return tied_embedding_parts(
        settings.model,
        settings.cluster,
        first.island,
        last.island,
        settings.tied_precision,
        tp,
        tp * max(1, senders // tp),
        settings.known,
    )
