"""A plan's step, or a measured run, as a trace for ui.perfetto.dev and chrome://tracing.

Trace Event Format, object form, times in microseconds. A process per stage; its passes, its
collectives and what it sends over each boundary are threads of their own:

    X    a pass, a collective, a transfer (from the first byte to the last on the wire)
    s, f a transfer's way from its sender to the pass that waits for it
    C    memory of one device: state, and activations as microbatches come and go; their peak is the
         estimate's, between they are in proportion to the layers whose activations are alive
    M    names

A measured run has a process for its steps, and one per stage with the medians of its ranks: what a
trainer measures is how long, not when, so those bars stand one behind the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

from hetplan.comparison.compare import ComparedRun
from hetplan.comparison.logs import is_run_log, last_run
from hetplan.comparison.parts import TimerRow
from hetplan.cost.estimate_values import MemoryUse
from hetplan.cost.step_model.pricer import Pricer
from hetplan.errors import InputError
from hetplan.plans.plan import LayerRange, Plan
from hetplan.reports.timeline import (
    MOST_PASSES,
    Bar,
    PipelineTimeline,
    StageTimeline,
    Timeline,
    Track,
    forward_passes,
    timeline_of,
)
from hetplan.runtime.measured import RankMeasure

Event = dict[str, object]

MICROSECONDS = 1e6
"""Of one second; the unit of the format."""
_FIXED = {Track.COMPUTE: 0, Track.COLLECTIVES: 1}
_FIRST_SEND = 2
"""Threads of transfers come after those of compute and collectives."""


def trace_text(plan: Plan, pricer: Pricer, runs: Sequence[ComparedRun] = ()) -> str:
    """The whole trace of a plan, and of runs of it, as JSON text.

    InputError where the step has more passes than a trace can hold.
    """
    passes = forward_passes(plan)
    if passes > MOST_PASSES:
        raise InputError(
            f"the step has {passes:,} forward passes, a trace at most {MOST_PASSES:,}; trace a "
            "plan of a smaller batch"
        )
    memory = pricer.step(plan).memory
    events = [*trace_events(plan, timeline_of(plan, pricer), memory)]
    for run in runs:
        events += measured_events(run, first=1 + max(_number(event["pid"]) for event in events))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _number(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError("a process has a number")
    return value


def trace_events(
    plan: Plan, timeline: Timeline, memory: Sequence[Sequence[MemoryUse]]
) -> Iterator[Event]:
    """Names of processes and threads, then every event."""
    first, flow = 0, 0
    for p, pipeline in enumerate(timeline.pipelines):
        place = f"pipeline {p}, " if len(timeline.pipelines) > 1 else ""
        for s, stage in enumerate(pipeline.stages):
            process = first + s
            name = f"{place}stage {s}: {stage.num_devices} x {stage.device}, {stage.island}"
            yield _named("process_name", name, process)
            yield {**_named("process_sort_index", "", process), "args": {"sort_index": process}}
            yield from _threads(process, s, stage)
            for bar in stage.bars:
                yield _bar(process, bar)
            chunks = plan.pipelines[p].stages[s].chunks
            yield from _memory(process, stage, chunks, memory[p][s])
        for event in _flows(first, pipeline):
            yield {**event, "id": flow + _number(event["id"])}
        flow += sum(len(stage.bars) for stage in pipeline.stages)
        first += len(pipeline.stages)


def _named(what: str, name: str, process: int, thread: int = 0) -> Event:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": {"name": name}}


def _thread(bar: Bar) -> int:
    if bar.hop < 0:
        return _FIXED[bar.track]
    return _FIRST_SEND + 2 * bar.hop + (bar.track is Track.GRADIENTS)


def _threads(process: int, s: int, stage: StageTimeline) -> Iterator[Event]:
    names = {_FIXED[track]: track.value for track in _FIXED}
    for bar in stage.bars:
        if bar.hop >= 0:
            names[_thread(bar)] = f"{bar.track.value}, hop {bar.hop}: stage {s} to {bar.to}"
    for thread, name in sorted(names.items()):
        yield _named("thread_name", name, process, thread)


def _bar(process: int, bar: Bar) -> Event:
    known: dict[str, object] = {}
    if bar.microbatch >= 0:
        known = {"microbatch": bar.microbatch, "chunk": bar.chunk}
    if bar.hop >= 0:
        arrives = bar.arrives_seconds * MICROSECONDS
        known |= {"arrives_microseconds": arrives, "link": bar.link}
    return _slice(process, _thread(bar), bar.name, (bar.start_seconds, bar.end_seconds), known)


def _slice(
    process: int, thread: int, name: str, span: tuple[float, float], known: dict[str, object]
) -> Event:
    start, end = span
    return {
        "ph": "X",
        "pid": process,
        "tid": thread,
        "name": name,
        "cat": "hetplan",
        "ts": start * MICROSECONDS,
        "dur": (end - start) * MICROSECONDS,
        "args": known,
    }


def _flows(first: int, pipeline: PipelineTimeline) -> Iterator[Event]:
    """From every transfer to the pass that its receiver needs it for."""
    needs = {
        (s, bar.chunk, bar.microbatch, bar.name): bar.start_seconds
        for s, stage in enumerate(pipeline.stages)
        for bar in stage.passes
    }
    number = 0
    for s, stage in enumerate(pipeline.stages):
        for bar in stage.bars:
            if bar.hop < 0:
                continue
            number += 1
            name = "backward" if bar.track is Track.GRADIENTS else "forward"
            at = needs[bar.to, bar.chunk, bar.microbatch, name]
            same: Event = {"cat": "transfer", "name": bar.name, "id": number}
            sender, receiver = first + s, first + bar.to
            ts = bar.start_seconds * MICROSECONDS
            yield {**same, "ph": "s", "pid": sender, "tid": _thread(bar), "ts": ts}
            yield {
                **same,
                "ph": "f",
                "bp": "e",
                "pid": receiver,
                "tid": _FIXED[Track.COMPUTE],
                "ts": at * MICROSECONDS,
            }


def _memory(
    process: int, stage: StageTimeline, chunks: Sequence[LayerRange], use: MemoryUse
) -> Iterator[Event]:
    """Bytes on one device: its state, and activations as microbatches come and go."""
    state = use.parameter_bytes + use.gradient_bytes + use.optimizer_bytes + use.buffer_bytes
    layers = [chunk.stop - chunk.start for chunk in chunks]
    alive, moments = 0, [(0.0, 0)]
    for bar in stage.passes:
        if bar.name == "forward":
            alive += layers[bar.chunk]
            moments.append((bar.start_seconds, alive))
        elif bar.name == "backward":
            alive -= layers[bar.chunk]
            moments.append((bar.end_seconds, alive))
    most = max(count for _, count in moments)
    for seconds, count in sorted(moments, key=lambda each: each[0]):
        activations = use.activation_bytes * count / most if most else 0.0
        yield {
            "ph": "C",
            "pid": process,
            "tid": 0,
            "name": "memory of one device, bytes",
            "ts": seconds * MICROSECONDS,
            "args": {"state": state, "activations": activations},
        }


# ---- measured


def measured_events(run: ComparedRun, first: int) -> Iterator[Event]:
    """Steps one behind the other, then what is known of one step: its ranks, or its timers."""
    yield _named("process_name", f"measured: {run.comparison.trainer}, steps that count", first)
    yield _named("thread_name", "steps", first)
    at = 0.0
    for timed in run.chosen.used:
        known: dict[str, object] = {"iteration": timed.step.iteration}
        yield _slice(first, 0, "step", (at, at + timed.seconds), known)
        at += timed.seconds
    log = run.files.logs[0]
    if is_run_log(log):
        yield from _ranks(last_run(log, run.result)[0].ranks, first + 1)
    elif run.comparison.timers:
        yield from _timers(run.comparison.timers, first + 1)


def _ranks(ranks: Sequence[RankMeasure], first: int) -> Iterator[Event]:
    """A process per stage, a thread per rank."""
    for stage in sorted({rank.stage for rank in ranks}):
        yield _named(
            "process_name", f"measured: stage {stage}, medians; in no order", first + stage
        )
    for rank in ranks:
        process = first + rank.stage
        yield _named("thread_name", f"rank {rank.rank}, {rank.device_kind}", process, rank.rank)
        spans = (
            ("forward and backward", rank.busy_seconds),
            ("waits", rank.wait_seconds),
            ("gradient reduction", rank.reduction_seconds),
            ("optimizer", rank.optimizer_seconds),
        )
        yield from _behind_each_other(process, rank.rank, spans)


def _timers(timers: Sequence[TimerRow], process: int) -> Iterator[Event]:
    """A trainer's timers, of its fastest and of its slowest rank."""
    yield _named("process_name", "measured: timers of a step, medians; in no order", process)
    least = [(row.timer, row.measured_least_seconds) for row in timers]
    most = [(row.timer, row.measured_most_seconds) for row in timers]
    for thread, (name, spans) in enumerate((("least of all ranks", least), ("most", most))):
        yield _named("thread_name", name, process, thread)
        yield from _behind_each_other(process, thread, spans)


def _behind_each_other(
    process: int, thread: int, spans: Iterable[tuple[str, float]]
) -> Iterator[Event]:
    at = 0.0
    for name, seconds in spans:
        yield _slice(process, thread, name, (at, at + seconds), {})
        at += seconds
