"""Every cut of a row whose bound is below a limit, by the labels of `interleaved.program`.

Slots are cut from the first to the last. A cut is followed as long as some label of the slots below
keeps every chain of the slots above, and its own, under the limit.
"""

from __future__ import annotations

import numpy as np

from hetplan.kernels import kernel
from hetplan.search.families.space import Floats, Ints
from hetplan.search.interleaved.paths import (
    AWAY,
    AWAY_BACK,
    OWN,
    RISE,
    SKIP,
    SKIP_BACK,
    TURN,
    TURN_BACK,
)
from hetplan.search.interleaved.rows import Arrays, cut_seconds
from hetplan.search.single.replay import NEVER


@kernel
def _open(
    row: Arrays,
    terms: Floats,
    variant: Ints,
    units: Ints,
    slot: int,
    labels: Floats,
    count: int,
    limit: float,
) -> bool:
    """Whether the slots below `slot` can be cut so that no chain seen here reaches the limit."""
    rise = np.zeros(slot + 2)
    for i in range(slot + 1):
        rise[i + 1] = rise[i] + terms[i, variant[i], units[i], RISE]
    for e in range(count):
        turn, turn_back = labels[e, 0], labels[e, 1]
        fine = rise[slot + 1] + labels[e, 4] < limit
        for i in range(slot, -1, -1):
            if not fine:
                break
            own = terms[i, variant[i], units[i]]
            gain = max(0.0, turn - own[SKIP])
            gain_back = max(0.0, turn_back - own[SKIP_BACK])
            if i == 0 and row.lockstep:
                gain = max(gain, labels[e, 2] - own[AWAY])
                gain_back = max(gain_back, labels[e, 3] - own[AWAY_BACK])
            gained = max(gain, gain_back) if row.one_detour else gain + gain_back
            fine = rise[i] + own[OWN] + gained < limit
            turn += own[TURN]
            turn_back += own[TURN_BACK]
        if fine:
            return True
    return False


@kernel
def list_cuts(
    row: Arrays,
    terms: Floats,
    total: int,
    cutoff: float,
    labels: Floats,
    counts: Ints,
    most: int,
    effort: int,
) -> tuple[Ints, int, bool]:
    """[cuts, 2, P] variants and units of cuts whose bound is below `cutoff`, how many they are, and
    whether they are all: at most `most`, and at most `effort` places looked at.
    """
    slots, variants = row.unit_forward.shape
    found = np.empty((most, 2, slots), np.int64)
    variant, units = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
    left = np.zeros(slots + 1, np.int64)
    left[0] = total
    units[0] = row.chunks - 1
    limit = cutoff
    kept, looked, s = 0, 0, 0
    while s >= 0:
        # The next choice of slot s.
        units[s] += 1
        if units[s] > min(left[s], row.most[s, variant[s]]):
            variant[s] += 1
            units[s] = row.chunks - 1
            if variant[s] == variants:
                variant[s] = 0
                s -= 1
            continue
        looked += 1
        if looked > effort:
            return found, kept, False
        if s == 0:
            n = units[0]
            limit = cutoff - row.closing - row.after[0, n] - row.leaving[0, n]
        rest = left[s] - units[s]
        if not _open(
            row, terms, variant, units, s, labels[s + 1, rest], counts[s + 1, rest], limit
        ):
            continue
        if s == slots - 1:
            if kept == most:
                return found, kept, False
            found[kept, 0] = variant
            found[kept, 1] = units
            kept += 1
            continue
        left[s + 1] = rest
        s += 1
        variant[s] = 0
        units[s] = row.chunks - 1
    return found, kept, True


@kernel
def fastest(row: Arrays, cuts: Ints, count: int) -> tuple[float, int]:
    """Least step of these cuts by lock-step replay, and which one it is."""
    best, at = NEVER, -1
    for i in range(count):
        seconds = cut_seconds(row, cuts[i, 0], cuts[i, 1])
        if seconds < best:
            best, at = seconds, i
    return best, at
