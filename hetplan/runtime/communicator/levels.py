"""Which rank sends which part of a message to which, so that ranks in nested units sum it.

Ranks lie in units (nodes, islands, regions) that may have unequal numbers of them, units in larger
ones. From the inside out

    every unit   each rank gets, from every other one, one part of what they hold, and adds it up
    the last     two units: each sends its sums to the other, both add; more units: each gets one
                 part of every sum, and sends it to the others when it is added up
    back         each rank sends the parts that it has added up to the others of its unit

Where one unit's part ends, the others' parts that face it are cut too, so every byte crosses once.
For n ranks and S bytes 2 (n - 1) S are sent, 2 (units - 1) S of them by the last level. Every
element is added up by one rank, or by two from the same two sums: all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

Levels = Sequence[Sequence[int]]
"""From the inside out, the number of its unit for every rank; (): all ranks are one unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSum:
    """How the ranks of a group sum."""

    ranks: tuple[int, ...]
    """In the order of the group."""
    levels: tuple[tuple[int, ...], ...]
    """`Levels` of these ranks, each numbered in the order of its units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Elements of the message that one rank sends to another."""

    source: int
    """Position in the group."""
    target: int
    start: int
    stop: int
    adds: bool
    """The target adds them to its own; otherwise they replace its own."""


Phase = tuple[Move, ...]
"""Moves that do not wait for each other."""

_Owned = tuple[int, int, int]
"""Elements from, to, and the rank that has their sum over its unit."""
_Sums = Sequence[_Owned]
"""Of one unit, in the order of the elements, without gaps."""


def phases(levels: Levels, num_ranks: int, count: int) -> tuple[Phase, ...]:
    """The moves that sum a message of `count` elements among ranks in these units."""
    if count == 0:
        return ()
    units: list[_Sums] = [[(0, count, rank)] for rank in range(num_ranks)]
    numbers = list(range(num_ranks))  # of a rank's unit in `units`
    up: list[Phase] = []
    for level in [*levels, [0] * num_ranks]:
        last = len(set(level)) == 1
        outer = {label: at for at, label in enumerate(dict.fromkeys(level))}
        members: list[list[int]] = [[] for _ in outer]
        for rank, label in enumerate(level):
            if numbers[rank] not in members[outer[label]]:
                members[outer[label]].append(numbers[rank])
        moves: list[Move] = []
        merged: list[_Sums] = []
        for inner in members:
            facing = list(_facing([units[number] for number in inner]))
            if last and len(inner) == 2:
                back = reversed(up)
                return (*up, tuple(_exchange(facing)), *(_returned(phase) for phase in back))
            cut = list(_cut(facing))
            moves += _scatter(cut)
            merged.append([(start, stop, owners[at]) for start, stop, owners, at in cut])
        units, numbers = merged, [outer[label] for label in level]
        if moves:
            up.append(tuple(moves))
        if last:
            break
    return (*up, *(_returned(phase) for phase in reversed(up)))


def _facing(units: Sequence[_Sums]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Runs of elements whose sum is on one rank in every unit, and those ranks."""
    at = [0] * len(units)
    start, end = 0, units[0][-1][1]
    while start < end:
        owners = [unit[i] for unit, i in zip(units, at, strict=True)]
        stop = min(owned[1] for owned in owners)
        yield start, stop, tuple(owned[2] for owned in owners)
        at = [
            i + (owned[1] == stop and i + 1 < len(unit))
            for unit, i, owned in zip(units, at, owners, strict=True)
        ]
        start = stop


def _exchange(facing: Sequence[tuple[int, int, tuple[int, ...]]]) -> Iterator[Move]:
    for start, stop, (one, two) in facing:
        for source, target in ((one, two), (two, one)):
            yield Move(source=source, target=target, start=start, stop=stop, adds=True)


def _cut(
    facing: Sequence[tuple[int, int, tuple[int, ...]]],
) -> Iterator[tuple[int, int, tuple[int, ...], int]]:
    """One part for each of the owners: elements, all owners, which of them gets it."""
    for start, stop, owners in facing:
        count = len(owners)
        for at in range(count):
            low = start + (stop - start) * at // count
            high = start + (stop - start) * (at + 1) // count
            if low < high:
                yield low, high, owners, at


def _scatter(cut: Sequence[tuple[int, int, tuple[int, ...], int]]) -> Iterator[Move]:
    for start, stop, owners, at in cut:
        for source in owners:
            if source != owners[at]:
                yield Move(source=source, target=owners[at], start=start, stop=stop, adds=True)


def _returned(phase: Phase) -> Phase:
    """The sums, to those who sent their parts of them."""
    return tuple(
        Move(source=move.target, target=move.source, start=move.start, stop=move.stop, adds=False)
        for move in phase
    )


def chunks(count: int, parts: int) -> list[tuple[int, int]]:
    """So many elements in at most so many parts, none of them empty."""
    cuts = [count * at // parts for at in range(parts + 1)]
    return [(low, high) for low, high in pairwise(cuts) if low < high]
