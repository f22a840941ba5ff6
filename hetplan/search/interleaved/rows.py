"""One row of an interleaved family: its numbers, its replay in lock-step, and chains that bound it.

A row is slots in pipeline order, everything known but layers and recomputation. `Row` holds what
compiled code needs of it: passes of every chunk for every number of layer units, transfers with the
hop that leads back from the last slot to the first, memory by position, and what follows the
pipeline. The units of a slot are dealt over its chunks as evenly as possible, the first ones one
more; embedding and front layers are in the first chunk of the first slot, head and back layers in
the last chunk of the last one.

Replay. Megatron-LM's batched exchange (`hetplan.cost.replay.programs`, Exchange.MEGATRON) ties all
stages together. P stages, v chunks, m microbatches (a multiple of P, at least 2 P), N = m v.
Stage s runs w_s = 2 (P - 1 - s) + (v - 1) P forward passes, then pairs of a forward and a backward
pass, then w_s backward passes. After each of these N + w_s turns it exchanges, and whatever two
stages exchange they post in the same tick t = s + turn:

    turn t - s of stage s    forward pass k = t - s        where 0 <= k < N
                             backward pass y = k - w_s     where 0 <= y < N
    exchange of tick t       F_k to the stage below, B_y to the stage above; from the last stage to
                             the first and back where a next chunk follows

so a tick is one sweep over the stages, and a step N + 3 P + (v - 1) P sweeps or so. The general
replay (`hetplan.cost.replay.ends`) gives the same ends to the last bit or two; this one takes a
twentieth of its time.

Chains of passes add up over slots. Of every slot s one is followed: down through the slots above it
with the first microbatch's first chunk, along all turns of s, and up again with the last
microbatch's first chunk. Twice it may leave s for the slots below:

    the first backward pass of s waits for the first microbatch, which from forward pass (v - 1) P
    of s goes down its last chunk to the last slot and up again; s itself has only 2 (P - 1 - s)
    forward passes to run meanwhile
    the last forward pass of s goes down to the last slot, and its gradient comes up; s has only
    2 (P - 1 - s) backward passes to run meanwhile

    step >= sum of rise_i (i < s) + own_s + max(0, sum of turn_j (j > s) - skip_s)
                                          + max(0, sum of turn'_j (j > s) - skip'_s)

With lock-step exchanges (`lockstep_applies`, rendezvous sends) a slot below that is passed on the
way up of the first detour runs a forward pass in the same turn, one on the way down of the second
a backward pass, and between two turns of s lies an exchange. Without, turns follow each other at
once and the passes of the detour are all. m is a multiple of P. Where it is P (`one_detour`), slots
may run all forward passes before the first backward pass: there a chain takes one detour only, the
longer one, of which s never has more passes meanwhile than it has behind forward pass (v - 1) P.

With lock-step exchanges slot 0 may also leave for the last slot at once, over the hop that leads
back: that is at its pairs P - 1 ticks earlier, and has them P - 1 ticks longer. Slot 0 is away in
the ticks v P - 1 to v P + P - 2, or N - 1 to N + P - 2; the longer of two detours counts.

Hop times do not depend on layers, so all exchanges of a slot are one number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.replay.ends import step_ends
from hetplan.cost.replay.times import Exchange, PipelineTimes
from hetplan.kernels import kernel
from hetplan.search.space.row import (
    NEVER,
    before_norm,
    boundaries_of,
    norm_seconds,
    step_of_ends,
)
from hetplan.search.space.stage_table import FIRST, LAST, StageTable


@kernel
def lockstep_applies(stages: int, microbatches: int) -> bool:
    """Whether this order of exchanges is the one above, Megatron-LM's sends provided."""
    return stages >= 3 and microbatches % stages == 0 and microbatches >= 2 * stages


@kernel
def chunk_at(place: int, stages: int, chunks: int) -> int:
    """Chunk of the forward pass at this place of a stage's order; any place, also before 0.

    Of a backward pass it is v - 1 less this.
    """
    return (place // stages) % chunks


@kernel
def lockstep_ends(forward: Floats, backward: Floats, hops: Floats, microbatches: int) -> Floats:
    """End of every stage, seconds. forward and backward are [P, v].

    hops [4, P]: send of an activation, send of a gradient, latency, wait of rendezvous sends; hop s
    leads from stage s to s + 1, the last one back to stage 0. `lockstep_applies` must hold.
    """
    stages, chunks = forward.shape
    total = microbatches * chunks
    last = stages - 1
    base = 2 * last + (chunks - 1) * stages
    posted, now = np.zeros(stages), np.zeros(stages)
    for t in range(total + base + 1):
        for s in range(stages):
            k = t - s
            y = t + s - base
            spent = now[s]
            if 0 <= k < total:
                spent += forward[s, (k // stages) % chunks]
            if 0 <= y < total:
                spent += backward[s, chunks - 1 - (y // stages) % chunks]
            posted[s] = now[s] = spent
        for s in range(stages):
            below = s + 1 if s < last else 0
            k = t - s
            # Activations downwards; the last chunk of the last stage sends none.
            if 0 <= k < total and (s < last or (k // stages) % chunks < chunks - 1):
                left = max(posted[s], posted[below] + hops[3, s]) + hops[0, s]
                now[s] = max(now[s], left)
                now[below] = max(now[below], left + hops[2, s])
            # Gradients upwards, over the same hop; the first chunk of the first stage sends none.
            y = t + below - base
            if 0 <= y < total and (s < last or (y // stages) % chunks < chunks - 1):
                left = max(posted[below], posted[s] + hops[3, s]) + hops[1, s]
                now[below] = max(now[below], left)
                now[s] = max(now[s], left + hops[2, s])
    return now


RISE, OWN, TURN, TURN_BACK, SKIP, SKIP_BACK, AWAY, AWAY_BACK = range(8)
"""Entries of `slot_terms`. Away is what slot 0 leaves out and the last slot runs instead."""
TERMS = 8


@kernel
def slot_exchanges(hops: Floats, s: int, chunks: int, microbatches: int) -> Floats:
    """[5] seconds of exchanges between the turns of slot s: of all, of those that the first and the
    second detour leave out, and those of first and last slot while slot 0 is away, twice, with the
    ways there and back. Lock-step only; `hops` as in `lockstep_ends`.
    """
    stages, total = hops.shape[1], microbatches * chunks
    last = stages - 1
    base = 2 * last + (chunks - 1) * stages
    found = np.zeros(5)
    if s == last:
        found[3] = found[4] = 2.0 * hops[3, last] + hops[0, last] + hops[1, last]
    above = s - 1 if s > 0 else last
    below = s + 1 if s < last else 0
    received_above = hops[3, above] + hops[2, above] + hops[0, above]
    received_below = hops[3, s] + hops[2, s] + hops[1, s]
    warmup = base - 2 * s
    for turn in range(total + warmup - 1):
        t = s + turn
        wait = 0.0
        # Activations out and in, gradients out and in; the same tick on both sides.
        k, y = t - s, t + s - base
        if 0 <= k < total and (s < last or chunk_at(k, stages, chunks) < chunks - 1):
            wait = max(wait, hops[0, s])
        k = t - above
        if 0 <= k < total and (s > 0 or chunk_at(k, stages, chunks) < chunks - 1):
            wait = max(wait, received_above)
        if 0 <= y < total and (s > 0 or chunk_at(y, stages, chunks) < chunks - 1):
            wait = max(wait, hops[1, above])
        y = t + below - base
        if 0 <= y < total and (s < last or chunk_at(y, stages, chunks) < chunks - 1):
            wait = max(wait, received_below)
        found[0] += wait
        if (chunks - 1) * stages <= turn < warmup:
            found[1] += wait
        if total - 1 <= turn < total + warmup - 1 - (chunks - 1) * stages:
            found[2] += wait
        # Slot 0 leaves after the tick before, and comes back after the last one.
        for detour in range(2):
            begin = chunks * stages - 1 if detour == 0 else total - 1
            here = begin - (s == 0) <= t < begin + stages - (s == last)
            if here and (s == 0 or s == last):
                found[3 + detour] += wait
    return found


_GENERAL = 50
"""How much longer a pass of the general replay takes than one in lock-step (measured)."""


class Arrays(NamedTuple):
    """A row as compiled code takes it; P slots, V recomputations, v chunks, L units."""

    units: int
    """L: layer units of the whole model."""
    microbatches: int
    chunks: int
    lockstep: bool
    """Megatron-LM's exchanges, in lock-step."""
    one_detour: bool
    """Chains leave a slot for those below once only (see above)."""
    unit_forward: Floats
    """[P, V] seconds of one layer unit, one microbatch."""
    unit_backward: Floats
    first: Floats
    """[2, V] forward and backward seconds that the first chunk of slot 0 has besides."""
    last: Floats
    """[2, V] the same of the last chunk of the last slot."""
    hops: Floats
    """[4, P] as in `lockstep_ends`."""
    most: Ints
    """[P, V] layer units that fit; 0: none."""
    after: Floats
    """[P, L + 1] after a slot's last pass, less `leaving`; with the tied matrix's sum."""
    leaving: Floats
    """[P, L + 1]"""
    closing: float
    """What every plan of the row waits for besides: the sum of the norms."""
    terms: Floats
    """[P, V, L + 1, TERMS] `slot_terms` of every slot, recomputation and number of layer units.
    Valid from the chunks' number up to what fits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """A row of slots."""

    mesh: tuple[int, ...]
    """Of every slot."""
    exchange: Exchange
    rendezvous: bool
    arrays: Arrays

    @property
    def slots(self) -> int:
        """P."""
        return len(self.mesh)

    @property
    def work(self) -> int:
        """Passes, and gaps between them, that one replay goes through; more where it is general."""
        arrays = self.arrays
        passes = (arrays.microbatches + self.slots) * arrays.chunks * self.slots
        return passes if arrays.lockstep else _GENERAL * passes

    def seconds(self, variant: Ints, units: Ints) -> float:
        """One step by replay; `NEVER` where it does not fit, or waits for itself."""
        if self.arrays.lockstep:
            return float(cut_seconds(self.arrays, variant, units))
        if not fits(self.arrays, variant, units):
            return NEVER
        forward, backward = passes_of(self.arrays, variant, units)
        return float(close(self.arrays, units, self._ends(forward, backward)))

    def _ends(self, forward: Floats, backward: Floats) -> Floats:
        slots, chunks = forward.shape
        hop = np.arange(slots * chunks - 1) % slots
        hops = self.arrays.hops[:, hop]
        nothing = np.zeros(len(hop))
        alone = np.full(len(hop), -1, dtype=np.int64)
        times = PipelineTimes(
            schedule="interleaved-1f1b",
            num_microbatches=self.arrays.microbatches,
            warmup=(1,) * slots,  # read for 1f1b only
            forward=forward,
            backward=backward,
            weight=np.zeros_like(forward),
            send_forward=hops[0],
            send_backward=hops[1],
            wire_latency=hops[2],
            rendezvous_extra=hops[3],
            link_forward=alone,
            link_backward=alone,
            shared_forward=nothing,
            shared_backward=nothing,
            exchange=self.exchange,
        )
        return step_ends((times,), rendezvous=self.rendezvous)[0]


def row_of(
    table: StageTable, mesh: tuple[int, ...], most: Ints, chunks: int, exchange: Exchange
) -> Row:
    """The row over these meshes; `most` [P, V] is what fits on each slot."""
    at, slots = np.array(mesh, dtype=np.int64), len(mesh)
    boundaries = boundaries_of(table, at)
    _lead_back(table, at, boundaries)
    roles, tied = np.zeros(slots, dtype=np.int64), np.zeros((slots, 1))
    roles[0], roles[-1] = FIRST, LAST
    tied[[0, -1]] = table.tied[at[0], at[-1]]
    leaving = table.leaving[roles, at]
    ends = np.stack((table.extra_forward, table.extra_backward))
    batched = exchange is Exchange.MEGATRON and table.rendezvous
    arrays = Arrays(
        units=table.num_layers,
        microbatches=table.num_microbatches,
        chunks=chunks,
        lockstep=bool(batched and lockstep_applies(slots, table.num_microbatches)),
        one_detour=table.num_microbatches == slots,
        unit_forward=np.ascontiguousarray(table.forward[:, at].T),
        unit_backward=np.ascontiguousarray(table.backward[:, at].T),
        first=np.ascontiguousarray(ends[:, FIRST, :, at[0]]),
        last=np.ascontiguousarray(ends[:, LAST, :, at[-1]]),
        hops=np.ascontiguousarray(boundaries[:4]),
        most=np.ascontiguousarray(most, dtype=np.int64),
        after=before_norm(table.after[roles, at], leaving, tied),
        leaving=leaving,
        closing=float(norm_seconds(table, at, boundaries)),
        terms=np.empty((0, 0, 0, TERMS)),
    )
    arrays = arrays._replace(terms=row_terms(arrays))
    return Row(mesh=mesh, exchange=exchange, rendezvous=table.rendezvous, arrays=arrays)


def _lead_back(table: StageTable, at: Ints, boundaries: Floats) -> None:
    """Fill in the hop from the last slot to the first one."""
    last = len(at) - 1
    left, right = at[last], at[0]
    inside = left == right and last < table.stages_per_node[left]
    if left == right and not inside:
        boundaries[:4, last] = table.node_links[:, left]
        boundaries[4, last] = table.norm_node_links[left]
    else:
        boundaries[:4, last] = table.links[:, left, right]
        boundaries[4, last] = table.norm_links[left, right]


@kernel
def slot_passes(
    row: Arrays, slot: int, variant: int, units: int, forward: Floats, backward: Floats
) -> None:
    """Fill in [v] seconds of each chunk of a slot."""
    chunks = row.chunks
    share, rest = units // chunks, units % chunks
    for c in range(chunks):
        held = share + (1 if c < rest else 0)
        forward[c] = held * row.unit_forward[slot, variant]
        backward[c] = held * row.unit_backward[slot, variant]
    if slot == 0:
        forward[0] += row.first[0, variant]
        backward[0] += row.first[1, variant]
    if slot == row.unit_forward.shape[0] - 1:
        forward[chunks - 1] += row.last[0, variant]
        backward[chunks - 1] += row.last[1, variant]


@kernel
def passes_of(row: Arrays, variant: Ints, units: Ints) -> tuple[Floats, Floats]:
    """Forward and backward seconds, [P, v]."""
    slots = units.shape[0]
    forward, backward = np.empty((slots, row.chunks)), np.empty((slots, row.chunks))
    for s in range(slots):
        slot_passes(row, s, variant[s], units[s], forward[s], backward[s])
    return forward, backward


@kernel
def fits(row: Arrays, variant: Ints, units: Ints) -> bool:
    """Whether every slot has a unit for each chunk and memory for all."""
    for s in range(units.shape[0]):
        if units[s] < row.chunks or units[s] > row.most[s, variant[s]]:
            return False
    return True


@kernel
def close(row: Arrays, units: Ints, ends: Floats) -> float:
    """The step, from when every slot has left the pipeline."""
    after, leaving = np.empty(units.shape[0]), np.empty(units.shape[0])
    for s in range(units.shape[0]):
        after[s], leaving[s] = row.after[s, units[s]], row.leaving[s, units[s]]
    return step_of_ends(ends, after, leaving, row.closing)


@kernel
def cut_seconds(row: Arrays, variant: Ints, units: Ints) -> float:
    """One step by lock-step replay; `NEVER` where it does not fit."""
    if not fits(row, variant, units):
        return NEVER
    forward, backward = passes_of(row, variant, units)
    return close(row, units, lockstep_ends(forward, backward, row.hops, row.microbatches))


@kernel
def _both_ways(hops: Floats, s: int) -> float:
    return float(hops[0, s] + hops[1, s] + 2.0 * hops[2, s])


@kernel
def slot_terms(
    row: Arrays, slot: int, forward: Floats, backward: Floats, exchanges: Floats, out: Floats
) -> None:
    """The numbers of a slot with these passes per chunk.

    exchanges [5]: of this slot, zeros without lock-step.
    """
    chunks, microbatches, lockstep = row.chunks, row.microbatches, row.lockstep
    stages = row.hops.shape[1]
    last = stages - 1
    # Both ways of one transfer over the hop to the slot above, and below.
    hop_above, hop_below = _both_ways(row.hops, (slot - 1) % stages), _both_ways(row.hops, slot)
    busy = 0.0
    for c in range(chunks):
        busy += forward[c] + backward[c]
    out[RISE] = forward[0] + backward[0] + hop_below
    out[OWN] = microbatches * busy + exchanges[0]
    out[TURN:] = 0.0
    passes = forward[chunks - 1] + backward[chunks - 1] + hop_above
    out[TURN] = out[TURN_BACK] = passes
    held = 1 if lockstep else 0
    reached = (chunks - 1) * stages
    warmup = reached + 2 * (last - slot)
    total = microbatches * chunks
    if lockstep and slot < last:
        out[TURN] += forward[chunk_at(warmup, stages, chunks)]
        out[TURN_BACK] += backward[chunks - 1 - chunk_at(total - 1 - warmup, stages, chunks)]
    out[SKIP], out[SKIP_BACK] = exchanges[1], exchanges[2]
    for place in range(reached + 1, min(warmup + 1 - held, total)):
        out[SKIP] += forward[chunk_at(place, stages, chunks)]
        out[SKIP_BACK] += backward[chunks - 1 - chunk_at(total - 1 - place, stages, chunks)]
    if not lockstep or 0 < slot < last:
        return
    base = 2 * last + (chunks - 1) * stages
    for detour in range(2):
        out[AWAY + detour] = exchanges[3 + detour]
        begin = chunks * stages - 1 if detour == 0 else total - 1
        for t in range(begin, begin + stages):
            k, y = t - slot, t + slot - base
            if k < total:
                out[AWAY + detour] += forward[chunk_at(k, stages, chunks)]
            if y >= 0:
                out[AWAY + detour] += backward[chunks - 1 - chunk_at(y, stages, chunks)]


@kernel
def row_terms(row: Arrays) -> Floats:
    """`Arrays.terms` of the row."""
    slots, variants = row.unit_forward.shape
    terms = np.zeros((slots, variants, row.units + 1, TERMS))
    forward, backward = np.empty(row.chunks), np.empty(row.chunks)
    exchanges = np.zeros(5)
    for s in range(slots):
        if row.lockstep:
            exchanges = slot_exchanges(row.hops, s, row.chunks, row.microbatches)
        for v in range(variants):
            for n in range(row.chunks, min(row.units, row.most[s, v]) + 1):
                slot_passes(row, s, v, n, forward, backward)
                slot_terms(row, s, forward, backward, exchanges, terms[s, v, n])
    return terms
