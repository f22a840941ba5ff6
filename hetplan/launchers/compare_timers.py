"""Which of the plan's components each timer of a trainer counts, and what it does not tell apart.

This is the table of docs/compare.md. A timer's figure is of whole steps, in the median over the
steps that count; minima and maxima over ranks stand beside the least and the most over the plan's
stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from hetplan.cost.estimate_values import Component, Estimate, StageEstimate
from hetplan.importers.training_log import TimerRanks


class Quantity(StrEnum):
    """What a timer counts, in the plan's words."""

    FORWARD = "forward passes"
    BACKWARD = "backward passes"
    PASSES = "passes"
    PASSES_AND_WAITS = "passes and waits"
    SCHEDULE = "passes, waits and reduction"
    WAITS = "waits in the pipeline"
    REDUCTION = "gradient reduction"
    EMBEDDING = "tied embedding"
    WAITS_TO_THE_END = "waits, and those of the tied embedding"
    END = "norm, update and gathering"
    NORM = "gradient norm"
    UPDATE = "optimizer update"
    GATHERING = "parameter gathering"
    DATA = "data loading"
    TENSOR_PARALLEL = "tp"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerMeaning:
    """What one timer counts."""

    timer: str
    quantity: Quantity | None
    """None: nothing that the plan predicts by itself."""
    note: str = ""


_IN_PASSES = "holds tp, cp and ep communication"
_WAITING = "waiting for the other side included: bubble and transfer are not told apart"
_ONE_OF = "one of several steps of the update"

MEANINGS: tuple[TimerMeaning, ...] = tuple(
    TimerMeaning(timer=timer, quantity=quantity, note=note)
    for timer, quantity, note in (
        # Megatron-LM, megatron/training/training.py and megatron/core; 2021 to 2026.
        ("forward-backward", Quantity.SCHEDULE, "holds bubble, transfers and, in new versions, "
         "the reduction"),
        ("forward-compute", Quantity.FORWARD, f"{_IN_PASSES}, and batch-generator"),
        ("backward-compute", Quantity.BACKWARD, f"{_IN_PASSES}, and recomputation"),
        ("batch-generator", Quantity.DATA, "inside forward-compute"),
        ("forward-recv", Quantity.WAITS, _WAITING),
        ("forward-send", Quantity.WAITS, _WAITING),
        ("backward-recv", Quantity.WAITS, _WAITING),
        ("backward-send", Quantity.WAITS, _WAITING),
        ("forward-send-forward-recv", Quantity.WAITS, _WAITING),
        ("forward-send-backward-recv", Quantity.WAITS, _WAITING),
        ("backward-send-forward-recv", Quantity.WAITS, _WAITING),
        ("backward-send-backward-recv", Quantity.WAITS, _WAITING),
        ("forward-backward-send-forward-backward-recv", Quantity.WAITS, _WAITING),
        ("all-grads-sync", Quantity.REDUCTION, "what nothing hides"),
        ("grads-all-reduce", Quantity.REDUCTION, "after the passes"),
        ("grads-reduce-scatter", Quantity.REDUCTION, "after the passes"),
        ("backward-params-all-reduce", Quantity.REDUCTION, "after the passes"),
        ("embedding-grads-all-reduce", Quantity.EMBEDDING, "waits for the other end included"),
        ("backward-embedding-all-reduce", Quantity.EMBEDDING, "waits for the other end included"),
        ("layernorm-grads-all-reduce", None, "sums of what sequence parallelism leaves whole"),
        ("non-tensor-parallel-grads-all-reduce", None, "sums of what tp leaves whole"),
        ("conditional-embedder-grads-all-reduce", None, "models with a conditional embedder"),
        ("params-all-gather", Quantity.GATHERING, "what nothing hides"),
        ("backward-gather-model-params", Quantity.GATHERING, "after the update"),
        ("optimizer", Quantity.END, "holds the norm and, without overlap, the gathering"),
        ("optimizer-clip-main-grad", Quantity.NORM, ""),
        ("optimizer-inner-step", Quantity.UPDATE, _ONE_OF),
        ("optimizer-copy-to-main-grad", Quantity.UPDATE, _ONE_OF),
        ("optimizer-unscale-and-check-inf", Quantity.UPDATE, _ONE_OF),
        ("optimizer-count-zeros", Quantity.UPDATE, _ONE_OF),
        ("optimizer-copy-main-to-model-params", Quantity.UPDATE, _ONE_OF),
        # Megatron-LM of 2020.
        ("backward-backward", Quantity.BACKWARD, f"{_IN_PASSES}, and recomputation"),
        ("backward-allreduce", Quantity.REDUCTION, "after the passes"),
        ("batch generator", Quantity.DATA, "inside forward"),
        # DeepSpeed, deepspeed/runtime/engine.py and runtime/pipe/engine.py.
        ("fwd", Quantity.FORWARD, _IN_PASSES),
        ("bwd", None, "bwd_inner and bwd_allreduce together"),
        ("bwd_inner", Quantity.BACKWARD, f"{_IN_PASSES}, and recomputation"),
        ("bwd_allreduce", Quantity.REDUCTION, "what nothing hides"),
        ("step", Quantity.END, "holds norm, update and gathering"),
        ("optimizer_step", Quantity.UPDATE, _ONE_OF),
        ("optimizer_gradients", Quantity.UPDATE, _ONE_OF),
        ("optimizer_allgather", Quantity.GATHERING, "after the update"),
        ("forward", Quantity.FORWARD, _IN_PASSES),
        ("backward", None, "backward passes and their reduction together"),
        ("backward_inner", Quantity.BACKWARD, f"{_IN_PASSES}, and recomputation"),
        ("backward_allreduce", Quantity.REDUCTION, "what nothing hides"),
        ("backward_tied_allreduce", Quantity.EMBEDDING, "waits for the other end included"),
        ("batch_input", Quantity.DATA, "outside of forward"),
        ("pipe_send_output", Quantity.WAITS, _WAITING),
        ("pipe_send_grad", Quantity.WAITS, _WAITING),
        ("pipe_recv_input", Quantity.WAITS, _WAITING),
        ("pipe_recv_grad", Quantity.WAITS, _WAITING),
        # hetplan's own trainer, hetplan/runtime/measured.py.
        ("busy", Quantity.PASSES, _IN_PASSES),
        ("wait", Quantity.WAITS, "until the rank leaves the pipeline"),
        ("reduction", Quantity.REDUCTION, "waiting for the others included"),
        ("optimizer_seconds", Quantity.END, "norm, update and gathering"),
        ("tensor_parallel", Quantity.TENSOR_PARALLEL, "inside busy; accelerators do not tell it"),
    )
)  # fmt: skip

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
