"""How wide must a step's 90 % interval be, by the errors of runs that were held back?

Split conformal prediction (Papadopoulos 2008): of n errors |log(measured / predicted)| the one of
rank ceil((n + 1) * 0.9) bounds the next one with 90 % probability if runs are exchangeable within a
group, which needs n >= 9. Groups are a device kind (or a mix) and a regime; below 9 runs they are
pooled, first with other regimes of the same devices, then with other devices, and say so; pools
need twice as many.

Where predictions know which of them are worse, errors over the prediction's own half-width are more
alike than errors (normalised scores: Papadopoulos 2008, Romano and others 2019); whether they do is
decided per group by the interval score (Gneiting and Raftery 2007, eq. 43) of left-out cells.

A few runs that are far slower than all others (a slow node, a busy fabric) would make every
interval as wide as the worst cluster. They are told apart by their distance from the median and
reported as a tail with its share; the intervals are of the others. Such a group can make intervals
wider than the predictions' own, never narrower: its runs were chosen.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetplan.predict.calibration.values import GroupInterval, SlowTail
from hetplan.predict.regression import COVERAGE, MIN_CALIBRATION_ROWS, conformal_halfwidth

MIN_POOLED = 2 * MIN_CALIBRATION_ROWS
"""Runs of a pool: they are of unlike groups, so one of them must not set the width alone."""
_MIN_WITH_TAIL = 20  # below, a single slow run is more than one in twenty, and no tail yet

# 95 % of 57 A100 runs without slow ones lie within 0.052 of their predictions: a tail starts beyond
# all of them.
_TAIL_LOG = 0.08
_TAIL_DEVIATIONS = 3.0  # one run in 740 of a normal law lies above
_MAD_TO_DEVIATION = 1.4826  # of a normal law: one over its 75 % quantile, 0.6745
_MAX_SLOW = 0.4  # where two runs in five are slow the others are no rule they break

_Measure = Callable[["Score"], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A held-back run."""

    cell: str
    devices: tuple[str, ...]
    regime: str
    log_error: float
    """log(measured / predicted)."""
    own: float
    """Half-width that the predictions alone give."""


def conformal_quantile(values: Sequence[float]) -> float:
    """The size of rank ceil((n + 1) * 0.9) among n; infinite of fewer than 9."""
    found = conformal_halfwidth(values)
    return math.inf if found is None else found


def group_intervals(
    scores: Sequence[Score], slow: Sequence[Score] = ()
) -> tuple[tuple[GroupInterval, ...], tuple[str, ...]]:
    """(widths of every group that has enough runs, and of the pools; what to say).

    `slow` runs were left out of the scores.
    """
    groups = sorted({(score.devices, score.regime) for score in scores})
    keys = [*groups, *((devices, "") for devices in sorted({key[0] for key in groups}))]
    keys += [((), regime) for regime in sorted({key[1] for key in groups})]
    keys.append(((), ""))
    found = []
    for devices, regime in keys:
        held = members(scores, devices, regime)
        pooled = not devices or not regime
        if len(held) >= (MIN_POOLED if pooled else MIN_CALIBRATION_ROWS):
            tail = len(members(slow, devices, regime))
            found.append(_interval(held, (devices, regime), tail, pooled))
    few = [
        f"{', '.join(devices)}, {regime}: {len(members(scores, devices, regime))} runs, fewer than "
        f"the {MIN_CALIBRATION_ROWS} that an interval of their own needs"
        for devices, regime in groups
        if len(members(scores, devices, regime)) < MIN_CALIBRATION_ROWS
    ]
    return tuple(found), tuple(few)


def members(scores: Sequence[Score], devices: tuple[str, ...], regime: str) -> list[Score]:
    """Runs of a group; no devices or no regime: any."""
    return [
        score
        for score in scores
        if (not devices or score.devices == devices) and (not regime or score.regime == regime)
    ]


def _interval(
    held: Sequence[Score], group: tuple[tuple[str, ...], str], slow_runs: int, pooled: bool
) -> GroupInterval:
    plain = conformal_quantile([_plain(score) for score in held])
    scaled = all(score.own > 0 for score in held) and (
        _left_out_score(held, _normalised) < _left_out_score(held, _plain)
    )
    return GroupInterval(
        devices=group[0],
        regime=group[1],
        log_halfwidth=plain,
        rows=len(held),
        pooled=pooled,
        scale=conformal_quantile([_normalised(score) for score in held]) if scaled else None,
        least_log_halfwidth=statistics.median(_plain(score) for score in held),
        slow_runs=slow_runs,
    )


def _plain(score: Score) -> float:
    return abs(score.log_error)


def _normalised(score: Score) -> float:
    return abs(score.log_error) / score.own


def _left_out_score(held: Sequence[Score], measure: _Measure) -> float:
    """Mean interval score of every run with the width that runs of other cells give; infinite
    where those are too few.
    """
    total = 0.0
    for cell in sorted({score.cell for score in held}):
        quantile = conformal_quantile([measure(each) for each in held if each.cell != cell])
        for score in held:
            if score.cell == cell:
                unit = score.own if measure is _normalised else 1.0
                width = quantile * unit
                missed = max(0.0, abs(score.log_error) - width)
                total += 2.0 * width + 2.0 / (1.0 - COVERAGE) * missed
    return total / len(held)


def slow_tails(
    scores: Sequence[Score],
) -> tuple[tuple[SlowTail, ...], tuple[Score, ...], tuple[Score, ...]]:
    """(tails of groups that have one, the runs that are in none, the runs that are in one)."""
    tails: list[SlowTail] = []
    slow: set[int] = set()
    for devices, regime in sorted({(score.devices, score.regime) for score in scores}):
        held = [
            (place, score)
            for place, score in enumerate(scores)
            if score.devices == devices and score.regime == regime
        ]
        beyond = _beyond(held)
        if not beyond or len(beyond) > _MAX_SLOW * len(held):
            continue
        slow.update(place for place, _ in beyond)
        errors = [math.expm1(score.log_error) for _, score in beyond]
        tails.append(
            SlowTail(
                devices=devices,
                regime=regime,
                runs=len(held),
                slow=len(beyond),
                least=min(errors),
                most=max(errors),
            )
        )
    return (
        tuple(tails),
        tuple(score for place, score in enumerate(scores) if place not in slow),
        tuple(score for place, score in enumerate(scores) if place in slow),
    )


def _beyond(held: Sequence[tuple[int, Score]]) -> list[tuple[int, Score]]:
    """Runs far above the median, by the spread of the runs and by what each's predictions give."""
    if len(held) < _MIN_WITH_TAIL:
        return []
    middle = statistics.median(score.log_error for _, score in held)
    above = [score.log_error - middle for _, score in held]
    limit = max(_TAIL_LOG, _TAIL_DEVIATIONS * _deviation(above))
    relative, most = above, limit
    if all(score.own > 0 for _, score in held):
        relative = [each / score.own for each, (_, score) in zip(above, held, strict=True)]
        most = _TAIL_DEVIATIONS * _deviation(relative)
    return [
        entry
        for entry, plain, own in zip(held, above, relative, strict=True)
        if plain > limit and own > most
    ]


def _deviation(values: Sequence[float]) -> float:
    """Standard deviation around 0 of a normal law with this median distance."""
    return _MAD_TO_DEVIATION * statistics.median(abs(each) for each in values)
