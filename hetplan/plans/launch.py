"""What of a plan for target native does `hetplan launch` not run, and which pins avoid it?

The reference trainer is made for more than it runs today; plans of all that it is made for can be
searched and priced. It runs one 1F1B pipeline whose stages have one tp, dp and microbatch size,
each on one island, with the schedule's own warm-up depths and a whole optimizer on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hetplan.errors import Fault
from hetplan.plans.depths import own_depth
from hetplan.plans.plan import Pipeline, Plan, Stage


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
    if len(plan.pipelines) != 1:
        yield LaunchLimit(
            field="pipelines",
            message=f"{len(plan.pipelines)} pipelines; the trainer runs one",
            pin="pipelines: 1",
        )
        return
    yield from _pipeline(plan.pipelines[0], plan.precision)
    if plan.overlap.send:
        yield LaunchLimit(
            field="overlap.send",
            message="the trainer's sends wait for their receivers",
            pin="depth: 0",
        )
    if plan.optimizer_shards != 1:
        yield LaunchLimit(
            field="optimizer_shards",
            message=f"{plan.optimizer_shards}; the trainer does not shard the optimizer",
            pin="sharded_optimizer: false",
        )


def _pipeline(pipeline: Pipeline, precision: str) -> Iterator[LaunchLimit]:
    stages, count = pipeline.stages, pipeline.num_microbatches
    degrees = set()
    for index, stage in enumerate(stages):
        depth = own_depth("1f1b", index, len(stages), count)
        yield from _stage(f"pipelines[0].stages[{index}]", stage, depth)
        degrees |= {(r.tp, r.dp, r.microbatch_size) for r in stage.replicas}
    if len(degrees) > 1:
        yield LaunchLimit(
            field="pipelines[0]",
            message=f"stages differ in (tp, dp, microbatch size): {sorted(degrees)}; the trainer "
            "needs the same for all",
            pin="same_degrees: true",
        )
    schedule = pipeline.schedule
    if schedule.name != "1f1b" or schedule.virtual_stages != 1:
        yield LaunchLimit(
            field="pipelines[0].schedule",
            message=f"{schedule.name} with {schedule.virtual_stages} virtual stages; the trainer "
            "runs 1f1b with 1",
            pin="virtual_stages: 1",
        )
    if count < len(stages):
        yield LaunchLimit(
            field="pipelines[0].num_microbatches",
            message=f"{count} for {len(stages)} stages; the trainer needs one per stage",
        )
    for boundary in pipeline.boundaries:
        if boundary.precision != precision:
            yield LaunchLimit(
                field=f"pipelines[0].boundaries[{boundary.index}].precision",
                message=f"{boundary.precision}; the trainer sends what it computes, {precision}",
            )


def _stage(place: str, stage: Stage, depth: int) -> Iterator[LaunchLimit]:
    if len(stage.chunks) != 1:
        yield LaunchLimit(
            field=f"{place}.chunks",
            message=f"{len(stage.chunks)} layer ranges; the trainer runs one",
            pin="virtual_stages: 1",
        )
    if len(stage.replicas) != 1:
        yield LaunchLimit(
            field=f"{place}.replicas",
            message=f"{len(stage.replicas)} replicas; the trainer runs one",
            pin="same_degrees: true",
        )
    for replica in stage.replicas:
        if (replica.cp, replica.ep, replica.etp) != (1, 1, 1) or replica.sequence_parallel:
            yield LaunchLimit(
                field=f"{place}.replicas[0]",
                message="the trainer has no context, expert or sequence parallelism; use cp, ep, "
                "etp 1",
            )
    # Of an interleaved stage the schedule is named, not its depth.
    if stage.warmup_depth != depth and len(stage.chunks) == 1:
        yield LaunchLimit(
            field=f"{place}.warmup_depth",
            message=f"{stage.warmup_depth}; the trainer's 1F1B has {depth} microbatches in flight "
            "there",
            pin="depth: 0",
        )
