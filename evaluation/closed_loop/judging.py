"""What do predicted and measured steps say together: errors, rank correlation, regret, validity?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from evaluation.closed_loop.choosing import MUCH_STALLED
from evaluation.closed_loop.values import (
    MAX_OVERRUN,
    MAX_PROFILE_EXCESS,
    MAX_SPREAD,
    Goals,
    LoopPass,
    LoopRow,
    LoopTotals,
    TrainedPlan,
    Verdict,
)

LIKE = 1e-12
"""Two predictions that differ by less are equal."""


def judge(
    rows: Sequence[LoopRow],
    repeats: Sequence[TrainedPlan],
    *,
    jitter: float,
    goals: Goals,
    profile_excess: float = 0.0,
) -> LoopPass:
    """A pass with its numbers; `repeats` are all trainings of the searched plan."""
    found = totals(rows, repeats)
    reasons = tuple(_invalid(found))
    if profile_excess > MAX_PROFILE_EXCESS:
        reasons += (
            f"a device kind was profiled {profile_excess:.1%} above its pace (at most "
            f"{MAX_PROFILE_EXCESS:.0%}): the machine was busy then; remove the folder and profile "
            "again",
        )
    verdict = Verdict.INVALID
    if not reasons:
        reasons = tuple(_missed(found, goals))
        verdict = Verdict.MISSED if reasons else Verdict.REACHED
    return LoopPass(
        jitter=jitter,
        rows=tuple(sorted(rows, key=lambda row: row.trained.predicted_seconds)),
        repeats=tuple(repeats),
        profile_excess=profile_excess,
        totals=found,
        verdict=verdict,
        reasons=reasons,
    )


def totals(rows: Sequence[LoopRow], repeats: Sequence[TrainedPlan]) -> LoopTotals:
    """The numbers of a pass of at least one plan, the searched one among them."""
    trained = [row.trained for row in rows]
    measured = [each.measured_seconds for each in trained]
    errors = [each.error for each in trained]
    searched = next(row.trained for row in rows if row.searched)
    everything = (*trained, *repeats)
    passes = sum(each.paced_passes for each in everything)
    return LoopTotals(
        mape=sum(map(abs, errors)) / len(errors),
        worst=max(map(abs, errors)),
        bias=sum(errors) / len(errors),
        spearman=spearman([each.predicted_seconds for each in trained], measured),
        regret=searched.measured_seconds / min(measured) - 1.0,
        repeats_spread=spread([each.measured_seconds for each in repeats]),
        overrun=sum(each.overruns for each in everything) / passes if passes else 0.0,
        range=max(measured) / min(measured),
        stalled_plans=sum(row.stalled >= MUCH_STALLED for row in rows),
        load_average=max(each.load_average for each in everything),
        steal=max(each.steal for each in everything),
    )


def spread(seconds: Sequence[float]) -> float:
    """(longest - shortest) / shortest; 0 of a single one."""
    return max(seconds) / min(seconds) - 1.0


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Rank correlation, equal values with their mean rank; 1 where either side has only one rank.

    C. Spearman, The Proof and Measurement of Association between Two Things, 1904.
    """
    left, right = ranks(one), ranks(other)
    middle = (len(left) + 1) / 2
    a, b = [each - middle for each in left], [each - middle for each in right]
    norm = (sum(x * x for x in a) * sum(y * y for y in b)) ** 0.5
    return sum(x * y for x, y in zip(a, b, strict=True)) / norm if norm else 1.0


def ranks(values: Sequence[float]) -> list[float]:
    """From 1 for the smallest; equal values share the mean of their ranks."""
    order = sorted(range(len(values)), key=lambda at: values[at])
    found = [0.0] * len(values)
    start = 0
    while start < len(order):
        stop = start
        while stop < len(order) and values[order[stop]] <= values[order[start]] * (1 + LIKE):
            stop += 1
        for at in order[start:stop]:
            found[at] = (start + 1 + stop) / 2
        start = stop
    return found


def _invalid(found: LoopTotals) -> Iterator[str]:
    yield from invalid(found.overrun, found.repeats_spread, found.load_average, found.steal)


def invalid(overrun: float, repeats_spread: float, load: float, steal: float) -> Iterator[str]:
    """Why measurements say nothing of predictions; none where they do."""
    busy = f"load average up to {load:.1f}, steal up to {steal:.1%}"
    if overrun > MAX_OVERRUN:
        yield (
            f"{overrun:.0%} of the paced passes took longer than their pace (at most "
            f"{MAX_OVERRUN:.0%}): the cores were too busy ({busy})"
        )
    if repeats_spread > MAX_SPREAD:
        yield (
            f"trainings of one plan differ by {repeats_spread:.1%} (at most {MAX_SPREAD:.0%}): "
            f"the machine was not the same all the time ({busy})"
        )


def _missed(found: LoopTotals, goals: Goals) -> Iterator[str]:
    if found.mape > goals.mape:
        yield f"MAPE {found.mape:.1%}; the goal is {goals.mape:.0%}"
    if found.spearman < goals.spearman:
        yield f"Spearman {found.spearman:.3f}; the goal is {goals.spearman:g}"
    if found.regret > goals.regret:
        yield f"regret {found.regret:.1%}; the goal is {goals.regret:.0%}"
