"""Cheap lower bound and estimate of a family, without an order of islands; takes microseconds.

c is a stage's forward and backward pass of one microbatch, a unit of layers costs a, L units in
all, m microbatches. Some stage has the longest c; call it K. For every plan of the family

    step >= m K                                              that stage is busy so long
    step >= S + (m - 1) K - (min(W, m) - 1) min(f, b)        S = sum of all c (1F1B only)

and, where the host updates the optimizer, which takes u for a unit of layers,

    step >= m K'                                             K' as K, with a' = a + u / m for a

as every stage of n units is busy for n m a and updates for n u after that (`hetplan.cost.bounds`; W
are the microbatches in flight, f and b that stage's passes). K is at
least the least number with which stages of at most floor(K / a) units hold L of them:

    by islands      an island is in one mesh; no stage holds more than fit with 1 microbatch
    by position     the w-th stage from the end has w microbatches in flight, with chunks more

and S at least L units on the cheapest islands, as far as those have room. Embedding, head,
transfers and everything else only make steps longer. Memory is that of a middle stage without
messages, which no other stage is below. Costs of passes do not depend on dp here: other groups of a
stage only slow down. So few numbers are priced for thousands of families, and none for shapes that
do not fit.

The estimate also guesses what boundaries cost, by bytes alone: who uses all islands crosses at
least the slowest hop of the fastest tree over them (`BottleneckLinks`).

Split backward passes (`SEARCHED_SPLIT`): the first inequality holds, as a stage runs B and W for
its backward pass. The limits of memory hold too. Before the first backward pass of stage s of P,
zb-h1 has min(P - s, m) microbatches in flight, as 1F1B. zbv and dualpipev have min(2 P - 1 - s, m)
of chunk 0 and min(s + 1, m) of chunk 1, so at least min(s + 1, m) of the whole stage; then the last
unit of chunk 1 runs backward, which needs what the last unit of the stage does. Over all stages
that is one stage with w in flight for each w from 1 to P: as by position, in another order.

With several chunks a stage keeps more in flight (`least_chunked`). Of P stages of v chunks the w-th
from the end has 2 (w - 1) + (v - 1) P + 1 chunk passes in flight before its first backward
pass (at most m v), and has them in its first chunks, which are the larger ones: with n units at
least n / v for each. So a stage has room for fewer units than under 1F1B, every one has at least v,
and P is a number of stages that the target can interleave.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.memory.device import gradient_bytes_per_parameter
from hetplan.cost.step_model.end_of_step import host_update_seconds
from hetplan.kernels import kernel, order_of, sum_of
from hetplan.plans.chosen import Shape
from hetplan.plans.plan import NO_RECOMPUTE, Recompute, Sharding
from hetplan.search.space.family import Family, Kind, Mesh
from hetplan.search.space.stage_pricer import StagePricer
from hetplan.search.space.stage_table import FIRST, LAST, MIDDLE

_CHUNKED_STEPS = 20
"""Halvings of the range of K: the bound is within 1e-6 of the range of what it could be."""

_BESIDE_SLOW_HOPS = 4.0
"""Stages that wait for the slowest hops in every exchange: two of them, one leads back. A guess."""


@kernel
def room_of(
    rows: Floats, room: Floats, units: int, m: int, chunks: int, stages: int
) -> Floats:  # fmt: skip
    """[V, M, P] units that fit, by distance from the last stage."""
    found = np.zeros((rows.shape[0], rows.shape[1], stages))
    for v in range(rows.shape[0]):
        for i in range(rows.shape[1]):
            r = rows[v, i]
            have = room[i] * (1.0 + 1e-12)
            fixed = min(float(units), (have - r[4]) / r[5])
            for w in range(stages):
                passes = min(2 * w + (chunks - 1) * stages + 1, m * chunks)
                fits = math.floor(min(fixed, (have - r[0]) / (r[1] + passes / chunks * r[7])))
                if fits < chunks:
                    break
                found[v, i, w] = fits
    return found


@kernel
def _holds_chunked(
    longest: float, cost: Floats, cap: Floats, first: Ints, most: Ints, chunks: int, units: int
) -> bool:
    """Whether P stages of at most this long could hold all units, by islands and by position."""
    choices, meshes, stages = cap.shape
    best = np.zeros(int(first.max()) + 1)
    at = np.zeros(stages)
    for i in range(meshes):
        own = 0.0
        for w in range(stages):
            here = 0.0
            for v in range(choices):
                here = max(
                    here, min(math.floor(longest / cost[v, i] * (1.0 + 1e-12)), cap[v, i, w])
                )
            if here < chunks:
                break
            at[w] = max(at[w], here)
            if w < most[i]:
                own += here
        best[first[i]] = max(best[first[i]], own)
    return bool(at.min() >= chunks and sum_of(best) >= units and sum_of(at) >= units)


@kernel
def least_chunked(
    cost: Floats,
    rows: Floats,
    room: Floats,
    first: Ints,
    most: Ints,
    units: int,
    microbatches: int,
    most_chunks: int,
    stages: Ints,
    known: float,
    whole: float,
    hop: float,
    enough: float,
) -> Floats:
    """[most_chunks + 1, 2] for each number of chunks: least K, and a guess at the least step, over
    these numbers of stages; infinite where none fits.

    cost [V, M] of one unit; rows [V, M, 8] and room [M] of memory; first [M]: island; most [M]:
    stages; known: K is not below; whole: sum of all stages' passes; hop: seconds that an exchange
    over the slowest hop takes; enough: of a longer K it is not said how long, and no guess made.
    """
    # Many arguments: slices of one block's columns, which a tuple would copy for every block.
    found = np.full((most_chunks + 1, 2), np.inf)
    high = 0.0
    for i in range(cost.shape[1]):
        for v in range(cost.shape[0]):
            if cost[v, i] < np.inf:
                high = max(high, cost[v, i] * units)
    for chunks in range(2, most_chunks + 1):
        for count in stages:
            if count * chunks > units:
                break
            cap = room_of(rows, room, units, microbatches, chunks, count)
            low, top = known, high
            if not _holds_chunked(low, cost, cap, first, most, chunks, units):
                if not _holds_chunked(top, cost, cap, first, most, chunks, units):
                    continue
                if enough < top and not _holds_chunked(
                    enough, cost, cap, first, most, chunks, units
                ):
                    found[chunks, 0] = min(found[chunks, 0], enough)
                    continue
                for _ in range(_CHUNKED_STEPS):
                    middle = 0.5 * (low + top)
                    if _holds_chunked(middle, cost, cap, first, most, chunks, units):
                        top = middle
                    else:
                        low = middle
            waits = microbatches * chunks * hop * min(1.0, _BESIDE_SLOW_HOPS / count)
            guess = microbatches * low + max(0.0, whole - low) / chunks + waits
            found[chunks, 0] = min(found[chunks, 0], low)
            found[chunks, 1] = min(found[chunks, 1], guess)
    return found


_STEPS = 24
"""Halvings of the range of K: the bound is within 1e-7 of the range of what it could be."""


@kernel
def caps(rows: Floats, room: Floats, most: int, microbatches: int, positions: int) -> Floats:
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


@kernel
def holds(longest: float, cost: Floats, cap: Floats, first: Ints, most: Ints, units: int) -> bool:
    """Whether stages of at most this long could hold all units, by islands and by position."""
    choices, meshes, positions = cap.shape
    best = np.zeros(int(first.max()) + 1)
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
    if sum_of(best) < units:
        return False
    return bool(sum_of(at) >= units)


@kernel
def least_bottleneck(
    cost: Floats, cap: Floats, first: Ints, most: Ints, units: int
) -> tuple[float, float]:
    """(least K, least S) with which the units find room, which they must without a limit on K.

    cost[V, M] of one unit; cap[V, M, W]: units that fit; first[M]: island; most[M]: stages.
    """
    choices, meshes = cost.shape
    islands = int(first.max()) + 1
    cheapest = np.full(islands, np.inf)
    rooms = np.zeros(islands)
    high, low = 0.0, np.inf
    for i in range(meshes):
        for v in range(choices):
            if cap[v, i, 0] > 0:
                cheapest[first[i]] = min(cheapest[first[i]], cost[v, i])
                rooms[first[i]] = max(rooms[first[i]], most[i] * cap[v, i, 0])
                high = max(high, cost[v, i] * cap[v, i, 0])
                low = min(low, cost[v, i])
    low *= 1.0 - 1e-9
    for _ in range(_STEPS):
        middle = 0.5 * (low + high)
        if holds(middle, cost, cap, first, most, units):
            high = middle
        else:
            low = middle
    whole, left = 0.0, float(units)
    for at in order_of(cheapest):
        taken = min(left, rooms[at])
        if taken > 0:
            whole += taken * cheapest[at]
            left -= taken
    return low, whole


@dataclass(frozen=True, slots=True)
class BottleneckLinks:
    """Seconds of a transfer over the slowest hop of the fastest tree over a family's islands."""

    placed: StagePricer
    _trees: dict[tuple[tuple[int, ...], int], tuple[tuple[float, float], ...]] = field(
        default_factory=dict, repr=False
    )

    def of(self, meshes: Sequence[Mesh]) -> float:
        """Seconds of one transfer of the first mesh's shape; 0 on one island."""
        job, shape = self.placed.job, meshes[0].shapes[0]
        islands = tuple(sorted({mesh.islands[0] for mesh in meshes}))
        key = (islands, shape.num_devices)
        tree = self._trees.get(key)
        if tree is None:
            tree = self._trees[key] = self._tree(*key)
        tokens = shape.microbatch_size * job.sequence_length / shape.cp
        size = tokens * self.placed.model.hidden_size * job.precision.bytes_per_element
        return max((latency + size / rate for latency, rate in tree), default=0.0)

    def _tree(self, islands: tuple[int, ...], senders: int) -> tuple[tuple[float, float], ...]:
        """(latency, bytes per second) of its hops; islands join by latency, then by rate."""
        cluster = self.placed.cluster
        names = [cluster.islands[at].name for at in islands]
        found, joined, left = [], names[:1], names[1:]
        while left:
            hops = []
            for one in joined:
                for two in left:
                    link = cluster.link_between(one, two).among(senders)
                    hops.append((link.latency_seconds, link.goodput_bytes_per_second, two))
            latency, rate, at = min(hops, key=lambda hop: (hop[0], -hop[1]))
            found.append((latency, rate))
            joined.append(at)
            left.remove(at)
        return tuple(found)


class Way(NamedTuple):
    """What of a family's kind decides memory and passes."""

    recompute: tuple[Recompute, ...]
    sharding: Sharding
    offload: float
    sharing_ranks: int

    @classmethod
    def of(cls, each: Family | Kind) -> Way:
        """Of a family or its kind."""
        return cls(each.recompute, each.sharding, each.offload, each.sharing_ranks)


class Unit(NamedTuple):
    """One unit of layers on one part of a mesh, by recomputation."""

    forward: Floats
    backward: Floats
    ends: float
    """Embedding and head over one unit, both passes."""


CHUNKS = 8
"""Numbers of chunks that are looked at together: most families come with all of these."""

BESIDE_SLOW_HOP = 2.0
"""Stages that wait for the slowest hop twice a microbatch. A guess."""

_Recompute = tuple[Recompute, ...]
_Line = tuple[float, ...]
"""What the memory of a middle stage is made of, see `UnitCosts._middle`."""


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """Times and memory of one unit of layers for the families of a job; keeps what they share."""

    placed: StagePricer
    hops: BottleneckLinks
    _units: dict[tuple[object, ...], Unit] = field(default_factory=dict, repr=False)
    _bytes: dict[tuple[object, ...], tuple[_Line, ...]] = field(default_factory=dict, repr=False)
    _ratios: dict[tuple[object, ...], float] = field(default_factory=dict, repr=False)

    def host_seconds(self, island: int) -> float:
        """For each parameter of which the host updates the optimizer: the time is in proportion.

        0 where hosts cannot: no mesh of an offloading family lies there.
        """
        job, place = self.placed.job, self.placed.cluster.islands[island]
        if not place.can_offload:
            return 0.0
        return sum(host_update_seconds(place, job, 1.0))

    def passes_of_gradients(self, sharding: Sharding, microbatches: Ints) -> Floats:
        """Bytes per parameter that go over the links in a step of so many microbatches."""
        gradient = gradient_bytes_per_parameter(self.placed.job)
        parameter = self.placed.job.precision.bytes_per_element
        if sharding is Sharding.NONE:
            return np.full(len(microbatches), 2.0 * gradient)
        if sharding is Sharding.OPTIMIZER:
            return np.full(len(microbatches), float(gradient + parameter))
        gathered = 2.0 * parameter if sharding is Sharding.PARAMETERS else 0.0
        return (gradient + gathered) * microbatches.astype(np.float64)

    def goodput(self, mesh: Mesh) -> float:
        """Bytes per second between the copies of a stage's weights."""
        cluster = self.placed.cluster
        island = cluster.islands[mesh.islands[0]]
        link = island.inter_node
        if len(mesh.islands) > 1:
            other = cluster.islands[mesh.islands[-1]]
            link = cluster.link_between(island.name, other.name)
        elif mesh.shapes[0].num_devices <= island.devices_per_node:
            link = island.intra_node
        return link.goodput_bytes_per_second

    def bytes_of(self, island: int, shape: Shape, recompute: _Recompute) -> tuple[_Line, ...]:
        """Of a middle stage, by recomputation."""
        key = (self.placed.memory_class(island), shape.tp, shape.cp, shape.ep, shape.etp,
               shape.microbatch_size, shape.sequence_parallel, recompute)  # fmt: skip
        found = self._bytes.get(key)
        if found is None:
            found = tuple([self._middle(island, shape, each) for each in recompute])
            self._bytes[key] = found
        return found

    def _middle(self, island: int, shape: Shape, recompute: Recompute) -> _Line:
        """Bytes of this microbatch size from those of 1 and 2: all but a maximum are linear."""
        one, two = (
            self.placed.stage_bytes(
                island,
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
            one.parameter_bytes,
            one.gradient_bytes,
            one.optimizer_bytes,
            one.update_bytes,
        )

    def unit(self, island: int, shape: Shape, recompute: _Recompute) -> Unit:
        """Of one part of a mesh."""
        key = (island, shape.tp, shape.cp, shape.ep, shape.etp, shape.microbatch_size,
               shape.sequence_parallel, recompute)  # fmt: skip
        found = self._units.get(key)
        if found is None:
            one = shape.with_fewest_copies()  # more of them are never faster
            forward, backward = self.placed.unit_passes(island, one, recompute)
            found = self._units[key] = Unit(forward, backward, self._ends(island, one))
        return found

    def _ends(self, island: int, shape: Shape) -> float:
        """Embedding and head over a unit of layers: of one sequence, which is that of all."""
        key = (island, shape.tp, shape.ep, shape.etp, shape.sequence_parallel)
        found = self._ratios.get(key)
        if found is None:
            none = (NO_RECOMPUTE,)
            one = replace(shape, cp=1, dp=shape.cp * shape.dp, microbatch_size=1)
            passes = self.placed.passes(island, one, none)
            both = passes.extra_forward + passes.extra_backward
            unit = float(passes.forward[0] + passes.backward[0])
            found = self._ratios[key] = float(both[FIRST, 0] + both[LAST, 0]) / unit
        return found


T = TypeVar("T", float, Floats)


def lines_of(
    base: Sequence[T], sharding: Sharding, offload: float, own: T
) -> tuple[T | float, ...]:
    """As of `hetplan.cost.memory.lines.Lines.row`, for a stage of units only; `own`: parameters of
    a unit whose state is on one rank. What is gathered while a layer runs is left out: more fits.
    """
    dense, routed, kept, working, buffers, parameter, gradient, optimizer, update = base
    whole, level = dense + routed, tuple(Sharding).index(sharding)
    weights = (own if level >= 3 else whole) * parameter
    weights = weights + (own if level >= 2 else whole) * gradient
    on_device = 1.0 - offload
    state = weights + own * optimizer * on_device
    last = state + own * update * on_device
    return (buffers + working, state, -math.inf, 0.0, buffers, last, 0.0, kept)
