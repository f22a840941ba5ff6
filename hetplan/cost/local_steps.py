"""What averaging the sites of local steps adds to a step (`hetplan.plans.local_steps`).

A fragment's differences are summed over all of its copies in all sites, once in H = sync_steps
steps, beside the next tau = fragment_sync_delay steps:

    exposed = max(0, seconds of the fragment's sums - tau * step)
    added   = sum over fragments of exposed / H

Over a long link a fragment of S bytes moves 2 S (1 - 1/R) bytes between R sites, whatever the ranks
(the trainer sums level by level; `hetplan.cost.collectives`). Pieces of layers that a stage holds
in several groups follow each other; different stages sum at the same time. The outer optimizer's
own pass over the weights, once in H steps, is not counted.

Memory: every rank keeps in its host's memory the weights of the last averaging and their momentum
in float32, and on the device the largest fragment's differences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hetplan.cost.estimate_values import Component, MemoryUse
from hetplan.cost.step_model.groups import copies_of, holders_of
from hetplan.cost.terms import Part, repeated, seconds_of_parts
from hetplan.job.spec import Precision
from hetplan.plans.local_steps import fragments
from hetplan.plans.plan import LayerRange, OuterSynchronisation, ReductionGroup
from hetplan.profiling.samples import LinkOperation

if TYPE_CHECKING:
    from hetplan.cost.step_model.plan import PipelineWork, PlanCosts

HOST_BYTES_PER_PARAMETER = 8.0
"""Weights and momentum in float32."""


def outer_parts(
    outer: OuterSynchronisation,
    costs: PlanCosts,
    work: Sequence[PipelineWork],
    inner_seconds: float,
) -> tuple[Part, ...]:
    """What averaging adds to every step, whose own part takes `inner_seconds`."""
    hidden = outer.fragment_sync_delay * inner_seconds
    found: list[Part] = []
    for parts in fragment_parts(outer, costs, work):
        seconds = seconds_of_parts(parts)
        if seconds > hidden:
            found += repeated(parts, (seconds - hidden) / seconds / outer.sync_steps)
    return tuple(found)


def fragment_parts(
    outer: OuterSynchronisation, costs: PlanCosts, work: Sequence[PipelineWork]
) -> Iterator[tuple[Part, ...]]:
    """The sums of each fragment's differences, nothing hidden: those of its slowest stage."""
    model = costs.settings.model
    for layers in fragments(model.num_layers, len(model.layers), outer.num_fragments):
        groups = [
            replace(group, layers=both)
            for group in outer.reduction_groups
            if (both := _common(group.layers, layers)) is not None
        ]
        by_stage: dict[tuple[int, int], list[Part]] = {}
        for group, reduction in zip(
            sorted(groups, key=lambda each: -each.layers.start),
            costs.reductions(groups, work),
            strict=True,
        ):
            parts = _sums(group, costs, work, reduction.members)
            for p, s, _ in reduction.members:
                by_stage.setdefault((p, s), []).extend(parts)
        yield tuple(max(by_stage.values(), key=seconds_of_parts, default=()))


def _sums(
    group: ReductionGroup,
    costs: PlanCosts,
    work: Sequence[PipelineWork],
    members: Sequence[tuple[int, int, float]],
) -> tuple[Part, ...]:
    """The sum of what the group's largest member holds."""
    settings = costs.settings
    replicas = [unit.replica for p, s, _ in members for unit in work[p].stages[s].units]
    copies = copies_of(settings.cluster, holders_of(replicas, expert=group.expert), 1)
    size = max(count for _, _, count in members) * Precision(group.precision).bytes_per_element
    terms = settings.known.of(
        copies.whole, LinkOperation.ALL_REDUCE, size, "all_reduce of differences"
    )
    return tuple(Part(component=Component.OUTER, term=term) for term in terms)


def _common(one: LayerRange, two: LayerRange) -> LayerRange | None:
    start, stop = max(one.start, two.start), min(one.stop, two.stop)
    return LayerRange(start=start, stop=stop) if start < stop else None


def with_outer_state(use: MemoryUse, outer: OuterSynchronisation, parameters: float) -> MemoryUse:
    """The memory of a rank with so many parameters, with what averaging keeps."""
    size = Precision(outer.reduction_groups[0].precision).bytes_per_element
    return replace(
        use,
        temporary_bytes=use.temporary_bytes + size * parameters / outer.num_fragments,
        host_bytes=use.host_bytes + HOST_BYTES_PER_PARAMETER * parameters,
    )
