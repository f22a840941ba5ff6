"""Where does the search of a family with too many rows begin, and which rows are next to a row?

A row is runs of stages, (mesh, stages) from the first to the last. It begins with the runs of the
best plan so far, where the family has meshes on the same islands, and with the fastest meshes one
after the other, stretched to every number of stages near by that the target can interleave.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from hetplan.plans.chosen import ChosenPlan
from hetplan.search.families.family import Family
from hetplan.search.families.space import MAX_FREE_ISLANDS, Space
from hetplan.search.interleaved.orders import stage_counts

Runs = tuple[tuple[int, int], ...]

_COUNTS_NEAR = 3
"""Numbers of stages that are tried for each beginning, those nearest to its own."""


def beginnings(
    space: Space, family: Family, islands: Sequence[str], chosen: ChosenPlan | None
) -> list[Runs]:
    """Legal rows to begin with; none twice."""
    counts, found = stage_counts(space, family), dict[Runs, None]()
    bases = [_fastest_first(space), tuple(reversed(_fastest_first(space)))]
    own = like(family, islands, chosen)
    if own:
        bases.insert(0, own)
    for base in bases:
        size = sum(stages for _, stages in base)
        for stages in sorted(counts, key=lambda each: (abs(each - size), each))[:_COUNTS_NEAR]:
            runs = _stretched(space, base, stages)
            if runs and legal(space, runs):
                found[runs] = None
    return list(found)


def like(family: Family, islands: Sequence[str], chosen: ChosenPlan | None) -> Runs:
    """The runs of a plan in this family's meshes; empty where it has none on these islands."""
    if chosen is None or len(chosen.pipelines) != 1:
        return ()
    at = {tuple(islands[i] for i in mesh.islands): m for m, mesh in enumerate(family.meshes)}
    found = []
    for names, stages in groupby(
        tuple(part.island for part in stage.parts) for stage in chosen.pipelines[0].stages
    ):
        if names not in at:
            return ()
        found.append((at[names], len(list(stages))))
    return tuple(found)


def _fastest_first(space: Space) -> Runs:
    """All stages of meshes on islands of their own, the fastest per layer first."""
    each = (space.forward + space.backward).min(axis=0)
    used, found = 0, []
    for mesh in np.argsort(each, kind="stable").tolist():
        if not used & int(space.island_mask[mesh]):
            used |= int(space.island_mask[mesh])
            found.append((mesh, int(space.max_stages[mesh])))
    return tuple(found)


def _stretched(space: Space, base: Runs, stages: int) -> Runs:
    """The same runs with so many stages together; empty where their meshes have too few."""
    count = [min(each, int(space.max_stages[mesh])) for mesh, each in base]
    while sum(count) > stages:
        # From the back: the slowest of `_fastest_first`, or the end of a plan.
        at = max(i for i, each in enumerate(count) if each > 0)
        count[at] -= min(count[at], sum(count) - stages)
    for i, (mesh, _) in enumerate(base):
        count[i] += min(int(space.max_stages[mesh]) - count[i], stages - sum(count))
    if sum(count) != stages:
        return ()
    return tuple((mesh, each) for (mesh, _), each in zip(base, count, strict=True) if each)


def legal(space: Space, runs: Runs) -> bool:
    """Islands used once, no more stages than there are, ends where the job lets them be."""
    used = 0
    for mesh, stages in runs:
        mask = int(space.island_mask[mesh])
        if used & mask or not 0 < stages <= int(space.max_stages[mesh]):
            return False
        used |= mask
    regions = [int(space.region[mesh]) for mesh, _ in runs]
    together = [region for region, _ in groupby(regions)]
    if len({i for mesh in space.family.meshes for i in mesh.islands}) > MAX_FREE_ISLANDS and (
        len(together) != len(set(together))
    ):
        return False
    return bool(space.may_be_first[runs[0][0]] and space.may_be_last[runs[-1][0]])


def neighbours(space: Space, family: Family, runs: Runs) -> Iterator[Runs]:
    """Rows one move away: runs swapped, a stage handed on, a mesh replaced, other counts."""
    found = [*_moves(space, runs)]
    size = sum(stages for _, stages in runs)
    counts = stage_counts(space, family)
    for stages in (
        max((each for each in counts if each < size), default=0),
        min((each for each in counts if each > size), default=0),
    ):
        if stages:
            found.append(_stretched(space, runs, stages))
    for each in dict.fromkeys(found):
        if each and each != runs and legal(space, each):
            yield each


def _moves(space: Space, runs: Runs) -> Iterator[Runs]:
    row = list(runs)
    for i in range(len(row)):
        for j in range(i + 1, len(row)):
            swapped = row.copy()
            swapped[i], swapped[j] = swapped[j], swapped[i]
            yield tuple(swapped)
    for i, (giver, many) in enumerate(row):
        for j, (taker, few) in enumerate(row):
            if i != j:
                moved = row.copy()
                moved[i], moved[j] = (giver, many - 1), (taker, few + 1)
                yield tuple((mesh, stages) for mesh, stages in moved if stages)
        for mesh in range(len(space.max_stages)):
            yield (*row[:i], (mesh, many), *row[i + 1 :])
            if many > 1:
                yield (*row[:i], (giver, many - 1), (mesh, 1), *row[i + 1 :])
                yield (*row[:i], (mesh, 1), (giver, many - 1), *row[i + 1 :])


def meshes_of(runs: Runs) -> tuple[int, ...]:
    """Mesh of every slot."""
    return tuple(mesh for mesh, stages in runs for _ in range(stages))


def runs_of(row: Sequence[int]) -> Runs:
    """Its runs of one mesh."""
    return tuple((mesh, len(list(slots))) for mesh, slots in groupby(row))


def units_of(space: Space, chosen: ChosenPlan) -> list[int]:
    """Layer units of the stages of a plan's first pipeline."""
    stages = chosen.pipelines[0].stages
    layers = [sum(stage.layers) for stage in stages]
    layers[0] -= space.front_layers
    layers[-1] -= space.back_layers
    return [each // space.layers_per_unit for each in layers]
