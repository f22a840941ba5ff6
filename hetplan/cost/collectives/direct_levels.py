"""Sums by messages of hetplan's own trainer: the levels that it cuts, and their cost.

A library's all_reduce over several islands is one ring, whose every step waits for the longest
link. The trainer of target native sums groups of several islands that talk through the host's
memory by messages of its own (`hetplan.runtime.communicator.levels`), level by level: for R units
and S bytes

    inside     every rank sends each other one its part of what they hold, and adds its own up
    the last   two units: each sends its sums to the other, S each way; more: as inside, and back
    back       every rank sends what it has added up to the others

A message has one latency, its receiver having posted long before. It goes in C chunks, so phases of
times w_p overlap, up to the link that is used longest (inside units on the way there and back):

    sum of latencies + sum of w_p / C + (C - 1) / C max(w_last, 2 w_inside)

Which levels are cut, or whether the ring is taken after all, is chosen by the cluster file's own
figures for one size of message: what runs hangs neither on samples nor on how layers are cut, and
the trainer chooses by the same function as the price.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import permutations

from hetplan.cluster.spec import Cluster, Link, Transport
from hetplan.cost.collectives.rings import (
    NODE,
    RANK,
    REGION,
    WHOLE,
    Block,
    Islands,
    Layout,
    Owners,
    SameCluster,
    count_units,
    describe,
    layouts,
    rings,
    whose_capacity,
)
from hetplan.cost.collectives.shape import GroupShape, IslandRanks, transport_of
from hetplan.cost.collectives.values import Algorithm, Asking, CollectiveCost, LinkUse
from hetplan.cost.network.segments import LinkName, LinkScope, between_islands, island_link
from hetplan.cost.terms import Term
from hetplan.predict.fit import FittedPredictor
from hetplan.predict.predictor import Prediction, Predictor, SendLaw, link_cause
from hetplan.profiling.samples import LinkOperation

CHUNK_BYTES = 2**18
"""A millisecond at 2 Gbit/s: long beside the cost of a message, short beside a long link's way."""
MAX_CHUNKS = 8
"""More would hide no more than another 1/8 of the shorter phases."""
CHOICE_BYTES = 1.6e7
"""Message by which the levels are chosen: 4 million float32 gradients."""


def num_chunks(message_bytes: float) -> int:
    """Into how many chunks a message of this size is cut."""
    return max(1, min(MAX_CHUNKS, int(message_bytes // CHUNK_BYTES)))


def summed_by_messages(cluster: Cluster, shape: GroupShape) -> Layout | None:
    """The layout by which the trainer sums; None where it leaves the sum to the library."""
    if len(shape.islands) == 1 or transport_of(cluster, shape) is not Transport.HOST_STAGED:
        return None
    return _chosen(SameCluster(cluster), shape)


@lru_cache(maxsize=2048)
def _chosen(cluster: SameCluster, shape: GroupShape) -> Layout | None:
    asking = Asking(predictor=_figures(), share=1.0)
    ring = next(rings(cluster.cluster, shape, LinkOperation.ALL_REDUCE, CHOICE_BYTES, asking))
    best, least = None, ring.seconds
    for layout in layouts(cluster.cluster, shape, equal=True):
        seconds = direct_sum(layout, CHOICE_BYTES, asking).seconds
        if seconds < least:
            best, least = layout, seconds
    return best


@cache
def _figures() -> Predictor:
    return FittedPredictor.datasheet_only()


def direct_sum(layout: Layout, message_bytes: float, asking: Asking) -> CollectiveCost:
    """Cost of an all_reduce by messages, cut where the layout is."""
    *below, top = layout.blocks
    found = [(_slowest(layout, block, message_bytes, asking), 2) for block in below]
    whole = _exchanges(layout, top)
    found.append((_slowest(layout, top, message_bytes, asking), 1 if whole else 2))
    # Not whole: a longer message never takes less time, on which the search's bounds rely.
    parts = min(float(MAX_CHUNKS), max(1.0, message_bytes / CHUNK_BYTES))
    terms = [leg.term(leg.latency_seconds + leg.wire_seconds / parts, n) for leg, n in found]
    if parts > 1:
        leg, passes = max(found, key=lambda each: each[0].wire_seconds * each[1])
        terms.append(leg.term(leg.wire_seconds * (parts - 1) / parts, passes))
    return CollectiveCost(
        algorithm=Algorithm.TWO_LEVEL if below else Algorithm.DIRECT,
        terms=tuple(terms),
        sent=tuple(_sent(layout, block, message_bytes) for block in layout.blocks),
        detail=f"{describe(layout.blocks)}, by messages",
    )


def _exchanges(layout: Layout, block: Block) -> bool:
    """Whether two units send each other all that they have, each adding up for itself."""
    low, high = block
    return high == WHOLE and count_units(low, layout.shape.islands) == 2


@dataclass(slots=True, kw_only=True)
class _Leg:
    """What one device sends in a phase, over links that it uses one after the other."""

    latency_seconds: float = 0.0
    wire_seconds: float = 0.0
    worst: tuple[Link, SendLaw] | None = None
    """The least known of the links."""

    def add(self, asking: Asking, use: LinkUse, message_bytes: float) -> None:
        law = asking.law(use, message_bytes)
        self.latency_seconds = max(self.latency_seconds, law.wire_latency_seconds)
        self.wire_seconds += message_bytes * law.seconds_per_byte
        if self.worst is None or law.log_halfwidth > self.worst[1].log_halfwidth:
            self.worst = use.link, law

    @property
    def seconds(self) -> float:
        return self.latency_seconds + self.wire_seconds

    def term(self, seconds: float, count: int) -> Term:
        if self.worst is None:
            raise ValueError("a phase in which nothing is sent has no price")
        link, law = self.worst
        return Term(
            what="sum by messages",
            cause=link_cause(link),
            count=count,
            prediction=Prediction(
                seconds=seconds,
                log_halfwidth=law.log_halfwidth,
                source=law.source,
                extrapolating=law.extrapolating,
            ),
        )


def _slowest(layout: Layout, block: Block, message_bytes: float, asking: Asking) -> _Leg:
    """Of the devices of all groups of this block."""
    low, high = block
    legs: list[_Leg] = []
    if high == NODE:
        for each in layout.shape.islands:
            if each.most_ranks > 1:
                size = message_bytes * (each.most_ranks - 1) / each.most_ranks
                legs.append(_leg(asking, _inside(layout, each), size))
    else:
        for islands in layout.groups(high):
            units = count_units(low, islands)
            if units > 1:
                part = 1.0 if _exchanges(layout, block) else 1.0 / units
                of_group = _regions if low == REGION else _islands
                legs += of_group(layout, low, islands, part * message_bytes, asking)
    return max(legs, key=lambda leg: leg.seconds)


def _islands(
    layout: Layout, low: int, islands: Islands, message_bytes: float, asking: Asking
) -> Iterator[_Leg]:
    """A device of each island: what stays in the node, in the region, what goes to each other."""
    cluster = layout.cluster
    for each in islands:
        size = layout.share(low, (each,)) * message_bytes
        if low == RANK and each.most_ranks > 1:
            yield _leg(asking, _inside(layout, each), size * (each.most_ranks - 1))
        near = _Leg()
        if low <= NODE and each.num_nodes > 1:
            here = each.fewest_ranks if low == RANK else 1
            use = LinkUse(link=cluster.island(each.island).inter_node, nodes=2)
            near.add(asking, use, size * (count_units(low, (each,)) - here))
        far: dict[tuple[Owners, Link], float] = defaultdict(float)
        for other in islands:
            if other is each:
                continue
            link = layout.link(each, other)
            sent = size * count_units(low, (other,))
            if other.region == each.region:
                near.add(asking, LinkUse(link=link, senders=each.num_ranks, nodes=2), sent)
            else:
                far[whose_capacity(cluster, each, other), link] += sent
        for (owners, link), sent in far.items():
            # All devices of a region send at the same time over what its islands share.
            senders = _ranks_in(each.region, islands) if owners[0] else each.num_ranks
            yield _leg(asking, LinkUse(link=link, senders=senders, nodes=2), sent)
        if near.worst is not None:
            yield near


def _regions(
    layout: Layout, low: int, islands: Islands, message_bytes: float, asking: Asking
) -> Iterator[_Leg]:
    """A device of each region: what goes to each other region."""
    regions = _by_region(islands)
    for one in regions:
        ranks = count_units(RANK, one)
        for other in regions:
            if other is one:
                continue
            parts: dict[tuple[Owners, Link], float] = defaultdict(float)
            for pair in layout.facing(one, other):
                owners = whose_capacity(layout.cluster, pair.left, pair.right)
                parts[owners, layout.link(pair.left, pair.right)] += pair.part
            for (_, link), part in parts.items():
                use = LinkUse(link=link, senders=max(1.0, part * ranks), nodes=2)
                yield _leg(asking, use, layout.share(low, one) * message_bytes)


def _sent(layout: Layout, block: Block, message_bytes: float) -> Iterator[tuple[LinkName, float]]:
    """Bytes of a phase, the way back included, over all links.

    Of regions that were summed inside before, parts that face each other are taken to be stretches
    of the message, island by island; where regions were cut at several levels the trainer's are
    scattered, and unlike regions' bytes may fall on other pairs of islands, as many in all.
    """
    low, high = block
    if high == NODE:
        for each in layout.shape.islands:
            name = island_link(each.island, LinkScope.NODE)
            pairs = sum(nodes.nodes * (nodes.ranks - 1) for nodes in each.nodes)
            yield name, 2.0 * pairs * message_bytes
        return
    for islands in layout.groups(high):
        units = count_units(low, islands)
        if units == 1:
            continue
        size = message_bytes * (1.0 if _exchanges(layout, block) else 2.0 / units)
        if low == REGION:
            for left, right in permutations(_by_region(islands), 2):
                for pair in layout.facing(left, right):
                    name = between_islands(pair.left.island, pair.right.island)
                    yield name, size * pair.part
            continue
        for each in islands:
            here = count_units(low, (each,))
            if low == RANK:
                alone = sum(nodes.nodes * nodes.ranks**2 for nodes in each.nodes)
                yield island_link(each.island, LinkScope.NODE), size * (alone - here)
                yield island_link(each.island, LinkScope.ISLAND), size * (here**2 - alone)
            elif low == NODE:
                yield island_link(each.island, LinkScope.ISLAND), size * here * (here - 1)
        for each, other in permutations(islands, 2):
            pairs = count_units(low, (each,)) * count_units(low, (other,))
            yield between_islands(each.island, other.island), size * pairs


def _leg(asking: Asking, use: LinkUse, message_bytes: float) -> _Leg:
    found = _Leg()
    found.add(asking, use, message_bytes)
    return found


def _inside(layout: Layout, each: IslandRanks) -> LinkUse:
    link = layout.cluster.island(each.island).intra_node
    return LinkUse(link=link, shared=layout.shape.num_nodes == 1)


def _by_region(islands: Islands) -> list[Islands]:
    regions: dict[str, list[IslandRanks]] = {}
    for each in islands:
        regions.setdefault(each.region, []).append(each)
    return [tuple(found) for found in regions.values()]


def _ranks_in(region: str, islands: Islands) -> int:
    return sum(each.num_ranks for each in islands if each.region == region)
