"""Bound of interleaved families with too many rows to list: over sets of islands.

Is any plan of the family faster than T, whichever rows of slots it has? P stages; symbols and
chains as in `hetplan.search.interleaved.chains`. In a plan below T the chain of every slot s is
below T, so with lower bounds of what the other slots add to it,

    prefix_s <= sum of rise_i (i < s)     drain_s <= sum of turn_j (j > s)     the same with turn'

slot s has at most as many units as own_s + prefix_s + max(0, drain_s - skip_s) + .. < T allows.
Slots limited in this way hold little more than the L units that they must, so each of them is
nearly full, and that bounds what they add to each other's chains:

    1. by own chains alone, and the least rises of slots with a unit per chunk
    2. least sums of turn, and of turn', of the last slots (`fill`, from the last to the first):
       drain by position
    3. least sums of rise of the first slots, every chain below T: prefix by position. Where they
       cannot hold all units there is no plan below T; otherwise once more from 2.

Sums know which islands are used up and which mesh a slot has, drain and prefix know the position
only. Every hop is at least the least one of its mesh; hops between meshes count in sums, and no
step below T has some of them at all (`bound.borders_of`). A slot ends after its own chain as well,
which it begins by itself: own_s + after_s < T.

The sums come from a program over sets of islands (`fill`). Slots are filled in one direction. A
state is the islands that are used up, the number k of slots that are filled, and the mesh of the
last of them; it keeps, for each number of layer units that these slots may hold, the least sum of a
cost per slot. A run of slots of one mesh is one step.

    most_behind   units that the slots from k on can hold on the islands that are left
    low .. high   units that matter here: enough with most_behind, at most what fits. At most WIDTH
                  of them are told apart; fewer units count as the least of those: the least sum
                  only falls by that, so it stays a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.replay.times import Exchange
from hetplan.kernels import kernel
from hetplan.search.interleaved.bound import Borders, borders_of, least_level
from hetplan.search.interleaved.chains import (
    OF_ISLANDS,
    OWN,
    RISE,
    SKIP,
    SKIP_BACK,
    TURN,
    TURN_BACK,
)
from hetplan.search.interleaved.enumerate import MostUnits, RowListing
from hetplan.search.interleaved.rows import row_of
from hetplan.search.space.family import Family
from hetplan.search.space.row import NEVER, norm_levels
from hetplan.search.space.stage_table import MAX_FREE_ISLANDS, StageTable

WIDTH = 12

_MOST_ISLANDS = 12
"""Islands up to which sets of them are told apart: their number doubles with each. Of more, only
what single slots can hold is known."""


class Slots(NamedTuple):
    """Meshes and what their slots cost, in the direction of filling; M meshes, P slots."""

    masks: Ints
    """[M] islands as bits, without gaps."""
    most_stages: Ints
    region: Ints
    """[M] meshes of one region stand together; all of one region: no such rule."""
    begins: Ints
    """[M] 1 where the first slot may be of this mesh."""
    ends: Ints
    cost: Floats
    """[M, P, L + 1] of a slot with so many units."""
    chain: Floats
    """[M, P, L + 1] must stay below the limit, the sum so far besides where `adds`; `NEVER`: the
    slot cannot have so many units."""
    extra: Floats
    """[M, M] cost of a step from a mesh (row) to another (column)."""
    adds: bool


@kernel
def most_units(slots: Slots, limit: float, before: Floats) -> Ints:
    """[M, P] units for which a chain stays below the limit; `before` [P] is added to it."""
    meshes, count, width = slots.chain.shape
    found = np.zeros((meshes, count), np.int64)
    for j in range(meshes):
        for at in range(count):
            for n in range(width - 1, 0, -1):
                if before[at] + slots.chain[j, at, n] < limit:
                    found[j, at] = n
                    break
    return found


@kernel
def _run_length(slots: Slots, most: Ints, j: int, k: int, chunks: int) -> int:
    """Slots from k on that can be of mesh j together."""
    longest = 0
    while k + longest < most.shape[1] and longest < slots.most_stages[j]:
        if most[j, k + longest] < chunks:
            break
        longest += 1
    return longest


@kernel
def most_behind(slots: Slots, most: Ints, chunks: int) -> Ints:
    """[sets, P + 1] units that slots k .. P - 1 can hold on islands outside a set; -1: none can."""
    meshes, count = most.shape
    sets = 1
    for j in range(meshes):
        while sets <= slots.masks[j]:
            sets *= 2
    found = np.full((sets, count + 1), -1, np.int64)
    found[:, count] = 0
    for used in range(sets - 1, -1, -1):
        for j in range(meshes):
            if used & slots.masks[j]:
                continue
            behind = used | slots.masks[j]
            for k in range(count - 1, -1, -1):
                held = 0
                for end in range(k, k + _run_length(slots, most, j, k, chunks)):
                    held += most[j, end]
                    if end == count - 1 and slots.ends[j] == 0:
                        continue
                    if found[behind, end + 1] >= 0:
                        found[used, k] = max(found[used, k], held + found[behind, end + 1])
    return found


@kernel
def most_before(slots: Slots, most: Ints, chunks: int, sets: int) -> Ints:
    """[sets, P + 1] units that the first k slots can hold on exactly these islands; -1: none."""
    meshes, count = most.shape
    found = np.full((sets, count + 1), -1, np.int64)
    found[0, 0] = 0
    for used in range(sets):
        for k in range(count):
            if found[used, k] < 0:
                continue
            for j in range(meshes):
                if used & slots.masks[j] or (k == 0 and slots.begins[j] == 0):
                    continue
                held = found[used, k]
                for end in range(k, k + _run_length(slots, most, j, k, chunks)):
                    held += most[j, end]
                    now = used | slots.masks[j]
                    found[now, end + 1] = max(found[now, end + 1], held)
    return found


@kernel
def _stays(slots: Slots, used: int, last: int, new: int) -> bool:
    """Whether a mesh may follow the last one by the rule of regions."""
    if last < 0 or slots.region[last] == slots.region[new]:
        return True
    for j in range(slots.masks.shape[0]):
        if slots.region[j] == slots.region[new] and used & slots.masks[j]:
            return False
    return True


@kernel
def _states(before: Ints, behind: Ints, units: int) -> tuple[Ints, int]:
    """[sets, P + 1] numbers of the states of rows that hold the units, -1: of none; how many."""
    index, states = np.full(before.shape, -1, np.int64), 0
    for used in range(before.shape[0]):
        for k in range(before.shape[1]):
            reached = before[used, k] >= 0 and behind[used, k] >= 0
            if reached and before[used, k] + behind[used, k] >= units:
                index[used, k] = states
                states += 1
    return index, states


@kernel
def fill(
    slots: Slots, limit: float, most: Ints, units: int, chunks: int, room: int
) -> tuple[float, Floats, Ints]:
    """(least sum of all slots, [P + 1] least sum of the first k, [P] mesh of every slot).

    The sum is `NEVER` where the slots cannot hold the units; then the meshes say nothing. Where it
    takes more than `room` states, nothing is known: a sum of -1.
    """
    # Long: one program, whose steps share the arrays of the state that they start from.
    meshes, count = most.shape
    behind = most_behind(slots, most, chunks)
    sets = behind.shape[0]
    least = np.full(count + 1, NEVER)
    row = np.zeros(count, np.int64)
    if behind[0, 0] < units:
        return NEVER, least, row
    before = most_before(slots, most, chunks, sets)
    index, states = _states(before, behind, units)
    if states * meshes * WIDTH > room:
        return -1.0, least, row
    sums = np.full((states, meshes, WIDTH), NEVER)
    parent = np.full((states, meshes, WIDTH), -1, np.int64)
    low = np.zeros(states, np.int64)
    for used in range(sets):
        for k in range(count + 1):
            if index[used, k] >= 0:
                high = min(units, before[used, k])
                low[index[used, k]] = max(units - behind[used, k], high - WIDTH + 1, 0)
    least[0] = 0.0
    now, later = np.empty(WIDTH), np.empty(WIDTH)
    origin, origin_later = np.empty(WIDTH, np.int64), np.empty(WIDTH, np.int64)
    ahead = np.empty(count + 2, np.int64)
    for used in range(sets):
        for k in range(count):
            at = index[used, k]
            if at < 0:
                continue
            for j in range(meshes):
                if used & slots.masks[j] or (k == 0 and slots.begins[j] == 0):
                    continue
                taken = used | slots.masks[j]
                now[:] = NEVER
                if k == 0:
                    now[0], origin[0] = 0.0, 0
                for last in range(meshes):
                    if k == 0 or not _stays(slots, used, last, j):
                        continue
                    for w in range(WIDTH):
                        value = sums[at, last, w] + slots.extra[last, j]
                        if value < now[w]:
                            now[w] = value
                            origin[w] = (last * (count + 1) + k) * WIDTH + w
                longest = _run_length(slots, most, j, k, chunks)
                # What slots behind each end of the run can hold, the run's own among them.
                ahead[longest + 1] = -1
                for r in range(longest, 0, -1):
                    ahead[r] = -1
                    if k + r < count or slots.ends[j] == 1:
                        ahead[r] = behind[taken, k + r]
                    if r < longest and ahead[r + 1] >= 0:
                        ahead[r] = max(ahead[r], most[j, k + r] + ahead[r + 1])
                base, high = low[at], min(units, before[used, k])
                for r in range(1, longest + 1):
                    if ahead[r] < 0:
                        break
                    slot = k + r - 1
                    high = min(units, high + most[j, slot])
                    needed = units - ahead[r]
                    lowest = max(needed, high - WIDTH + 1, 0)
                    later[:] = NEVER
                    any_left = False
                    for w in range(WIDTH):
                        if now[w] >= NEVER:
                            continue
                        so_far = now[w] if slots.adds else 0.0
                        for n in range(most[j, slot], chunks - 1, -1):
                            held = min(units, base + w + n)
                            if held < needed:
                                break
                            if so_far + slots.chain[j, slot, n] >= limit:
                                continue
                            value = now[w] + slots.cost[j, slot, n]
                            to = max(held, lowest) - lowest
                            if value < later[to]:
                                later[to], origin_later[to] = value, origin[w]
                                any_left = True
                    if not any_left:
                        break
                    base = lowest
                    for w in range(WIDTH):
                        now[w], origin[w] = later[w], origin_later[w]
                        least[k + r] = min(least[k + r], now[w])
                    to_state = index[taken, k + r]
                    if to_state < 0 or (k + r == count and slots.ends[j] == 0):
                        continue
                    for w in range(WIDTH):
                        held = base + w
                        if now[w] >= NEVER or held < units - behind[taken, k + r]:
                            continue
                        to = min(max(held - low[to_state], 0), WIDTH - 1)
                        if now[w] < sums[to_state, j, to]:
                            sums[to_state, j, to] = now[w]
                            parent[to_state, j, to] = origin[w]
    best, best_set, best_mesh, best_w = NEVER, -1, -1, 0
    for used in range(sets):
        at = index[used, count]
        if at < 0:
            continue
        for j in range(meshes):
            for w in range(WIDTH):
                if low[at] + w == units and sums[at, j, w] < best:
                    best, best_set, best_mesh, best_w = sums[at, j, w], used, j, w
    if best_set < 0:
        return NEVER, least, row
    used, end, j, w = best_set, count, best_mesh, best_w
    while end > 0:
        key = parent[index[used, end], j, w]
        w, k = key % WIDTH, key // WIDTH % (count + 1)
        row[k:end] = j
        used ^= slots.masks[j]
        j, end = key // WIDTH // (count + 1), k
    return best, least, row


_ROUNDS = 2
"""How often steps 2 and 3 are taken."""

_MAX_STATES = 3_000_000
"""Sums that are kept at a time: 24 MB, and as much to find the row."""

_DOUBLINGS = 40
"""Steps half as long again that are tried until one may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is known of plans below T."""

    none: bool
    """There is none."""
    most: Ints
    """[M, P] units that a slot of a mesh can hold in a plan below T."""
    row: tuple[int, ...] = ()
    """Otherwise the mesh of every slot of a row that may have one; empty: nothing is known."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IslandProgram:
    """All rows of P stages of a family."""

    units: int
    chunks: int
    one_detour: bool
    terms: Floats
    """[M, P, V, L + 1, OF_ISLANDS]"""
    allowed: Floats
    """[M, P, V, L + 1] 0 where a slot may have so many units, `NEVER` where not."""
    ending: float
    """Least seconds that follow slot 0."""
    alone: Floats
    """[M, P, V, L + 1] own chain of a slot and what follows it."""
    borders: Borders
    down: Slots
    """From the first slot to the last; cost: rise."""
    up: Sequence[Slots]
    """From the last slot to the first; cost: turn, and turn'."""

    def below(self, limit: float) -> Answer:
        """Whether a plan may have a step below `limit`."""
        cut = limit - self.ending
        down, up = self._within(limit)
        slots = self.terms.shape[1]
        drain = np.zeros((2, slots))
        if self._many:
            return self._by_slots(down._replace(chain=self._chain(drain, limit)), cut)
        least = np.array([self.down.cost[:, s, self.chunks].min() for s in range(slots - 1)])
        prefix = np.concatenate(([0.0], np.cumsum(least)))
        for _ in range(_ROUNDS):
            back = np.ascontiguousarray(self._chain(drain, limit)[:, ::-1])
            for which, slots_up in enumerate(up):
                slots_up = slots_up._replace(chain=back)
                most = most_units(slots_up, cut, np.ascontiguousarray(prefix[::-1]))
                total, sums, _ = fill(slots_up, cut, most, self.units, self.chunks, _MAX_STATES)
                if not 0.0 <= total < NEVER:
                    most = np.ascontiguousarray(most[:, ::-1])
                    return Answer(none=total >= NEVER, most=most)
                drain[which] = np.maximum(drain[which], sums[slots - 1 :: -1])
            down = down._replace(chain=self._chain(drain, limit))
            most = most_units(down, cut, prefix)
            total, sums, row = fill(down, cut, most, self.units, self.chunks, _MAX_STATES)
            if not 0.0 <= total < NEVER:
                return Answer(none=total >= NEVER, most=most)
            prefix = np.maximum(prefix, sums[:slots])
        return Answer(none=False, most=most, row=tuple(row.tolist()))

    def rows(self, limit: float, most_rows: int) -> list[tuple[int, ...]] | None:
        """All rows that may have a step below `limit`; None where they are more than `most_rows`.

        Where meshes of a region stand together, rows that break this rule are among them.
        """
        answer = self.below(limit)
        if answer.none:
            return []
        if self._many:
            return None
        down, _ = self._within(limit)
        behind = most_behind(down, answer.most, self.chunks).tolist()
        follows = [np.flatnonzero(each).tolist() for each in ~self.borders.blocked(limit)]
        begins = np.flatnonzero(down.begins).tolist()
        listing = RowListing(
            masks=self.down.masks.tolist(),
            most_stages=self.down.most_stages.tolist(),
            ends=down.ends.tolist(),
            held=answer.most.T.tolist(),
            chunks=self.chunks,
            next_meshes=lambda runs: follows[runs[-1][0]] if runs else begins,
            enough=lambda used, at, units: bool(behind[used][at] >= max(units, 0)),
            most_rows=most_rows,
        )
        return listing.rows(self.units)

    @property
    def _many(self) -> bool:
        return int(self.down.masks.max()) >> _MOST_ISLANDS > 0

    def _by_slots(self, down: Slots, cut: float) -> Answer:
        """What is known without sets of islands: every place takes the mesh that holds most."""
        most = most_units(down, cut, np.zeros(self.terms.shape[1]))
        return Answer(none=int(most.max(axis=0).sum()) < self.units, most=most)

    def least_work(self) -> float:
        """Seconds of a slot with a unit per chunk, the fastest mesh; a step to begin with."""
        return float((self.terms[..., OWN] + self.allowed)[..., self.chunks :].min())

    def _within(self, limit: float) -> tuple[Slots, Sequence[Slots]]:
        """`down` and `up` without boundaries that no step below the limit has."""
        blocked, rings = self.borders.blocked(limit), self.borders.rings(limit)
        begins = np.ascontiguousarray(rings.any(axis=0), dtype=np.int64)
        ends = np.ascontiguousarray(rings.any(axis=1), dtype=np.int64)
        extra = np.where(blocked, NEVER, self.down.extra)
        down = self.down._replace(begins=begins, ends=ends, extra=extra)
        return down, [
            each._replace(begins=ends, ends=begins, extra=np.where(blocked.T, NEVER, each.extra))
            for each in self.up
        ]

    def _chain(self, drain: Floats, limit: float) -> Floats:
        """[M, P, L + 1] least chain of a slot without the slots above."""
        terms = self.terms
        gain = np.maximum(0.0, drain[0][None, :, None, None] - terms[..., SKIP])
        back = np.maximum(0.0, drain[1][None, :, None, None] - terms[..., SKIP_BACK])
        gained = np.maximum(gain, back) if self.one_detour else gain + back
        allowed = np.where(self.alone < limit, self.allowed, NEVER)
        return np.ascontiguousarray((terms[..., OWN] + gained + allowed).min(axis=2))


def program_bytes(space: StageTable, stages: int) -> int:
    """What a program of so many stages takes, most of it for `terms`, `allowed` and `alone`."""
    variants, meshes = space.forward.shape
    rows = meshes * stages * (space.num_layers + 1)
    return 8 * int(rows) * (int(variants) * (OF_ISLANDS + 2) + 4)


def island_program(
    space: StageTable, family: Family, most_units: MostUnits, exchange: Exchange, stages: int
) -> IslandProgram:
    """The program over all rows of so many stages."""
    numbers, both, least = _least_hops(space)
    count, units, chunks = len(space.max_stages), space.num_layers, family.virtual_stages
    norm = _least_norm(space, stages)
    terms, allowed, alone, ending = [], [], [], NEVER
    n = np.arange(units + 1)
    for mesh in range(count):
        alike = (mesh,) * stages
        row = row_of(numbers, alike, most_units(alike), chunks, exchange, apart=True).arrays
        terms.append(row.terms[..., :OF_ISLANDS].copy())  # a view would keep all of them
        held = (n >= chunks) & (n <= row.most[..., None])
        allowed.append(np.where(held, 0.0, NEVER))
        closing = row.after + row.leaving + norm[mesh]
        alone.append(terms[-1][..., OWN] + closing[:, None, :])
        follows = np.where(held[0].any(axis=0), closing[0], NEVER)
        if space.may_be_first[mesh]:
            ending = min(ending, float(follows.min()))
    found, may = np.array(terms), np.array(allowed)
    down, up = _slots(space, [(found[..., at] + may).min(axis=2) for at in (RISE, TURN, TURN_BACK)])
    extra = both - least[:, None], both.T - least[:, None]
    return IslandProgram(
        units=units,
        chunks=chunks,
        one_detour=family.num_microbatches == stages,
        terms=found,
        allowed=may,
        ending=ending,
        alone=np.array(alone),
        borders=borders_of(space, chunks, exchange, stages),
        down=down._replace(extra=np.ascontiguousarray(extra[0])),
        up=tuple(each._replace(extra=np.ascontiguousarray(extra[1])) for each in up),
    )


def _slots(space: StageTable, costs: Sequence[Floats]) -> tuple[Slots, Sequence[Slots]]:
    """From the first slot to the last, and back; costs [M, P, L + 1]: rise, turn, turn'."""
    count = len(space.max_stages)
    down = Slots(
        masks=_without_gaps(space.island_mask),
        most_stages=np.ascontiguousarray(space.max_stages, dtype=np.int64),
        region=_regions(space),
        begins=space.may_be_first.astype(np.int64),
        ends=space.may_be_last.astype(np.int64),
        cost=np.ascontiguousarray(costs[0]),
        chain=np.ascontiguousarray(costs[0]),
        extra=np.zeros((count, count)),
        adds=True,
    )
    return down, [
        down._replace(
            begins=down.ends,
            ends=down.begins,
            cost=np.ascontiguousarray(cost[:, ::-1]),
            adds=False,
        )
        for cost in costs[1:]
    ]


def _least_norm(numbers: StageTable, stages: int) -> Floats:
    """[M] least seconds of the sum of norms where a slot is of this mesh."""
    return numbers.norm_inside + norm_levels(stages) * least_level(numbers)


def _least_hops(space: StageTable) -> tuple[StageTable, Floats, Floats]:
    """With the least hop of every mesh inside it, [M, M] both ways of a hop, [M] of the least."""
    links, at = space.links.copy(), np.arange(len(space.max_stages))
    # A mesh has hops inside nodes where nodes have several of its stages, and others where more.
    inside = np.where(space.stages_per_node > 1, links[:, at, at], np.inf)
    across = np.where(space.max_stages > space.stages_per_node, space.node_links, np.inf)
    links[:, at, at] = np.inf
    least = np.minimum(links.min(axis=2), links.min(axis=1))
    least = np.minimum(least, np.minimum(inside, across))
    both = space.links[0] + space.links[1] + 2.0 * space.links[2]
    links[:, at, at] = least
    tied = np.broadcast_to(space.tied.min(axis=1)[:, None], space.tied.shape).copy()
    changed = space._replace(links=links, node_links=least, tied=tied)
    return changed, both, least[0] + least[1] + 2.0 * least[2]


def _without_gaps(masks: Ints) -> Ints:
    """The same islands, numbered from 0 on."""
    used = sorted({bit for mask in masks.tolist() for bit in _bits(mask)})
    at = {bit: i for i, bit in enumerate(used)}
    return np.array([sum(1 << at[bit] for bit in _bits(mask)) for mask in masks.tolist()])


def _bits(mask: int) -> Sequence[int]:
    return [bit for bit in range(mask.bit_length()) if mask >> bit & 1]


def _regions(space: StageTable) -> Ints:
    """Zeros where meshes of a region need not stand together, or a mesh is in several."""
    many = len({bit for mask in space.island_mask.tolist() for bit in _bits(mask)})
    if many <= MAX_FREE_ISLANDS or (space.region < 0).any():
        return np.zeros(len(space.region), dtype=np.int64)
    return np.ascontiguousarray(space.region, dtype=np.int64)


def least_open(
    program: IslandProgram, low: float, high: float, halvings: int
) -> tuple[float, tuple[int, ...]]:
    """(bound, row): no plan has a step below the bound, which is between `low` and `high`; the row
    is the best guess at one that does not lie far above, empty where there is none below `high`.

    `low` must be a bound; `high` may be `NEVER`.
    """
    tries, top = 1, high
    if high >= NEVER:
        tries, top = _DOUBLINGS, max(low, program.least_work())
    for _ in range(tries):
        answer = program.below(top)
        if not answer.none:
            break
        low, top = top, 1.5 * top
    else:
        return min(low, high), ()
    row = answer.row
    for _ in range(halvings):
        middle = 0.5 * (low + top)
        answer = program.below(middle)
        if answer.none:
            low = middle
        else:
            top, row = middle, answer.row or row
    return low, row
