"""Which process trains what: one rank per device of a plan, and the groups it talks in.

Ranks are numbered in the order in which the plan names its devices: stage by stage, in each stage
data-parallel index by index, tensor-parallel index fastest. So rank = (stage * dp + dp_index) *
tp + tp_index, and every group lists its members in rising order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from hetplan.errors import Fault, InputError
from hetplan.model.spec import ModelSpec
from hetplan.plans.launch import launch_faults
from hetplan.plans.plan import LayerRange, Pipeline, Plan, expand


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """What one rank holds and whom it talks to."""

    rank: int
    device: int
    """Device number of the cluster."""
    stage: int
    dp_index: int
    tp_index: int
    layers: LayerRange
    """Positions in `ModelSpec.layers`."""
    tp_ranks: tuple[int, ...]
    """Ranks that hold the other slices of the same layers for the same samples."""
    dp_ranks: tuple[int, ...]
    """Ranks that hold the same slice for other samples; gradients are summed over them."""
    pp_ranks: tuple[int, ...]
    """One rank per stage, in pipeline order: the chain this rank's activations pass through."""
    tied_ranks: tuple[int, ...]
    """First and last rank of the chain where they share a tied matrix and this is one of them."""


def place_ranks(plan: Plan) -> tuple[RankPlace, ...]:
    """The place of every rank; an InputError where hetplan's trainer cannot run the plan.

    `hetplan.plans.launch` says what it can run; the plan must also be legal (`check_plan`).
    """
    faults = tuple(launch_faults(plan))
    if faults:
        raise InputError(*faults)
    pipeline = plan.pipelines[0]
    tied = bool(plan.tied_embedding_devices)
    return tuple(
        chain.from_iterable(
            _stage_places(pipeline, index, tied=tied) for index in range(len(pipeline.stages))
        )
    )


def _stage_places(pipeline: Pipeline, stage: int, *, tied: bool) -> Iterator[RankPlace]:
    replica = pipeline.stages[stage].replicas[0]
    tp, dp, pp = replica.tp, replica.dp, len(pipeline.stages)
    for position, device in enumerate(expand(replica.devices)):
        dp_index, tp_index = divmod(position, tp)
        chain_ranks = tuple(s * dp * tp + position for s in range(pp))
        first = stage * dp * tp
        yield RankPlace(
            rank=first + position,
            device=device,
            stage=stage,
            dp_index=dp_index,
            tp_index=tp_index,
            layers=pipeline.stages[stage].chunks[0],
            tp_ranks=tuple(first + dp_index * tp + other for other in range(tp)),
            dp_ranks=tuple(first + other * tp + tp_index for other in range(dp)),
            pp_ranks=chain_ranks,
            tied_ranks=(chain_ranks[0], chain_ranks[-1]) if tied and stage in (0, pp - 1) else (),
        )


def vocabulary_faults(plan: Plan, model: ModelSpec) -> Iterator[Fault]:
    """Whether the plan pads the vocabulary as the trainer's layers do: to a multiple of tp."""
    tp = plan.pipelines[0].stages[0].replicas[0].tp
    padded = -(-model.vocab_size // tp) * tp
    if plan.padded_vocab_size != padded:
        yield Fault(
            field="padded_vocab_size",
            message=f"{plan.padded_vocab_size}; with tp {tp} the trainer pads {model.vocab_size} "
            f"to {padded}",
        )
