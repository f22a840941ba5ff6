"""Chains of passes that bound the step of an interleaved row: no step is shorter than a chain.

Symbols, and the order of passes and exchanges: `hetplan.search.interleaved.rows`. Whatever else
makes a pass wait only adds reasons to wait, so every chain holds with sends of any kind.

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

Without lock-step, between the two detours: W_s = min(w_s + 1, N) forward passes of s come before
its first backward pass, and backward pass y is followed by forward pass y + W_s. From forward pass
k of s, k >= W_s, another chain goes to forward pass k of s + 1, to the backward pass there that
follows, k - W_(s+1) + 1, and over the same one of s to forward pass k + q of s,
q = W_s - W_(s+1) + 1. Such a circuit replaces q - 1 passes of s of each kind; (N - 1 - W_s) / q
circuits, rounded down, fit before the last forward pass. What s + 1 runs in each is at least a
layer unit, down and up:

    own_s may grow by circuits * (unit_(s+1) + both ways of the hop) - what s leaves out

The head makes the last chunk of the last slot long. The last slot runs it forward and backward in
the same P turns of every group of P microbatches, H each; the other turns of s may take longer than
its own. Group g has k = g v P + (v - 1) P and y = g v P, d = P - 1 - s:

    down and up    forward pass k of s goes down the last chunks to the last slot; there P turns;
                   backward pass y + P - 1 goes up to s, which follows with forward pass k + P + 2 d
    around         backward pass y - 1 - P of s goes up to slot 0 and back to the last slot; there
                   backward pass y - 1, P turns, forward pass k + P; that goes to slot 0 and down to
                   forward pass k + 2 P of s

The first fits between two groups where 2 d <= (v - 1) P, the second where 2 d >= (3 - v) P. The
first and the last of the m / P groups belong to the two detours, which stay with the last slot for
P turns instead of one; the others lie in the steady state. Every slot takes the longest of its
chains; circuits and early receives (below, STEADY) count only where it stays at home. With one
group only all forward passes of s come before backward pass P - 1: the chain goes down from forward
pass (v - 1) P, and s leaves out the last chunk of the other P - 1 microbatches.

torch's early receives (`hetplan.cost.replay.programs`, rendezvous sends): stages take turns, a pass
each, stage 0 first. By induction forward pass k of s has round k for k < W_s, later 2 k - W_s + 1;
backward pass y has round 2 y + W_s, in the cool-down, y > N - W_s, the round after that of s + 1.
So what a pass needs is made in its own round or at most two rounds before, s + 1 after s. A receive
goes behind what the receiver has done by then:

    forward pass k of s, 0 < k < W_s, s > 0        is received after forward pass k - 1
    backward pass y of s, 0 < y, s < P - 1         is received after backward pass y - 1

and a chain along s has these receives in it: posted by s, then wait, transfer and latency. In the
steady state, y <= N - W_s, a forward pass of s lies between and counts where it takes longer.
Megatron-LM's batched exchange has the same receives where it is not in lock-step, m = P; there slot
0 also receives forward passes from the last slot after each of its own from P - 1 on, (v - 1) P of
them, and the last slot as many gradients from slot 0.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.kernels import kernel
from hetplan.search.space.row import NEVER


@kernel
def chunk_at(place: int, stages: int, chunks: int) -> int:
    """Chunk of the forward pass at this place of a stage's order; any place, also before 0.

    Of a backward pass it is v - 1 less this.
    """
    return (place // stages) % chunks


RISE, OWN, TURN, TURN_BACK, SKIP, SKIP_BACK, AWAY, AWAY_BACK = range(8)
"""Entries of `slot_terms`. Away is what slot 0 leaves out and the last slot runs instead."""

OF_ISLANDS = 8
"""So many of them are asked for sets of islands."""

STEADY, PASS, HEAD, STAY, STAY_BACK, GROUP, AROUND = range(8, 15)

TERMS = 15


@kernel
def slot_exchanges(hops: Floats, s: int, chunks: int, microbatches: int) -> Floats:
    """[6] seconds of exchanges between the turns of slot s: of all, of those that the first and the
    second detour leave out, those of first and last slot while slot 0 is away, twice, with the
    ways there and back; of the longest one. Lock-step only; `hops` as in `lockstep_ends`.
    """
    stages, total = hops.shape[1], microbatches * chunks
    last = stages - 1
    base = 2 * last + (chunks - 1) * stages
    found = np.zeros(6)
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
        found[5] = max(found[5], wait)
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


@kernel
def in_flight(stages: int, s: int, chunks: int, total: int) -> int:
    """W_s: forward passes of slot s before its first backward pass; total: N."""
    return min(2 * (stages - 1 - s) + (chunks - 1) * stages + 1, total)


@kernel
def early_receives_of(
    hops: Floats, s: int, chunks: int, microbatches: int, batched: bool
) -> Floats:
    """As `slot_exchanges`, of receives in the warm-up and the cool-down of slot s: torch's, or
    batched ones without lock-step.
    """
    stages = hops.shape[1]
    last, again = stages - 1, (chunks - 1) * stages
    found = np.zeros(6)
    ahead = in_flight(stages, s, chunks, microbatches * chunks) - 1
    meanwhile = ahead - again
    if s > 0 or batched:
        above = s - 1 if s > 0 else last
        received = hops[3, above] + hops[0, above] + hops[2, above]
        found[0] += (ahead if s > 0 else again) * received
        found[1] = meanwhile * received
    if s < last or batched:
        received = hops[3, s] + hops[1, s] + hops[2, s]
        found[0] += (ahead if s < last else again) * received
        found[2] = meanwhile * received
    return found


@kernel
def turns_elsewhere(stages: int, s: int, chunks: int, total: int, held: int) -> Floats:
    """[4, 2, v] forward and backward passes by chunk that slot s leaves out while its chain is at
    the last slot: for a longer first and second detour, down and up, around. held: 1 in lock-step.
    """
    found = np.zeros((4, 2, chunks))
    ahead, down = in_flight(stages, s, chunks, total) - held, 2 * (stages - 1 - s)
    k = (chunks - 1) * stages
    for i in range(stages - 1):
        found[0, 0, chunk_at(ahead + i, stages, chunks)] += 1
        found[0, 1, chunks - 1 - chunk_at(i, stages, chunks)] += 1
        found[1, 0, chunk_at(total - 1 - i, stages, chunks)] += 1
        found[1, 1, chunks - 1 - chunk_at(total - 1 - i - ahead, stages, chunks)] += 1
    for i in range(1, stages + down):
        found[2, 0, chunk_at(k + i, stages, chunks)] += 1
        found[2, 1, chunks - 1 - chunk_at(i - 1 - down, stages, chunks)] += 1
    for i in range(3 * stages - down):
        found[3, 0, chunk_at(k + down - stages + i, stages, chunks)] += 1
        found[3, 1, chunks - 1 - chunk_at(i - stages, stages, chunks)] += 1
    return found


@kernel
def _met(begin: int, step: int, count: int, low: int, high: int) -> int:
    """How many of `count` numbers from `begin` on, `step` apart, lie from `low` to `high` - 1."""
    until = min(max((high - begin + step - 1) // step, 0), count)
    return until - min(max((low - begin + step - 1) // step, 0), count)


@kernel
def steady_passes(stages: int, s: int, chunks: int, microbatches: int) -> tuple[Floats, int]:
    """([3, v] passes of slot s by chunk, circuits to the slot below): forward passes that lie
    between two backward passes, before the last one; forward, and backward passes that the
    circuits leave out.
    """
    total = microbatches * chunks
    found = np.zeros((3, chunks))
    ahead = in_flight(stages, s, chunks, total)
    if s == stages - 1 or ahead >= total:
        return found, 0
    further = ahead - in_flight(stages, s + 1, chunks, total) + 1
    circuits = (total - 1 - ahead) // further
    for low in range(0, total, stages):
        c, high = chunk_at(low, stages, chunks), low + stages
        found[0, c] += _met(ahead, 1, total - 1 - ahead, low, high)
        for j in range(1, further):
            found[1, c] += _met(ahead + j, further, circuits, low, high)
            found[2, chunks - 1 - c] += _met(j, further, circuits, low, high)
    return found, circuits


class Arrays(NamedTuple):
    """A row as compiled code takes it; P slots, V recomputations, v chunks, L units."""

    units: int
    """L: layer units of the whole model."""
    microbatches: int
    chunks: int
    lockstep: bool
    """Megatron-LM's exchanges, in lock-step."""
    batched: bool
    """Megatron-LM's exchanges, with sends that wait."""
    early: bool
    """Sends that wait for receives, without lock-step."""
    one_detour: bool
    """Chains leave a slot for those below once only (see above)."""
    unit_forward: Floats
    """[P, V] seconds of one layer unit, one microbatch."""
    unit_backward: Floats
    below: Floats
    """[P] least seconds of both passes of a layer unit on the slot below; 0: not known."""
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
def _both_ways(hops: Floats, s: int) -> float:
    return float(hops[0, s] + hops[1, s] + 2.0 * hops[2, s])


@kernel
def _steady_seconds(
    row: Arrays, slot: int, forward: Floats, backward: Floats, passes: Floats, circuits: int
) -> float:
    """What receives, or circuits to the slot below, add to the own chain of a slot."""
    hops = row.hops
    received = hops[3, slot] + hops[1, slot] + hops[2, slot]
    around, waited = circuits * (row.below[slot] + _both_ways(hops, slot)), 0.0
    for c in range(row.chunks):
        around -= passes[1, c] * forward[c] + passes[2, c] * backward[c]
        if row.early:
            waited += passes[0, c] * max(0.0, received - forward[c])
    return float(max(around, waited, 0.0))


@kernel
def slot_terms(
    row: Arrays,
    slot: int,
    forward: Floats,
    backward: Floats,
    exchanges: Floats,
    passes: Floats,
    circuits: int,
    out: Floats,
) -> None:
    """The numbers of a slot with these seconds per chunk, but for `_terms_of_groups`.

    exchanges [6] and passes, circuits: of this slot, zeros where they do not apply.
    """
    chunks, microbatches, lockstep = row.chunks, row.microbatches, row.lockstep
    stages = row.hops.shape[1]
    last = stages - 1
    # Both ways of one transfer over the hop to the slot above, and below.
    hop_above, hop_below = _both_ways(row.hops, (slot - 1) % stages), _both_ways(row.hops, slot)
    busy = 0.0
    for c in range(chunks):
        busy += forward[c] + backward[c]
    out[:] = 0.0
    out[RISE] = forward[0] + backward[0] + hop_below
    out[OWN] = microbatches * busy + exchanges[0]
    if circuits > 0:
        out[STEADY] = _steady_seconds(row, slot, forward, backward, passes, circuits)
        out[OWN] += out[STEADY]
    turn = forward[chunks - 1] + backward[chunks - 1] + hop_above
    out[TURN] = out[TURN_BACK] = turn
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
def _terms_of_groups(
    row: Arrays, slot: int, forward: Floats, backward: Floats, exchanges: Floats, elsewhere: Floats,
    out: Floats,
) -> None:  # fmt: skip
    """The numbers of a slot whose chain stays with the last slot for P turns of a group.

    exchanges [6]: of the slot; elsewhere: of `turns_elsewhere`.
    """
    hops, chunks, longest = row.hops, row.chunks, exchanges[5]
    stages = hops.shape[1]
    down = 2 * (stages - 1 - slot)
    last_chunk = forward[chunks - 1] + backward[chunks - 1]
    out[PASS] = last_chunk + _both_ways(hops, (slot - 1) % stages)
    if slot == stages - 1:
        out[HEAD] = last_chunk
        if row.batched:
            out[HEAD] += hops[3, slot - 1] + hops[2, slot - 1] + hops[0, slot - 1]
    if row.one_detour:
        out[STAY] = (stages - 1) * last_chunk + exchanges[1] + exchanges[2] + out[STEADY]
        return
    out[STAY] = out[STAY_BACK] = (stages - 1) * longest
    out[GROUP] = (stages + down - 1) * longest
    out[AROUND] = (3 * stages - down + 1) * longest - _both_ways(hops, stages - 1)
    for j in range(slot):
        out[AROUND] -= _both_ways(hops, j) + (row.below[j - 1] if j > 0 else 0.0)
    for c in range(chunks):
        for kind in range(4):
            left = elsewhere[kind, 0, c] * forward[c] + elsewhere[kind, 1, c] * backward[c]
            out[(STAY, STAY_BACK, GROUP, AROUND)[kind]] += left
    if down > (chunks - 1) * stages:
        out[GROUP] = NEVER
        if row.microbatches < 3 * stages:  # both longer detours would overlap
            out[STAY] = NEVER
    if down < (3 - chunks) * stages:
        out[AROUND] = NEVER


@kernel
def most_below(row: Arrays, limit: float) -> Ints:
    """[P] most units of every slot in a step below `limit`, by its own chain behind the least rise
    of the slots above; 0: none.
    """
    slots, variants = row.unit_forward.shape
    found = np.zeros(slots, np.int64)
    rise = row.closing
    for s in range(slots):
        least = NEVER
        for v in range(variants):
            if row.most[s, v] >= row.chunks:
                least = min(least, row.terms[s, v, row.chunks, RISE])
            for n in range(row.chunks, min(row.units, row.most[s, v]) + 1):
                if rise + row.terms[s, v, n, OWN] < limit:
                    found[s] = max(found[s], n)
        rise += least
    return found


@kernel
def row_terms(row: Arrays) -> Floats:
    """`Arrays.terms` of the row."""
    slots, variants = row.unit_forward.shape
    terms = np.zeros((slots, variants, row.units + 1, TERMS))
    forward, backward = np.empty(row.chunks), np.empty(row.chunks)
    exchanges, passes, circuits = np.zeros(6), np.zeros((3, row.chunks)), 0
    total, held = row.microbatches * row.chunks, 1 if row.lockstep else 0
    for s in range(slots):
        if row.lockstep:
            exchanges = slot_exchanges(row.hops, s, row.chunks, row.microbatches)
        else:
            passes, circuits = steady_passes(slots, s, row.chunks, row.microbatches)
            if row.early:
                exchanges = early_receives_of(
                    row.hops, s, row.chunks, row.microbatches, row.batched
                )
        elsewhere = turns_elsewhere(slots, s, row.chunks, total, held)
        for v in range(variants):
            for n in range(row.chunks, min(row.units, row.most[s, v]) + 1):
                out = terms[s, v, n]
                slot_passes(row, s, v, n, forward, backward)
                slot_terms(row, s, forward, backward, exchanges, passes, circuits, out)
                _terms_of_groups(row, s, forward, backward, exchanges, elsewhere, out)
    return terms
