"""Rings, flat or one inside the other, for n ranks and S bytes.

    flat ring         2 (n - 1) steps of S / n (all_reduce), half of them for the two others
    two-level         reduce_scatter inside every unit, all_reduce across them, all_gather inside,
                      the same inside the units where more levels are separated

Every step of a ring takes as long as its slowest link; rings of one level run at the same time.
Both forms send 2 (R - 1) S over the links between R regions. (Ring: Patarasu and Yuan, J. Parallel
Distrib. Comput. 69, 2009.)
"""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.cluster.spec import Cluster
from hetplan.cost.collectives.layout import (
    ISLAND,
    NODE,
    RANK,
    REGION,
    WHOLE,
    Block,
    Layout,
    count_units,
    layouts,
    ring_order,
)
from hetplan.cost.collectives.shape import GroupShape
from hetplan.cost.collectives.values import (
    Algorithm,
    Asking,
    CollectiveCost,
    Sent,
    slowest,
)
from hetplan.cost.network.segments import LinkName, LinkScope, island_link
from hetplan.cost.terms import Term
from hetplan.profiling.samples import LinkOperation

RING_OPERATIONS = (
    LinkOperation.ALL_REDUCE,
    LinkOperation.REDUCE_SCATTER,
    LinkOperation.ALL_GATHER,
)

_UNITS = {RANK: "rank", NODE: "node", ISLAND: "island", REGION: "region", WHOLE: "all"}


def rings(
    cluster: Cluster,
    shape: GroupShape,
    operation: LinkOperation,
    message_bytes: float,
    asking: Asking,
) -> Iterator[CollectiveCost]:
    """Cost of the flat ring, then of every two-level form."""
    shape = ring_order(cluster, shape, message_bytes)
    for layout in layouts(cluster, shape, equal=operation is LinkOperation.ALL_REDUCE):
        blocks = layout.blocks
        terms, sent = list[Term](), list[Sent]()
        for block, asked in _phases(blocks, operation):
            terms += _longest(layout, block, asked, message_bytes, asking)
            sent.append(_phase_bytes(layout, block, asked, message_bytes))
        yield CollectiveCost(
            algorithm=Algorithm.RING if len(blocks) == 1 else Algorithm.TWO_LEVEL,
            terms=tuple(terms),
            sent=tuple(sent),
            detail=describe(blocks) if len(blocks) > 1 else "",
        )


def describe(blocks: tuple[Block, ...]) -> str:
    """Where a chain of blocks cuts the group, as in `inside nodes, inside islands, across`."""
    return ", ".join([f"inside {_UNITS[high]}s" for _, high in blocks[:-1]] + ["across"])


def _phases(
    blocks: tuple[Block, ...], operation: LinkOperation
) -> Iterator[tuple[Block, LinkOperation]]:
    """Blocks in the order of their rings, with what each does."""
    if operation is LinkOperation.ALL_GATHER:
        for block in reversed(blocks):
            yield block, operation
        return
    *below, top = blocks
    for block in below:
        yield block, LinkOperation.REDUCE_SCATTER
    yield top, operation
    if operation is LinkOperation.ALL_REDUCE:
        for block in reversed(below):
            yield block, LinkOperation.ALL_GATHER


def _longest(
    layout: Layout,
    block: Block,
    operation: LinkOperation,
    message_bytes: float,
    asking: Asking,
) -> tuple[Term, ...]:
    """The slowest ring of a block, and after it the slowest detour to other rails."""
    found = []
    for asked, what in (
        (layout.rings_of[block], operation.value),
        (layout.detours_of[block], "other rails"),
    ):
        terms = [
            asking.collective(use, operation, units, message_bytes * part, what)
            for use, units, part in asked
        ]
        if terms:
            found.append(slowest(terms))
    return tuple(found)


def _phase_bytes(
    layout: Layout, block: Block, operation: LinkOperation, message_bytes: float
) -> Iterator[tuple[LinkName, float]]:
    low, high = block
    passes = 2 if operation is LinkOperation.ALL_REDUCE else 1
    if high == NODE:
        for each in layout.shape.islands:
            sends = sum(nodes.nodes * (nodes.ranks - 1) for nodes in each.nodes)
            name = island_link(each.island, LinkScope.NODE)
            yield name, passes * sends * message_bytes
        return
    for islands in layout.groups(high):
        if count_units(low, islands) == 1:
            continue
        for edges in layout.edges(low, islands):
            # A chunk passes every edge but the one out of its owner (reduce_scatter), into it
            # (all_gather).
            count = 0.0
            if operation is not LinkOperation.ALL_GATHER:
                count += edges.count - edges.source_weights
            if operation is not LinkOperation.REDUCE_SCATTER:
                count += edges.count - edges.target_weights
            yield edges.link, count * message_bytes
