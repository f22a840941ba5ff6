"""Rules about tables of efficiency by shape."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from hetplan.lint.evidence import Evidence
from hetplan.lint.findings import Severity
from hetplan.lint.rows import EfficiencyRow
from hetplan.lint.rule import Rule, Sighting, grouped, per_file, sighting

ORIENTATION = frozenset({"layout", "stage"})
"""What beside the sizes decides which product it is; the rest is easily taken for decoration."""
DIFFERENCE = 0.02  # of the efficiency: less than 2 % is noise between two runs of one kernel
ATTENTION = ("sdp", "attention", "flash", "attn")


def _is_attention(row: EfficiencyRow) -> bool:
    return any(word in row.operation.lower() for word in ATTENTION)


def _shape(row: EfficiencyRow) -> dict[str, str]:
    pairs = [part.partition("=") for part in row.shape.split(",")]
    return {key.strip(): value.strip() for key, _, value in pairs}


def _above_one(evidence: Evidence) -> Iterator[Sighting]:
    rows = [
        row
        for row in evidence.material.efficiencies
        if row.efficiency > 1 and not _is_attention(row)
    ]
    yield from per_file(
        rows,
        lambda row: row.place,
        lambda group: (
            f"up to {max(row.efficiency for row in group):.3f} in "
            f"{group[0].operation} on "
            f"{group[0].device}"
        ),
    )


def _not_positive(evidence: Evidence) -> Iterator[Sighting]:
    rows = [row for row in evidence.material.efficiencies if row.efficiency <= 0]
    yield from per_file(
        rows, lambda row: row.place, lambda group: f"down to {min(r.efficiency for r in group):g}"
    )


def _causal_full(evidence: Evidence) -> Iterator[Sighting]:
    attention = [row for row in evidence.material.efficiencies if _is_attention(row)]
    for group in grouped(attention, lambda row: (row.place.file, row.device)).values():
        above = [row for row in group if row.efficiency > 1]
        if above:
            most = max(above, key=lambda row: row.efficiency)
            yield sighting(
                (row.place for row in above),
                f"up to {most.efficiency:.3f} of the peak in {most.operation} on {most.device}; "
                f"all {len(group)} rows of attention there count the same way",
            )


def _sizes(row: EfficiencyRow) -> tuple[tuple[str, str], ...]:
    """What decides the work: every number of the shape, and how its operands lie."""
    return tuple(
        sorted(
            (key, value)
            for key, value in _shape(row).items()
            if value.isdecimal() or key in ORIENTATION
        )
    )


def _ignored_key(evidence: Evidence) -> Iterator[Sighting]:
    found: list[tuple[EfficiencyRow, EfficiencyRow, str]] = []
    by_size = grouped(
        evidence.material.efficiencies,
        lambda row: (row.place.file, row.source, row.device, row.operation, _sizes(row)),
    )
    for rows in by_size.values():
        pair = _most_different(rows)
        names = ", ".join(sorted(_differing(*pair))) if pair is not None else ""
        if pair is not None and names:
            found.append((*pair, names))
    for group in grouped(found, lambda entry: (entry[0].place.file, entry[0].device)).values():
        first, second, names = max(group, key=lambda entry: _ratio(entry[0], entry[1]))
        yield sighting(
            (entry[1].place for entry in group),
            f"{first.operation} on {first.device}: shapes alike but for {names} differ by up to "
            f"{_ratio(first, second) - 1:.0%} ({first.efficiency:.3f} and {second.efficiency:.3f})",
        )


def _most_different(rows: list[EfficiencyRow]) -> tuple[EfficiencyRow, EfficiencyRow] | None:
    pairs = [(a, b) for a, b in combinations(rows, 2) if min(a.efficiency, b.efficiency) > 0]
    pair = max(pairs, key=lambda each: _ratio(*each), default=None)
    return pair if pair is not None and _ratio(*pair) > 1 + DIFFERENCE else None


def _ratio(a: EfficiencyRow, b: EfficiencyRow) -> float:
    return max(a.efficiency, b.efficiency) / min(a.efficiency, b.efficiency)


def _differing(a: EfficiencyRow, b: EfficiencyRow) -> set[str]:
    first, second = _shape(a), _shape(b)
    return {key for key in first.keys() | second.keys() if first.get(key) != second.get(key)}


RULES = (
    Rule(
        id="efficiency-above-one",
        severity=Severity.IMPOSSIBLE,
        title="more than the peak rate",
        explanation="An efficiency above 1 is more operations per second than the device has: the "
        "peak belongs to another precision, or the operations are counted twice.",
        advice="Check the peak that the efficiency was computed with.",
        check=_above_one,
    ),
    Rule(
        id="efficiency-not-positive",
        severity=Severity.IMPOSSIBLE,
        title="an efficiency of zero or below",
        explanation="Zero stands for a measurement that failed.",
        advice="Leave the row out.",
        check=_not_positive,
    ),
    Rule(
        id="causal-attention-counted-full",
        severity=Severity.IMPOSSIBLE,
        title="attention with more than the peak rate",
        explanation="A causal kernel computes half of the scores. Its efficiency exceeds 1 when "
        "the full square is counted: then every attention row of the table counts it, those below "
        "1 too.",
        advice="Use full-attention operations with these efficiencies; do not halve them again.",
        check=_causal_full,
    ),
    Rule(
        id="key-ignores-a-column",
        severity=Severity.SUSPICIOUS,
        title="equal sizes, different efficiencies",
        explanation="Rows agree in every size and differ in something that is easily left out of "
        "a key, such as the type of the output. A look-up by sizes returns one of them by chance.",
        advice="Make what differs part of the key.",
        check=_ignored_key,
    ),
)
