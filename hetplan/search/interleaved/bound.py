"""Bound of interleaved families: no plan has a shorter step than this says.

Of one row, and of one boundary; `island_bound` bounds families with too many rows to list.

`capacity_bound` looks at every slot by itself. A slot of n units takes its own chain
(`interleaved.chains`) after the rise of the slots above, each of which has at least a unit per
chunk. So for a step T every slot has a largest n, and a row whose slots together hold too few has
no cut below T. Cheap, and blind to detours.

`least_bound` is the least over all cuts: a program over slots, from the last to the first. Of the
slots from s on that hold l layer units, a label has what the chains of
`hetplan.search.interleaved.chains` need of them:

    turn, turn'   sums of what the two detours of slots above s run here
    away, away'   what the last slot runs while slot 0 is away
    need          longest chain of these slots, from the first pass of s to its last one
    pass          sum of last chunks and hops on the way to the last slot and back
    head          H, a turn of the last slot with its last chunk

All of them only make steps longer, so a label that is nowhere below another one is left out. Where
a place has more labels than it has room for, two are replaced by the least of both, entry by entry:
the bound stays valid and loses a little.

`borders_of` says which meshes can stand next to each other in an interleaved pipeline with a step
below T.

m v messages cross the boundary between two stages each way, m (v - 1) of them the one that leads
from the last stage back to the first. One stage's messages to another leave one after the other, so
for every boundary

    messages * max(activation, gradient) < T

Where sends are batched (Exchange.MEGATRON, rendezvous) the slots on both sides wait for them too,
in all exchanges but one (`hetplan.search.bounds.crossing_bound`). Both have a unit per chunk or
more, c is what these take, and `after` follows the last pass of a slot:

    m c + (messages - 1) max(wait + activation, gradient) + after < T         the slot below
    m c + (messages - 1) max(wait + gradient, activation) + after < T         the slot above

with latencies and waits of rendezvous sends on what is received. Otherwise, N = m v passes of each
kind, f the least forward pass, `unit` both passes of a layer unit, W the most passes in flight
(symbols and chains: `hetplan.search.interleaved.chains`):

    m c + (N - 2) max(0, wait + gradient - f) + after < T      the slot above, early receives
    m c + (N - 1 - W) / 3 (unit of the other slot + both ways - 2 unit) + after < T        both
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.replay.times import Exchange
from hetplan.kernels import kernel
from hetplan.search.interleaved.chains import (
    AROUND,
    AWAY,
    AWAY_BACK,
    GROUP,
    HEAD,
    OWN,
    PASS,
    RISE,
    SKIP,
    SKIP_BACK,
    STAY,
    STAY_BACK,
    STEADY,
    TURN,
    TURN_BACK,
    Arrays,
    in_flight,
)
from hetplan.search.space.row import NEVER, norm_levels
from hetplan.search.space.stage_table import StageTable


@kernel
def capacity_bound(row: Arrays) -> float:
    """Least T for which the slots hold all units, exact; `NEVER` where memory forbids it."""
    slots, variants = row.unit_forward.shape
    terms, units = row.terms, row.units
    # Of every slot and number of units the least chain: T is one of these values.
    chain = np.full((slots, units + 1), NEVER)
    rise, ending = 0.0, NEVER
    most = np.zeros(slots, np.int64)
    for n in range(row.chunks, units + 1):
        if n <= row.most[0].max():
            ending = min(ending, row.after[0, n] + row.leaving[0, n])
    held = 0
    for s in range(slots):
        least = NEVER
        for v in range(variants):
            for n in range(row.chunks, min(units, row.most[s, v]) + 1):
                chain[s, n] = min(chain[s, n], rise + terms[s, v, n, OWN])
                most[s] = max(most[s], n)
            if row.most[s, v] >= row.chunks:
                least = min(least, terms[s, v, row.chunks, RISE])
        if most[s] < row.chunks:
            return NEVER
        held += most[s]
        rise += least
    if held < units:
        return NEVER
    # Give units to the slot where one more costs least, from the fewest on: exact for a maximum.
    now = np.full(slots, row.chunks, np.int64)
    bound = 0.0
    for s in range(slots):
        bound = max(bound, chain[s, row.chunks])
    for _ in range(units - row.chunks * slots):
        at, least = -1, NEVER
        for s in range(slots):
            if now[s] < most[s] and chain[s, now[s] + 1] < least:
                at, least = s, chain[s, now[s] + 1]
        if at < 0:
            return NEVER
        now[at] += 1
        bound = max(bound, least)
    return bound + ending + row.closing


ROOM = 12
"""Labels kept per place."""
_WIDTH = 7


@kernel
def add_label(labels: Floats, origin: Ints, count: int, new: Floats, parent: Ints) -> int:
    """Keep a label, or what it is dominated by; how many there are then."""
    kept = 0
    for i in range(count):
        worse = True
        better = True
        for d in range(_WIDTH):
            if labels[i, d] > new[d]:
                worse = False
            if labels[i, d] < new[d]:
                better = False
        if worse:
            return count
        if not better:
            if kept < i:
                for d in range(_WIDTH):
                    labels[kept, d] = labels[i, d]
                for d in range(3):
                    origin[kept, d] = origin[i, d]
            kept += 1
    if kept == labels.shape[0]:
        # The nearest one by `need` takes both.
        near, gap = 0, NEVER
        for i in range(kept):
            if abs(labels[i, 4] - new[4]) < gap:
                near, gap = i, abs(labels[i, 4] - new[4])
        if new[4] < labels[near, 4]:
            for d in range(3):
                origin[near, d] = parent[d]
        for d in range(_WIDTH):
            labels[near, d] = min(labels[near, d], new[d])
        return kept
    for d in range(_WIDTH):
        labels[kept, d] = new[d]
    for d in range(3):
        origin[kept, d] = parent[d]
    return kept + 1


@kernel
def gained_of(
    row: Arrays, own: Floats, turn: float, turn_back: float, way: float, below: Floats, away: bool
) -> float:
    """What the chain of a slot gains by leaving for slots below, above a label whose slots add up
    to these turns, and to this way; own: [TERMS] of the slot; away: slot 0 may leave for the last
    slot. Without a slot below (way: 0) it cannot leave.
    """
    gain = max(0.0, turn - own[SKIP])
    gain_back = max(0.0, turn_back - own[SKIP_BACK])
    if away:
        gain = max(gain, below[2] - own[AWAY])
        gain_back = max(gain_back, below[3] - own[AWAY_BACK])
    stages, head = row.hops.shape[1], below[6]
    stay = way + (stages - 1) * head
    if row.one_detour:
        return float(max(gain, gain_back, stay - own[STAY] if way > 0.0 else 0.0))
    if way <= 0.0:
        return float(gain + gain_back)
    groups = row.microbatches // stages - 2
    longer = max(gain, stay - own[SKIP] - own[STAY])
    longer += max(gain_back, stay - own[SKIP_BACK] - own[STAY_BACK])
    longer += groups * max(0.0, stay - own[GROUP], stages * head - own[AROUND])
    return float(max(gain + gain_back, longer - own[STEADY]))


class CutBound(NamedTuple):
    """The least bound over the cuts of a row, and what it was made of."""

    seconds: float
    """`NEVER` where no cut is below the cutoff."""
    variant: Ints
    """[P] of the cut it came from; where labels were merged, of one of theirs: its bound may be
    larger."""
    units: Ints
    """[P]"""
    labels: Floats
    """[P + 1, L + 1, ROOM, 7] of the slots from one on that hold so many units."""
    counts: Ints
    """[P + 1, L + 1]"""


class _Least(NamedTuple):
    """The best cut so far."""

    seconds: Floats
    """[1]"""
    place: Ints
    """[3] variant and units of slot 0, and the label below it."""


@kernel
def _add_slots(
    row: Arrays,
    limit: float,
    at: Ints,
    labels: Floats,
    origin: Ints,
    counts: Ints,
    found: _Least,
    slice_: int,
) -> None:
    """Labels from slot at[0] upwards, until about `slice_` of them were tried; at[0] is the next
    slot then, -1 behind the first one.
    """
    # Long: one program, whose loops leave as soon as a limit is passed.
    slots, variants = row.unit_forward.shape
    terms, units = row.terms, row.units
    rise = np.zeros(slots + 1)  # least of the slots above
    room = np.zeros(slots + 1, np.int64)  # most units that they hold
    for s in range(slots):
        least, most = NEVER, 0
        for v in range(variants):
            most = max(most, min(row.most[s, v], units))
            if row.most[s, v] >= row.chunks:
                least = min(least, terms[s, v, row.chunks, RISE])
        rise[s + 1] = rise[s] + least
        room[s + 1] = room[s] + most
    new, parent = np.empty(_WIDTH), np.empty(3, np.int64)
    tried = 0
    while at[0] >= 0 and tried < slice_:
        s = at[0]
        at[0] -= 1
        for held in range(max(row.chunks * (slots - 1 - s), units - room[s + 1]), units + 1):
            for i in range(counts[s + 1, held]):
                below = labels[s + 1, held, i]
                for v in range(variants):
                    for n in range(row.chunks, min(units - held, row.most[s, v]) + 1):
                        if held + n + room[s] < units:
                            continue
                        own = terms[s, v, n]
                        if own[OWN] + rise[s] >= limit:
                            break
                        tried += 1
                        away = s == 0 and row.lockstep
                        gained = gained_of(row, own, below[0], below[1], below[5], below, away)
                        need = max(own[OWN] + gained, own[RISE] + below[4])
                        if need + rise[s] >= limit:
                            continue
                        if s == 0:
                            if held + n == units:
                                bound = need + row.after[0, n] + row.leaving[0, n]
                                if bound < min(found.seconds[0], limit):
                                    found.seconds[0] = bound
                                    found.place[0], found.place[1], found.place[2] = v, n, i
                            continue
                        new[0] = below[0] + own[TURN]
                        new[1] = below[1] + own[TURN_BACK]
                        new[2], new[3], new[4] = below[2], below[3], need
                        new[5], new[6] = below[5] + own[PASS], below[6]
                        if s == slots - 1:
                            new[2], new[3], new[6] = own[AWAY], own[AWAY_BACK], own[HEAD]
                        parent[0], parent[1], parent[2] = v, n, i
                        counts[s, held + n] = add_label(
                            labels[s, held + n], origin[s, held + n], counts[s, held + n], new,
                            parent,
                        )  # fmt: skip


_SLICE = 1_000_000
"""Labels that are tried between two looks at the clock: some hundredths of a second."""


def label_bytes(slots: int, units: int) -> int:
    """What `least_bound` takes."""
    return 8 * (slots + 1) * (units + 1) * ROOM * (_WIDTH + 3)


def least_bound(row: Arrays, cutoff: float, check: Callable[[], None] = lambda: None) -> CutBound:
    """Least bound over all cuts, below `cutoff`. check is called now and then and may raise."""
    slots, units = len(row.unit_forward), row.units
    labels = np.empty((slots + 1, units + 1, ROOM, _WIDTH))
    origin = np.empty((slots + 1, units + 1, ROOM, 3), np.int64)
    counts = np.zeros((slots + 1, units + 1), np.int64)
    labels[slots, 0, 0] = 0.0
    counts[slots, 0] = 1
    at = np.full(1, slots - 1, np.int64)
    found = _Least(np.full(1, NEVER), np.full(3, -1, np.int64))
    while at[0] >= 0:
        check()
        _add_slots(row, cutoff - row.closing, at, labels, origin, counts, found, _SLICE)
    variant, chosen = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
    v, n, i = found.place.tolist()
    if i < 0:
        return CutBound(NEVER, variant, chosen, labels, counts)
    held = units
    for s in range(slots):
        variant[s], chosen[s] = v, n
        held -= n
        if s + 1 < slots:
            v, n, i = origin[s + 1, held, i].tolist()
    return CutBound(float(found.seconds[0]) + row.closing, variant, chosen, labels, counts)


class Borders(NamedTuple):
    """Least steps of pipelines with a boundary; NEVER where two meshes cannot be beside."""

    between: Floats
    """[M, M] from mesh (row) to mesh (column); 0 for boundaries inside a mesh."""
    around: Floats
    """[M, M] from the last slot's mesh (row) back to the first one's."""

    def blocked(self, limit: float) -> npt.NDArray[np.bool_]:
        """[M, M] boundaries that no step below the limit has."""
        return np.asarray(self.between >= limit)

    def rings(self, limit: float) -> npt.NDArray[np.bool_]:
        """[M, M] ends of the pipeline that a step below the limit may have."""
        return np.asarray(self.around < limit)


def borders_of(space: StageTable, chunks: int, exchange: Exchange, stages: int) -> Borders:
    """Of interleaved pipelines of so many stages."""
    m = space.num_microbatches
    unit, total = (space.forward + space.backward).min(axis=0), m * chunks
    least = total * unit + space.after[:, :, chunks:].min(axis=(0, 2))
    level = norm_levels(stages) * least_level(space)
    norm = np.maximum(level, norm_levels(stages) * space.norm_links)
    forward, backward, latency, posted = space.links
    below = np.maximum(posted + forward + latency, backward)
    above = np.maximum(posted + backward + latency, forward)
    batched = exchange is Exchange.MEGATRON and space.rendezvous
    found = []
    for messages, closing in ((total, norm), (m * (chunks - 1), level)):
        seconds = messages * np.maximum(forward, backward)
        if batched:
            seconds = np.maximum(seconds, least[None, :] + (messages - 1) * below + closing)
            seconds = np.maximum(seconds, least[:, None] + (messages - 1) * above + closing)
        found.append(seconds)
    between, around = found
    if not batched:
        circuits = max(0, (total - 1 - in_flight(stages, 0, chunks, total)) // 3)
        further = circuits * (unit[:, None] + unit[None, :] + forward + backward + 2.0 * latency)
        both = least - 3 * circuits * unit
        between = np.maximum(between, further + np.maximum(both[:, None], both[None, :]) + norm)
        if space.rendezvous:
            waits = posted + backward + latency - space.forward.min(axis=0)[:, None]
            waited = least[:, None] + (total - 2) * np.maximum(0.0, waits) + norm
            between = np.maximum(between, waited)
    masks = space.island_mask
    shared = (masks[:, None] & masks[None, :]) != 0
    for each in (between, around):
        each[shared] = NEVER
        np.fill_diagonal(each, 0.0)
    around[~space.may_be_last, :] = NEVER
    around[:, ~space.may_be_first] = NEVER
    return Borders(between, around)


def least_level(numbers: StageTable) -> float:
    """Least seconds of one level of it."""
    return float(min(numbers.norm_links.min(), numbers.norm_node_links.min()))
