"""How fast can an interleaved pipeline be, slot by slot: chains of passes that add up over slots.

Symbols as in `hetplan.search.interleaved.ticks`. Of every slot s one chain is followed: down
through the slots above it with the first microbatch's first chunk, along all turns of s, and up
again with the last microbatch's first chunk. Twice it may leave s for the slots below:

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

import numpy as np

from hetplan.kernels import kernel
from hetplan.search.families.space import Floats
from hetplan.search.interleaved.ticks import chunk_at

RISE, OWN, TURN, TURN_BACK, SKIP, SKIP_BACK, AWAY, AWAY_BACK = range(8)
"""Entries of `slot_terms`. Away is what slot 0 leaves out and the last slot runs instead."""
TERMS = 8


@kernel
def slot_exchanges(
    hops: Floats, s: int, stages: int, chunks: int, microbatches: int, found: Floats
) -> None:
    """Fill in [5] of slot s as `exchange_seconds` has them, from the hops above and below it."""
    total = microbatches * chunks
    last = stages - 1
    base = 2 * last + (chunks - 1) * stages
    found[:] = 0.0
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


@kernel
def exchange_seconds(hops: Floats, stages: int, chunks: int, microbatches: int) -> Floats:
    """[5, P] seconds of exchanges between the turns of each slot: of all, of those that the first
    and the second detour leave out, and those of first and last slot while slot 0 is away, twice,
    with the ways there and back. Lock-step only; `hops` as in `lockstep_ends`.
    """
    found = np.zeros((5, stages))
    own = np.empty(5)
    for s in range(stages):
        slot_exchanges(hops, s, stages, chunks, microbatches, own)
        for e in range(5):
            found[e, s] = own[e]
    return found


@kernel
def slot_terms(
    forward: Floats,
    backward: Floats,
    slot: int,
    stages: int,
    microbatches: int,
    hop_above: float,
    hop_below: float,
    exchanges: Floats,
    lockstep: bool,
    out: Floats,
) -> None:
    """The numbers of a slot with these passes per chunk.

    hop_above, hop_below: both ways of one transfer over the hop to the slot above, and below.
    exchanges [5]: of this slot, zeros without lock-step.
    """
    chunks = forward.shape[0]
    last = stages - 1
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
