"""A bound of a family that knows what it costs to cross from one island to another.

`order_free_bound` fills islands as if they were one; between regions a transfer can take longer
than a stage computes. Of all boundaries of a family the shortest between each two islands counts,
and T grows until islands that can be joined within T hold all units (`least_step`). That takes some
tenths of a millisecond, so only families that the order-free bound leaves open are asked.

Symbols: T, m microbatches, S as in `order_free_bound`; the w-th stage from the end has W
microbatches in flight. With rendezvous sends a stage is busy with its transfers too
(`hetplan.cost.bounds`, (a) and (b)): of the activations that it receives, i, and of
the gradients, g,

    m (c + i + g) <= T                 S + (m - 1) (c + i + g) - (W - 1) (r c + max(i, g)) <= T

where the shorter pass is at most r c. So a stage holds fewer units the longer its transfers; and
whatever it does after its last pass (gradients that are summed up between regions) comes on top of
m (c + i + g), with all sends.

Trainers that batch their sends exchange after every turn of an interleaved pipeline of v chunks
(`hetplan.cost.replay.programs`, Exchange.MEGATRON). A middle stage receives activations in N - 1 of
these exchanges, N = m v: after passes 0 .. N - 2; gradients in as many, from the one before its
first backward pass on. Whichever of them are the same, together they take N - 1 times the longer
of i and g: how long an exchange takes over the hop above, and below, from when both sides have
posted, with both ways. At the ends of the pipeline one of the two does not count.

    m c + (N - 1) max(i, g) <= T

    room        of a mesh: its stages have different w, each with the shortest transfers of all
    loss        what the stage at one end of a mesh holds less because the boundary there leads to
                another island: the last stage sends, some stage receives. None where the stage
                cannot hold one unit, or the wire could not carry m messages within T.

An island stands in the pipeline once, with one mesh, so the islands that are used are joined by a
path. It loses no less than the tree over them that loses least. Both ends of the pipeline have one
neighbour only, which is added once.

Families with several chunks: every stage is busy for m c, no island has more room than without
chunks, and m v messages cross every boundary, one after the other in each direction; where the
trainer batches its sends a stage also waits for every exchange. Early sends: a stage does not wait
for its transfers, only the wire does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.replay.times import Exchange
from hetplan.cost.step_model.plan import exchange_of
from hetplan.kernels import kernel, sum_of
from hetplan.plans.targets import target
from hetplan.search.bounds.order_free_bound import caps
from hetplan.search.bounds.order_free_families import OrderFreeBounds
from hetplan.search.bounds.order_free_table import Bases
from hetplan.search.space.family import Family, island_masks
from hetplan.search.space.optimizer_phase import Ends
from hetplan.search.space.stage_table import (
    MIDDLE,
    RENDEZVOUS_EXTRA,
    ROLES,
    SEND_BACKWARD,
    SEND_FORWARD,
    backward_wires,
    forward_wires,
)
from hetplan.search.space.transfers import Transfers

MAX_LISTED = 12
"""Islands up to which every set of them is looked at."""

_CLOSE = 1e-3
"""Part of the bound within which it is found."""
_DOUBLINGS = 12


class CrossingInputs(NamedTuple):
    """What stages hold and what boundaries cost, M meshes of J islands (of their first parts)."""

    cost: Floats
    """[V, M] both passes of one unit."""
    cap: Floats
    """[V, M, W] units that fit with 1 .. W microbatches in flight."""
    first: Ints
    """[M] island."""
    most: Ints
    """[M] stages."""
    into: Floats
    """[M, J] least serial seconds of activations from an island."""
    back: Floats
    """[M, J] least serial seconds of gradients from an island."""
    least: Floats
    """[2, M] of both, over all boundaries that a stage of the mesh can have."""
    wire: Floats
    """[J, J] least seconds that a message occupies the wire between two islands."""
    after: Floats
    """[M, L + 1] least seconds after a stage's last pass, growing; 0 where it is not known."""
    units: int
    microbatches: int
    messages: int
    """That cross every boundary in one direction."""
    whole: float
    """S; negative: the second inequality does not hold (several chunks)."""
    shorter: float
    """r"""
    extra: int
    """Most microbatches in flight beyond the schedule's own."""
    chunks: int = 1
    """Units that every stage holds at least."""
    exchanges: int = 0
    """N - 1 where transfers of both directions are exchanged together."""


@kernel
def _fits(h: CrossingInputs, limit: float, mesh: int, w: int, i: float, g: float) -> float:
    """Units that the w-th stage from the end (from 0) holds within the limit."""
    m = h.microbatches
    waits = h.exchanges * max(i, g) if h.exchanges > 0 else m * (i + g)
    most = (limit - waits) / m
    if h.whole >= 0.0 and m > 1:
        more = min(w + h.extra, m - 1)
        spare = limit - h.whole - (m - 1) * (i + g) + more * max(i, g)
        most = min(most, spare / (m - 1 - more * h.shorter))
    found = 0.0
    if most > 0.0:
        for v in range(h.cost.shape[0]):
            held = min(math.floor(most / h.cost[v, mesh] * (1.0 + 1e-9)), h.cap[v, mesh, w])
            # What is left for passes, less the end of the step of so many units.
            spare = (limit * (1.0 + 1e-9) - waits) / m
            while held > found and held * h.cost[v, mesh] + h.after[mesh, int(held)] / m > spare:
                held -= 1.0
            found = max(found, held)
    return found if found >= h.chunks else 0.0


@kernel
def _profile(h: CrossingInputs, limit: float, mesh: int, i: float, g: float, out: Floats) -> None:
    """out[w]: most units of a stage that is the w-th of its mesh, or one in front of that."""
    best = 0.0
    for w in range(out.shape[0] - 1, -1, -1):
        best = max(best, _fits(h, limit, mesh, w, i, g))
        out[w] = best


@kernel
def _mesh(
    h: CrossingInputs, limit: float, mesh: int, at: Floats, ends: Floats, lost: Floats
) -> float:  # fmt: skip
    """Units on all stages of a mesh; fills at[w], ends [2] and lost [2, J] (into, back)."""
    positions = h.cap.shape[2]
    stages = min(h.most[mesh], positions)
    i, g = h.least[0, mesh], h.least[1, mesh]
    usual, other = np.empty(positions), np.empty(positions)
    _profile(h, limit, mesh, i, g, usual)
    for w in range(positions):
        at[w] = max(at[w], _fits(h, limit, mesh, w, i, g))
    ends[0] = max(ends[0], _fits(h, limit, mesh, 0, i, 0.0) - usual[0])
    _profile(h, limit, mesh, 0.0, g, other)
    for w in range(stages):
        ends[1] = max(ends[1], other[w] - usual[w])
    for j in range(lost.shape[1]):
        lost[:, j] = np.inf
        if j == h.first[mesh]:
            continue
        # Where a mesh has one stage both ends are the same: each counts for a half.
        part = 0.5 if h.most[mesh] == 1 else 1.0
        _profile(h, limit, mesh, max(i, h.into[mesh, j]), g, other)
        if other[0] >= 1.0:
            lost[0, j] = part * (usual[:stages] - other[:stages]).min()
        _profile(h, limit, mesh, i, max(g, h.back[mesh, j]), other)
        if other[0] >= 1.0:
            lost[1, j] = part * (usual[0] - other[0])
    return float(sum_of(usual[:stages]))


@kernel
def tree(loss: Floats, chosen: Ints, most: float) -> float:
    """Least sum of losses that joins the islands; infinite above `most`."""
    count = chosen.shape[0]
    near = np.empty(count)
    for k in range(count):
        near[k] = loss[chosen[0], chosen[k]]
    near[0] = -1.0
    total = 0.0
    for _ in range(count - 1):
        best, at = np.inf, -1
        for k in range(count):
            if near[k] >= 0.0 and near[k] < best:
                best, at = near[k], k
        total += best
        if at < 0 or total > most:
            return np.inf
        near[at] = -1.0
        for k in range(count):
            if near[k] >= 0.0:
                near[k] = min(near[k], loss[chosen[at], chosen[k]])
    return total


@kernel
def joined(room: Floats, loss: Floats, need: float) -> bool:
    """Whether islands that can be joined have room enough."""
    some = np.flatnonzero(room > 0.0)
    if sum_of(room) < need:
        return False
    count = some.shape[0]
    if count == 0:
        return True  # what the ends of the pipeline hold beyond their room is enough
    if tree(loss, some, sum_of(room) - need) < np.inf:
        return True
    if count > MAX_LISTED:
        return _reached(room, loss, need)
    if _alone(room, loss, some) < need:
        return False
    if _fewer(room, loss, some, need):
        return True
    for mask in range(1, 1 << count):
        have, size = 0.0, 0
        for k in range(count):
            if mask >> k & 1:
                have += room[some[k]]
                size += 1
        if have < need:
            continue
        chosen = np.empty(size, np.int64)
        size = 0
        for k in range(count):
            if mask >> k & 1:
                chosen[size] = some[k]
                size += 1
        if tree(loss, chosen, have - need) < np.inf:
            return True
    return False


@kernel
def _alone(room: Floats, loss: Floats, some: Ints) -> float:
    """Most units on islands that are joined, if each but one loses what its best boundary does."""
    total, spared = 0.0, 0.0
    for i in some:
        least = np.inf
        for j in some:
            if i != j:
                least = min(least, loss[i, j])
        # One that is not joined stands alone.
        spared = max(spared, min(least, room[i]))
        total += max(0.0, room[i] - least)
    return total + spared


@kernel
def _fewer(room: Floats, loss: Floats, some: Ints, need: float) -> bool:
    """Whether islands that are joined have room enough, leaving out one after the other: each time
    the one without which most is left. A yes is certain, a no is none.
    """
    chosen = some.copy()
    while chosen.shape[0] > 1:
        best, at = -np.inf, -1
        for k in range(chosen.shape[0]):
            left = np.concatenate((chosen[:k], chosen[k + 1 :]))
            have = sum_of(room[left])
            if have < need:
                continue
            if tree(loss, left, have - need) < np.inf:
                return True
            value = have - tree(loss, left, 1e300)
            if value > best:
                best, at = value, k
        if at < 0:
            return False
        chosen = np.concatenate((chosen[:at], chosen[at + 1 :]))
    return False


@kernel
def _reached(room: Floats, loss: Floats, need: float) -> bool:
    """The same of many islands: what can be joined at all, at no loss."""
    count = room.shape[0]
    seen = np.zeros(count, np.bool_)
    for start in range(count):
        if seen[start]:
            continue
        have, todo = 0.0, [start]
        seen[start] = True
        while len(todo) > 0:
            one = todo.pop()
            have += room[one]
            for two in range(count):
                if not seen[two] and loss[one, two] < np.inf:
                    seen[two] = True
                    todo.append(two)
        if have >= need:
            return True
    return False


@kernel
def _holds(h: CrossingInputs, limit: float) -> bool:
    """Whether there may be a plan with a step of at most `limit`."""
    meshes, positions = h.cost.shape[1], h.cap.shape[2]
    islands = h.wire.shape[0]
    own, lost = np.zeros(meshes), np.zeros((meshes, 2, islands))
    at, ends = np.zeros(positions), np.zeros(2)
    for mesh in range(meshes):
        if h.chunks == 1 and _fits(h, limit, mesh, 0, 0.0, 0.0) >= h.units:
            return True  # on one stage
        own[mesh] = _mesh(h, limit, mesh, at, ends, lost[mesh])
    need = h.units - sum_of(ends)
    if sum_of(at) < need:
        return False
    room = np.zeros(islands)
    for mesh in range(meshes):
        room[h.first[mesh]] = max(room[h.first[mesh]], own[mesh])
    # An island loses what one of its meshes does, and has what it has less than the best.
    side = np.full((2, islands, islands), np.inf)
    for mesh in range(meshes):
        i = h.first[mesh]
        for j in range(islands):
            for d in range(2):
                worse = 0.5 * (room[i] - own[mesh]) + lost[mesh, d, j]
                side[d, i, j] = min(side[d, i, j], worse)
    loss = np.full((islands, islands), np.inf)
    for i in range(islands):
        for j in range(islands):
            # A boundary that leads from i to j.
            if i != j and h.messages * h.wire[i, j] <= limit * (1.0 + 1e-9):
                both = max(0.0, side[1, i, j] + side[0, j, i])
                loss[i, j] = min(loss[i, j], both)
                loss[j, i] = min(loss[j, i], both)
    return bool(joined(room, loss, need * (1.0 - 1e-9)))


@kernel
def least_step(h: CrossingInputs, known: float, enough: float = np.inf) -> float:
    """No plan has a shorter step; `known` is such a bound too. `enough` where that is no step: how
    much longer it must be is not looked for.
    """
    low = known
    if low >= enough or _holds(h, low):
        return low
    if enough < np.inf and not _holds(h, enough):
        return enough
    high = low
    for _ in range(_DOUBLINGS):
        low, high = high, min(2.0 * high, enough)
        if _holds(h, high):
            break
    else:
        return high
    while high - low > _CLOSE * high:
        middle = 0.5 * (low + high)
        if _holds(h, middle):
            high = middle
        else:
            low = middle
    return low


_MANY = 48
"""Meshes above which boundaries are taken as free: pricing all pairs takes longer than a proof."""

_MORE = 1.01
"""A bound that is a little more than enough still is when the best plan gets a new price."""

_FOR_EVER = 1e30
"""Seconds."""


class _Wires(NamedTuple):
    """As `CrossingInputs` takes them."""

    into: Floats
    back: Floats
    least: Floats
    wire: Floats
    batched: tuple[Floats, Floats, Floats]
    """The first three for exchanges of both directions together."""


@dataclass(frozen=True, slots=True)
class CrossingBounds:
    """Sharper bounds of the families of a job; keeps what they share."""

    order_free_bounds: OrderFreeBounds
    transfers: Transfers
    ends: Ends
    _wires: dict[tuple[object, ...], _Wires] = field(default_factory=dict, repr=False)

    def of_all(self, loosest: Family, enough: float) -> float:
        """No plan has a shorter step of all families that the loosest one is for (`FamilyTable`).

        What it takes of a family is no more for the loosest one: the cost of a unit is that of its
        cheapest recomputation and its room that of the smallest; S and the shorter pass likewise;
        with fewer chunks there are fewer messages, exchanges and units that a stage must hold. What
        follows the last pass is left out, and so is what the order-free bound knows of chunks.
        """
        base = self.order_free_bounds.base(loosest)
        if not len(base.at):
            return np.inf
        loading = self.order_free_bounds.placed.job.data_loading_seconds
        busy = float(base.longest[0]) * loosest.num_microbatches
        held = self._inputs(loosest, base)
        return loading + float(least_step(held, busy, _MORE * (enough - loading)))

    def seconds(self, family: Family, enough: float = np.inf) -> float:
        """No plan of the family has a shorter step; not below the order-free bound.

        What would make the bound more than `enough` is left out, a little aside.
        """
        known = self.order_free_bounds.of(family).bound_seconds
        base = self.order_free_bounds.base(family)
        if not len(base.at) or known == np.inf or family.splits:
            return known
        loading = self.order_free_bounds.placed.job.data_loading_seconds
        held = self._inputs(family, base)
        much = _MORE * (enough - loading)
        found = float(least_step(held, known - loading, much))
        if found < much and self._may_close(family, held, found, enough - loading):
            self._after(family, held)
            found = float(least_step(held, found, much))
        return max(known, loading + found)

    def _inputs(self, family: Family, base: Bases) -> CrossingInputs:
        """Without what follows the last pass."""
        m, units = family.num_microbatches, self.order_free_bounds.placed.units.count
        single = family.virtual_stages == 1
        waits = (
            target(self.order_free_bounds.placed.job.target).rendezvous_sends
            and not family.early_sends
        )
        wires = self._of(family, base.first)
        into, back, least = wires.into, wires.back, wires.least
        batched = not single and waits and self._batched
        if batched:
            into, back, least = wires.batched
        elif not (single and waits):
            into, back, least = (np.zeros_like(each) for each in (into, back, least))
        return CrossingInputs(
            cost=base.cost,
            cap=caps(base.rows, base.room, units, m, int(base.positions[0])),
            first=base.first,
            most=base.most,
            into=into,
            back=back,
            least=least,
            wire=wires.wire,
            after=np.zeros((len(family.meshes), units + 1)),
            units=units,
            microbatches=m,
            messages=m * family.virtual_stages,
            whole=float(base.whole[0]) if single else -1.0,
            shorter=float(base.least[0]),
            extra=family.most_extra_depth,
            chunks=family.virtual_stages,
            exchanges=m * family.virtual_stages - 1 if batched else 0,
        )

    def _far(self, family: Family, held: CrossingInputs) -> list[int]:
        """Meshes over several regions that fit."""
        islands = self.order_free_bounds.placed.cluster.islands
        return [
            k
            for k, mesh in enumerate(family.meshes)
            if len({islands[at].region for at in mesh.islands}) > 1 and held.cap[:, k, 0].max() > 0
        ]

    def _may_close(self, family: Family, held: CrossingInputs, found: float, enough: float) -> bool:
        """Whether the bound would be enough if what those do after their passes took for ever:
        how long it does take is much more work to say.
        """
        far = self._far(family, held)
        if not far:
            return False
        held.after[far] = _FOR_EVER
        without = float(least_step(held, found, enough))
        held.after[far] = 0.0
        return without > found if enough == np.inf else without >= enough

    @property
    def _batched(self) -> bool:
        """Whether the trainer of the job batches the sends of interleaved pipelines."""
        return exchange_of(self.order_free_bounds.placed.job) is Exchange.MEGATRON

    def _after(self, family: Family, held: CrossingInputs) -> None:
        """Fill in what meshes over several regions do after their passes."""
        for k in self._far(family, held):
            mesh, most = family.meshes[k], int(held.cap[:, k, 0].max())
            waited = np.ones((len(mesh.islands), ROLES, held.units + 1), dtype=np.bool_)
            chunked = family.virtual_stages > 1
            times = self.ends.least(mesh, family, (most,) * ROLES, waited, chunked=chunked)
            # Growing, and a stage at an end of the pipeline has more to sum up.
            seconds = np.sum(times, axis=0)[MIDDLE]
            held.after[k] = np.minimum.accumulate(seconds[::-1])[::-1]
            held.after[k, most + 1 :] = held.after[k, most]

    def _of(self, family: Family, first: Ints) -> _Wires:
        """Shared by families whose boundaries carry the same messages."""
        meshes, islands = family.meshes, int(first.max()) + 1
        if len(meshes) > _MANY:
            none = np.zeros((len(meshes), islands))
            free = none, none, np.zeros((2, len(meshes)))
            return _Wires(*free, np.zeros((islands, islands)), free)
        sides = tuple([self._side(k, family) for k in range(len(meshes))])
        key = tuple([(mesh.islands, mesh.max_stages > 1) for mesh in meshes]), sides
        found = self._wires.get(key)
        if found is None:
            found = self._wires[key] = self._priced(family, first, islands)
        return found

    def _side(self, at: int, family: Family) -> tuple[object, ...]:
        """What the transfers of a mesh depend on, besides its islands."""
        return tuple([
            (shape.num_devices, shape.microbatch_size, shape.cp, shape.tp, shape.sequence_parallel)
            for shape in family.meshes[at].shapes
        ])  # fmt: skip

    def _priced(self, family: Family, first: Ints, islands: int) -> _Wires:
        links, nodes, _, _ = self.transfers.between(family.meshes)
        masks = island_masks(family.meshes)
        apart = (masks[:, None] & masks) == 0
        wire = np.full((islands, islands), np.inf)
        busy = np.maximum(links[SEND_FORWARD], links[SEND_BACKWARD])
        np.minimum.at(wire, (first[:, None], first), np.where(apart, busy, np.inf))
        alone = _sides(
            first, islands, apart, (forward_wires(links), backward_wires(links)),
            (forward_wires(nodes), backward_wires(nodes)), family,
        )  # fmt: skip
        batched = _sides(first, islands, apart, _exchanged(links), _exchanged(nodes), family)
        return _Wires(*alone, wire, batched)


def _exchanged(links: Floats) -> tuple[Floats, Floats]:
    """Seconds of an exchange for the stage below the boundary, and for the one above it."""
    posted = links[RENDEZVOUS_EXTRA]
    return (
        np.maximum(posted + forward_wires(links), links[SEND_BACKWARD]),
        np.maximum(posted + backward_wires(links), links[SEND_FORWARD]),
    )


def _sides(
    first: Ints,
    islands: int,
    apart: npt.NDArray[np.bool_],
    links: tuple[Floats, Floats],
    nodes: tuple[Floats, Floats],
    family: Family,
) -> tuple[Floats, Floats, Floats]:
    """(into, back, least) of these seconds below and above every boundary."""
    into, back = np.full((2, islands, len(family.meshes)), np.inf)
    np.minimum.at(into, first, np.where(apart, links[0], np.inf))
    np.minimum.at(back, first, np.where(apart, links[1], np.inf).T)
    least = np.stack((into.min(axis=0), back.min(axis=0)))
    several = np.array([mesh.max_stages > 1 for mesh in family.meshes])
    own = [np.minimum(one.diagonal(), node) for one, node in zip(links, nodes, strict=True)]
    least = np.where(several, np.minimum(least, own), least)
    into, back = np.ascontiguousarray(into.T), np.ascontiguousarray(back.T)
    return into, back, np.where(np.isfinite(least), least, 0.0)
