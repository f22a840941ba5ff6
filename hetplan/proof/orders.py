"""Does any pipeline of a family have a step below a limit, over all orders, stages and cuts?

A dynamic program places one stage after the other. A state is the set of islands that have been
used, the mesh of the last stage that was placed, how many stages and how many units are placed; its
value is the least time D of a chain through the placed stages. Every inequality is one of
`hetplan.cost.bounds`; the numbers are those of the family's stage table.

1F1B, from the last stage to the first. D is one microbatch's way through all that is downstream.

    step >= Sigma + X + end     X >= (b) less Sigma, and X >= (c) less Sigma, of every stage

    step >= m C + end of every stage

The program says for a given X what Sigma + end is at least: v. A plan below A has X < A - v. So
asked again with that X, and again, it ends where nothing is left (no plan is below A), or stands
still (it cannot say).

Interleaved, from the first stage to the last. D is the way of one microbatch through the first
chunks of all that is upstream, down and up again, and the end of the step of the first stage. A
stage works for m microbatches after the way down and before the way up:

    step >= D + m C + waits     waits: m v - 1 exchanges, where the trainer batches its messages
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.bounds import downstream_room_seconds, wait_once_seconds
from hetplan.kernels import kernel
from hetplan.plans.targets import target
from hetplan.proof.closed_form import ROUNDING, ClosedForm, passes_in_flight
from hetplan.search.space.family import Family, island_masks
from hetplan.search.space.stage_table import (
    FIRST,
    LAST,
    RENDEZVOUS_EXTRA,
    StageTable,
    backward_wires,
    forward_wires,
)
from hetplan.search.space.stage_tables import StageTables

_ROUNDS = 60
"""Times that X is brought down; most families end within ten."""
_STANDS_STILL = 1e-7
"""X that comes down by less than this part of itself is not asked again."""
_SLACK = 1.0 + ROUNDING
_MOST_STATES = 1 << 16
"""Sets of islands: of more than 16 islands nothing is shown."""
_MOST_NUMBERS = 30_000_000
"""That a program may keep: 240 MB."""


class Row(NamedTuple):
    """What stages lie between in the order of placing: rows are the one that was placed before."""

    chunks: int
    """1: 1F1B, from the last stage on."""
    stages: int
    """Of an interleaved pipeline; most stages of one under 1F1B."""
    seconds: float
    """Of a step; longer ones are not looked for."""
    flights: Ints
    """[W] passes in flight by number of stages placed before, as `StageTable.most_layers` counts.
    """
    before: Floats
    """[M, M] seconds that D grows by before a stage; on the diagonal between stages of a mesh."""
    arrives: Floats
    """[M, M] the rest of the way between them, the new stage's own."""
    waits: Floats
    """[M, M] what a stage waits for the one before, in every microbatch or exchange."""
    waits_next: Floats
    """[2, M] least of the same for the one behind: on its mesh, on another one."""


@kernel
def least_way(t: StageTable, row: Row, limit: float) -> float:
    """1F1B: least Sigma and end of pipelines with X up to the limit. Interleaved: something finite
    where a step up to the limit is possible. Infinite where there is none.
    """
    meshes, width, states = t.island_mask.shape[0], t.num_layers + 1, 1
    for mask in t.island_mask:
        while states <= mask:
            states *= 2
    left = np.full((states, meshes, row.stages + 1, width), np.inf)
    start = np.full((row.stages + 1, width), np.inf)
    start[0, 0] = 0.0
    answer = np.inf
    for mask in range(1, states):
        for b in range(meshes):
            if t.island_mask[b] & mask != t.island_mask[b]:
                continue
            prior = mask ^ t.island_mask[b]
            placed = np.full((row.stages + 1, width), np.inf)
            if prior == 0:
                answer = min(answer, place(t, row, limit, -1, b, start, placed, left[mask, b]))
            for a in range(meshes):
                if prior > 0 and t.island_mask[a] & prior == t.island_mask[a]:
                    have = left[prior, a]
                    answer = min(answer, place(t, row, limit, a, b, have, placed, left[mask, b]))
            for _ in range(1, min(t.max_stages[b], row.stages)):
                more = np.full((row.stages + 1, width), np.inf)
                answer = min(answer, place(t, row, limit, b, b, placed, more, left[mask, b]))
                placed = more
    return answer


@kernel
def place(
    t: StageTable,
    row: Row,
    limit: float,
    a: int,
    b: int,
    have: Floats,
    stay: Floats,
    leave: Floats,
) -> float:
    """One stage of mesh b behind those that end on mesh a, -1 for none; the least whole way.

    have, stay, leave: [stages placed, units placed] least D, where the next stage is on the same
    mesh, or on another one.
    """
    # Long: one stage, tried as the last on its mesh, before another mesh, and at the end.
    answer, before, arrives, waits = np.inf, 0.0, 0.0, 0.0
    if a >= 0:
        before, arrives, waits = row.before[a, b], row.arrives[a, b], row.waits[a, b]
    one_by_one = row.chunks == 1
    may_start = t.may_be_last[b] if one_by_one else t.may_be_first[b]
    may_end = t.may_be_first[b] if one_by_one else t.may_be_last[b]
    if a < 0 and not may_start:
        return answer
    for w in range(row.stages):
        some = np.flatnonzero(have[w] < np.inf)
        for ending in range(3 if some.shape[0] > 0 else 0):
            ends = ending == 2
            if (ends and not may_end) or (not one_by_one and ends != (w + 1 == row.stages)):
                continue
            start_role, end_role = (LAST, FIRST) if one_by_one else (FIRST, LAST)
            role = (start_role if w == 0 else 0) | (end_role if ends else 0)
            waits_next = 0.0 if ends else row.waits_next[ending, b]
            for v in range(t.forward.shape[0]):
                most = min(t.most_layers[v, role, b, row.flights[w]], t.num_layers - some[0])
                for n in range(row.chunks, most + 1):
                    if ends and have[w, t.num_layers - n] == np.inf:
                        continue
                    f = t.extra_forward[role, v, b] + n * t.forward[v, b]
                    g = t.extra_backward[role, v, b] + n * t.backward[v, b]
                    if one_by_one:
                        flight = min(w + 1 + t.most_extra_depth, t.num_microbatches)
                        one, two = f + waits_next, g + waits
                        least = wait_once_seconds(one, two, t.num_microbatches, flight)
                        room = downstream_room_seconds(
                            limit * _SLACK, one, two, g + arrives, t.num_microbatches, flight
                        )
                        room = room if least <= limit * _SLACK else -1.0
                        way = f + g + arrives + (t.after[role, b, n] if ends else 0.0)
                        busy = t.num_microbatches * (one + two)
                    else:
                        own = n * (t.forward[v, b] + t.backward[v, b])
                        busy = t.num_microbatches * (f + g)
                        room = limit * _SLACK - busy
                        way = own / row.chunks
                        if w == 0:
                            room -= t.after[role, b, n]
                            way += f + g - own + t.after[role, b, n]
                        elif not ends:
                            turns = t.num_microbatches * row.chunks - 1
                            room -= turns * max(waits, waits_next)
                    if room < 0.0 and (one_by_one or w > 0):
                        break
                    if busy + t.after[role, b, n] > row.seconds * _SLACK:
                        continue
                    if ends:
                        d = have[w, t.num_layers - n] + before
                        if d <= room * _SLACK:
                            answer = min(answer, d + way)
                        continue
                    into = stay if ending == 0 else leave
                    for u in some:
                        d = have[w, u] + before
                        if u + n < t.num_layers and d <= room * _SLACK:
                            into[w + 1, u + n] = min(into[w + 1, u + n], d + way)
    return answer


def row_of(table: StageTable, family: Family, count: int, seconds: float, *, batched: bool) -> Row:
    """What lies between stages of the table's meshes; `batched`: exchanges of both directions."""
    down, up = _least(table, forward_wires), _least(table, backward_wires)
    none = np.zeros_like(down)
    flights = passes_in_flight(family, count)
    if family.virtual_stages > 1:
        waits, onward = (down, up.T) if batched else (none, none)
        return Row(
            family.virtual_stages, count, seconds, flights[::-1].copy(), _finite(down + up), none,
            _finite(waits), _next(onward),
        )  # fmt: skip
    posted = _least(table, lambda links: links[RENDEZVOUS_EXTRA])
    waits, onward = (up + posted, (down + posted).T) if table.rendezvous else (none, none)
    return Row(
        1, count, seconds, flights, _finite(down.T), _finite(up.T), _finite(waits.T),
        _next(onward.T),
    )  # fmt: skip


def _least(table: StageTable, seconds: Callable[[Floats], Floats]) -> Floats:
    """[M, M] from upstream (row) to downstream (column); of neighbours on a mesh the nearer ones;
    infinite where meshes share an island.
    """
    between = seconds(table.links).copy()
    own = np.minimum(np.diagonal(between), seconds(table.node_links))
    between[(table.island_mask[:, None] & table.island_mask[None]) != 0] = np.inf
    np.fill_diagonal(between, own)
    return between


def _finite(seconds: Floats) -> Floats:
    return np.ascontiguousarray(np.where(np.isfinite(seconds), seconds, 0.0))


def _next(seconds: Floats) -> Floats:
    """[2, M] of the next stage (row) to this one (column): on the mesh, least of the others."""
    others = np.where(np.eye(len(seconds), dtype=bool), np.inf, seconds).min(axis=0)
    return _finite(np.stack([np.diagonal(seconds), others]))


def excludes(
    tables: StageTables, form: ClosedForm, family: Family, limit_seconds: float
) -> bool | None:
    """Whether no plan of the family has a step below the limit; None: the program is too large."""
    states = 1 << int(island_masks(family.meshes).max()).bit_length()
    if states > _MOST_STATES:
        return None
    table = tables.of(family)
    counts = [form.places] if family.virtual_stages == 1 else list(form.stage_counts(family))
    numbers = states * len(family.meshes) * (table.num_layers + 1) * (max(counts, default=0) + 1)
    if numbers > _MOST_NUMBERS:
        return None
    batched = target(tables.job.target).batched_interleaving and table.rendezvous
    rows = [row_of(table, family, count, limit_seconds, batched=batched) for count in counts]
    if family.virtual_stages > 1:
        return all(least_way(table, row, limit_seconds) == np.inf for row in rows)
    longest = limit_seconds
    for _ in range(_ROUNDS):
        way = least_way(table, rows[0], longest)
        if way >= limit_seconds:
            return True
        if limit_seconds - way > longest * (1.0 - _STANDS_STILL):
            return False
        longest = limit_seconds - way
    return False
