"""Which meshes of a large family are worth a local search?

Neighbourhoods of a local search grow with the meshes, and most meshes of an island are worse than
another one on it. With K the least time of a stage's passes at which all islands together hold the
units, each by its best mesh (`max_stages` stages of what K and memory allow), the meshes that hold
most at a little more than K are kept, some per set of islands.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.search.space.stage_table import Links, StageTable

MANY = 48
"""Meshes above which a local search sees the likely ones only."""

_ALONE = 4
"""Meshes that are kept of an island,"""
_TOGETHER = 2
"""and of a set of islands."""
_SLACKS = (1.0, 1.15)
"""Times K, at which meshes are compared."""
IN_FLIGHT = 4
_HALVINGS = 40


def likely_meshes(
    masks: Ints, seconds: Floats, fits: Floats, most_stages: Ints, layers: int
) -> Ints:
    """Numbers of the meshes that are kept, increasing; all where they are not many.

    masks, most_stages: [M]; seconds: [V, M] both passes of a unit, infinite where none fits; fits:
    [V, M] units that a stage with some microbatches in flight holds (`IN_FLIGHT`); layers: units.
    """
    if len(masks) <= MANY:
        return np.arange(len(masks))
    islands = [1 << bit for bit in range(int(masks.max()).bit_length())]
    alone = [np.flatnonzero(masks == island) for island in islands]

    def held(longest: float) -> Floats:
        units = np.minimum(np.floor(longest / seconds), fits).max(axis=0)
        found: Floats = units * most_stages
        return found

    low, high = 0.0, float(seconds[np.isfinite(seconds)].max()) * layers
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        units = held(middle)
        enough = sum(float(units[each].max()) for each in alone if len(each)) >= layers
        low, high = (low, middle) if enough else (middle, high)
    kept: set[int] = set()
    for mask in np.unique(masks).tolist():
        here = np.flatnonzero(masks == mask)
        most = _ALONE if mask in islands else _TOGETHER
        for slack in _SLACKS:
            units = held(high * slack)[here]
            # Of equal ones the fastest; stages that need no recomputation are.
            order = np.lexsort((seconds.min(axis=0)[here], -units))
            kept.update(here[order[:most]].tolist())
    return np.array(sorted(kept), dtype=np.int64)


def part_of(space: StageTable, meshes: Ints) -> StageTable:
    """The space of these meshes alone."""
    norm = space.norm
    if norm is not None:
        norm = replace(
            norm,
            inside=norm.inside[meshes],
            links=norm.links[np.ix_(meshes, meshes)],
            node_links=norm.node_links[meshes],
        )
    return replace(
        space,
        family=replace(space.family, meshes=tuple(space.family.meshes[m] for m in meshes.tolist())),
        region=space.region[meshes],
        island_mask=space.island_mask[meshes],
        max_stages=space.max_stages[meshes],
        forward=space.forward[:, meshes],
        backward=space.backward[:, meshes],
        extra_forward=space.extra_forward[:, :, meshes],
        extra_backward=space.extra_backward[:, :, meshes],
        links=_links(space.links, np.ix_(meshes, meshes)),
        node_links=_links(space.node_links, meshes),
        stages_per_node=space.stages_per_node[meshes],
        tied=space.tied[np.ix_(meshes, meshes)],
        most_layers=space.most_layers[:, :, meshes],
        after=space.after[:, meshes],
        leaving=space.leaving[:, meshes],
        norm=norm,
        may_be_first=space.may_be_first[meshes],
        may_be_last=space.may_be_last[meshes],
    )


def _links(links: Links, at: Ints | tuple[Ints, ...]) -> Links:
    return Links(
        send_forward=links.send_forward[at],
        send_backward=links.send_backward[at],
        wire_latency=links.wire_latency[at],
        rendezvous_extra=links.rendezvous_extra[at],
    )
