"""Trees: all_reduce over two binary trees (Sanders, Speck and Träff, Two-tree algorithms for full
bandwidth broadcast, reduction and scan, Parallel Computing 35, 2009). Inner ranks of one tree are
leaves of the other, each tree carries half of the message up and down, in K chunks that follow each
other; no rank sends more than 2 S.

Trees lie inside nodes, then join nodes, islands and regions, so every long link is crossed as
rarely as it can be. The message is cut into K chunks. The first chunk takes all hops one after the
other; the others follow it, and are held up by the port that has most to do. With the message in
one chunk, let A be the seconds of all hops together, without latencies, and B those for which the
busiest port sends; alpha is the latency of a message:

    T(K) = latencies + A / K + (K - 1) (alpha + B / K),   least near K = sqrt((A - B) / alpha)

Several lanes leave a node where it has several ranks, each with its own part of the message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from hetplan.cluster.spec import Cluster
from hetplan.cost.collectives.shape import GroupShape, IslandRanks, off_rails
from hetplan.cost.collectives.values import (
    Algorithm,
    Asking,
    CollectiveCost,
    LinkUse,
    inside_node,
    slowest,
)
from hetplan.cost.network.segments import LinkName, LinkScope, between_islands, island_link
from hetplan.cost.terms import Term, seconds_of

Edge = tuple[int, int]
"""(child, parent)."""

_MAX_CHUNKS = 1 << 20
"""A chunk of a message of a terabyte is then still larger than a packet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    """Trees or chains of one level, on one link."""

    use: LinkUse
    hops: int
    """On the longest way."""
    hop_part: float
    """Part of the message that crosses in one hop."""
    load: float
    """Largest part of the message that one device sends, all chunks of all its hops together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Edge:
    """One edge of a tree between two islands."""

    link: LinkName
    members: int
    """Of the tree."""
    regions: bool
    """Whether they are regions, not islands of one."""


def inorder_edges(members: int) -> tuple[Edge, ...]:
    """A binary tree over 0 .. members - 1 in order: even members are leaves, odd ones are not."""
    edges: list[Edge] = []
    stack: list[tuple[int, int, int]] = [(0, members, -1)]
    while stack:
        start, stop, parent = stack.pop()
        if start >= stop:
            continue
        half = 1 << (stop - start).bit_length() - 1
        root = start + half - 1
        if parent >= 0:
            edges.append((root, parent))
        stack += [(start, root, root), (root + 1, stop, root)]
    return tuple(edges)


def double_tree(members: int) -> tuple[tuple[Edge, ...], tuple[Edge, ...]]:
    """Two trees in which no member is an inner one of both: the second is the mirror image of the
    first, or for odd counts the first with its members shifted by one.
    """
    first = inorder_edges(members)
    if members % 2 == 0:
        second = tuple((members - 1 - child, members - 1 - up) for child, up in first)
    else:
        second = tuple(((child + 1) % members, (up + 1) % members) for child, up in first)
    return first, second


@lru_cache(maxsize=1024)
def _heaviest(members: int) -> float:
    """Largest part of the message that one member of two trees sends: half per edge."""
    if members > 64:
        return 2.0
    degrees = Counter(end for edges in double_tree(members) for edge in edges for end in edge)
    return max(degrees.values()) / 2


def tree_all_reduce(
    cluster: Cluster, shape: GroupShape, message_bytes: float, asking: Asking
) -> CollectiveCost:
    """Cost of an all_reduce over two binary trees."""
    lanes = _lanes(shape)
    sent = list[tuple[LinkName, float]]()
    for each in shape.islands:
        sent += _count_inside(each, 2 * message_bytes)
        both = chain.from_iterable(double_tree(each.num_nodes) if len(each.nodes) > 1 else ())
        node = island_link(each.island, LinkScope.NODE)
        sent.append((node, _detours(each, both) * message_bytes))
    across = list(_across(shape))
    sent += [(edge.link, message_bytes) for edge in across]
    levels = []
    for kind in _tree_levels(cluster, shape, across, lanes):
        slow = [
            (seconds_of(_chunked([level], message_bytes, asking, "", 1)), index)
            for index, level in enumerate(kind)
        ]
        if slow:
            levels.append(kind[max(slow)[1]])
    terms = _pipelined(levels, message_bytes, asking, "tree all_reduce")
    return CollectiveCost(
        algorithm=Algorithm.TREE, terms=tuple(terms), sent=(sent,), detail="two binary trees"
    )


def _lanes(shape: GroupShape) -> int:
    return shape.fewest_ranks if shape.num_nodes > 1 else 1


def _across(shape: GroupShape) -> Iterator[_Edge]:
    """Edges between islands: a tree over those of each region, and one over the regions' roots."""
    for number in range(2):
        roots = []
        for region in shape.regions:
            edges = double_tree(len(region))[number]
            (root,) = set(range(len(region))) - {child for child, _ in edges}
            roots.append(region[root])
            yield from _edges_over(region, edges, regions=False)
        yield from _edges_over(roots, double_tree(len(roots))[number], regions=True)


def _edges_over(
    islands: Sequence[IslandRanks], edges: Sequence[Edge], *, regions: bool
) -> Iterator[_Edge]:
    for child, up in edges:
        link = between_islands(islands[child].island, islands[up].island)
        yield _Edge(link=link, members=len(islands), regions=regions)


def _detours(each: IslandRanks, edges: Iterable[Edge]) -> float:
    """How many of these edges between an island's nodes change rails, in parts."""
    if len(each.nodes) == 1 or not each.nodes[0].rails:
        return 0.0
    own = [nodes for nodes in each.nodes for _ in range(nodes.nodes)]
    return sum(off_rails(own[child], own[up]) for child, up in edges)


def _most_off(each: IslandRanks) -> float:
    """Largest part that changes rails between two nodes."""
    return max(off_rails(one, other) for one in each.nodes for other in each.nodes)


def _count_inside(each: IslandRanks, per_edge: float) -> list[tuple[LinkName, float]]:
    """Trees inside nodes and one over the nodes."""
    node = island_link(each.island, LinkScope.NODE)
    between = island_link(each.island, LinkScope.ISLAND)
    return [
        (node, (each.num_ranks - each.num_nodes) * per_edge),
        (between, (each.num_nodes - 1) * per_edge),
    ]


def _tree_levels(
    cluster: Cluster, shape: GroupShape, edges: Sequence[_Edge], lanes: int
) -> Iterator[list[_Level]]:
    """Trees inside nodes, over nodes, over islands; those of one kind run at the same time."""
    spans = shape.num_nodes > 1
    intra, inter, rails = (dict[_Level, None]() for _ in range(3))
    for each in shape.islands:
        island = cluster.island(each.island)
        use = inside_node(island, each.most_ranks, shared=not spans)
        intra[_tree_level(use, each.most_ranks, 1.0)] = None
        use = LinkUse(link=island.inter_node, nodes=2)
        inter[_tree_level(use, each.num_nodes, 1.0 / lanes)] = None
        if (part := _most_off(each)) > 0:
            use = LinkUse(link=island.intra_node, shared=False)
            rails[_tree_level(use, each.num_nodes, part / lanes)] = None
    yield list(intra)
    yield list(inter)
    yield list(rails)
    for regions in (False, True):
        across = dict[_Level, None]()
        for edge in edges:
            if edge.regions is regions:
                link = cluster.link_between(edge.link.left, edge.link.right)
                use = LinkUse(link=link, senders=lanes, nodes=2)
                across[_tree_level(use, edge.members, 1.0 / lanes)] = None
        yield list(across)


def _tree_level(use: LinkUse, members: int, part: float) -> _Level:
    load = part * _heaviest(members) if members > 1 else 0.0
    # A hop is one half of the way, up or down.
    hops = 2 * (members.bit_length() - 1)
    return _Level(use=use, hops=hops, hop_part=load / 2, load=load)


def _pipelined(levels: list[_Level], message_bytes: float, asking: Asking, what: str) -> list[Term]:
    """Terms of a message that passes all levels in the best number of chunks."""
    levels = [level for level in levels if level.hops]
    laws = [asking.law(level.use, level.load * message_bytes) for level in levels]
    ports = [
        (law.wire_latency_seconds, level.load * message_bytes * law.seconds_per_byte)
        for level, law in zip(levels, laws, strict=True)
    ]
    hops = sum(
        level.hops * level.hop_part * message_bytes * law.seconds_per_byte
        for level, law in zip(levels, laws, strict=True)
    )

    def seconds(chunks: int) -> float:
        """What depends on the number of chunks; convex in it, because hops >= every port."""
        return hops / chunks + (chunks - 1) * max(a + b / chunks for a, b in ports)

    least, most = 1, _MAX_CHUNKS
    while least < most:
        middle = (least + most) // 2
        if seconds(middle + 1) < seconds(middle):
            least = middle + 1
        else:
            most = middle
    terms = _chunked(levels, message_bytes, asking, what, least)
    if levels:
        # All start together, so the first hop has to meet first; the others' receivers wait.
        first = levels[0]
        part = first.hop_part * message_bytes / least
        meeting = asking.send(first.use, part, what, together=True)
        terms[:1] = [meeting, terms[0].times((first.hops - 1) / first.hops)]
    return terms


def _chunked(
    levels: list[_Level], message_bytes: float, asking: Asking, what: str, chunks: int
) -> list[Term]:
    """The first chunk over all hops, then the others through the slowest port."""
    terms = [
        asking.send(level.use, level.hop_part * message_bytes / chunks, what).times(level.hops)
        for level in levels
    ]
    if chunks > 1:
        rounds = [
            asking.send(level.use, level.load * message_bytes / chunks, what).times(chunks - 1)
            for level in levels
        ]
        terms.append(slowest(rounds))
    return terms
