"""Which of the plan's components each timer of a trainer counts, and what it does not tell apart.

This is the table of docs/compare.md. A timer's figure is of whole steps, in the median over the
steps that count; minima and maxima over ranks stand beside the least and the most over the plan's
stages.
"""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.cost.estimate_values import Component, Estimate, StageEstimate
from hetplan.trainers import deepspeed_log
from hetplan.trainers.megatron import log as megatron_log
from hetplan.trainers.training_log import IN_PASSES, Quantity, TimerRanks, meanings

WAITS = (Component.BUBBLE, Component.PIPELINE)
REDUCTION = (Component.DATA_PARALLEL,)
UPDATE = (Component.OPTIMIZER, Component.OFFLOAD)
END = (Component.NORM, *UPDATE, Component.GATHERING)
OUTSIDE_PASSES = (
    *WAITS,
    *REDUCTION,
    Component.EMBEDDING,
    *END,
    Component.DATA_LOADING,
    Component.OTHER_STAGES,
    Component.STRAGGLERS,
)
"""Every other component is compute or communication inside the passes."""
PASSES = tuple(each for each in Component if each not in OUTSIDE_PASSES)

COMPONENTS: tuple[tuple[Quantity, tuple[Component, ...]], ...] = (
    (Quantity.FORWARD, PASSES),
    (Quantity.BACKWARD, PASSES),
    (Quantity.PASSES, PASSES),
    (Quantity.PASSES_AND_WAITS, (*PASSES, *WAITS)),
    (Quantity.SCHEDULE, (*PASSES, *WAITS, *REDUCTION, Component.EMBEDDING)),
    (Quantity.WAITS, WAITS),
    (Quantity.REDUCTION, REDUCTION),
    (Quantity.EMBEDDING, (Component.EMBEDDING,)),
    (Quantity.WAITS_TO_THE_END, (*WAITS, Component.OTHER_STAGES, Component.EMBEDDING)),
    (Quantity.END, END),
    (Quantity.NORM, (Component.NORM,)),
    (Quantity.UPDATE, UPDATE),
    (Quantity.GATHERING, (Component.GATHERING,)),
    (Quantity.DATA, (Component.DATA_LOADING,)),
    (Quantity.TENSOR_PARALLEL, (Component.TENSOR_PARALLEL,)),
)


_NATIVE = meanings(
    # hetplan's own trainer, hetplan/runtime/measured.py.
    ("busy", Quantity.PASSES, IN_PASSES),
    ("wait", Quantity.WAITS, "until the rank leaves the pipeline"),
    ("reduction", Quantity.REDUCTION, "waiting for the others included"),
    ("optimizer_seconds", Quantity.END, "norm, update and gathering"),
    ("tensor_parallel", Quantity.TENSOR_PARALLEL, "inside busy; accelerators do not tell it"),
)  # fmt: skip

MEANINGS = (*megatron_log.TIMERS, *deepspeed_log.TIMERS, *_NATIVE)
MEANING = {each.timer: each for each in MEANINGS}


def components_of(quantity: Quantity) -> tuple[Component, ...]:
    """The components that the quantity holds."""
    return dict(COMPONENTS)[quantity]


def predicted(
    estimate: Estimate, quantity: Quantity, ranks: TimerRanks
) -> tuple[float, float] | None:
    """Least and most seconds over the stages; None where the estimate has no components."""
    stages = estimate.stages
    if not all(stage.components for stage in stages):
        return None
    if ranks is TimerRanks.FIRST:
        stages = stages[:1]
    elif ranks is TimerRanks.LAST:
        stages = stages[-1:]
    found = list(_of_stages(stages, estimate.num_microbatches, quantity))
    return min(found), max(found)


def _of_stages(
    stages: tuple[StageEstimate, ...], num_microbatches: int, quantity: Quantity
) -> Iterator[float]:
    """Seconds per stage and step."""
    for stage in stages:
        whole = of_components(stage, quantity)
        if quantity in (Quantity.FORWARD, Quantity.BACKWARD):
            both = stage.forward_seconds + stage.backward_seconds
            one = stage.forward_seconds if quantity is Quantity.FORWARD else stage.backward_seconds
            # The split between the two passes is of one microbatch; their sum is the step's.
            whole = whole * one / both if both else 0.0
        yield whole


def of_components(stage: StageEstimate, quantity: Quantity) -> float:
    """Sum of the stage's components that the quantity holds."""
    held = set(components_of(quantity))
    return sum((each.seconds for each in stage.components if each.component in held), 0.0)
