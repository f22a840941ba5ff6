"""Every rank to every other, and one rank to one: all_to_all and send.

    direct      n - 1 sends of S / n from every rank, to one partner after the other; S is what a
                rank starts with
    two-level   all_to_all inside every unit (node, island or region) of u ranks with everything
                that goes to partners of one number, then among the n / u ranks of one number in
                the units: the same bytes cross, in n / u - 1 messages instead of n - u

Two-level needs units of equal size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from hetplan.cluster.spec import Cluster
from hetplan.cost.collectives.layout import (
    ISLAND,
    NODE,
    RANK,
    Islands,
    Owners,
    count_units,
    whose_capacity,
)
from hetplan.cost.collectives.shape import (
    GroupShape,
    IslandRanks,
    Kind,
    NodeRanks,
    kinds_of,
    off_rails,
)
from hetplan.cost.collectives.values import Algorithm, Asking, Candidate, LinkUse, Sent, slowest
from hetplan.cost.network.segments import LinkName, LinkScope, between_islands, island_link
from hetplan.cost.terms import Term, seconds_of
from hetplan.profiling.samples import LinkOperation

_OPERATION = LinkOperation.ALL_TO_ALL


def direct_all_to_all(
    cluster: Cluster, shape: GroupShape, message_bytes: float, asking: Asking
) -> Candidate:
    """Cost of pairwise exchange between all ranks."""
    return Candidate(
        algorithm=Algorithm.DIRECT,
        terms=_direct(cluster, shape, shape.islands, RANK, message_bytes, asking),
        sent=(_count(shape.islands, RANK, message_bytes),),
    )


def two_level_all_to_all(
    cluster: Cluster, shape: GroupShape, message_bytes: float, asking: Asking
) -> Iterator[Candidate]:
    """Cost of both phases, for every level with several units of several ranks each."""
    for level, groups in ((NODE, None), (ISLAND, [(each,) for each in shape.islands])):
        sizes = set(_unit_sizes(shape, level))
        units = count_units(level, shape.islands)
        if len(sizes) > 1 or sizes == {1} or units == 1:
            continue
        if level == ISLAND and shape.num_nodes == len(shape.islands):
            continue  # the same as by nodes
        sent = list[Sent]()
        if groups is None:
            inside = [_inside_nodes(cluster, shape, message_bytes, asking, sent)]
        else:
            each = [_direct(cluster, shape, group, RANK, message_bytes, asking) for group in groups]
            inside = list(max(each, key=seconds_of))
            sent += [_count(group, RANK, message_bytes) for group in groups]
        across = _direct(cluster, shape, shape.islands, level, message_bytes, asking)
        sent.append(_count(shape.islands, level, message_bytes))
        yield Candidate(
            algorithm=Algorithm.TWO_LEVEL,
            terms=(*inside, *across),
            sent=tuple(sent),
            detail=f"inside {'nodes' if level == NODE else 'islands'}, across",
        )


def send(
    cluster: Cluster,
    shape: GroupShape,
    operation: LinkOperation,
    message_bytes: float,
    asking: Asking,
) -> Candidate:
    """Cost of a message from one rank to another, both posting together, or the receiver early."""
    islands = shape.islands
    spans = shape.num_nodes > 1
    first = cluster.island(islands[0].island)
    if len(islands) == 2:
        link = cluster.link_between(islands[0].island, islands[1].island)
        name = between_islands(islands[0].island, islands[1].island)
    else:
        link = first.inter_node if spans else first.intra_node
        scope = LinkScope.ISLAND if spans else LinkScope.NODE
        name = island_link(first.name, scope)
    sent = [(name, message_bytes)]
    together = operation is LinkOperation.SEND_RECV
    use = LinkUse(link=link, nodes=2 if spans or len(islands) == 2 else 1)
    terms = [asking.send(use, message_bytes, operation.value, together=together)]
    nodes = islands[0].nodes
    if len(islands) == 1 and len(nodes) == 2 and off_rails(nodes[0], nodes[1]) > 0:
        fabric = island_link(first.name, LinkScope.NODE)
        sent.append((fabric, message_bytes))
        use = LinkUse(link=first.intra_node, shared=False)
        terms.append(asking.send(use, message_bytes, "other rails"))
    return Candidate(algorithm=Algorithm.DIRECT, terms=tuple(terms), sent=(sent,))


def _unit_sizes(shape: GroupShape, level: int) -> Iterator[int]:
    for each in shape.islands:
        if level == ISLAND:
            yield each.num_ranks
        else:
            yield from (nodes.ranks for nodes in each.nodes)


def _inside_nodes(
    cluster: Cluster, shape: GroupShape, message_bytes: float, asking: Asking, sent: list[Sent]
) -> Term:
    """All nodes at the same time; they have equal numbers of ranks."""
    ranks = shape.fewest_ranks
    uses = dict[LinkUse, None]()
    for each in shape.islands:
        uses[LinkUse(link=cluster.island(each.island).intra_node, shared=False)] = None
        name = island_link(each.island, LinkScope.NODE)
        sent.append([(name, each.num_nodes * (ranks - 1) * message_bytes)])
    return slowest(
        asking.collective(use, _OPERATION, ranks, message_bytes, _OPERATION.value) for use in uses
    )


def _direct(
    cluster: Cluster,
    shape: GroupShape,
    islands: Islands,
    level: int,
    message_bytes: float,
    asking: Asking,
) -> tuple[Term, ...]:
    """The rank that takes longest to exchange with one rank of every other unit."""
    units = count_units(level, islands)
    spans = shape.num_nodes > 1

    def exchange(use: LinkUse, partners: int) -> Iterator[Term]:
        if partners:
            message = message_bytes * (partners + 1) / units
            yield asking.collective(use, _OPERATION, partners + 1, message, _OPERATION.value)

    worst: tuple[Term, ...] = ()
    kinds = kinds_of(cluster, islands)
    for kind in kinds:
        each = kind.first
        island = cluster.island(each.island)
        across = tuple(
            term
            for use, partners in _crossings(cluster, kind, kinds, level).items()
            for term in exchange(use, partners)
        )
        for nodes in each.nodes:
            inter = each.num_ranks - nodes.ranks if level == RANK else each.num_nodes - 1
            intra = nodes.ranks - 1 if level == RANK else 0
            detours = _detours(each, nodes, level)
            found = (
                *exchange(LinkUse(link=island.intra_node, shared=not spans), intra + detours),
                *exchange(LinkUse(link=island.inter_node, nodes=2), inter if level <= NODE else 0),
                *across,
            )
            if not worst or seconds_of(found) > seconds_of(worst):
                worst = found
    return worst


def _crossings(
    cluster: Cluster, own: Kind, kinds: Sequence[Kind], level: int
) -> dict[LinkUse, int]:
    """Partners of an island of this kind in other islands, by the link to them."""
    one = own.first
    # (an island of the kind, those of it that are not this one, their ranks and units)
    others = []
    for kind in kinds:
        less = kind is own
        other = kind.second if less else kind.first
        if other is None:
            continue
        count = kind.count - less
        ranks = kind.num_ranks - less * one.num_ranks
        nodes = kind.num_nodes - less * one.num_nodes
        units = ranks if level == RANK else nodes if level == NODE else count
        others.append((other, whose_capacity(cluster, one, other), ranks, units))
    # Over a link of regions all their islands exchange at the same time.
    region = sum(kind.num_ranks for kind in kinds if kind.first.region == one.region)
    there = Counter[Owners]()
    for _, owners, ranks, _ in others:
        there[owners] += ranks
    found = dict[LinkUse, int]()
    for other, owners, _, units in others:
        # In one step of a pairwise exchange a rank has one partner.
        facing = there[owners] if owners[0] else other.num_ranks
        use = LinkUse(
            link=cluster.link_between(one.island, other.island),
            senders=min(region if owners[0] else one.num_ranks, facing),
            nodes=2,
        )
        found[use] = found.get(use, 0) + units
    return found


def _detours(each: IslandRanks, own: NodeRanks, level: int) -> int:
    """Partners on other rails in other nodes of the island, for the rank with most of them."""
    if level == NODE:
        return sum(nodes.nodes for nodes in each.nodes if off_rails(own, nodes) > 0)
    if level != RANK or not own.rails:
        return 0
    same = min(
        there - here for there, here in zip(_per_rail(each), own.rails, strict=False) if here
    )
    return each.num_ranks - own.ranks - same


def _detour_pairs(each: IslandRanks, level: int) -> float:
    """Ordered pairs of ranks in different nodes that exchange and are on different rails."""
    if level == NODE:
        return sum(
            one.nodes * other.nodes * one.ranks * off_rails(one, other)
            for one in each.nodes
            for other in each.nodes
        )
    if level != RANK or not each.nodes[0].rails:
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


def _count(islands: Islands, level: int, message_bytes: float) -> Iterator[tuple[LinkName, float]]:
    """Every rank sends one part of the message to a rank of every other unit."""
    part = message_bytes / count_units(level, islands)
    for each in islands:
        node = island_link(each.island, LinkScope.NODE)
        yield node, _detour_pairs(each, level) * part
        if level == RANK:
            squares = sum(nodes.nodes * nodes.ranks**2 for nodes in each.nodes)
            yield node, (squares - each.num_ranks) * part
            pairs = each.num_ranks**2 - squares
        else:
            pairs = each.num_ranks * (each.num_nodes - 1) if level == NODE else 0
        between = island_link(each.island, LinkScope.ISLAND)
        yield between, pairs * part
    for index, one in enumerate(islands):
        for other in islands[:index]:
            there = one.num_ranks * count_units(level, (other,))
            back = other.num_ranks * count_units(level, (one,))
            yield between_islands(one.island, other.island), (there + back) * part
