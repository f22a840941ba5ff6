"""Collectives done rank by rank and step by step on real numbers, every message written down.

Written apart from `hetplan.cost.collectives`: here a message is cut into atoms (intervals of
fractions of it), every rank has one whole number per atom, sends are collected step by step, and
the result is compared with the sum. What the sends add up to is what the closed forms must say.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, lru_cache
from itertools import pairwise, product
from math import lcm
from typing import NamedTuple

ONE = Fraction(1)


class Rank(NamedTuple):
    """Where a rank is; the order of these is the order of the ranks."""

    region: int
    island: int
    node: int
    local: int


Unit = tuple[Rank, ...]
Atoms = list[tuple[Fraction, Fraction]]
Holder = Callable[[int], Rank]
Send = tuple[Rank, Rank, int]
"""Source, target, atom."""


@lru_cache(maxsize=4096)
def units(ranks: Unit, level: int) -> tuple[Unit, ...]:
    """Ranks, nodes, islands, regions or all of them (level 0 to 4), in order."""

    def name(rank: Rank) -> tuple[int, ...]:
        return (rank.region, rank.island, rank.node, rank.local)[: 4 - level]

    found: dict[tuple[int, ...], list[Rank]] = {}
    for rank in ranks:
        found.setdefault(name(rank), []).append(rank)
    return tuple(tuple(unit) for unit in found.values())


@dataclass
class Machine:
    """Ranks with their numbers, and everything they sent."""

    ranks: tuple[Rank, ...]
    atoms: Atoms
    values: dict[Rank, list[int]]
    widths: list[int] = field(init=False)
    """Of the atoms, in parts of a message of `total`."""
    total: int = field(init=False)
    counts: dict[tuple[Rank, Rank], int] = field(default_factory=lambda: defaultdict(int))
    steps: list[dict[tuple[Rank, Rank], int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.total = lcm(*(cut.denominator for atom in self.atoms for cut in atom))
        self.widths = [int((stop - start) * self.total) for start, stop in self.atoms]

    @property
    def sent(self) -> dict[tuple[Rank, Rank], Fraction]:
        """Parts of the message, by source and target."""
        return {pair: Fraction(count, self.total) for pair, count in self.counts.items()}

    def step(self, sends: Sequence[Send], *, add: bool) -> None:
        """All of these at once: every target adds what it gets, or takes it."""
        arriving = [(target, atom, self.values[source][atom]) for source, target, atom in sends]
        loads: dict[tuple[Rank, Rank], int] = defaultdict(int)
        for source, target, atom in sends:
            if source == target:
                raise ValueError("a rank sends to itself")
            loads[source, target] += self.widths[atom]
            self.counts[source, target] += self.widths[atom]
        self.steps.append(dict(loads))
        for target, atom, value in arriving:
            self.values[target][atom] = value + (self.values[target][atom] if add else 0)

    def middle(self, atom: int) -> Fraction:
        start, stop = self.atoms[atom]
        return (start + stop) / 2


def machine(ranks: Unit, cuts: set[Fraction]) -> Machine:
    """Different numbers everywhere, so that no wrong sum is right by chance."""
    points = sorted(cuts | {Fraction(0), ONE})
    atoms = list(pairwise(points))
    values = {
        rank: [(7 * index + 3) ** 2 * (13 * atom + 5) for atom in range(len(atoms))]
        for index, rank in enumerate(ranks)
    }
    return Machine(ranks=ranks, atoms=atoms, values=values)


def sums(world: Machine) -> list[int]:
    """What every atom adds up to over all ranks."""
    return [sum(world.values[rank][a] for rank in world.ranks) for a in range(len(world.atoms))]


Block = tuple[int, int]


@dataclass
class Chain:
    """Rings of rings, as blocks (low, high) from the inside; where every byte is, by its position.

    Position 0 to 1 in a group's part of the message says which of its units owns it: the chunk
    that holds the position; the place inside the chunk is the position in the unit.
    """

    ranks: tuple[Rank, ...]
    blocks: tuple[Block, ...]
    equal: bool
    known: dict[tuple[Unit, ...], list[tuple[Fraction, Fraction]]] = field(default_factory=dict)

    def weights(self, members: tuple[Unit, ...]) -> list[Fraction]:
        if self.equal:
            return [Fraction(1, len(members))] * len(members)
        total = sum(map(len, members))
        return [Fraction(len(unit), total) for unit in members]

    def lanes(self, low: int, group: Unit) -> int:
        nodes = units(group, 1)
        return min(map(len, nodes)) if low == 0 and len(nodes) > 1 else 1

    def cuts(self) -> set[Fraction]:
        """Every place where anybody's part of the message ends."""
        found: set[Fraction] = set()
        pieces = {(Fraction(0), ONE)}
        for low, high in reversed(self.blocks):
            inner: set[tuple[Fraction, Fraction]] = set()
            for group in units(self.ranks, high):
                members = units(group, low)
                bounds = self._bounds(members)
                for start, stop in pieces:
                    for left, right in bounds:
                        lanes = self.lanes(low, group)
                        width = (stop - start) * (right - left) / lanes
                        begin = start + (stop - start) * left
                        found |= {begin + width * lane for lane in range(lanes + 1)}
                        inner.add((begin, begin + width * lanes))
            pieces = inner
        return found

    def _bounds(self, members: tuple[Unit, ...]) -> list[tuple[Fraction, Fraction]]:
        known = self.known.get(members)
        if known is not None:
            return known
        bounds, total = [], Fraction(0)
        for weight in self.weights(members):
            bounds.append((total, total + weight))
            total += weight
        self.known[members] = bounds
        return bounds

    def owner(self, members: tuple[Unit, ...], position: Fraction) -> tuple[int, Fraction]:
        """Which unit owns this position of the group's message, and where in the unit's part."""
        for index, (left, right) in enumerate(self._bounds(members)):
            if left <= position < right:
                return index, (position - left) / (right - left)
        raise ValueError(f"no unit owns {position}")

    def position(self, level: int, x: Fraction, unit: Unit) -> Fraction:
        """Position in a unit's message of this place of the whole message."""
        for low, high in reversed(self.blocks):
            if high == level:
                return x
            group = next(g for g in units(self.ranks, high) if unit[0] in g)
            _, x = self.owner(units(group, low), x)
        return x

    def holder(self, world: Machine, unit: Unit, level: int) -> Holder:
        """The rank of a unit that holds an atom once the unit has reduced inside."""

        @cache
        def find(atom: int) -> Rank:
            inside, at = unit, level
            x = self.position(level, world.middle(atom), unit)
            for low, high in reversed(self.blocks):
                if high > at:
                    continue
                members = units(inside, low)
                index, x = self.owner(members, x)
                inside, at = members[index], low
            return inside[0]

        return find

    def run(self, world: Machine, block: Block, *, reduce: bool, gather: bool) -> list[range]:
        """All rings of one block, at the same time; for each group the steps it took."""
        low, high = block
        spans = []
        for group in units(self.ranks, high):
            start = len(world.steps)
            members = units(group, low)
            if len(members) > 1:
                if reduce:
                    self._ring(world, group, block, back=False)
                if gather:
                    self._ring(world, group, block, back=True)
            spans.append(range(start, len(world.steps)))
        return spans

    def _ring(self, world: Machine, group: Unit, block: Block, *, back: bool) -> None:
        low, high = block
        members = units(group, low)
        lanes = self.lanes(low, group)
        count = len(members)
        holders = [self.holder(world, unit, low) for unit in members]
        # Per atom: lane, owner.
        where = []
        for atom in range(len(world.atoms)):
            x = self.position(high, world.middle(atom), group)
            index, rest = self.owner(members, x)
            where.append((int(rest * lanes), index))
        orders = [_ring_order(group, lane) if lanes > 1 else None for lane in range(lanes)]
        for step in range(count - 1):
            sends: list[Send] = []
            for atom, (lane, owner) in enumerate(where):
                order = orders[lane]
                seats = order if order is not None else list(range(count))
                # A chunk starts behind its owner and ends there; gathered, it starts there.
                seat = (seats.index(owner) + step + (0 if back else 1)) % count
                source, target = seats[seat], seats[(seat + 1) % count]
                sends.append((holders[source](atom), holders[target](atom), atom))
            world.step(sends, add=not back)


def _ring_order(group: Unit, lane: int) -> list[int]:
    """Ranks of a group around the ring of this lane: each lane leaves a node elsewhere."""
    order: list[int] = []
    start = 0
    for node in units(group, 1):
        order += [start + (local + lane) % len(node) for local in range(len(node))]
        start += len(node)
    return order


def chained(
    ranks: Unit, blocks: tuple[Block, ...], *, operation: str
) -> tuple[Machine, list[list[range]]]:
    """An all_reduce, reduce_scatter or all_gather by rings of rings, its result checked."""
    chain = Chain(ranks=ranks, blocks=blocks, equal=operation == "all_reduce")
    world = machine(ranks, chain.cuts())
    whole = sums(world)
    owner = chain.holder(world, ranks, 4)
    phases = []
    if operation == "all_gather":
        for atom in range(len(whole)):
            world.values[owner(atom)][atom] = whole[atom]
    if operation != "all_gather":
        for block in blocks[:-1]:
            phases.append(chain.run(world, block, reduce=True, gather=False))
        gather = operation == "all_reduce"
        phases.append(chain.run(world, blocks[-1], reduce=True, gather=gather))
    if operation == "reduce_scatter":
        shares = dict.fromkeys(ranks, Fraction(0))
        for atom, total in enumerate(whole):
            assert world.values[owner(atom)][atom] == total
            shares[owner(atom)] += world.atoms[atom][1] - world.atoms[atom][0]
        assert set(shares.values()) == {Fraction(1, len(shares))}
        return world, phases
    for block in reversed(blocks if operation == "all_gather" else blocks[:-1]):
        phases.append(chain.run(world, block, reduce=False, gather=True))
    assert all(world.values[rank] == whole for rank in ranks)
    return world, phases


def through_trees(
    ranks: Unit,
    trees: Callable[[int], Sequence[Sequence[tuple[int, int]]]],
) -> Machine:
    """An all_reduce over trees, each with its part of the message: inside nodes, over nodes, over
    islands. `trees(n)` are the (child, parent) edges over n members; every lane of a node has its
    own turn of the ranks.
    """
    nodes = units(ranks, 1)
    lanes = min(map(len, nodes)) if len(nodes) > 1 else 1
    parts = len(trees(2))
    total = parts * lanes
    world = machine(ranks, {Fraction(part, total) for part in range(total)})
    whole = sums(world)
    for part, lane in product(range(parts), range(lanes)):
        edges, _ = _joined(ranks, 0, lambda count, part=part: trees(count)[part], lane)
        atom = part * lanes + lane
        parents = dict(edges)
        assert len(parents) == len(ranks) - 1

        def depth(rank: Rank, parents: dict[Rank, Rank] = parents) -> int:
            return 1 + depth(parents[rank]) if rank in parents else 0

        for child, parent in sorted(edges, key=lambda edge: -depth(edge[0])):
            world.step([(child, parent, atom)], add=True)
        for child, parent in sorted(edges, key=lambda edge: depth(edge[0])):
            world.step([(parent, child, atom)], add=False)
    assert all(world.values[rank] == whole for rank in ranks)
    return world


def _joined(
    ranks: Unit,
    level: int,
    tree: Callable[[int], Sequence[tuple[int, int]]],
    lane: int,
) -> tuple[list[tuple[Rank, Rank]], Rank]:
    """Edges of a tree over ranks in nodes, nodes in islands, islands; and its root."""
    edges: list[tuple[Rank, Rank]] = []
    summits = []
    for region in units(ranks, 3):
        roots = []
        for island in units(region, 2):
            tops = []
            for node in units(island, 1):
                turned = [node[(seat + lane) % len(node)] for seat in range(len(node))]
                tops.append(_tree_over(turned, tree, edges))
            roots.append(_tree_over(tops, tree, edges))
        summits.append(_tree_over(roots, tree, edges))
    return edges, _tree_over(summits, tree, edges)


def _tree_over(
    members: Sequence[Rank],
    tree: Callable[[int], Sequence[tuple[int, int]]],
    edges: list[tuple[Rank, Rank]],
) -> Rank:
    found = tree(len(members))
    edges += [(members[child], members[parent]) for child, parent in found]
    (root,) = set(range(len(members))) - {child for child, _ in found}
    return members[root]


def exchanged(ranks: Unit) -> dict[tuple[Rank, Rank], Fraction]:
    """Parts of the message that an all_to_all sends, every rank to every other one."""
    part = Fraction(1, len(ranks))
    return {
        (source, target): part for source, target in product(ranks, repeat=2) if source != target
    }
