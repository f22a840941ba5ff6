"""Recursive halving-doubling: log2(n) exchanges of halved messages, then of doubled ones.

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
from hetplan.cost.collectives.candidate import Candidate
from hetplan.cost.collectives.layout import Owners, whose_capacity
from hetplan.cost.collectives.parts import Asking, LinkUse, slowest
from hetplan.cost.collectives.shape import GroupShape, off_rails
from hetplan.cost.collectives.values import Algorithm, ExchangeOrder
from hetplan.cost.network.link_names import LinkName, LinkScope, between_islands, island_link
from hetplan.cost.terms import Term
from hetplan.profiling.samples import LinkOperation


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
) -> Candidate:
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
    return Candidate(
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
