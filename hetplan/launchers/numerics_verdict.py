"""May these device kinds train one model together?

A kind is refused where a result is further from its reference than its number format explains, or
where it does not compute something. Two kinds are refused where they are further from each other
than both together may be from the reference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby

from hetplan.launchers.numerics_values import KindNumerics, Numerics, NumericsResult


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorDeviation:
    """The result of one operator and kind that uses most of what is allowed."""

    kind: str
    operator: str
    worst: NumericsResult
    results: int
    """Results of the operator that were compared."""


def by_operator(kind: KindNumerics) -> tuple[OperatorDeviation, ...]:
    """One line per operator, in the order in which they were computed."""
    order = list(dict.fromkeys(result.operator for result in kind.results))
    ranked = sorted(kind.results, key=lambda result: order.index(result.operator))
    return tuple(
        _deviation(kind.kind, operator, tuple(results))
        for operator, results in groupby(ranked, key=lambda result: result.operator)
    )


def _deviation(kind: str, operator: str, results: tuple[NumericsResult, ...]) -> OperatorDeviation:
    worst = max(results, key=lambda result: result.share)
    return OperatorDeviation(kind=kind, operator=operator, worst=worst, results=len(results))


def numerics_faults(numerics: Numerics) -> tuple[str, ...]:
    """Why the kinds must not be mixed, one line each; empty: they may be."""
    return (
        *(line for kind in numerics.kinds for line in _alone(kind)),
        *(line for one, other in combinations(numerics.kinds, 2) for line in _together(one, other)),
    )


def kinds_left(numerics: Numerics, kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Which of these kinds have no answer."""
    known = {each.kind for each in numerics.kinds}
    return tuple(kind for kind in kinds if kind not in known)


def units_left(numerics: Numerics, work: Sequence[tuple[str, str, int]]) -> tuple[str, ...]:
    """What of this work (operator, what, tp) a kind neither computed nor was refused, a line each:
    answers that lack something are not those of a whole check.
    """
    lines = []
    for kind in numerics.kinds:
        done = {(each.operator, each.what, each.tp) for each in kind.results}
        refused = {(each.operator, each.what) for each in kind.refused}
        for operator, what, tp in work:
            if (operator, what, tp) not in done and (operator, what) not in refused:
                lines.append(f"{kind.kind}: no answer of {operator} ({what}, tp {tp})")
    return tuple(lines)


def _alone(kind: KindNumerics) -> Iterator[str]:
    for refused in kind.refused:
        yield f"{kind.kind}: {refused.operator} ({refused.what}): {refused.message}"
    for each in by_operator(kind):
        if not each.worst.share <= 1.0:
            yield f"{kind.kind}: {_place(each.worst)} deviates by {_figures(each.worst)}"


def _together(one: KindNumerics, other: KindNumerics) -> Iterator[str]:
    """The worst pair of results of every operator, where it is too far apart."""
    theirs = {result.key: result for result in other.results}
    mine = {result.key for result in one.results}
    worst: dict[str, tuple[float, str]] = {}
    for own in one.results:
        answer = theirs.get(own.key)
        if answer is None:
            if any(each.operator == own.operator for each in other.refused):
                continue
            line = f"{one.kind} and {other.kind}: {_place(own)} was computed by {one.kind} only"
            worst.setdefault(own.operator, (float("inf"), line))
            continue
        apart = _apart(own, answer)
        both = own.allowed.largest + answer.allowed.largest
        if not apart <= both and apart / both > worst.get(own.operator, (0.0, ""))[0]:
            line = (
                f"{one.kind} and {other.kind}: {_place(own)} differs by {apart:.1e} of the "
                f"reference's RMS, allowed {both:.1e}"
            )
            worst[own.operator] = (apart / both, line)
    for found in other.results:
        known = any(each.operator == found.operator for each in one.refused)
        if found.key not in mine and not known:
            line = f"{one.kind} and {other.kind}: {_place(found)} was computed by {other.kind} only"
            worst.setdefault(found.operator, (float("inf"), line))
    for _, line in worst.values():
        yield line


def _apart(own: NumericsResult, found: NumericsResult) -> float:
    scale = own.reference_rms or 1.0
    if len(own.probes) != len(found.probes):
        return math.inf
    pairs = zip(own.probes, found.probes, strict=True)
    return max((abs(a - b) for a, b in pairs), default=0.0) / scale


def _place(result: NumericsResult) -> str:
    return f"{result.operator} ({result.what}, tp {result.tp}, {result.tensor})"


def _figures(result: NumericsResult) -> str:
    return (
        f"rms {result.rms_deviation:.1e} (allowed {result.allowed.rms:.1e}), largest "
        f"{result.largest_deviation:.1e} (allowed {result.allowed.largest:.1e})"
    )
