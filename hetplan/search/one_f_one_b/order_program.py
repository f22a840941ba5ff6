"""How few seconds a family needs, over all orders of meshes, numbers of stages, cuts, depths.

`OrderProgram.least(x)` is the least Sigma + after_0 of any pipeline whose X is at most x; symbols
and inequalities are those of `order_relaxation`. It is exact for what is added up there, with three
relaxations: inside a mesh a boundary costs what the faster of its two kinds does, unless all are of
one kind; a tied matrix costs what it costs at least, and the sum of norms what it does in the
fastest order of the islands that are used (`order_numbers.norm_hops`); and below a long boundary
the passes of a slot are known by bucket, lower edge (eager sends; with rendezvous sends (b) of the
two slots implies their circuit).

Extra depth grows towards the first stage; levels of it may be joined: bounds then assume the
deepest, memory the flattest of a level, which both only help a plan.

The pipeline that was found is read back from the packed tables. They hold no pointers, so each
mesh's block is computed once more with all its lengths, and the predecessor of an entry is the one
whose value leads to it.

What programs take is bounded: one whose tables would be large has no orders (`has_orders`), and one
that turns out to be ends with TooLargeError.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from hetplan.cost.arrays import Floats, Ints
from hetplan.kernels import kernel
from hetplan.search.one_f_one_b.order_kernel import (
    Goal,
    boundaries,
    end_block,
    longer,
    prune_length,
    run,
    starts,
    table_of_length,
)
from hetplan.search.one_f_one_b.order_numbers import BUCKETS, Ending, OrderNumbers, order_numbers
from hetplan.search.one_f_one_b.order_relaxation import NONE, Outline, outline
from hetplan.search.one_f_one_b.order_slots import (
    Link,
    Packed,
    Pool,
    Work,
    bucket_of,
    clean,
    depths,
    end_seconds,
    fronted,
    lateness,
    link_between,
    link_inside,
    link_of_last,
    load,
    slot_own,
    slot_room,
    table_of,
    turning_of,
    widen,
    work_of,
)
from hetplan.search.space.stage_table import BOTH, FIRST, LAST, StageTable


@kernel
def _nearest(
    o: OrderNumbers,
    out: Outline,
    a: int,
    link: Link,
    below: Floats,
    place: tuple[int, int, int, int],
    goal: float,
) -> tuple[float, int, int, int]:
    """(distance, row below, variant, units) of the slot that leads nearest to a value.

    place: row and layers of the value, the bucket of the slot (0: any) and the move of the
    pipeline's first mesh.
    """
    row, at, bucket, first = place
    levels = o.level_bound.shape[0]
    level, nearest = row % levels, (np.inf, 0, 0, 0)
    by_end, upstream, is_first = o.edges.shape[0] > 0, False, link.role & FIRST > 0
    lowest, highest = (0, levels) if by_end else (0 if link.joins else level, level + 1)
    for source in range(lowest, highest):
        under = (row // levels - 1) * levels + source
        flight, held = depths(o, under, source if by_end else level)
        turning = turning_of(o, under)
        for v in range(o.table.forward.shape[0]):
            for n in range(1, min(at, o.table.most_layers[v, link.role, a, held]) + 1):
                value = below[under, at - n]
                f = o.table.extra_forward[link.role, v, a] + n * o.table.forward[v, a]
                b = o.table.extra_backward[link.role, v, a] + n * o.table.backward[v, a]
                m = o.table.num_microbatches
                if by_end:
                    to, upstream = lateness(o, a, n, source, link.back + b)
                    if (source if is_first else to) != level:
                        continue
                room = slot_room(out.limit, m, f, b, link, flight, turning, upstream)
                if value >= NONE or value > room:
                    continue
                if bucket > 0 and bucket_of(f + b, out.slowest) != bucket:
                    continue
                value += slot_own(link, f, b)
                if is_first:
                    value += end_seconds(o, first, link.role, n, under, link.back + b)
                if abs(value - goal) < nearest[0]:
                    nearest = (abs(value - goal), under, v, n)
    return nearest


@kernel
def least_limit(o: OrderNumbers, numbers: Ints, links: Floats, below: Floats, high: float) -> float:
    """Least X with which every slot of a pipeline stays within its room, at most `high`.

    numbers: [P, 8] mesh, variant, units, W, W of the slot below, role, joins, level below; links:
    [P, 6] the other entries of `Link`; below: [P] seconds downstream.
    """
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2.0
        fits = True
        for s in range(below.shape[0]):
            a, v, n, flight, turning, role, joins, level = numbers[s]
            wire_in, post_in, late, back, post_back, beside = links[s]
            link = Link(role, wire_in, post_in, late, back, post_back, beside, joins > 0)
            f = o.table.extra_forward[role, v, a] + n * o.table.forward[v, a]
            b = o.table.extra_backward[role, v, a] + n * o.table.backward[v, a]
            m, upstream = o.table.num_microbatches, False
            if o.edges.shape[0]:
                _, upstream = lateness(o, a, n, level, back + b)
            if below[s] > slot_room(middle, m, f, b, link, flight, turning, upstream):
                fits = False
                break
        if fits:
            high = middle
        else:
            low = middle
    return high


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """An entry of a table: of a class in front of a state, or a whole pipeline."""

    part: int
    """Slice; -1: nothing is in front."""
    row: int
    at: int
    """Layers."""
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One stage as the program chose it, and what it was put in front of."""

    mesh: int
    variant: int
    units: int
    level: int
    link: Link
    below: _Entry
    """Its slice is of class `below_class`."""
    stages_below: int
    """Length of the block below within the same mesh; 0: another mesh is below."""
    below_class: int
    """-1: nothing is below."""
    distance: float
    """Between the entry that it was looked for and the one that it leads to: rounding."""


class TooLargeError(Exception):
    """A program needs more operations, or more memory, than it may."""


class Tracer:
    """Reads one run of the program; TooLargeError where that takes too much memory."""

    def __init__(self, numbers: OrderNumbers, out: Outline, pool: Pool, work: Work) -> None:
        self._o, self._out, self._pool, self._work = numbers, out, pool, work
        self._spare = empty_goal()
        self._lengths: list[Packed] = []
        """Blocks of a move's mesh of 1, 2, ... stages."""
        self._open: Floats = np.full(work.one.values.shape, NONE)
        self._first = 0

    def slots(self, goal: Goal) -> tuple[Slot, ...]:
        """Stages of the best pipeline, first to last."""
        found: list[Slot] = []
        move, row, _ = goal.place.tolist()
        layers, value = self._o.table.num_layers, float(goal.seconds[0])
        self._first, entry = move, _Entry(part=-1, row=row, at=layers, value=value)
        while True:
            found += self._block(move, entry)
            if found[-1].below_class < 0:
                return tuple(found)
            move, entry = self._move(int(self._o.states.below[move]), found[-1])

    def limit(self, slots: tuple[Slot, ...]) -> float:
        """The X of these slots, as the program counts it."""
        o = self._o
        numbers, links = [], []
        for slot in slots:
            flight, _ = depths(o, slot.below.row, slot.level)
            turning = turning_of(o, slot.below.row)
            role, *times, joins = slot.link
            each = slot.mesh, slot.variant, slot.units, flight, turning, role, int(joins)
            numbers.append((*each, slot.below.row % len(o.level_bound)))
            links.append(times)
        below = np.array([slot.below.value for slot in slots])
        return float(least_limit(o, np.array(numbers), np.array(links), below, self._out.limit))

    def _block(self, move: int, entry: _Entry) -> list[Slot]:
        """The stages of a move's mesh that lead to an entry, from the front one on."""
        found: list[Slot] = []
        self._rebuild(move)
        self._empty()
        behind = -1  # stages of the mesh below this one; it is not known of the front one
        while True:
            choices = self._inner(move, entry, behind, first=not found)
            if behind <= 0:
                choices += self._outer(move, entry, first=not found)
            slot = min(choices, key=lambda slot: slot.distance)
            found.append(slot)
            if slot.stages_below == 0:
                return found
            entry, behind = slot.below, slot.stages_below - 1

    def _rebuild(self, move: int) -> None:
        """Make a move's blocks once more; its closings gather in the working space."""
        o, out, w = self._o, self._out, self._work
        state = int(np.searchsorted(o.states.first, move, side="right")) - 1
        a = int(o.states.mesh[move])
        self._lengths, held = [], 0
        self._spare.seconds[0] = NONE
        ahead = boundaries(o, out, state, a)
        if not starts(o, out, move, ahead, self._pool, w, self._spare):
            return
        for length in range(1, int(o.table.max_stages[a])):
            if not prune_length(o, out, state, move, length, w):
                break
            self._lengths.append(Packed.of(table_of_length(w, length)))
            held += self._lengths[-1].values.size
            if held > _MOST_TRACED:
                raise TooLargeError
            longer(o, out, move, length, w)
        end_block(o, out, state, move, w, self._spare)

    def _empty(self) -> None:
        for part in range(self._work.closing.values.shape[0]):
            clean(table_of(self._work.closing, part))

    def _ahead(self, a: int, entry: _Entry, link: Link, first: bool) -> tuple[Link, int]:
        """The slot's boundary in front, and the bucket that it must be in."""
        o, c = self._o, int(self._o.mesh_class[a])
        if not first:
            return fronted(link, link.role, o.inner[0, a], o.inner[1, a]), 0
        if entry.part < 0:
            return fronted(link, BOTH if link.role == LAST else FIRST, 0.0, 0.0), 0
        if o.buckets[c]:
            return link, entry.part
        wire, post = o.slice_in[c, entry.part]
        return fronted(link, link.role, wire, post), 0

    def _inner(self, move: int, entry: _Entry, behind: int, *, first: bool) -> list[Slot]:
        """Slots in front of blocks of the same mesh; of any length where `behind` is negative."""
        a = int(self._o.states.mesh[move])
        inner = link_inside(self._o, a)
        link, bucket = self._ahead(a, entry, inner, first)
        lengths = range(1, len(self._lengths) + 1) if behind < 0 else range(behind, behind + 1)
        found = []
        for length in lengths:
            if length:
                packed = self._lengths[length - 1]
                packed.write(self._open)
                source = length, -1, 0
                found.append(self._slot(a, link, self._open, entry, bucket, source))
                packed.wipe(self._open)
        return found

    def _outer(self, move: int, entry: _Entry, *, first: bool) -> list[Slot]:
        """Slots in front of what the lower state has in front."""
        o, table = self._o, self._work.below
        a, under = int(o.states.mesh[move]), int(o.states.below[move])
        if under == 0:
            link, bucket = self._ahead(a, entry, link_of_last(), first)
            table.values[0, 0] = 0.0
            widen(table.band, 0, 0, 0)
            slot = self._slot(a, link, table.values, entry, bucket, (0, -1, 0))
            clean(table)
            return [slot]
        found = []
        for c in range(len(o.slices)):
            if self._pool.start[under, c] < 0:
                continue
            far = bool(o.is_long[a, c])
            for part in range(1, BUCKETS + 1) if far else (int(o.slice_of[a, c]),):
                load(self._pool, under, c, part, table)
                link = link_between(o, a, c, part, self._out.slowest)
                link, bucket = self._ahead(a, entry, link, first)
                found.append(self._slot(a, link, table.values, entry, bucket, (0, c, part)))
                clean(table)
        return found

    def _slot(
        self,
        a: int,
        link: Link,
        below: Floats,
        entry: _Entry,
        bucket: int,
        source: tuple[int, int, int],
    ) -> Slot:
        """The slot of mesh a that leads nearest to an entry from a table below.

        source: stages, class and slice of that table.
        """
        stages, c, part = source
        place = entry.row, entry.at, bucket, self._first
        distance, row, variant, units = _nearest(
            self._o, self._out, a, link, below, place, entry.value
        )
        at = entry.at - units
        return Slot(
            mesh=a,
            variant=variant,
            units=units,
            level=entry.row % len(self._o.level_bound),
            link=link,
            below=_Entry(part=part, row=row, at=at, value=float(below[row, at])),
            stages_below=stages,
            below_class=c,
            distance=distance,
        )

    def _move(self, state: int, slot: Slot) -> tuple[int, _Entry]:
        """The move that made the table which a slot was put in front of, and its entry."""
        o, entry, c = self._o, slot.below, slot.below_class
        place = entry.part, entry.row, entry.at
        candidates: list[tuple[float, int]] = []
        for move in range(int(o.states.first[state]), int(o.states.first[state + 1])):
            a = int(o.states.mesh[move])
            if a < 0:
                if self._value(int(o.states.below[move]), c, entry) == entry.value:
                    return self._move(int(o.states.below[move]), slot)
                continue
            if o.mesh_class[a] != c or not self._out.live[a]:
                continue
            self._rebuild(move)
            closing = self._work.closing.values
            value = closing[place]
            if entry.part == 0 and o.buckets[c]:
                value = closing[:, entry.row, entry.at].min()
            candidates.append((abs(float(value) - entry.value), move))
            self._empty()
        return min(candidates)[1], entry

    def _value(self, state: int, c: int, entry: _Entry) -> float:
        table = self._work.below
        load(self._pool, state, c, entry.part, table)
        value = float(table.values[entry.row, entry.at])
        clean(table)
        return value


def empty_goal() -> Goal:
    """Nothing found yet."""
    place: Ints = np.zeros(3, dtype=np.int64)
    return Goal(np.full(1, NONE), place)


_FEW_ROWS = 40
"""Stages up to which every extra depth is a level of its own; more stages join them."""

_SLICE = 5_000_000
"""Operations between two looks at the clock: some hundredths of a second."""

_MOST_WORK = 60_000_000
"""Entries of the working space, at 8 bytes each."""

_FIRST_PACKED, _MOST_PACKED = 1 << 16, 100_000_000
"""The same of the packed tables of all states, before they grow and at most."""

_MOST_TRACED = 50_000_000
"""The same of the blocks of one mesh while a pipeline is read back."""

_KEPT_PACKED = 1 << 22
"""Entries of packed tables that a program keeps from one run to the next."""

_MOST_AT_ONCE = 5e8
"""Operations of one slot in front of one table, between which nobody looks at the clock: half a
second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A pipeline with everything decided; entries by slot, first to last."""

    meshes: tuple[int, ...]
    variants: tuple[int, ...]
    units: tuple[int, ...]
    extra: tuple[int, ...]
    """Microbatches in flight beyond the schedule's own (of a joined level the least)."""


def depth_levels(most_extra: int, stages: int) -> tuple[tuple[int, int], ...]:
    """(extra depth that bounds assume, that memory assumes) by level."""
    if stages <= _FEW_ROWS:
        return tuple((extra, extra) for extra in range(most_extra + 1))
    edges = [0, 1, 2, 4, most_extra + 1]
    return tuple(
        (min(top, most_extra + 1) - 1, low) for low, top in pairwise(edges) if low <= most_extra
    )


class OrderProgram:
    """The dynamic program of one table.

    prune: whether entries that cannot end below a cutoff are dropped (the results
    are the same). levels: see `depth_levels`; ending: of tables without extra depth.
    """

    def __init__(
        self,
        table: StageTable,
        *,
        levels: tuple[tuple[int, int], ...] | None = None,
        prune: bool = True,
        ending: Ending | None = None,
    ) -> None:
        self._prune = prune
        depth = levels or depth_levels(table.most_extra_depth, table.num_layers)
        if ending is not None:
            depth = ((0, 0),) * len(ending.edges)
        self.parts = [
            order_numbers(table, depth, last=last, ending=ending) for last in _last_groups(table)
        ]
        self._levels = depth
        self._works: list[Work | None] = [None] * len(self.parts)
        states, classes = len(self.parts[0].states.blocked), len(self.parts[0].slices)
        self._pool = Pool(
            np.empty(_FIRST_PACKED),
            np.full((states, classes), -1, dtype=np.int64),
            np.zeros((states, classes, 4), dtype=np.int64),
        )
        self._has_orders = states > 1 and all(map(_is_small, self.parts))
        self._best: Order | None = None
        self._best_limit = NONE
        self.operations = 0
        """Additions and comparisons of table entries so far: what a budget counts."""

    @property
    def has_orders(self) -> bool:
        """Whether `least` knows anything: not of more states or larger tables than can be gone
        through.
        """
        return self._has_orders

    def levels_within(self, entries: int) -> int:
        """How many times as many entries its tables may have."""
        part = self.parts[0]
        own = len(part.states.blocked) * (part.most_stages + 1) * (part.table.num_layers + 1)
        return entries // own

    def free(self, limit: float) -> float:
        """At most `least(limit)`, without regard to order or places; NONE where it is NONE."""
        return min(NONE, *(self._outline(part, limit).free for part in self.parts))

    def least(
        self,
        limit: float,
        cutoff: float = NONE,
        *,
        keep: bool = True,
        check: Callable[[], None] | None = None,
    ) -> float:
        """Least Sigma + after_0 with X at most `limit`; NONE where no plan has less than `cutoff`.

        keep: whether `order` can be asked for afterwards. check is called now and then and may
        raise; the program can be asked again then. TooLargeError where it takes too much memory.
        """
        try:
            return self._least(limit, cutoff, keep, check)
        finally:
            if len(self._pool.values) > _KEPT_PACKED:
                self._pool = self._pool._replace(values=np.empty(_FIRST_PACKED))

    def _least(
        self, limit: float, cutoff: float, keep: bool, check: Callable[[], None] | None
    ) -> float:
        self._best = None
        least = NONE
        for at, part in enumerate(self.parts):
            top = min(cutoff, least) * (1.0 + 1e-12)
            out = self._outline(part, limit)._replace(cutoff=top)
            if out.free > top:
                continue
            goal = empty_goal()
            work = self._run(at, out, goal, check)
            value = float(goal.seconds[0])
            if value < min(least, cutoff):
                least = value
                if keep:
                    tracer = Tracer(part, out, self._pool, work)
                    slots = tracer.slots(goal)
                    self._best, self._best_limit = self._order(slots), tracer.limit(slots)
            self._works[at] = work
        return least

    def _run(self, at: int, out: Outline, goal: Goal, check: Callable[[], None] | None) -> Work:
        """The program of one part, slice by slice, and its working space: that of the part, which
        has none until it is given back. One that was broken off is full, and made anew.
        """
        part, work = self.parts[at], self._works[at]
        if work is None:
            work = work_of(part)
        self._works[at] = None
        place = np.zeros(4, dtype=np.int64)
        self.operations += out.need.size
        while place[0] < len(part.states.blocked):
            if check is not None:
                check()
            self._make_room(int(place[2]), work.closing.values.size)
            self.operations += int(run(part, out, self._pool, work, goal, place, _SLICE))
        return work

    def _make_room(self, used: int, more: int) -> None:
        """Room for one more table in the pool, of which so many entries are in use."""
        values = self._pool.values
        if used + more <= len(values):
            return
        if used + more > _MOST_PACKED:
            raise TooLargeError
        larger = np.empty(min(_MOST_PACKED, 2 * used + more))
        larger[:used] = values[:used]
        self._pool = self._pool._replace(values=larger)

    def order(self) -> Order | None:
        """The pipeline of the last call of `least` that found one."""
        return self._best

    def limit_of_order(self) -> float:
        """The X of that pipeline; `least` is the same from here up to the limit asked for.

        Below long boundaries buckets depend on the limit, so that there it may be larger: the
        bound of a lower limit is then the better one.
        """
        return self._best_limit

    def _outline(self, part: OrderNumbers, limit: float) -> Outline:
        return outline(part, limit, self._prune)

    def _order(self, slots: tuple[Slot, ...]) -> Order:
        return Order(
            meshes=tuple(slot.mesh for slot in slots),
            variants=tuple(slot.variant for slot in slots),
            units=tuple(slot.units for slot in slots),
            extra=tuple(self._levels[slot.level][1] for slot in slots),
        )


def _is_small(part: OrderNumbers) -> bool:
    """Whether the tables of a part have room, and none of them takes long."""
    variants, layers = part.table.forward.shape[0], part.table.num_layers
    rows = (part.most_stages + 1) * part.level_bound.shape[0]
    entries = (5 + int(part.slices.max())) * rows * (layers + 1)
    return bool(entries <= _MOST_WORK and variants * rows * layers**2 / 2 <= _MOST_AT_ONCE)


def _last_groups(table: StageTable) -> list[npt.NDArray[np.bool_] | None]:
    """Last meshes that can stand behind the same first ones; None: all of them."""
    allowed = np.isfinite(table.tied)
    if allowed.all():
        return [None]
    columns = [tuple(bool(x) for x in column) for column in allowed.T]
    return [np.array([column == key for column in columns]) for key in sorted(set(columns))]
