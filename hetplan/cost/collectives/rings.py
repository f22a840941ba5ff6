"""Rings, flat or one inside the other, and halving-doubling, for n ranks and S bytes.

    flat ring         2 (n - 1) steps of S / n (all_reduce), half of them for the two others
    two-level         reduce_scatter inside every unit, all_reduce across them, all_gather inside,
                      the same inside the units where more levels are separated

Every step of a ring takes as long as its slowest link; rings of one level run at the same time.
Both forms send 2 (R - 1) S over the links between R regions. (Ring: Patarasu and Yuan, J. Parallel
Distrib. Comput. 69, 2009.)

Recursive halving-doubling: log2(n) exchanges of halved messages, then of doubled ones.

    reduce_scatter   for d in order: send S / 2, S / 4, ..., S / n to the partner across bit d
    all_gather       the same backwards; all_reduce is one after the other

    single level     log2(n) alpha + (n - 1) / n S beta for each half

(Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH,
IJHPCA 19, 2005.) Ranks are numbered node by node, so the low bits are partners in one node and
the high ones partners in other islands and regions. All n / 2 pairs of a bit exchange at once: with
the bit between two regions last, n / 2 ranks send S / n in each half, S in each direction
together; with this bit first they send S / 2, which is n S / 2. It needs equal halves at every bit:
a power of two of ranks in every node, of nodes in every island, and so on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from hetplan.cluster.spec import Cluster
from hetplan.cost.collectives.layout import (
    ISLAND,
    NODE,
    RANK,
    REGION,
    WHOLE,
    Block,
    Layout,
    Owners,
    count_units,
    layouts,
    ring_order,
    whose_capacity,
)
from hetplan.cost.collectives.shape import GroupShape, off_rails
from hetplan.cost.collectives.values import (
    Algorithm,
    Asking,
    CollectiveCost,
    ExchangeOrder,
    LinkUse,
    Sent,
    slowest,
)
from hetplan.cost.network.segments import LinkName, LinkScope, between_islands, island_link
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bit:
    """One exchange: which links, and how many devices send over each in both directions."""

    uses: tuple[LinkUse, ...]
    senders: tuple[tuple[LinkName, int], ...]


def unequal_halves(shape: GroupShape) -> str | None:
    """Why halving-doubling cannot be used on this group; None where it can."""
    if any(off_rails(*pair) for each in shape.islands for pair in each.around(closed=False)):
        return "nodes with ranks on other rails than their partners"
    counts = (
        ("ranks in a node", [each.ranks for island in shape.islands for each in island.nodes]),
        ("nodes in an island", [each.num_nodes for each in shape.islands]),
        ("islands in a region", [len(region) for region in shape.regions]),
        ("regions", [len(shape.regions)]),
    )
    for what, found in counts:
        least, most = min(found), max(found)
        if least != most:
            return f"{what}: {least} here and {most} there, which makes no equal halves"
        if least & (least - 1):
            return f"{what}: {least}, which is no power of two"
    return None


def halving_doubling(
    cluster: Cluster,
    shape: GroupShape,
    operation: LinkOperation,
    message_bytes: float,
    asking: Asking,
    order: ExchangeOrder,
) -> CollectiveCost:
    """Cost of all_reduce, reduce_scatter or all_gather of a shape with equal halves."""
    bits = list(_bits(cluster, shape))
    if order is ExchangeOrder.FAR_FIRST:
        bits.reverse()
    passes = 2 if operation is LinkOperation.ALL_REDUCE else 1
    terms, sent = list[Term](), list[tuple[LinkName, float]]()
    message = message_bytes
    for bit in bits:
        message /= 2
        found = slowest(asking.send(use, message, "halving-doubling") for use in bit.uses)
        terms.append(found.times(passes))
        sent += [(link, passes * senders * message) for link, senders in bit.senders]
    return CollectiveCost(
        algorithm=Algorithm.HALVING_DOUBLING,
        terms=tuple(terms),
        sent=(sent,),
        detail=order.value,
    )


def _bits(cluster: Cluster, shape: GroupShape) -> Iterator[_Bit]:
    """From the nearest partners to the farthest."""
    islands = shape.islands
    first = islands[0]
    spans = shape.num_nodes > 1
    own = [(each, cluster.island(each.island)) for each in islands]
    for _ in range(first.most_ranks.bit_length() - 1):
        yield _Bit(
            uses=tuple(
                {LinkUse(link=island.intra_node, shared=not spans): None for _, island in own}
            ),
            senders=tuple(
                (island_link(each.island, LinkScope.NODE), each.num_ranks) for each, _ in own
            ),
        )
    for _ in range(first.num_nodes.bit_length() - 1):
        yield _Bit(
            uses=tuple({LinkUse(link=island.inter_node, nodes=2): None for _, island in own}),
            senders=tuple(
                (island_link(each.island, LinkScope.ISLAND), each.num_ranks) for each, _ in own
            ),
        )
    # Islands in order of their regions: the low bits of an island's number are in its region.
    for bit in range(len(islands).bit_length() - 1):
        pairs = [
            (islands[i], islands[i ^ (1 << bit)]) for i in range(len(islands)) if not i >> bit & 1
        ]
        senders = Counter[Owners]()
        for left, right in pairs:
            senders[whose_capacity(cluster, left, right)] += left.num_ranks
        uses = {
            LinkUse(
                link=cluster.link_between(left.island, right.island),
                senders=senders[whose_capacity(cluster, left, right)],
                nodes=2,
            ): None
            for left, right in pairs
        }
        yield _Bit(
            uses=tuple(uses),
            senders=tuple(
                (between_islands(left.island, right.island), left.num_ranks + right.num_ranks)
                for left, right in pairs
            ),
        )
