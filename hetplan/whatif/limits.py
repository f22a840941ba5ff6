"""What limits a plan: which stage, which boundary, whose memory?

A plan's step is what its critical path says, and that path changes as soon as something on it gets
faster. So each part is made faster by itself and the step composed anew, by the same replay as the
estimate:

    island     forward and backward passes of all its stages a tenth shorter
    stage      those of one stage
    boundary   its transfers for nothing

A gain of 0 says that something else limits the plan. Gains do not add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from hetplan.cost.arrays import Floats
from hetplan.cost.estimate_values import Component, ComponentSeconds, Estimate, MemoryUse
from hetplan.cost.replay.ends import step_ends
from hetplan.cost.step_model.plan import PipelineWork, StageWork, sends_wait
from hetplan.cost.step_model.pricer import Pricer, StepCost
from hetplan.cost.step_model.step import compose
from hetplan.plans.plan import Plan
from hetplan.plans.v_schedules import is_v
from hetplan.predict.predictor import Predictor
from hetplan.search.result import SearchResult

FASTER = 0.1
"""Part by which a stage's passes are made shorter."""

_NEARLY_FULL = 0.9
"""Part of a device's room from which its memory is worth a line."""

_MIN_GAIN = 1e-6
"""Gains below this part of the step come from sums in another order."""

ENDS = (
    Component.DATA_PARALLEL,
    Component.GATHERING,
    Component.EMBEDDING,
    Component.NORM,
    Component.OPTIMIZER,
    Component.OFFLOAD,
    Component.DATA_LOADING,
)
"""Components behind the pipeline's last pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandLimit:
    """All stages on the same islands."""

    island: str
    stages: int
    gain: float
    """Part of the step that is saved where their passes are `FASTER` shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLimit:
    """One stage."""

    pipeline: int
    stage: int
    island: str
    gain: float
    """Part of the step that is saved where its passes are `FASTER` shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryLimit:
    """The boundary behind a stage; of interleaved stages every way from it to its next one."""

    pipeline: int
    stage: int
    between: tuple[str, str]
    """Islands."""
    gain: float
    """Part of the step that is saved where its transfers take no time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """A stage whose devices are nearly full."""

    pipeline: int
    stage: int
    island: str
    used: float
    """Part of what a device offers."""
    largest: str
    """What takes most of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Everything that could hold a plan back, what matters most first."""

    step_seconds: float
    islands: tuple[IslandLimit, ...]
    stages: tuple[StageLimit, ...]
    boundaries: tuple[BoundaryLimit, ...]
    ends: tuple[ComponentSeconds, ...]
    """What comes behind the pipeline, on the critical path."""
    memory: tuple[MemoryLimit, ...]


def limits(result: SearchResult, predictor: Predictor) -> Limits:
    """What limits the result's plan; its stages and boundaries by falling gain."""
    inputs, plan = result.inputs, result.plan
    pricer = Pricer(inputs.model, inputs.cluster, inputs.job, predictor)
    cost = pricer.step(plan)
    islands = [[stage.unit.island.name for stage in each.stages] for each in cost.work]
    return Limits(
        step_seconds=cost.step_seconds,
        islands=tuple(sorted(_islands(pricer, plan, cost, islands), key=lambda each: -each.gain)),
        stages=_by_gain(_stages(pricer, plan, cost, islands)),
        boundaries=_by_gain(_boundaries(pricer, plan, cost, islands)),
        ends=tuple(each for each in result.estimate.components if each.component in ENDS),
        memory=tuple(_memory(result.estimate)),
    )


_Limit = TypeVar("_Limit", StageLimit, BoundaryLimit)


def _by_gain(found: Iterator[_Limit]) -> tuple[_Limit, ...]:
    return tuple(sorted(found, key=lambda each: (-each.gain, each.pipeline, each.stage)))


def _islands(
    pricer: Pricer, plan: Plan, cost: StepCost, islands: Sequence[Sequence[str]]
) -> Iterator[IslandLimit]:
    places: dict[str, set[tuple[int, int]]] = {}
    for p, row in enumerate(islands):
        for s, name in enumerate(row):
            places.setdefault(name, set()).add((p, s))
    for name, mine in places.items():
        gain = _gain(pricer, plan, cost, _faster(cost, mine))
        yield IslandLimit(island=name, stages=len(mine), gain=gain)


def _stages(
    pricer: Pricer, plan: Plan, cost: StepCost, islands: Sequence[Sequence[str]]
) -> Iterator[StageLimit]:
    for p, row in enumerate(islands):
        for s, island in enumerate(row):
            gain = _gain(pricer, plan, cost, _faster(cost, {(p, s)}))
            yield StageLimit(pipeline=p, stage=s, island=island, gain=gain)


def _faster(cost: StepCost, chosen: set[tuple[int, int]]) -> list[PipelineWork]:
    """The work with shorter passes of the chosen (pipeline, stage)s."""
    return [
        replace(
            pipeline,
            stages=[
                _shorter(stage) if (p, s) in chosen else stage
                for s, stage in enumerate(pipeline.stages)
            ],
        )
        for p, pipeline in enumerate(cost.work)
    ]


def _shorter(stage: StageWork) -> StageWork:
    def part(seconds: tuple[float, ...]) -> tuple[float, ...]:
        return tuple((1.0 - FASTER) * each for each in seconds)

    return replace(
        stage,
        forward=part(stage.forward),
        backward=part(stage.backward),
        weight=part(stage.weight),
    )


def _boundaries(
    pricer: Pricer, plan: Plan, cost: StepCost, islands: Sequence[Sequence[str]]
) -> Iterator[BoundaryLimit]:
    for p, pipeline in enumerate(cost.work):
        count = len(pipeline.stages)
        hops = len(pipeline.hops.send_forward)
        for s in range(count):
            name = pipeline.pipeline.schedule.name
            if is_v(name):  # two hops, down and up
                mine = np.isin(np.arange(hops), (s, hops - 1 - s)) & (s < count - 1)
            else:
                mine = np.arange(hops) % count == s
            if not mine.any() or count == 1:
                continue
            yield BoundaryLimit(
                pipeline=p,
                stage=s,
                between=(islands[p][s], islands[p][(s + 1) % count]),
                gain=_gain(pricer, plan, cost, cost.work, (p, np.where(mine, 0.0, 1.0))),
            )


def _gain(
    pricer: Pricer,
    plan: Plan,
    cost: StepCost,
    work: Sequence[PipelineWork],
    factors: tuple[int, Floats] | None = None,
) -> float:
    """Part of the step that is saved with this work, hops of one pipeline times these factors."""
    times = [
        pipeline.times(factors[1] if factors is not None and factors[0] == p else 1.0)
        for p, pipeline in enumerate(work)
    ]
    ends = step_ends(times, rendezvous=sends_wait(plan))
    step = compose(plan, pricer.costs(plan), work, ends).step_seconds
    gain = 1.0 - step / cost.step_seconds
    return gain if gain > _MIN_GAIN else 0.0


def _memory(estimate: Estimate) -> Iterator[MemoryLimit]:
    at: dict[int, int] = {}
    for stage in estimate.stages:
        number = at[stage.pipeline] = at.get(stage.pipeline, -1) + 1
        used = stage.memory.total_bytes / stage.memory.available_bytes
        if used >= _NEARLY_FULL:
            yield MemoryLimit(
                pipeline=stage.pipeline,
                stage=number,
                island=stage.island,
                used=used,
                largest=_largest(stage.memory),
            )


def _largest(memory: MemoryUse) -> str:
    parts = {
        "weights": memory.parameter_bytes,
        "gradients": memory.gradient_bytes,
        "optimizer state": memory.optimizer_bytes,
        "activations": memory.activation_bytes,
        "temporary buffers": memory.temporary_bytes + memory.buffer_bytes,
    }
    return max(parts, key=lambda name: parts[name])
