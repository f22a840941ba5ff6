"""How many microbatches does every pipeline get so that all are done first?

Pipelines p with G_p sequences per tick need seconds T_p(m), which never falls with m. Wanted are
whole m_p >= least_p with the sum of m_p G_p equal to the batch, and the least largest T_p(m_p).
Exact: of all values that T_p(m) takes the least is found by bisection at which a sum of multiples,
none above what each pipeline does in that time, is the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One pipeline's part in the problem."""

    sequences: int
    """Per tick, of all its data-parallel ranks."""
    least: int
    """Fewest microbatches that it can run."""
    seconds: Callable[[int], float]
    """Of so many microbatches; must not fall."""


def balanced(shares: Sequence[Share], batch: int) -> tuple[int, ...] | None:
    """Microbatches of every pipeline; None where no numbers add up to the batch."""
    most = [batch // share.sequences for share in shares]
    known: list[dict[int, float]] = [{} for _ in shares]

    def seconds(p: int, count: int) -> float:
        if count not in known[p]:
            known[p][count] = shares[p].seconds(count)
        return known[p][count]

    def within(limit: float) -> tuple[int, ...] | None:
        highest = []
        for p, share in enumerate(shares):
            low, high = share.least - 1, most[p]
            while low < high:
                middle = (low + high + 1) // 2
                if seconds(p, middle) <= limit:
                    low = middle
                else:
                    high = middle - 1
            if low < share.least:
                return None
            highest.append(low)
        return _adds_up(shares, highest, batch)

    if any(high < share.least for high, share in zip(most, shares, strict=True)):
        return None
    best = _adds_up(shares, most, batch)
    if best is None:
        return None
    while True:
        # The longest pipeline of what was found must get fewer: the next smaller value.
        limit = max(seconds(p, count) for p, count in enumerate(best))
        low, high = _floor(shares, batch, seconds), limit
        better = None
        for _ in range(50):
            middle = 0.5 * (low + high)
            found = within(middle)
            if found is None:
                low = middle
            else:
                better = found
                high = max(seconds(p, count) for p, count in enumerate(found))
            if high - low <= 1e-9 * high:
                break
        if better is None or high >= limit:
            return best
        best = better


def _floor(shares: Sequence[Share], batch: int, seconds: Callable[[int, int], float]) -> float:
    """No numbers that add up take less: every pipeline with its fewest."""
    return max(seconds(p, share.least) for p, share in enumerate(shares)) * (1 - 1e-9)


def _adds_up(shares: Sequence[Share], most: Sequence[int], batch: int) -> tuple[int, ...] | None:
    """Numbers between least and most whose sequences add up to the batch; as many as possible for
    the first pipelines. A program over the pipelines and the sequences that are still missing.
    """
    missing = batch - sum(share.least * share.sequences for share in shares)
    if missing < 0:
        return None
    # reached[p]: bits of what pipelines p and later can take.
    reached = [1]
    mask = (1 << (missing + 1)) - 1
    for share, high in zip(reversed(shares), reversed(most), strict=True):
        bits, left, step = reached[-1], high - share.least, 1
        while left > 0:
            take = min(step, left)
            bits |= (bits << (take * share.sequences)) & mask
            left -= take
            step *= 2
        reached.append(bits)
    reached.reverse()
    if not reached[0] >> missing & 1:
        return None
    found = []
    for p, (share, high) in enumerate(zip(shares, most, strict=True)):
        count = min(high - share.least, missing // share.sequences)
        while not reached[p + 1] >> (missing - count * share.sequences) & 1:
            count -= 1
        found.append(share.least + count)
        missing -= count * share.sequences
    return tuple(found)
