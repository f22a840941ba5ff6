"""How long a step takes once its pipelines' ends are known: reduction, norm, update, gathering.

For every stage s of every pipeline, with `end` from the replay:

    arrive = end + slow-down of the last backward pass + reduction that is left + tied matrix
    step   = max(arrive + update + gathering)                          without clipping
    step   = max(arrive) + sum of the norms + max(update + gathering)  with clipping

and the job's data loading on top. The norm of all gradients is a barrier: nobody updates before all
have reduced. Groups of several pipelines reduce their pieces of layers last ones first, each when
all of its members are there. Where the trainer overlaps, reduction hides behind the backward pass
of the last microbatch, and gathering behind the first microbatch's forward pass of the next step
(`hetplan.cost.components.overlap`); with virtual stages, behind those of a chunk's whole group of
microbatches. The tied matrix is summed by the first and the last stage, each after its own
reduction; neither waits for the other before that.

The sum of the norms is one number per rank: a tree over the ranks of a stage, then over the stages
and the pipelines, up and down again: 2 (ceil(log2 ranks) inside + ceil(log2 stages) across) times
the latency of the slowest link of each kind; a second time in float16, for the overflow flag.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetplan.cluster.spec import Link
from hetplan.cost.arrays import Floats
from hetplan.cost.components.overlap import (
    Overlap,
    bucket_count,
    gathering_of_chunks,
    in_buckets,
    not_overlapped,
    reduction_of_chunks,
    slowdowns,
)
from hetplan.cost.components.step import clips_gradients
from hetplan.cost.estimate_values import Component
from hetplan.cost.step_model.end_of_step import tied_embedding_parts
from hetplan.cost.step_model.plan import PipelineWork, PlanCosts, Reduction, StageWork
from hetplan.cost.step_model.values import seconds_of_parts
from hetplan.cost.terms import Part, Term
from hetplan.job.spec import Job, Precision
from hetplan.plans.build import Degrees, neighbour_link, stage_link
from hetplan.plans.formats import reduction_formats
from hetplan.plans.plan import Pipeline, Plan
from hetplan.predict.predictor import Prediction, Predictor, link_cause

SCALAR_BYTES = 4.0
"""One float32."""


def norm_parts(costs: PlanCosts, work: Sequence[PipelineWork]) -> tuple[Part, ...]:
    """The sum of one number over all ranks; kept for pipelines of the same placement."""
    key = tuple(pipeline.hops for pipeline in work)
    found = costs.norms.get(key)
    if found is None:
        found = costs.norms[key] = _norm_parts(costs, work)
    return found


def _norm_parts(costs: PlanCosts, work: Sequence[PipelineWork]) -> tuple[Part, ...]:
    predictor, job = costs.settings.predictor, costs.settings.job
    stages = [stage for pipeline in work for stage in pipeline.stages]
    inside = [
        scalar_term(stage_link(unit.island, unit.replica.num_devices), predictor).times(
            norm_depth(sum(each.replica.num_devices for each in stage.units))
        )
        for stage in stages
        for unit in stage.units
    ]
    links = {hop.path for pipeline in work for hop in pipeline.hops.hops}
    first = stages[0].unit.replica.devices[0].start
    for pipeline in work[1:]:
        other = pipeline.stages[0].unit.replica.devices[0].start
        links.add(neighbour_link(costs.settings.cluster, (first,), (other,))[0])
    depth = norm_depth(len(stages))
    across = [scalar_term(link, predictor).times(depth) for link in links]
    rounds = norm_rounds(job)
    return tuple(
        Part(component=Component.NORM, term=max(terms, key=lambda each: each.seconds).times(rounds))
        for terms in (inside, across)
        if terms and max(each.seconds for each in terms) > 0
    )


def norm_depth(count: int) -> int:
    """Levels of a binary tree over so many."""
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


@dataclass(slots=True)
class StageEnd:
    """One stage after its last pass, seconds."""

    end: float
    """When it leaves the pipeline."""
    waits: float
    """For others that reduce with it."""
    reduction: Overlap
    tied: tuple[Part, ...]
    """Sum of a tied matrix's gradients."""
    embedding: float
    """Seconds of that."""
    update: float
    gathering: Overlap
    reduced: tuple[Part, ...] | None = None
    """Collectives that the reduction is made of, nothing hidden; None: those of the stage alone."""
    gathered: tuple[Part, ...] = ()
    """The same of the gathering."""

    @property
    def arrives(self) -> float:
        """When all of its gradients are reduced."""
        return self.end + self.waits + self.reduction.added_seconds + self.embedding

    @property
    def leaves(self) -> float:
        """What it takes from there on."""
        return self.update + self.gathering.added_seconds


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
            tied = tied_parts(costs, pipeline)
            for s in {0, len(pipeline.stages) - 1}:
                stages[p][s].tied = tied
                stages[p][s].embedding = seconds_of_parts(tied)
    barrier = clips_gradients(costs.settings.job)
    norm = seconds_of_parts(norm_parts(costs, work)) if barrier else 0.0
    loading = costs.settings.job.data_loading_seconds
    arrive = leave = whole = -1.0
    first = last = only = (0, 0)
    for p, row in enumerate(stages):
        for s, stage in enumerate(row):
            reduction, gathering = stage.reduction, stage.gathering
            arrives = stage.end + stage.waits + stage.embedding
            arrives += reduction.exposed_seconds + reduction.compute_delay_seconds
            leaves = stage.update + gathering.exposed_seconds + gathering.compute_delay_seconds
            if arrives > arrive:
                arrive, first = arrives, (p, s)
            if leaves > leave:
                leave, last = leaves, (p, s)
            if arrives + leaves > whole:
                whole, only = arrives + leaves, (p, s)
    if barrier:
        first = _waited_for(stages, first, leaving=False)
        return Composed(arrive + norm + leave + loading, stages, norm, True, first, last)
    only = _waited_for(stages, only, leaving=True)
    return Composed(whole + loading, stages, 0.0, False, only, only)


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
    hides, gathers = overlap.reduction, overlap.gathering
    found = []
    for stage, end in zip(work.stages, ends, strict=True):
        seconds = stage.unit.end.seconds(stage.parameters, stage.expert_parameters)
        reduction, gathering = seconds.alone
        if hides and seconds.reduction:
            reduction = reduction_beside(stage, seconds.reduction, work.pipeline)
        if gathers and seconds.gathering:
            gathering = gathering_beside(stage, seconds.gathering, work.pipeline)
        found.append(StageEnd(end, 0.0, reduction, (), 0.0, seconds.update, gathering))
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


def _buckets(stage: StageWork, seconds: float, compute: float) -> Overlap:
    replica = stage.unit.replica
    ranks = replica.dp * replica.cp
    count = bucket_count(stage.parameters + stage.expert_parameters, ranks)
    return in_buckets(seconds, compute, count, slowdowns(stage.unit.island.device))


def _together(
    plan: Plan, costs: PlanCosts, work: Sequence[PipelineWork], ends: Sequence[Floats]
) -> tuple[list[StageEnd], ...]:
    """Stages of several pipelines, or of several replica entries, whose groups wait for members."""
    overlap = costs.settings.overlap
    now = [each.tolist() for each in ends]
    began = [each.tolist() for each in ends]
    spent = [[0.0] * len(each) for each in now]
    hidden = [[_NONE] * len(each) for each in now]
    gathered = [[0.0] * len(each) for each in now]
    parts: list[list[list[Part]]] = [[[] for _ in each] for each in now]
    gathers: list[list[list[Part]]] = [[[] for _ in each] for each in now]
    own = [[stage.parameters + stage.expert_parameters for stage in each.stages] for each in work]
    for group in costs.reductions(plan, work):
        seconds, reduced = group_seconds(group), group_parts(group)
        start = max((now[p][s] for p, s, _ in group.members), default=0.0)
        for p, s, count in group.members:
            part = not_overlapped(seconds)
            if overlap.reduction:
                part = _shared_buckets(work[p].stages[s], seconds, count)
            spent[p][s] += part.added_seconds
            hidden[p][s] = hidden[p][s] + part
            now[p][s] = start + part.added_seconds
            gathered[p][s] += group.end.seconds(count).gathering
            parts[p][s] += reduced
            gathers[p][s] += group.end.gathering(count)
            own[p][s] += group.end.own(count) - count
    rows = []
    for p, pipeline in enumerate(work):
        row = []
        for s, stage in enumerate(pipeline.stages):
            gathering = not_overlapped(gathered[p][s])
            if overlap.gathering:
                gathering = gathering_beside(stage, gathered[p][s], pipeline.pipeline)
            update = seconds_of_parts(
                stage.unit.end.update_of(own[p][s], stage.parameters + stage.expert_parameters)
            )
            waits = max(0.0, now[p][s] - began[p][s] - spent[p][s])
            row.append(
                StageEnd(
                    began[p][s],
                    waits,
                    hidden[p][s],
                    (),
                    0.0,
                    update,
                    gathering,
                    tuple(parts[p][s]),
                    tuple(gathers[p][s]),
                )
            )
        rows.append(row)
    return tuple(rows)


def _shared_buckets(stage: StageWork, seconds: float, count: float) -> Overlap:
    """One of several groups: the backward pass of its part of the stage's weights hides it."""
    held = stage.parameters + stage.expert_parameters
    compute = (sum(stage.backward) + sum(stage.weight)) * (count / held if held else 0.0)
    replica = stage.unit.replica
    ranks = replica.dp * replica.cp
    return in_buckets(
        seconds, compute, bucket_count(count, ranks), slowdowns(stage.unit.island.device)
    )


def group_seconds(group: Reduction) -> float:
    """A group's reduction; the member with most to send counts."""
    most = max((count for _, _, count in group.members), default=0.0)
    return group.end.seconds(most).reduction


def group_parts(group: Reduction) -> tuple[Part, ...]:
    """The terms of it."""
    most = max((count for _, _, count in group.members), default=0.0)
    return group.end.reduction(most)


def owned(
    plan: Plan, costs: PlanCosts, work: Sequence[PipelineWork]
) -> tuple[tuple[float, ...], ...]:
    """Parameters whose state a rank of each stage keeps."""
    if _is_alone(plan, work):
        return (
            tuple(
                stage.unit.end.own(stage.parameters, stage.expert_parameters)
                for stage in work[0].stages
            ),
        )
    own = [[stage.parameters + stage.expert_parameters for stage in each.stages] for each in work]
    for group in costs.reductions(plan, work):
        for p, s, count in group.members:
            own[p][s] += group.end.own(count) - count
    return tuple(map(tuple, own))


def tied_parts(costs: PlanCosts, pipeline: PipelineWork) -> tuple[Part, ...]:
    """The sum of a tied matrix's gradients between first and last stage."""
    if len(pipeline.stages) == 1:
        return ()
    first, last = pipeline.stages[0].unit, pipeline.stages[-1].unit
    replica, other, settings = first.replica, last.replica, costs.settings
    # A rank of the stage with the fewest slices sums with every one that holds a part of its own.
    tp = min(replica.tp, other.tp)
    senders = min(replica.num_devices, other.num_devices)
    return tied_embedding_parts(
        settings.model,
        settings.cluster,
        first.island,
        last.island,
        settings.tied_precision,
        Degrees(
            tp=tp,
            dp=max(1, senders // tp),
            microbatch_size=replica.microbatch_size,
        ),
        settings.known,
    )
