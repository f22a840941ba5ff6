"""Every rank to every other.

An all_to_all is n - 1 sends of S / n from every rank, to one partner after the other; S is what a
rank starts with.

Tokens that go to several experts need not go to their ranks several times (`dispatch`). DeepEP
(deepseek-ai/DeepEP, README) and HybridEP send a token once to each rank of the node that has
experts of it. Between nodes it goes once to each node, to the rank in the sender's place, which
hands it on inside the node while the next ones arrive. With N nodes, n ranks and S bytes of tokens
on each,

    inside a node   an all_to_all of S places(n)
    between nodes   the slower of an all_to_all of S places(N) among the N ranks of one place, and
                    the one of S places(n) inside the nodes: what comes in is handed on there

On H100 (DeepEP, 4096 tokens of 7168, 8 of 256 experts, 16 bit: AIConfigurator's tables) 4 nodes
take 3.5 ms, of which the NICs' part is 3.2 ms at 50 GB/s; 2 nodes 1.8 ms, where the law says 1.3:
handing on is not all hidden there. 8 nodes take 4.5 ms and stall 1 to 8 ms more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hetplan.cluster.spec import Cluster
from hetplan.cost.collectives.rings import RANK, Islands, Owners, count_units, whose_capacity
from hetplan.cost.collectives.shape import (
    GroupShape,
    IslandRanks,
    NodeRanks,
)
from hetplan.cost.collectives.values import (
    Algorithm,
    Asking,
    CollectiveCost,
    LinkUse,
    Routing,
    inside_node,
    slowest,
)
from hetplan.cost.network.segments import LinkName, LinkScope, between_islands, island_link
from hetplan.cost.terms import Term, seconds_of
from hetplan.profiling.samples import LinkOperation

_OPERATION = LinkOperation.ALL_TO_ALL


def dispatch(
    cluster: Cluster, shape: GroupShape, message_bytes: float, routing: Routing, asking: Asking
) -> CollectiveCost:
    """Cost of tokens to the ranks of their experts, or back; a rank has `message_bytes` of them."""
    to_ranks = message_bytes * routing.places(shape.num_ranks)
    nodes = shape.num_nodes
    if nodes == 1 or len(shape.islands) > 1 or shape.num_ranks % nodes:
        return direct_all_to_all(cluster, shape, to_ranks, asking)
    to_nodes = message_bytes * routing.places(nodes)
    each, inside = shape.islands[0], shape.num_ranks // nodes
    island = cluster.island(each.island)
    terms = [
        asking.collective(
            LinkUse(link=island.inter_node, nodes=2), _OPERATION, nodes, to_nodes, _OPERATION.value
        )
    ]
    if inside > 1:
        use = inside_node(island, inside, shared=False, every_pair=True)
        terms.append(asking.collective(use, _OPERATION, inside, to_ranks, _OPERATION.value))
    across = shape.num_ranks * to_nodes * (nodes - 1) / nodes
    within = shape.num_ranks * to_ranks * (inside - 1) / inside
    sent = (
        (island_link(each.island, LinkScope.ISLAND), across),
        (island_link(each.island, LinkScope.NODE), within),
    )
    return CollectiveCost(
        algorithm=Algorithm.DIRECT,
        detail="once to each node",
        terms=(slowest(terms),),
        sent=(sent,),
    )


def direct_all_to_all(
    cluster: Cluster, shape: GroupShape, message_bytes: float, asking: Asking
) -> CollectiveCost:
    """Cost of pairwise exchange between all ranks."""
    return CollectiveCost(
        algorithm=Algorithm.DIRECT,
        terms=_direct(cluster, shape, message_bytes, asking),
        sent=(_count(shape.islands, message_bytes),),
    )


def _direct(
    cluster: Cluster, shape: GroupShape, message_bytes: float, asking: Asking
) -> tuple[Term, ...]:
    """The rank that takes longest to exchange with every other one."""
    spans = shape.num_nodes > 1

    def exchange(use: LinkUse, partners: int) -> Iterator[Term]:
        if partners:
            message = message_bytes * (partners + 1) / shape.num_ranks
            yield asking.collective(use, _OPERATION, partners + 1, message, _OPERATION.value)

    worst: tuple[Term, ...] = ()
    for each in shape.islands:
        island = cluster.island(each.island)
        across = tuple(
            term
            for use, partners in _crossings(cluster, each, shape.islands).items()
            for term in exchange(use, partners)
        )
        for nodes in each.nodes:
            inside = nodes.ranks - 1 + _detours(each, nodes)
            found = (
                *exchange(
                    inside_node(island, nodes.ranks, shared=not spans, every_pair=True), inside
                ),
                *exchange(LinkUse(link=island.inter_node, nodes=2), each.num_ranks - nodes.ranks),
                *across,
            )
            if not worst or seconds_of(found) > seconds_of(worst):
                worst = found
    return worst


def _crossings(cluster: Cluster, own: IslandRanks, islands: Islands) -> dict[LinkUse, int]:
    """Partners of an island's ranks in other islands, by the link to them."""
    others = [(other, whose_capacity(cluster, own, other)) for other in islands if other is not own]
    # Over a link of regions all their islands exchange at the same time.
    region = sum(each.num_ranks for each in islands if each.region == own.region)
    there = Counter[Owners]()
    for other, owners in others:
        there[owners] += other.num_ranks
    found = dict[LinkUse, int]()
    for other, owners in others:
        # In one step of a pairwise exchange a rank has one partner.
        facing = there[owners] if owners[0] else other.num_ranks
        use = LinkUse(
            link=cluster.link_between(own.island, other.island),
            senders=min(region if owners[0] else own.num_ranks, facing),
            nodes=2,
        )
        found[use] = found.get(use, 0) + other.num_ranks
    return found


def _detours(each: IslandRanks, own: NodeRanks) -> int:
    """Partners on other rails in other nodes of the island, for the rank with most of them."""
    if not own.rails:
        return 0
    same = min(
        there - here for there, here in zip(_per_rail(each), own.rails, strict=False) if here
    )
    return each.num_ranks - own.ranks - same


def _detour_pairs(each: IslandRanks) -> int:
    """Ordered pairs of ranks in different nodes that exchange and are on different rails."""
    if not each.nodes[0].rails:
        return 0
    apart = each.num_ranks**2 - sum(nodes.nodes * nodes.ranks**2 for nodes in each.nodes)
    same = sum(rail**2 for rail in _per_rail(each))
    same -= sum(nodes.nodes * rail**2 for nodes in each.nodes for rail in nodes.rails)
    return apart - same


def _per_rail(each: IslandRanks) -> list[int]:
    """Ranks of the island on each rail."""
    count = max(len(nodes.rails) for nodes in each.nodes)
    return [
        sum(nodes.nodes * nodes.rails[rail] for nodes in each.nodes if rail < len(nodes.rails))
        for rail in range(count)
    ]


def _count(islands: Islands, message_bytes: float) -> Iterator[tuple[LinkName, float]]:
    """Every rank sends one part of the message to every other one."""
    part = message_bytes / count_units(RANK, islands)
    for each in islands:
        node = island_link(each.island, LinkScope.NODE)
        yield node, _detour_pairs(each) * part
        squares = sum(nodes.nodes * nodes.ranks**2 for nodes in each.nodes)
        yield node, (squares - each.num_ranks) * part
        yield island_link(each.island, LinkScope.ISLAND), (each.num_ranks**2 - squares) * part
    for index, one in enumerate(islands):
        for other in islands[:index]:
            both = 2 * one.num_ranks * other.num_ranks
            yield between_islands(one.island, other.island), both * part
