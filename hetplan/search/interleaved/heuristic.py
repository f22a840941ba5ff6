"""Heuristic of interleaved families: good plans, fast, without proof.

Which meshes, in which order, with how many stages each? A row is written as runs: (mesh, stages)
from the first stage to the last. `beginnings` are the runs of the best plan so far, where the
family has meshes on the same islands, and the fastest meshes one after the other, stretched to
every number of stages near by that the target can interleave; `neighbours` change a row.

`proportional` is a first cut of a row; `polish` moves units between slots and changes
recomputation, by replay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from hetplan.cost.arrays import Ints
from hetplan.plans.chosen import ChosenPlan
from hetplan.plans.v_schedules import stage_of
from hetplan.search.interleaved.enumerate import Runs, stage_counts
from hetplan.search.interleaved.rows import Row, passes_of
from hetplan.search.solver import RESOLUTION
from hetplan.search.space.family import Family
from hetplan.search.space.row import NEVER, region_follows
from hetplan.search.space.stage_table import StageTable


def polish(row: Row, variant: Ints, units: Ints, budget: int) -> tuple[float, Ints, Ints, int]:
    """Step, recomputation and units of the best cut met, and how many replays it took.

    The slots that are busy longest give first. At most `budget` replays.
    """
    variant, units = variant.copy(), units.copy()
    best, replays = row.seconds(variant, units), 1
    moved = best < NEVER
    while moved and replays < budget:
        moved = False
        for other, changed in _neighbours(row, variant, units):
            step = row.seconds(other, changed)
            replays += 1
            if step < best * (1.0 - RESOLUTION):
                best, variant, units, moved = step, other, changed, True
                break
            if replays >= budget:
                break
    return best, variant, units, replays


def _neighbours(row: Row, variant: Ints, units: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Cuts one move away that fit, those that relieve the busiest slots first."""
    arrays = row.arrays
    forward, backward = passes_of(arrays, variant, units)
    busy = forward.sum(axis=1) + backward.sum(axis=1)
    for giver in np.argsort(-busy, kind="stable"):
        for v in range(arrays.unit_forward.shape[1]):
            if v != variant[giver] and units[giver] <= arrays.most[giver, v]:
                other = variant.copy()
                other[giver] = v
                yield other, units
        if units[giver] <= arrays.chunks:
            continue
        for taker in np.argsort(busy, kind="stable"):
            if taker != giver and units[taker] < arrays.most[taker, variant[taker]]:
                changed = units.copy()
                changed[giver] -= 1
                changed[taker] += 1
                yield variant, changed


def proportional(row: Row) -> tuple[Ints, Ints] | None:
    """A first cut: every slot as many units as keeps all equally busy, by memory; None: none fits.

    Of every slot the recomputation that is fastest where it fits one unit per chunk, or else, where
    all together hold too little, the one that fits most.
    """
    arrays = row.arrays
    cost = arrays.unit_forward + arrays.unit_backward
    fit = arrays.most >= arrays.chunks
    if not fit.any(axis=1).all():
        return None
    variant = np.where(fit, cost, np.inf).argmin(axis=1)
    slots = np.arange(row.slots)
    if arrays.most[slots, variant].sum() < arrays.units:
        variant = arrays.most.argmax(axis=1)
    most = arrays.most[slots, variant]
    if most.sum() < arrays.units or arrays.units < arrays.chunks * row.slots:
        return None
    seconds = cost[slots, variant]
    besides = np.zeros(row.slots)
    besides[0] += arrays.first[:, variant[0]].sum()
    besides[-1] += arrays.last[:, variant[-1]].sum()
    units = np.full(row.slots, arrays.chunks, dtype=np.int64)
    for _ in range(arrays.units - arrays.chunks * row.slots):
        after = np.where(units < most, besides + (units + 1) * seconds, np.inf)
        units[int(after.argmin())] += 1
    return variant.astype(np.int64), units


_COUNTS_NEAR = 3
"""Numbers of stages that are tried for each beginning, those nearest to its own."""


def beginnings(
    space: StageTable, family: Family, islands: Sequence[str], chosen: ChosenPlan | None
) -> list[Runs]:
    """Legal rows to begin with; none twice."""
    counts, starts = stage_counts(space, family), dict[Runs, None]()
    fastest = _fastest_first(space)
    for base in (like(family, islands, chosen), fastest, tuple(reversed(fastest))):
        size = sum(stages for _, stages in base)
        for stages in sorted(counts, key=lambda count: (abs(count - size), count))[:_COUNTS_NEAR]:
            runs = _stretched(space, base, stages)
            if legal(space, runs):
                starts[runs] = None
    return list(starts)


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


def _fastest_first(space: StageTable) -> Runs:
    """All stages of meshes on islands of their own, the fastest per layer first."""
    unit = (space.forward + space.backward).min(axis=0)
    used, found = 0, []
    for mesh in np.argsort(unit, kind="stable").tolist():
        if not used & int(space.island_mask[mesh]):
            used |= int(space.island_mask[mesh])
            found.append((mesh, int(space.max_stages[mesh])))
    return tuple(found)


def _stretched(space: StageTable, base: Runs, stages: int) -> Runs:
    """The same runs with so many stages together; empty where their meshes have too few."""
    count = [min(own, int(space.max_stages[mesh])) for mesh, own in base]
    while sum(count) > stages:
        # From the back: the slowest of `_fastest_first`, or the end of a plan.
        at = max(i for i, left in enumerate(count) if left > 0)
        count[at] -= min(count[at], sum(count) - stages)
    for i, (mesh, _) in enumerate(base):
        count[i] += min(int(space.max_stages[mesh]) - count[i], stages - sum(count))
    if sum(count) != stages:
        return ()
    return tuple((mesh, own) for (mesh, _), own in zip(base, count, strict=True) if own)


def legal(space: StageTable, runs: Runs) -> bool:
    """Whether some runs are a row of the space, memory and the number of stages aside."""
    used, regions = 0, list[int]()
    for mesh, stages in runs:
        mask, region = int(space.island_mask[mesh]), int(space.region[mesh])
        if used & mask or not 0 < stages <= int(space.max_stages[mesh]):
            return False
        if space.regions_apart and not region_follows(regions, region):
            return False
        used |= mask
        regions.append(region)
    return bool(runs and space.may_be_first[runs[0][0]] and space.may_be_last[runs[-1][0]])


def neighbours(space: StageTable, family: Family, runs: Runs) -> Iterator[Runs]:
    """Rows one move away: runs swapped, a stage handed on, a mesh replaced, other counts."""
    moved = [*_moves(space, runs)]
    size, counts = sum(stages for _, stages in runs), stage_counts(space, family)
    for stages in (
        max((count for count in counts if count < size), default=0),
        min((count for count in counts if count > size), default=0),
    ):
        if stages:
            moved.append(_stretched(space, runs, stages))
    for other in dict.fromkeys(moved):
        if other != runs and legal(space, other):
            yield other


def _moves(space: StageTable, runs: Runs) -> Iterator[Runs]:
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


def runs_of(row: Sequence[int]) -> Runs:
    """Its runs of one mesh."""
    return tuple((mesh, len(list(slots))) for mesh, slots in groupby(row))


def units_of(space: StageTable, chosen: ChosenPlan) -> list[int]:
    """Layer units of the stages of a plan's first pipeline."""
    stages, schedule = chosen.pipelines[0].stages, chosen.pipelines[0].schedule
    layers = [sum(stage.layers) for stage in stages]
    layers[0] -= space.front_layers
    head = stage_of(schedule.name, schedule.virtual_stages * len(stages) - 1, len(stages))
    layers[head] -= space.back_layers
    return [held // space.layers_per_unit for held in layers]
