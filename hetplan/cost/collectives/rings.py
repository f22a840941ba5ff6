"""Rings over ranks, nodes, islands or regions: who is in them, over which links, with how much.

A group of ranks is a tree: region, island, node, rank. The levels are numbered from the inside:

    0 rank, 1 node, 2 island, 3 region, 4 the whole group

A block (low, high) is one ring per group of level `high` over its units of level `low`: (0, 1) a
ring over the ranks of every node, (1, 4) one over all nodes. A two-level algorithm is a chain of
blocks (0, a), (a, b), ..., (z, 4); the flat ring is (0, 4) alone.

Who has how much. After its reduce-scatter a node (island, region) holds the sums of its part of the
message in shards, one on each device. The ring above it then runs over units that may have unequal
numbers of devices, and so of shards: where a shard of one unit ends, that of the other is cut too,
every byte crosses once, and the device with the largest shard sets the pace. Every unit is given
an equal part of its group's message (all_reduce), or a part in proportion to its ranks
(reduce_scatter and all_gather, where every rank ends or starts with as much).

What a link is asked. A ring over n units takes n - 1 steps, and the predictor knows what a
collective of n equal ranks and S bytes costs, which sends S / n in a step. A link on which a device
sends p bytes in each step is therefore asked for a message of n p bytes: that, over the bytes of
the whole message, is the part which `Layout.uses` yields.

A ring over ranks that leaves the nodes is several rings, each with its own part of the message
and its own way out of a node: as many lanes as the emptiest node has ranks.

The order of islands and regions in a ring is the one with the fastest slowest edge. Three have only
one ring. Of more, every order of up to seven is looked at (360 rings); beyond that they stay in
order of their names.

Rings, flat or one inside the other, for n ranks and S bytes.

    flat ring         2 (n - 1) steps of S / n (all_reduce), half of them for the two others
    two-level         reduce_scatter inside every unit, all_reduce across them, all_gather inside,
                      the same inside the units where more levels are separated

Every step of a ring takes as long as its slowest link; rings of one level run at the same time.
Both forms send 2 (R - 1) S over the links between R regions. (Ring: Patarasu and Yuan, J. Parallel
Distrib. Comput. 69, 2009.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import permutations
from typing import TypeVar

from hetplan.cluster.spec import Cluster, Island, Link
from hetplan.cost.collectives.shape import GroupShape, IslandRanks, off_rails
from hetplan.cost.collectives.values import (
    Algorithm,
    Asking,
    CollectiveCost,
    LinkUse,
    Sent,
    inside_node,
    slowest,
)
from hetplan.cost.network.segments import (
    LinkName,
    LinkScope,
    between_islands,
    crosses_region_link,
    island_link,
)
from hetplan.cost.terms import Term
from hetplan.profiling.samples import LinkOperation

_MAX_TRIED = 7
_ONE_RING = 3

_T = TypeVar("_T")


def ring_order(cluster: Cluster, shape: GroupShape, message_bytes: float) -> GroupShape:
    """The shape with islands and regions in the order in which rings take them."""
    if max(len(shape.regions), *(len(region) for region in shape.regions)) <= _ONE_RING:
        return shape
    step_bytes = message_bytes / shape.num_ranks / shape.fewest_ranks

    def seconds(one: IslandRanks, two: IslandRanks) -> float:
        link = cluster.link_between(one.island, two.island)
        return link.latency_seconds + step_bytes / link.goodput_bytes_per_second

    def between(one: Islands, two: Islands) -> float:
        return max(seconds(left, right) for left in one for right in two)

    regions = [_around(region, seconds) for region in shape.regions]
    ordered = _around(regions, between)
    return GroupShape(islands=tuple(island for region in ordered for island in region))


def _around(units: Sequence[_T], seconds: Callable[[_T, _T], float]) -> tuple[_T, ...]:
    """The ring with the least slowest neighbours, then with the least sum; the first stays."""
    count = len(units)
    if not _ONE_RING < count <= _MAX_TRIED:
        return tuple(units)
    times = [[seconds(one, two) if one is not two else 0.0 for two in units] for one in units]

    def cost(order: tuple[int, ...]) -> tuple[float, float]:
        edges = [times[order[at - 1]][order[at]] for at in range(count)]
        return max(edges), sum(edges)

    # One of every two mirror images.
    orders = ((0, *rest) for rest in permutations(range(1, count)) if rest[0] < rest[-1])
    return tuple(units[at] for at in min(orders, key=cost))


RANK, NODE, ISLAND, REGION, WHOLE = range(5)

Block = tuple[int, int]
Islands = tuple[IslandRanks, ...]
Owners = tuple[bool, str, str]
"""Two regions, or two islands, and which of both they are."""
Ask = tuple[LinkUse, int, float]
"""A ring: one of its links, its units, and the part of the message that the link is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingEdges:
    """Edges of a ring that have links of one name."""

    link: LinkName
    count: float
    """A part of an edge where units of several islands face each other."""
    source_weights: float
    """Sum over these edges of the part of the message that their sources end up with."""
    target_weights: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Facing:
    """Two islands whose devices hold the same parts of the message, of which one sends."""

    left: IslandRanks
    right: IslandRanks
    part: float
    """Of what one of their units sends to the other."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A group's chain of blocks."""

    cluster: Cluster
    shape: GroupShape
    blocks: tuple[Block, ...]
    equal: bool
    """Whether units have equal parts of the message, and not parts in proportion to their ranks."""

    @cached_property
    def rings_of(self) -> dict[Block, tuple[Ask, ...]]:
        """Different rings of each block, which run at the same time, on each of their links."""
        return {block: tuple(dict.fromkeys(self._rings(block))) for block in self.blocks}

    @cached_property
    def detours_of(self) -> dict[Block, tuple[Ask, ...]]:
        """The same of what these rings send inside nodes, before every step, to reach other
        rails.
        """
        return {
            (low, high): tuple(
                dict.fromkeys(
                    (use, count_units(low, islands), part)
                    for islands in (self.groups(high) if high > NODE else ())
                    for use, part in self._detour_uses(low, islands)
                )
            )
            for low, high in self.blocks
        }

    def _rings(self, block: Block) -> Iterator[Ask]:
        low, high = block
        if high > NODE:
            for islands in self.groups(high):
                units = count_units(low, islands)
                if units > 1:
                    yield from ((use, units, part) for use, part in self.uses(low, islands))
            return
        for each in self.shape.islands:
            for nodes in each.nodes:
                if nodes.ranks > 1:
                    alone = self.shape.num_nodes == 1
                    yield (
                        inside_node(self._island(each), nodes.ranks, shared=alone),
                        nodes.ranks,
                        1.0,
                    )

    def groups(self, level: int) -> tuple[Islands, ...]:
        """The groups of a level of islands or above, as their islands."""
        if level == WHOLE:
            return (self.shape.islands,)
        if level == REGION:
            return self.shape.regions
        return tuple((each,) for each in self.shape.islands)

    def share(self, level: int, islands: Islands) -> float:
        """Largest part of the message on one device of a unit, once it is sharded inside units."""
        if level == RANK:
            return 1.0
        if level == NODE:
            return 1.0 / min(each.fewest_ranks for each in islands)
        groups = _groups_in(level, islands)
        if not self.equal:
            return 1.0 / min(count_units(RANK, group) for group in groups)
        low = next((block[0] for block in self.blocks if block[1] == level), None)
        if low is None:
            return 1.0  # nothing is sharded below the only level
        return max(self.share(low, group) / count_units(low, group) for group in groups)

    def step_share(self, low: int, islands: Islands) -> float:
        """Part of the message to ask a link for: n times the largest part of it that one device
        sends in one step of a ring over n units.
        """
        share = self.share(low, islands)
        if self.equal or low == RANK:
            return share
        # The largest chunk is under way in every step.
        sizes = _unit_ranks(low, islands)
        return share * max(sizes) * count_units(low, islands) / count_units(RANK, islands)

    def uses(self, low: int, islands: Islands) -> Iterator[tuple[LinkUse, float]]:
        """Links of the ring over the units of these islands, and the part of the message that each
        of them is asked for (see the top of this file).
        """
        nodes = count_units(NODE, islands)
        whole = self.shape.num_nodes > 1
        across = self.step_share(low, islands)
        lanes = 1.0 / self.share(low, islands)
        if low == RANK:
            if nodes > 1:
                lanes = float(min(each.fewest_ranks for each in islands))
                across = 1.0 / lanes
            for each in islands:
                if each.most_ranks > 1:
                    yield inside_node(self._island(each), each.most_ranks, shared=not whole), 1.0
        if low <= NODE:
            for each in islands:
                if each.num_nodes > 1:
                    yield LinkUse(link=self._island(each).inter_node, nodes=nodes), across
        stops = nodes if low == RANK else count_units(low, islands)
        for left, right in _cyclic(_groups_in(max(low, ISLAND), islands)):
            for use in self.crossing(left, right, lanes, stops):
                yield use, across

    def crossing(
        self, left: Islands, right: Islands, lanes: float, stops: int = 2
    ) -> Iterator[LinkUse]:
        """Links over which units of so many lanes face each other, in a ring of so many nodes."""
        shared: dict[tuple[Link, Owners], float] = {}
        for pair in self.facing(left, right):
            one, two = pair.left, pair.right
            key = (self.link(one, two), whose_capacity(self.cluster, one, two))
            shared[key] = shared.get(key, 0.0) + pair.part
        for (link, _), part in shared.items():
            yield LinkUse(link=link, senders=max(1.0, lanes * part), nodes=stops)

    def facing(self, left: Islands, right: Islands) -> list[Facing]:
        """Which islands of two regions hold the same parts of the message."""
        if len(left) == len(right) == 1:
            return [Facing(left=left[0], right=right[0], part=1.0)]
        found = []
        ends, others = self._ends(left), self._ends(right)
        i = j = 0
        start = 0.0
        while i < len(left) and j < len(right):
            stop = min(ends[i], others[j])
            if stop > start:
                found.append(Facing(left=left[i], right=right[j], part=stop - start))
            start = stop
            # Both where they end together.
            i, j = i + (ends[i] <= stop), j + (others[j] <= stop)
        return found

    def edges(self, low: int, islands: Islands) -> Iterator[RingEdges]:
        """Edges of the ring over the units of these islands."""
        units = count_units(low, islands)
        ranks = count_units(RANK, islands)
        alone = len(islands) == 1
        for each in islands:
            if low == RANK:
                closing = int(alone and each.num_nodes == 1)
                inside = each.num_ranks - each.num_nodes + closing
                yield _equal_edges(island_link(each.island, LinkScope.NODE), inside, units)
            if low <= NODE and each.num_nodes > 1:
                count = each.num_nodes - 1 + int(alone)
                name = island_link(each.island, LinkScope.ISLAND)
                yield from self._detours(low, each, units, ranks, alone)
                if low == RANK or self.equal:
                    yield _equal_edges(name, count, units)
                else:
                    total = each.num_ranks / ranks
                    yield RingEdges(
                        link=name,
                        count=count,
                        source_weights=total - (0 if alone else each.fewest_ranks / ranks),
                        target_weights=total - (0 if alone else each.most_ranks / ranks),
                    )
        for left, right in _cyclic(_groups_in(max(low, ISLAND), islands)):
            sources = self._weight(low, left, units, ranks, last=True)
            targets = self._weight(low, right, units, ranks, last=False)
            for pair in self.facing(left, right):
                yield RingEdges(
                    link=between_islands(pair.left.island, pair.right.island),
                    count=pair.part,
                    source_weights=pair.part * sources,
                    target_weights=pair.part * targets,
                )

    def _detours(
        self, low: int, each: IslandRanks, units: int, ranks: int, alone: bool
    ) -> Iterator[RingEdges]:
        """What changes rails between neighbours crosses the sender's node first."""
        even = self.equal or low == RANK
        for source, target in each.around(closed=alone):
            part = off_rails(source, target)
            yield RingEdges(
                link=island_link(each.island, LinkScope.NODE),
                count=part,
                source_weights=part / units if even else part * source.ranks / ranks,
                target_weights=part / units if even else part * target.ranks / ranks,
            )

    def _detour_uses(self, low: int, islands: Islands) -> Iterator[tuple[LinkUse, float]]:
        """Links inside nodes that bytes cross before a step between nodes of other rails, with the
        part of the message that each is asked for.
        """
        if low > NODE:
            return
        across = 1.0 if low == RANK else self.step_share(low, islands)
        if low == RANK:
            across /= min(each.fewest_ranks for each in islands)
        for each in islands:
            pairs = each.around(closed=len(islands) == 1)
            part = max((off_rails(one, other) for one, other in pairs), default=0.0)
            if part > 0:
                yield LinkUse(link=self._island(each).intra_node, shared=False), across * part

    def link(self, left: IslandRanks, right: IslandRanks) -> Link:
        """Between two islands."""
        return self.cluster.link_between(left.island, right.island)

    def _weight(self, low: int, islands: Islands, units: int, ranks: int, *, last: bool) -> float:
        """Part of the message of the unit at the end, or the beginning, of these islands."""
        if self.equal or low == RANK:
            return 1.0 / units
        if low == NODE:
            return (islands[-1].fewest_ranks if last else islands[0].most_ranks) / ranks
        return count_units(RANK, islands) / ranks

    def _ends(self, region: Islands) -> list[float]:
        """Where each island's part of its region's message ends."""
        low = RANK
        if self.equal:
            low = next(block[0] for block in self.blocks if block[0] <= ISLAND < block[1])
        counts = [count_units(low, (each,)) for each in region]
        ends, total = [], 0
        for count in counts:
            total += count
            ends.append(total / sum(counts))
        return ends

    def _island(self, each: IslandRanks) -> Island:
        return self.cluster.island(each.island)


def whose_capacity(cluster: Cluster, one: IslandRanks, two: IslandRanks) -> Owners:
    """Who shares the capacity of the link between two islands: the two themselves or, where it is
    a link of their regions, those.
    """
    if crosses_region_link(cluster, one.island, two.island):
        return True, one.region, two.region
    return False, one.island, two.island


class SameCluster:
    """A cluster as a key: itself, not one that is equal, which would take long to compare."""

    __slots__ = ("cluster",)

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def __hash__(self) -> int:
        return id(self.cluster)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameCluster) and self.cluster is other.cluster


def layouts(cluster: Cluster, shape: GroupShape, *, equal: bool) -> tuple[Layout, ...]:
    """A layout for every chain of blocks, the flat one first, the most nested one last.

    They do not depend on the message, so those of the last groups asked for are kept.
    """
    return _layouts(SameCluster(cluster), shape, equal)


@lru_cache(maxsize=2048)
def _layouts(cluster: SameCluster, shape: GroupShape, equal: bool) -> tuple[Layout, ...]:
    return tuple(
        Layout(cluster=cluster.cluster, shape=shape, blocks=blocks, equal=equal)
        for blocks in chains(shape)
    )


def chains(shape: GroupShape) -> Iterator[tuple[Block, ...]]:
    """Every chain of blocks in which each block has a ring of at least two; the flat one first,
    the one that separates all levels last.
    """
    levels = nontrivial_levels(shape)
    for chosen in range(1 << max(0, len(levels) - 1)):
        cuts = [level for bit, level in enumerate(levels[1:]) if chosen >> bit & 1]
        yield tuple(zip([RANK, *cuts], [*cuts, WHOLE], strict=True))


def nontrivial_levels(shape: GroupShape) -> list[int]:
    """Levels of units of which some group of the next level has several."""
    several = (
        any(each.most_ranks > 1 for each in shape.islands),
        any(each.num_nodes > 1 for each in shape.islands),
        any(len(region) > 1 for region in shape.regions),
        len(shape.regions) > 1,
    )
    return [level for level, has in enumerate(several) if has]


def count_units(level: int, islands: Islands) -> int:
    """Units of a level in these islands."""
    if level == RANK:
        return sum(each.num_ranks for each in islands)
    if level == NODE:
        return sum(each.num_nodes for each in islands)
    return len(_groups_in(level, islands))


def _groups_in(level: int, islands: Islands) -> list[Islands]:
    """Islands, or islands by region."""
    if level == ISLAND:
        return [(each,) for each in islands]
    regions: dict[str, list[IslandRanks]] = {}
    for each in islands:
        regions.setdefault(each.region, []).append(each)
    return [tuple(region) for region in regions.values()]


def _unit_ranks(level: int, islands: Islands) -> list[int]:
    """Ranks of the units of a level from nodes up; of equal nodes one."""
    if level == NODE:
        return [nodes.ranks for each in islands for nodes in each.nodes]
    return [count_units(RANK, group) for group in _groups_in(level, islands)]


def _cyclic(groups: Sequence[Islands]) -> Iterator[tuple[Islands, Islands]]:
    """Each with the next, the last with the first; nothing where there is one."""
    if len(groups) > 1:
        yield from zip(groups, [*groups[1:], groups[0]], strict=True)


def _equal_edges(link: LinkName, count: int, units: int) -> RingEdges:
    weights = count / units
    return RingEdges(link=link, count=count, source_weights=weights, target_weights=weights)


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
