"""When everything of a plan's step happens: the passes, transfers and end of every stage.

The replay says when passes and transfers run, the composed step what comes after them. The trace
(`reports.trace`) and the picture of the report (`reports.html`) draw these values.

Of communication that hides behind compute only what it adds to the step is here: reduction behind
the last backward passes, gathering behind the first forward ones.

A pipeline's warm-up lasts until every stage has begun its first backward pass, its cool-down begins
when a stage has ended its last forward pass. Schedules without a steady phase have these the other
way round.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from hetplan.cost.replay.step import Operation, PipelineReplay, replay_step
from hetplan.cost.step_model.plan import PipelineWork, sends_wait
from hetplan.cost.step_model.pricer import Pricer, StepCost
from hetplan.cost.step_model.step import StageEnd
from hetplan.plans.plan import Plan
from hetplan.plans.v_schedules import stage_of

MOST_PASSES = 200_000
"""Forward passes of a step that is drawn, by choice: a report of 3.2 million took 10 GB."""
PASS_NAMES = {"F": "forward", "B": "backward", "W": "weight gradients", "BW": "backward"}


class Track(StrEnum):
    """What a bar occupies."""

    COMPUTE = "compute"
    COLLECTIVES = "collectives"
    ACTIVATIONS = "activations sent"
    GRADIENTS = "gradients sent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Something that a stage does for some time, in seconds from the start of the step."""

    track: Track
    name: str
    start_seconds: float
    end_seconds: float
    """Of a transfer: its last byte has left."""
    microbatch: int = -1
    """-1: of no microbatch, as the three below."""
    chunk: int = -1
    hop: int = -1
    """Boundary between virtual stages that a transfer crosses."""
    to: int = -1
    """Stage that receives it."""
    arrives_seconds: float = 0.0
    link: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimeline:
    """One stage's step."""

    island: str
    device: str
    num_devices: int
    bars: tuple[Bar, ...]
    """Passes, then transfers that it sends, then the end of the step; each in order of start."""

    @property
    def passes(self) -> tuple[Bar, ...]:
        """Forward and backward passes."""
        return tuple(bar for bar in self.bars if bar.chunk >= 0 and bar.hop < 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimeline:
    """One pipeline's step."""

    schedule: str
    num_microbatches: int
    stages: tuple[StageTimeline, ...]
    end_seconds: float
    """Its last stage has left it."""
    warm_up_end_seconds: float
    cool_down_start_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step of a plan."""

    step_seconds: float
    pipelines: tuple[PipelineTimeline, ...]
    """Empty where the step has more than `MOST_PASSES`, at which nobody could look."""


def forward_passes(plan: Plan) -> int:
    """Of all stages of all pipelines."""
    return sum(each.forward_passes for each in plan.pipelines)


def timeline_of(plan: Plan, pricer: Pricer) -> Timeline:
    """The step of a legal plan as its prices say."""
    step = pricer.step(plan)
    if forward_passes(plan) > MOST_PASSES:
        return Timeline(step_seconds=step.step_seconds, pipelines=())
    replayed = replay_step(
        [pipeline.times() for pipeline in step.work], rendezvous=sends_wait(plan)
    )
    loading = pricer.job.data_loading_seconds
    return Timeline(
        step_seconds=step.step_seconds,
        pipelines=tuple(
            _pipeline(step, pipeline, replay, [[*_end(step, end, loading)] for end in ends])
            for pipeline, replay, ends in zip(
                step.work, replayed.pipelines, step.composed.stages, strict=True
            )
        ),
    )


def _pipeline(
    step: StepCost, work: PipelineWork, replay: PipelineReplay, ends: Sequence[Sequence[Bar]]
) -> PipelineTimeline:
    sent = _transfers(work, replay)
    operations = [stage.operations for stage in replay.stages]
    return PipelineTimeline(
        schedule=work.pipeline.schedule.name,
        num_microbatches=work.pipeline.num_microbatches,
        stages=tuple(
            StageTimeline(
                island="+".join(dict.fromkeys(unit.island.name for unit in stage.units)),
                device="+".join(dict.fromkeys(unit.island.device.kind for unit in stage.units)),
                num_devices=sum(unit.replica.num_devices for unit in stage.units),
                bars=(*map(_pass, own), *sent[s], *ends[s]),
            )
            for s, (stage, own) in enumerate(zip(work.stages, operations, strict=True))
        ),
        end_seconds=replay.end_seconds,
        warm_up_end_seconds=max(_first(each).start_seconds for each in operations),
        cool_down_start_seconds=min(
            max(one.end_seconds for one in each if one.kind == "F") for each in operations
        ),
    )


def _first(operations: Iterable[Operation]) -> Operation:
    """The first backward pass."""
    return next(one for one in operations if one.kind in ("B", "BW"))


def _pass(one: Operation) -> Bar:
    return Bar(
        track=Track.COMPUTE,
        name=PASS_NAMES[one.kind],
        start_seconds=one.start_seconds,
        end_seconds=one.end_seconds,
        microbatch=one.microbatch,
        chunk=one.chunk,
    )


def _transfers(work: PipelineWork, replay: PipelineReplay) -> list[list[Bar]]:
    """By the stage that sends."""
    schedule, count = work.pipeline.schedule.name, len(work.stages)
    found: list[list[Bar]] = [[] for _ in work.stages]
    for one in replay.transfers:
        hop = work.hops.row[one.hop]
        if hop is None:
            continue
        back = one.direction == "backward"
        sender, receiver = one.hop + back, one.hop + (not back)
        found[stage_of(schedule, sender, count)].append(
            Bar(
                track=Track.GRADIENTS if back else Track.ACTIVATIONS,
                name="gradients" if back else "activations",
                start_seconds=one.start_seconds,
                end_seconds=one.left_seconds,
                microbatch=one.microbatch,
                chunk=receiver // count,
                hop=one.hop,
                to=stage_of(schedule, receiver, count),
                arrives_seconds=one.end_seconds,
                link=hop.link,
            )
        )
    return found


def _end(step: StepCost, end: StageEnd, loading: float) -> Iterator[Bar]:
    """What the stage does after its last pass; it may wait between two of these."""
    composed, at = step.composed, end.end + end.waits
    parts = [
        (Track.COLLECTIVES, "gradient reduction", end.reduction.added_seconds),
        (Track.COLLECTIVES, "tied embedding", end.embedding),
    ]
    for track, name, seconds in parts:
        if seconds:
            yield Bar(track=track, name=name, start_seconds=at, end_seconds=at + seconds)
            at += seconds
    if composed.barrier:
        first, second = composed.last_to_arrive
        reduced = composed.stages[first][second].arrives
        at = reduced + composed.norm_seconds
        yield Bar(
            track=Track.COLLECTIVES, name="gradient norm", start_seconds=reduced, end_seconds=at
        )
    for track, name, seconds in (
        (Track.COMPUTE, "optimizer", end.update),
        (Track.COLLECTIVES, "parameter gathering", end.gathering.added_seconds),
    ):
        if seconds:
            yield Bar(track=track, name=name, start_seconds=at, end_seconds=at + seconds)
            at += seconds
    if loading:
        yield Bar(
            track=Track.COMPUTE,
            name="data loading",
            start_seconds=step.step_seconds - loading,
            end_seconds=step.step_seconds,
        )
