"""One row of slots: meshes in pipeline order, everything known but layers and recomputation.

`Row` holds what compiled code needs of it: passes of every chunk for every number of layer units,
transfers with the hop that leads back from the last slot to the first, memory by position, and what
follows the pipeline. The units of a slot are dealt over its chunks as evenly as possible, the first
ones one more; embedding and front layers are in the first chunk of the first slot, head and back
layers in the last chunk of the last one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hetplan.cost.replay.ends import step_ends
from hetplan.cost.replay.times import Exchange, PipelineTimes
from hetplan.kernels import kernel
from hetplan.search.families.space import FIRST, LAST, Floats, Ints
from hetplan.search.interleaved.paths import TERMS, exchange_seconds, slot_terms
from hetplan.search.interleaved.ticks import lockstep_applies, lockstep_ends
from hetplan.search.single.replay import NEVER, Numbers, boundaries_of, norm_seconds

_GENERAL = 50
"""How much longer a pass of the general replay takes than one in lock-step (measured)."""


class Arrays(NamedTuple):
    """A row as compiled code takes it; P slots, V recomputations, v chunks."""

    microbatches: int
    chunks: int
    lockstep: bool
    """Megatron-LM's exchanges, in lock-step."""
    one_detour: bool
    """Chains leave a slot for those below once only (`interleaved.paths`)."""
    unit_forward: Floats
    """[P, V] seconds of one layer unit, one microbatch."""
    unit_backward: Floats
    first: Floats
    """[2, V] forward and backward seconds that the first chunk of slot 0 has besides."""
    last: Floats
    """[2, V] the same of the last chunk of the last slot."""
    hops: Floats
    """[4, P] as in `ticks.lockstep_ends`."""
    most: Ints
    """[P, V] layer units that fit; 0: none."""
    after: Floats
    """[P, L + 1] after a slot's last pass, less `leaving`; with the tied matrix's sum."""
    leaving: Floats
    """[P, L + 1]"""
    closing: float
    """What every plan of the row waits for besides: the sum of the norms."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """A row of slots."""

    mesh: tuple[int, ...]
    """Of every slot."""
    units: int
    """Layer units of the whole model."""
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
    numbers: Numbers,
    mesh: tuple[int, ...],
    most: Ints,
    chunks: int,
    exchange: Exchange,
) -> Row:
    """The row over these meshes; `most` [P, V] is what fits on each slot."""
    at = np.array(mesh, dtype=np.int64)
    slots = len(mesh)
    boundaries = boundaries_of(numbers, at)
    _lead_back(numbers, at, boundaries)
    roles = np.zeros(slots, dtype=np.int64)
    roles[0] += FIRST
    roles[-1] += LAST
    after = numbers.after[roles, at]
    leaving = numbers.leaving[roles, at]
    after -= leaving
    after[[0, slots - 1]] += numbers.tied[at[0], at[-1]]
    ends = np.stack((numbers.extra_forward, numbers.extra_backward))
    batched = exchange is Exchange.MEGATRON and numbers.rendezvous
    return Row(
        mesh=mesh,
        units=numbers.layers,
        exchange=exchange,
        rendezvous=numbers.rendezvous,
        arrays=Arrays(
            microbatches=numbers.microbatches,
            chunks=chunks,
            lockstep=bool(batched and lockstep_applies(slots, numbers.microbatches)),
            one_detour=numbers.microbatches == slots,
            unit_forward=np.ascontiguousarray(numbers.forward[:, at].T),
            unit_backward=np.ascontiguousarray(numbers.backward[:, at].T),
            first=np.ascontiguousarray(ends[:, FIRST, :, at[0]]),
            last=np.ascontiguousarray(ends[:, LAST, :, at[-1]]),
            hops=np.ascontiguousarray(boundaries[:4]),
            most=np.ascontiguousarray(most, dtype=np.int64),
            after=after,
            leaving=leaving,
            closing=float(norm_seconds(numbers, at, boundaries)),
        ),
    )


def _lead_back(numbers: Numbers, at: Ints, boundaries: Floats) -> None:
    """Fill in the hop from the last slot to the first one."""
    last = len(at) - 1
    left, right = at[last], at[0]
    inside = left == right and last < numbers.stages_per_node[left]
    if left == right and not inside:
        boundaries[:4, last] = numbers.node_links[:, left]
        boundaries[4, last] = numbers.norm_node_links[left]
    else:
        boundaries[:4, last] = numbers.links[:, left, right]
        boundaries[4, last] = numbers.norm_links[left, right]


@kernel
def slot_passes(
    row: Arrays, slot: int, variant: int, units: int, forward: Floats, backward: Floats
) -> None:
    """Fill in [v] seconds of each chunk of a slot."""
    chunks = row.chunks
    each, rest = units // chunks, units % chunks
    for c in range(chunks):
        held = each + (1 if c < rest else 0)
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
    arrived, leaving = 0.0, 0.0
    for s in range(units.shape[0]):
        arrived = max(arrived, ends[s] + row.after[s, units[s]])
        leaving = max(leaving, row.leaving[s, units[s]])
    return arrived + leaving + row.closing


@kernel
def cut_seconds(row: Arrays, variant: Ints, units: Ints) -> float:
    """One step by lock-step replay; `NEVER` where it does not fit."""
    if not fits(row, variant, units):
        return NEVER
    forward, backward = passes_of(row, variant, units)
    return close(row, units, lockstep_ends(forward, backward, row.hops, row.microbatches))


@kernel
def row_terms(row: Arrays, units: int) -> Floats:
    """[P, V, L + 1, TERMS] `slot_terms` of every slot, recomputation and number of layer units.

    Valid from the chunks' number up to what fits.
    """
    slots, variants = row.unit_forward.shape
    terms = np.zeros((slots, variants, units + 1, TERMS))
    exchanges = np.zeros((5, slots))
    if row.lockstep:
        exchanges = exchange_seconds(row.hops, slots, row.chunks, row.microbatches)
    forward, backward = np.empty(row.chunks), np.empty(row.chunks)
    own = np.empty(5)
    for s in range(slots):
        above = (s - 1) % slots
        hop_above = row.hops[0, above] + row.hops[1, above] + 2.0 * row.hops[2, above]
        hop_below = row.hops[0, s] + row.hops[1, s] + 2.0 * row.hops[2, s]
        for e in range(5):
            own[e] = exchanges[e, s]
        for v in range(variants):
            for n in range(row.chunks, min(units, row.most[s, v]) + 1):
                slot_passes(row, s, v, n, forward, backward)
                slot_terms(
                    forward, backward, s, slots, row.microbatches, hop_above, hop_below, own,
                    row.lockstep, terms[s, v, n],
                )  # fmt: skip
    return terms
