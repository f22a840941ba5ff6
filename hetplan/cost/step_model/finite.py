"""Is a step's time a number that can be, and if not, which figure made it none?

Figures that pass the checks of their files one by one, as a link of 1e-300 bytes per second, can
make a time overflow, and draws around it even if it does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from hetplan.cost.step_model.norm import norm_parts
from hetplan.cost.step_model.plan import PlanCosts
from hetplan.cost.step_model.step import tied_parts
from hetplan.cost.step_model.values import Part
from hetplan.cost.step_model.work import PipelineWork, StageWork
from hetplan.errors import InputError

MAX_SECONDS = 1e30
"""No step takes longer; far below where sums of squares overflow."""


def check_finite(step_seconds: float, costs: PlanCosts, work: Sequence[PipelineWork]) -> None:
    """InputError where a step takes no possible time; names the part that takes longest."""
    if step_seconds <= MAX_SECONDS:
        return
    seconds, what, where = longest_part(costs, work)
    raise InputError(
        f"the step takes {step_seconds:g} s: {what} ({where}) takes {seconds:g} s; correct the "
        "bandwidth, latency, clock or throughput behind it in the cluster or devices"
    )


def longest_part(costs: PlanCosts, work: Sequence[PipelineWork]) -> tuple[float, str, str]:
    """(seconds, what it is and of what, where) of the longest part; no number counts as longest."""
    found: list[tuple[float, str, str]] = []
    for p, pipeline in enumerate(work):
        for s, stage in enumerate(pipeline.stages):
            island = stage.unit.island
            where = f"pipeline {p}, stage {s} on island {island.name}"
            if island.clock_ratio != 1:
                where += f", whose clock_ratio is {island.clock_ratio:g}"
            for part in _parts(stage):
                found.append((part.seconds, f"{part.term.what} of {part.term.cause}", where))
        for number, hop in enumerate(pipeline.hops.row):
            if hop is not None:
                seconds = hop.send_forward_seconds + hop.send_backward_seconds
                seconds += hop.law.rendezvous_latency_seconds
                found.append((seconds, f"send of {hop.link}", f"pipeline {p}, hop {number}"))
        for part in (*tied_parts(costs, pipeline), *norm_parts(costs, work)):
            found.append((part.seconds, f"{part.term.what} of {part.term.cause}", "end of step"))
    return max(found, key=lambda each: math.inf if math.isnan(each[0]) else each[0])


def _parts(stage: StageWork) -> Iterator[Part]:
    unit = stage.unit
    kinds = {unit.kind_at[at] for start, stop in stage.ranges for at in range(start, stop)}
    for kind in sorted(kinds):
        cost = unit.costs[kind]
        yield from (*cost.forward, *cost.backward, *cost.again)
    held = (stage.parameters, stage.expert_parameters)
    yield from unit.end.update(*held)
    yield from unit.end.reduction(*held)
    yield from unit.end.gathering(*held)
