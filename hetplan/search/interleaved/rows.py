"""One row of an interleaved family: its numbers, and its replay in lock-step.

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
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.replay.ends import step_ends
from hetplan.cost.replay.times import Exchange, PipelineTimes
from hetplan.kernels import kernel
from hetplan.search.interleaved.chains import TERMS, Arrays, most_below, row_terms, slot_passes
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


_GENERAL = 50
"""How much longer a pass of the general replay takes than one in lock-step (measured)."""


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

    def least_seconds(self, limit: float) -> float:
        """No cut of the row has a step below this and below `limit`.

        Of a step below `limit` every slot has some units at most (`most_below`), so each of them
        has at least what the others leave. Passes only get longer with more units, and a replay's
        ends are sums and maxima of passes and hops: a replay with the fewest units of every slot
        ends no later.
        """
        row = self.arrays
        most = most_below(row, limit)
        fewest = np.maximum(row.chunks, row.units - most.sum() + most)
        if (fewest > most).any():
            return limit
        forward, backward = (np.full((self.slots, row.chunks), NEVER) for _ in range(2))
        for v in range(row.unit_forward.shape[1]):
            some = passes_of(row, np.full(self.slots, v), fewest)
            fits = row.most[:, v, None] >= fewest[:, None]
            np.minimum(forward, some[0], out=forward, where=fits)
            np.minimum(backward, some[1], out=backward, where=fits)
        if row.lockstep:
            ends = lockstep_ends(forward, backward, row.hops, row.microbatches)
        else:
            ends = self._ends(forward, backward)
        held = np.arange(row.units + 1)
        may = (held >= fewest[:, None]) & (held <= most[:, None])
        after, leaving = (np.where(may, x, NEVER).min(axis=1) for x in (row.after, row.leaving))
        return float(step_of_ends(ends, after, leaving, row.closing))

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


def row_bytes(table: StageTable, slots: int) -> int:
    """What a row of so many slots takes, nearly all of it for its terms."""
    return 8 * slots * len(table.forward) * (table.num_layers + 1) * TERMS


def row_of(
    table: StageTable,
    mesh: tuple[int, ...],
    most: Ints,
    chunks: int,
    exchange: Exchange,
    *,
    apart: bool = False,
) -> Row:
    """The row over these meshes; `most` [P, V] is what fits on each slot.

    apart: every slot stands for itself, whichever meshes the others have.
    """
    at, slots = np.array(mesh, dtype=np.int64), len(mesh)
    boundaries = boundaries_of(table, at)
    _lead_back(table, at, boundaries)
    roles, tied = np.zeros(slots, dtype=np.int64), np.zeros((slots, 1))
    roles[0], roles[-1] = FIRST, LAST
    tied[[0, -1]] = table.tied[at[0], at[-1]]
    leaving = table.leaving[roles, at]
    unit = (table.forward + table.backward).min(axis=0)[at]
    ends = np.stack((table.extra_forward, table.extra_backward))
    batched = exchange is Exchange.MEGATRON and table.rendezvous
    lockstep = batched and lockstep_applies(slots, table.num_microbatches)
    arrays = Arrays(
        units=table.num_layers,
        microbatches=table.num_microbatches,
        chunks=chunks,
        lockstep=bool(lockstep),
        batched=bool(batched),
        early=bool(table.rendezvous and not lockstep),
        one_detour=table.num_microbatches == slots,
        unit_forward=np.ascontiguousarray(table.forward[:, at].T),
        unit_backward=np.ascontiguousarray(table.backward[:, at].T),
        below=np.zeros(slots) if apart else np.append(unit[1:], 0.0),
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
