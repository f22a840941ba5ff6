"""What is known of a family before any program runs: a valid bound and a guess, in microseconds.

c is a stage's forward and backward pass of one microbatch, a unit of layers costs a, L units in
all, m microbatches. Some stage has the longest c; call it K. For every plan of the family

    step >= m K                                              that stage is busy so long
    step >= S + (m - 1) K - (min(W, m) - 1) min(f, b)        S = sum of all c (1F1B only)

(`hetplan.cost.bounds`; W are the microbatches in flight, f and b that stage's passes.) K is at least
the least number with which stages of at most floor(K / a) units hold L of them:

    by islands      an island is in one mesh; no stage holds more than fit with 1 microbatch
    by position     the w-th stage from the end has w microbatches in flight

and S at least L units on the cheapest islands, as far as those have room. Embedding, head, transfers
and everything else only make steps longer. Memory is that of a middle stage without messages, which
no other stage is below. Costs of passes do not depend on dp here: other groups of a stage only slow
down. So few numbers are priced for thousands of families, and none for shapes that do not fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numba
import numpy as np

from hetplan.cost.memory.device import gradient_bytes_per_parameter
from hetplan.job.spec import Job
from hetplan.model.layer_units import LayerUnits
from hetplan.plans.chosen import Shape
from hetplan.plans.plan import RecomputeGranularity, Sharding
from hetplan.plans.targets import target
from hetplan.search.costs.placed import Placed
from hetplan.search.families.family import Family, Mesh
from hetplan.search.single.space import FIRST, LAST, MIDDLE, Floats, Ints
from hetplan.search.solver import Rough

_STEPS = 24
"""Halvings of the range of K: the bound is within 1e-7 of the range of what it could be."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """One unit of layers on one part of a mesh, by recomputation."""

    cost: tuple[float, ...]
    """Both passes."""
    least: float
    """The shorter pass over both, the largest of all choices."""
    ends: float
    """Embedding and head over one unit, both passes."""


@dataclass(frozen=True, slots=True)
class _Base:
    """What families have in common that differ in their schedules only."""

    family: Family
    """One of them; it keeps the meshes, whose identity is the key."""
    feasible: bool
    rows: Floats
    """[V, M, 8] lines of memory."""
    room: Floats
    cost: Floats
    """[V, M] both passes of one unit."""
    first: Ints
    """[M] island of the first part."""
    most: Ints
    """[M] stages."""
    stages: int
    """Most stages of all islands together."""
    least: float
    grown: float
    """What embedding and head make of K, where all stages can carry a part of them: a guess."""
    after: float
    """Seconds per part of the model that a stage holds: a guess."""
    found: dict[int, tuple[float, float]] = field(default_factory=dict)
    """(K, S) by number of positions."""


_Line = tuple[float, ...]
"""What the memory of a middle stage is made of, see `Roughs._middle`."""
_NOTHING = Rough(bound_seconds=math.inf, estimate_seconds=math.inf)


@dataclass(frozen=True, slots=True)
class Roughs:
    """Rough figures of the families of a job; keeps what they share."""

    placed: Placed
    _bases: dict[tuple[object, ...], _Base] = field(default_factory=dict, repr=False)
    _units: dict[tuple[object, ...], _Unit] = field(default_factory=dict, repr=False)
    _bytes: dict[tuple[object, ...], tuple[_Line, ...]] = field(default_factory=dict, repr=False)
    _ratios: dict[tuple[object, ...], float] = field(default_factory=dict, repr=False)

    def of(self, family: Family) -> Rough:
        """Bound and estimate; both infinite where no plan fits in memory."""
        # Families that share these share the objects; the base keeps them.
        key = (id(family.meshes), id(family.recompute), family.sharding is Sharding.NONE)
        base = self._bases.get(key)
        if base is None:
            base = self._bases[key] = self._base(family)
        if not base.feasible:
            return _NOTHING
        v, m = family.virtual_stages, family.num_microbatches
        stages, positions = base.stages, 1
        if v == 1:
            limit = self.placed.job.pin.pp or most_stages_of(
                self.placed.job, self.placed.units, family
            )
            # With virtual stages more is in flight than the position says; one always is.
            positions = stages = max(1, min(stages, limit))
        found = base.found.get(positions)
        if found is None:
            found = base.found[positions] = least_bottleneck(
                base.rows, base.room, base.cost, base.first, base.most, self.placed.units.count, m,
                positions,
            )  # fmt: skip
        longest, whole = found
        if longest == math.inf:
            return _NOTHING
        bound = m * longest
        if v == 1:
            in_flight = min(stages + family.most_extra_depth, m)
            other = whole + (m - 1) * longest - (in_flight - 1) * base.least * longest
            bound = max(bound, other)
        estimate = (m * longest + max(0.0, whole - longest) / v) * base.grown
        loading = self.placed.job.data_loading_seconds
        return Rough(
            bound_seconds=bound + loading,
            estimate_seconds=estimate + base.after * longest / whole + loading,
        )

    def _base(self, family: Family) -> _Base:
        meshes, choices = family.meshes, len(family.recompute)
        rows = [self._memory(family, mesh) for mesh in meshes]
        fits = [any(_fits(row, room) for row in lines) for lines, room in rows]
        cost = np.full((choices, len(meshes)), math.inf)
        least = ends = 0.0
        after = math.inf
        for at, mesh in enumerate(meshes):
            if fits[at]:
                unit = self._slowest(family, mesh)
                cost[:, at] = unit.cost
                least, ends = max(least, unit.least), max(ends, unit.ends)
                after = min(after, self._after(family, mesh))
        first = [mesh.islands[0] for mesh in meshes]
        most = [min(mesh.max_stages, self.placed.units.count) for mesh in meshes]
        best: dict[int, int] = {}
        for island, stages in zip(first, most, strict=True):
            best[island] = max(best.get(island, 0), stages)
        feasible = any(fits)
        return _Base(
            family=family,
            feasible=feasible,
            rows=np.array([lines for lines, _ in rows]).swapaxes(0, 1).copy()
            if feasible
            else _EMPTY,
            room=np.array([room for _, room in rows]),
            cost=cost,
            first=np.array(first, dtype=np.int64),
            most=np.array(most, dtype=np.int64),
            stages=sum(best.values()),
            least=least,
            grown=1.0 + ends / self.placed.units.count,
            after=after,
        )

    def _after(self, family: Family, mesh: Mesh) -> float:
        """A guess at the reduction of the whole model on stages of this mesh, by bytes alone."""
        placed = self.placed
        shape = mesh.shapes[0]
        island = placed.cluster.islands[mesh.islands[0]]
        copies = sum(each.dp * each.cp for each in mesh.shapes)
        link = island.inter_node
        if len(mesh.islands) > 1:
            other = placed.cluster.islands[mesh.islands[-1]]
            link = placed.cluster.link_between(island.name, other.name)
        elif shape.num_devices <= island.devices_per_node:
            link = island.intra_node
        plain, experts = placed.weights(shape).unit
        passes = 2.0 * gradient_bytes_per_parameter(placed.job)
        if family.sharding is not Sharding.NONE:
            passes = 0.5 * passes + placed.job.precision.bytes_per_element
        moved = (plain + experts) * placed.units.count * passes * (1.0 - 1.0 / copies)
        return moved / link.goodput_bytes_per_second

    def _memory(self, family: Family, mesh: Mesh) -> tuple[list[_Line], float]:
        """(eight numbers of `Lines.row` by recomputation, room) of the part with least room."""
        placed = self.placed
        copies = sum(each.dp * each.cp for each in mesh.shapes)
        sharded = family.sharding is not Sharding.NONE
        found: list[tuple[float, list[_Line], float]] = []
        for island, shape in zip(mesh.islands, mesh.shapes, strict=True):
            shards = float(copies) if sharded else 1.0
            experts = max(1.0, copies * shape.tp / (shape.ep * shape.etp)) if sharded else 1.0
            lines = [_lines(each, shards, experts) for each in self._bytes_of(family, shape)]
            place = placed.cluster.islands[island]
            room = place.memory_bytes * (1 - placed.job.memory_reserve_fraction)
            found.append((room - lines[0][0] - lines[0][1], lines, room))
        _, lines, room = min(found, key=lambda each: each[0])
        return lines, room

    def _bytes_of(self, family: Family, shape: Shape) -> tuple[_Line, ...]:
        key = (shape.tp, shape.cp, shape.ep, shape.etp, shape.microbatch_size,
               shape.sequence_parallel, family.recompute)  # fmt: skip
        found = self._bytes.get(key)
        if found is None:
            found = tuple([self._middle(shape, each) for each in family.recompute])
            self._bytes[key] = found
        return found

    def _middle(self, shape: Shape, recompute: RecomputeGranularity) -> _Line:
        """Bytes of this microbatch size from those of 1 and 2: all but a maximum are linear."""
        one, two = (
            self.placed.stage_bytes(
                Shape(
                    tp=shape.tp,
                    cp=shape.cp,
                    dp=1,
                    microbatch_size=size,
                    ep=shape.ep,
                    etp=shape.etp,
                    sequence_parallel=shape.sequence_parallel,
                ),
                recompute,
                MIDDLE,
            )
            for size in (1, 2)
        )
        # Working memory is the largest of straight lines, so convex: above its first chord.
        more = (shape.microbatch_size - 1) * (two.working_alone - one.working_alone)
        return (
            one.dense.each,
            one.routed.each,
            shape.microbatch_size * one.kept.each,
            one.working_alone + more,
            one.buffers,
            one.parameter_bytes + one.gradient_bytes,
            one.optimizer_bytes,
            one.update_bytes,
        )

    def _slowest(self, family: Family, mesh: Mesh) -> _Unit:
        """Of the part with the longest unit."""
        parts = [
            self._unit(island, shape, family.recompute)
            for island, shape in zip(mesh.islands, mesh.shapes, strict=True)
        ]
        if len(parts) == 1:
            return parts[0]
        return _Unit(
            cost=tuple(map(max, zip(*[part.cost for part in parts], strict=True))),
            least=max(part.least for part in parts),
            ends=max(part.ends for part in parts),
        )

    def _unit(
        self, island: int, shape: Shape, recompute: tuple[RecomputeGranularity, ...]
    ) -> _Unit:
        key = (island, shape.tp, shape.cp, shape.ep, shape.etp, shape.microbatch_size,
               shape.sequence_parallel, recompute)  # fmt: skip
        found = self._units.get(key)
        if found is None:
            # The fewest ranks that hold all experts; more of them are never faster.
            dp = max(1, shape.ep * shape.etp // (shape.tp * shape.cp))
            one = replace(shape, dp=dp)
            forward, backward = self.placed.unit_passes(island, one, recompute)
            cost = forward + backward
            found = self._units[key] = _Unit(
                cost=tuple(cost.tolist()),
                least=float((np.minimum(forward, backward) / cost).max()),
                ends=self._ends(island, one),
            )
        return found

    def _ends(self, island: int, shape: Shape) -> float:
        """Embedding and head over a unit of layers; of one microbatch size it is that of all."""
        key = (island, shape.tp, shape.sequence_parallel)
        found = self._ratios.get(key)
        if found is None:
            none = (RecomputeGranularity.NONE,)
            passes = self.placed.passes(island, shape, none)
            both = passes.extra_forward + passes.extra_backward
            unit = float(passes.forward[0] + passes.backward[0])
            found = self._ratios[key] = float(both[FIRST, 0] + both[LAST, 0]) / unit
        return found


_EMPTY = np.empty((0, 0, 8))


def most_stages_of(job: Job, units: LayerUnits, family: Family) -> int:
    """Most stages that the target can run: a unit in every chunk, and microbatches enough."""
    most = units.count // family.virtual_stages
    if target(job.target).fewer_microbatches_than_stages:
        return most
    return min(most, family.num_microbatches)


def _lines(base: _Line, shards: float, expert_shards: float) -> _Line:
    """As of `hetplan.cost.memory.lines.Lines.row`, for a stage of units only."""
    dense, routed, kept, working, buffers, weights, optimizer, update = base
    own = dense / shards + routed / expert_shards
    state = (dense + routed) * weights + own * optimizer
    return (buffers + working, state, -math.inf, 0.0, buffers, state + own * update, 0.0, kept)


def _fits(row: _Line, room: float) -> bool:
    """Whether one unit with one microbatch in flight does."""
    have = room * (1.0 + 1e-12)
    return row[0] + row[1] + row[7] <= have and row[4] + row[5] <= have


@numba.njit(cache=True)
def least_bottleneck(
    rows: Floats,
    room: Floats,
    cost: Floats,
    first: Ints,
    most: Ints,
    units: int,
    microbatches: int,
    positions: int,
) -> tuple[float, float]:
    """(least K, least S) with which the units find room; infinite where they find none.

    rows[V, M, 8] and room[M]: memory; cost[V, M] of one unit; first[M]: island; most[M]: stages.
    """
    cap = _caps(rows, room, units, microbatches, positions)
    choices, meshes = cost.shape
    islands = int(first.max()) + 1
    cheapest = np.full(islands, np.inf)
    holds = np.zeros(islands)
    high, low = 0.0, np.inf
    for i in range(meshes):
        for v in range(choices):
            if cap[v, i, 0] > 0:
                cheapest[first[i]] = min(cheapest[first[i]], cost[v, i])
                holds[first[i]] = max(holds[first[i]], most[i] * cap[v, i, 0])
                high = max(high, cost[v, i] * cap[v, i, 0])
                low = min(low, cost[v, i])
    if not _holds(np.inf, cost, cap, first, most, units, islands):
        return np.inf, np.inf
    low *= 1.0 - 1e-9
    for _ in range(_STEPS):
        middle = 0.5 * (low + high)
        if _holds(middle, cost, cap, first, most, units, islands):
            high = middle
        else:
            low = middle
    whole, left = 0.0, float(units)
    for at in np.argsort(cheapest):
        taken = min(left, holds[at])
        if taken > 0:
            whole += taken * cheapest[at]
            left -= taken
    return low, whole


@numba.njit(cache=True)
def _caps(rows: Floats, room: Floats, most: int, microbatches: int, positions: int) -> Floats:
    """[V, M, W] units that fit with 1 .. W microbatches in flight."""
    found = np.zeros((rows.shape[0], rows.shape[1], positions))
    for v in range(rows.shape[0]):
        for i in range(rows.shape[1]):
            r = rows[v, i]
            have = room[i] * (1.0 + 1e-12)
            fixed = min(float(most), (have - r[4]) / r[5])
            for w in range(positions):
                flight = min(w + 1, microbatches)
                fits = min(fixed, (have - r[0]) / (r[1] + flight * r[7]))
                if fits < 1.0:
                    break
                found[v, i, w] = math.floor(fits)
    return found


@numba.njit(cache=True)
def _holds(
    longest: float, cost: Floats, cap: Floats, first: Ints, most: Ints, units: int, islands: int
) -> bool:
    """Whether stages of at most this long could hold all units, by islands and by position."""
    choices, meshes, positions = cap.shape
    best = np.zeros(islands)
    at = np.zeros(positions)
    for i in range(meshes):
        for v in range(choices):
            if cap[v, i, 0] < 1.0:
                continue
            fits = np.floor(longest / cost[v, i] * (1.0 + 1e-12))
            best[first[i]] = max(best[first[i]], most[i] * min(fits, cap[v, i, 0]))
            for w in range(positions):
                if cap[v, i, w] < 1.0:
                    break
                at[w] = max(at[w], min(fits, cap[v, i, w]))
    if best.sum() < units:
        return False
    # A single position stands for all where in-flight numbers are not told apart.
    return positions == 1 or at.sum() >= units
