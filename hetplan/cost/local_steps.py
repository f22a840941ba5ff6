"""What averaging the sites of local steps adds to a step (`hetplan.plans.local_steps`).

A fragment's differences are summed over all of its copies in all sites, once in H = sync_steps
steps, beside the next tau = fragment_sync_delay steps:

    exposed = max(0, seconds of the fragment's sums - tau * step)
    added   = sum over fragments of (exposed + gathered) / H

Over a long link a fragment of S bytes moves 2 S (1 - 1/R) bytes between R sites, whatever the ranks
(the trainer sums level by level; `hetplan.cost.collectives`). Pieces of layers that a stage holds
in several groups follow each other; different stages sum at the same time and share what they have
in common, as reductions do. Before a fragment's differences are taken, and where tau > 0 before its
mean is applied, the ranks of a site gather all float32 weights of a sharded optimizer, hidden by
nothing (`runtime.averaging`). The outer optimizer's own pass over the weights, once in H steps, is
not counted.

Memory: every rank keeps in its host's memory the weights of the last averaging, their momentum and
a mean that arrives, in float32; and a fragment's differences, which are all weights of a stage
where fragments are no smaller.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hetplan.cost.estimate_values import Component
from hetplan.cost.terms import Part, repeated, seconds_of_parts
from hetplan.job.spec import Precision, Sharding, Synchronisation
from hetplan.plans.local_steps import common_layers, fragments
from hetplan.plans.plan import OuterSynchronisation
from hetplan.profiling.samples import LinkOperation

if TYPE_CHECKING:
    from hetplan.cost.step_model.plan import PipelineWork, PlanCosts, Reduction
    from hetplan.cost.step_model.step import StageEnd

HOST_BYTES_PER_PARAMETER = 12.0
"""Weights, momentum and mean in float32."""


def gatherings(wanted: Synchronisation, sharding: Sharding, precision: Precision) -> float:
    """How often in a step a site gathers float32 weights, of which its ranks have parts.

    Those of a sharded optimizer that are trained in float32 are gathered in every step anyway.
    """
    whole = precision is Precision.FLOAT32 and sharding is not Sharding.PARAMETERS
    if whole or sharding is Sharding.NONE:
        return 0.0
    return (2 if wanted.fragment_sync_delay else 1) * wanted.num_fragments / wanted.sync_steps


def outer_parts(
    outer: OuterSynchronisation,
    costs: PlanCosts,
    work: Sequence[PipelineWork],
    stages: Iterable[StageEnd],
    inner_seconds: float,
) -> tuple[Part, ...]:
    """What averaging adds to every step, whose own part takes `inner_seconds`."""
    hidden = outer.settings.fragment_sync_delay * inner_seconds
    settings, found = costs.settings, list[Part]()
    times = gatherings(outer.settings, settings.sharding, settings.job.precision)
    if times:
        exact = (
            [
                part
                for end, _, held in stage.groups
                for part in end.gathered(held, Precision.FLOAT32, Component.OUTER)
            ]
            for stage in stages
        )
        found += repeated(max(exact, key=seconds_of_parts), times)
    for parts in _fragment_parts(outer, costs, work):
        seconds = seconds_of_parts(parts)
        if seconds > hidden:
            found += repeated(parts, (seconds - hidden) / seconds / outer.settings.sync_steps)
    return tuple(found)


def _fragment_parts(
    outer: OuterSynchronisation, costs: PlanCosts, work: Sequence[PipelineWork]
) -> Iterator[tuple[Part, ...]]:
    """The sums of each fragment's differences, nothing hidden: those of its slowest stage."""
    for layers in fragments(costs.settings.model, outer.settings.num_fragments):
        groups = [
            replace(group, layers=both)
            for group in outer.reduction_groups
            if (both := common_layers(group.layers, layers)) is not None
        ]
        by_stage: dict[tuple[int, int], tuple[Part, ...]] = {}
        for reduction in costs.reductions(groups, work):
            parts = _sums(outer, costs, reduction)
            for p, s, _ in reduction.members:
                by_stage[p, s] = (*by_stage.get((p, s), ()), *parts)
        yield max(by_stage.values(), key=seconds_of_parts)


def _sums(outer: OuterSynchronisation, costs: PlanCosts, reduction: Reduction) -> tuple[Part, ...]:
    """The sum of what the largest member holds."""
    size = (
        max(count for *_, count in reduction.members) * outer.settings.precision.bytes_per_element
    )
    operation, group = LinkOperation.ALL_REDUCE, reduction.end.dense.whole
    terms = costs.settings.known.of(group, operation, size, "all_reduce of differences")
    return tuple(Part(component=Component.OUTER, term=term) for term in terms)


def host_bytes(outer: OuterSynchronisation, parameters: float) -> float:
    """The most that averaging keeps in the host's memory of a rank with so many parameters."""
    return (HOST_BYTES_PER_PARAMETER + outer.settings.precision.bytes_per_element) * parameters
