"""A plan's step as a timeline: JSON for chrome://tracing and ui.perfetto.dev.

Trace Event Format, object form: one process per pipeline; one thread per stage with its passes and
what comes after them, one per hop and direction with its transfers (from the first byte to the last
on the wire; the arrival is among the arguments). Complete events, times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from hetplan.cost.replay.step import PipelineReplay, replay_step
from hetplan.cost.step_model.plan import PipelineWork, sends_wait
from hetplan.cost.step_model.pricer import Pricer, StepCost
from hetplan.cost.step_model.step import StageEnd
from hetplan.plans.plan import Plan
from hetplan.plans.v_schedules import stage_of

Event = dict[str, object]

MICROSECONDS = 1e6
"""Of one second; the unit of the format."""

_WORDS = {"F": "forward", "B": "backward", "W": "weight gradients", "BW": "backward"}


def trace_text(plan: Plan, pricer: Pricer) -> str:
    """The whole timeline as JSON text."""
    return json.dumps({"traceEvents": list(trace_events(plan, pricer)), "displayTimeUnit": "ms"})


def trace_events(plan: Plan, pricer: Pricer) -> Iterator[Event]:
    """Names of processes and threads, then every event."""
    step = pricer.step(plan)
    replayed = replay_step(
        [pipeline.times() for pipeline in step.work], rendezvous=sends_wait(plan)
    )
    loading = pricer.job.data_loading_seconds
    for p, (pipeline, replay) in enumerate(zip(step.work, replayed.pipelines, strict=True)):
        yield from _names(p, pipeline)
        yield from _passes(p, replay)
        yield from _transfers(p, pipeline, replay)
        for s, end in enumerate(step.composed.stages[p]):
            yield from _end(p, s, end, step, loading)


def _names(p: int, pipeline: PipelineWork) -> Iterator[Event]:
    def named(what: str, name: str, thread: int = 0) -> Event:
        return {"ph": "M", "pid": p, "tid": thread, "name": what, "args": {"name": name}}

    stages = len(pipeline.stages)
    yield named("process_name", f"pipeline {p}")
    for s, stage in enumerate(pipeline.stages):
        unit = stage.unit
        name = f"stage {s}, {unit.replica.num_devices} x {unit.island.device.kind}"
        yield named("thread_name", f"{name}, island {unit.island.name}", s)
    schedule = pipeline.pipeline.schedule.name
    for k, hop in enumerate(pipeline.hops.row):
        if hop is not None:
            left, right = (stage_of(schedule, at, stages) for at in (k, k + 1))
            yield named("thread_name", f"hop {k}: stage {left} to {right}", _thread(stages, k, 0))
            yield named("thread_name", f"hop {k}: stage {right} to {left}", _thread(stages, k, 1))


def _thread(stages: int, hop: int, back: int) -> int:
    """Threads of hops come after those of the stages."""
    return stages + 2 * hop + back


def _event(p: int, thread: int, name: str, start: float, end: float, **arguments: object) -> Event:
    return {
        "ph": "X",
        "pid": p,
        "tid": thread,
        "name": name,
        "ts": start * MICROSECONDS,
        "dur": (end - start) * MICROSECONDS,
        "args": arguments,
    }


def _passes(p: int, replay: PipelineReplay) -> Iterator[Event]:
    for s, stage in enumerate(replay.stages):
        for one in stage.operations:
            yield _event(
                p,
                s,
                _WORDS[one.kind],
                one.start_seconds,
                one.end_seconds,
                microbatch=one.microbatch,
                chunk=one.chunk,
            )


def _transfers(p: int, pipeline: PipelineWork, replay: PipelineReplay) -> Iterator[Event]:
    stages = len(pipeline.stages)
    for one in replay.transfers:
        hop = pipeline.hops.row[one.hop]
        if hop is None:
            continue
        back = one.direction == "backward"
        yield _event(
            p,
            _thread(stages, one.hop, back),
            "gradients" if back else "activations",
            one.start_seconds,
            one.left_seconds,
            microbatch=one.microbatch,
            arrives_microseconds=one.end_seconds * MICROSECONDS,
            link=hop.link,
        )


def _end(p: int, s: int, end: StageEnd, step: StepCost, loading: float) -> Iterator[Event]:
    """What the stage does after its last pass; it may wait between two of these."""
    at = end.end + end.waits
    composed = step.composed
    parts = [
        ("gradient reduction", end.reduction.added_seconds),
        ("tied embedding", end.embedding),
    ]
    if composed.barrier:
        first, second = composed.last_to_arrive
        reduced = composed.stages[first][second].arrives
    for name, seconds in parts:
        if seconds:
            yield _event(p, s, name, at, at + seconds)
            at += seconds
    if composed.barrier:
        yield _event(p, s, "gradient norm", reduced, reduced + composed.norm_seconds)
        at = reduced + composed.norm_seconds
    for name, seconds in (
        ("optimizer", end.update),
        ("parameter gathering", end.gathering.added_seconds),
    ):
        if seconds:
            yield _event(p, s, name, at, at + seconds)
            at += seconds
    if loading:
        yield _event(p, s, "data loading", step.step_seconds - loading, step.step_seconds)
