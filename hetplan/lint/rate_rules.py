"""Rules about the rate at which layers and operators work: what the device can, and its class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetplan.lint.evidence import Evidence, Timed, phases, row_name
from hetplan.lint.findings import Severity
from hetplan.lint.known import known_device
from hetplan.lint.rule import Rule, Sighting, grouped, per_file, sighting, some

FAR_SLOWER = 1 / 3  # efficiencies of one device differ by 2 between widths, not by 3
SAME_RATE = 0.5  # of the true float32 peak: what a device that uses it reaches


def _faster_than_peak(evidence: Evidence) -> Iterator[Sighting]:
    above: list[tuple[Timed, str, float]] = []
    for row in evidence.timed:
        device = known_device(row.device)
        if device is None or not row.flops or not device.peak(row.precision):
            continue
        rates = [(work / seconds, phase) for phase, seconds, work in phases(row)]
        rate, phase = max(rates)
        if rate > device.peak(row.precision):
            above.append((row, phase, rate))
    for group in grouped(above, lambda entry: (entry[0].place.file, entry[0].precision)).values():
        yield from per_file(group, lambda entry: entry[0].place, _peak_words)


def _peak_words(group: Sequence[tuple[Timed, str, float]]) -> str:
    row, phase, rate = max(group, key=lambda entry: entry[2] / _peak(entry[0]))
    device = known_device(row.device)
    text = (
        f"up to {rate / 1e12:.0f} TFLOP/s where {row.precision} has {_peak(row) / 1e12:.1f} "
        f"({phase} of {row_name(row)}); devices: {some(entry[0].device for entry in group)}; "
        f"models: {some(entry[0].model for entry in group)}"
    )
    tensor = device.tensor_float32_flops_per_second if device is not None else 0.0
    if row.precision == "float32" and rate <= tensor:
        text += f"; TF32 has {tensor / 1e12:.0f}: the label hides TF32"
    return text


def _peak(row: Timed) -> float:
    device = known_device(row.device)
    return device.peak(row.precision) / device.margin if device is not None else 1.0


def _rate(row: Timed) -> float:
    """Forward operations per second; 0 where there is no forward time."""
    return row.flops / row.forward if row.forward else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slow:
    """Rows of one model in one file, and what they are measured against."""

    rows: tuple[Timed, ...]
    best: Timed
    """The fastest row of the slow model."""
    fast: Timed
    """The fastest row of the fastest narrower model."""


def _too_slow(evidence: Evidence) -> Iterator[_Slow]:
    """Models that reach far less than narrower ones on the same device, per file."""
    whole = [row for row in evidence.timed if row.whole and row.flops and row.width]
    # Populations of a store have circumstances of their own; profiles of one tool are compared
    # over their files, which often hold one model each.
    by_device = grouped(
        whole,
        lambda row: (
            row.origin if row.layer is None else "",
            row.device,
            row.precision,
            row.operation,
            row.tp,
        ),
    )
    for group in by_device.values():
        models = grouped(group, lambda row: row.model)
        best = {name: max(rows, key=_rate) for name, rows in models.items()}
        for name, rows in models.items():
            narrower = [
                row for other, row in best.items() if other != name and row.width <= rows[0].width
            ]
            fast = max(narrower, key=_rate, default=None)
            if fast is None or _rate(best[name]) >= FAR_SLOWER * _rate(fast):
                continue
            for in_file in grouped(rows, lambda row: row.place.file).values():
                yield _Slow(rows=tuple(in_file), best=best[name], fast=fast)


def _true_float32(slow: _Slow) -> bool:
    """Whether the slow rows are true float32 and the fast ones TF32 under the same label."""
    known = known_device(slow.best.device)
    rate, fast = _rate(slow.best), _rate(slow.fast)
    return (
        known is not None
        and slow.best.precision == "float32"
        and known.tensor_float32_flops_per_second > 0
        and SAME_RATE * known.float32_flops_per_second <= rate
        and rate <= known.float32_flops_per_second < fast
    )


def _slower_than_class(evidence: Evidence) -> Iterator[Sighting]:
    found = [slow for slow in _too_slow(evidence) if not _true_float32(slow)]
    yield from _class_sightings(found, "too slow for what they say")


def _label_of_two(evidence: Evidence) -> Iterator[Sighting]:
    found = [slow for slow in _too_slow(evidence) if _true_float32(slow)]
    yield from _class_sightings(found, "true float32 beside TF32 under one label")


def _class_sightings(found: Sequence[_Slow], what: str) -> Iterator[Sighting]:
    for group in grouped(found, lambda slow: slow.rows[0].place.file).values():
        worst = min(group, key=lambda slow: _rate(slow.best) / _rate(slow.fast))
        slow, fast = worst.best, worst.fast
        yield sighting(
            (row.place for each in group for row in each.rows),
            f"{what}: {slow.model} reaches {_rate(slow) / 1e12:.3g} TFLOP/s on {slow.device} at tp "
            f"{slow.tp}, the narrower {fast.model} {_rate(fast) / 1e12:.3g}",
        )


RULES = (
    Rule(
        id="faster-than-peak",
        severity=Severity.IMPOSSIBLE,
        title="more operations per second than the device has",
        explanation="The operations of the shape over the time exceed the device's peak rate in "
        "the precision that the row names. The label is wrong (TF32 called fp32, another device), "
        "or the row covers less work than it says.",
        advice="Find out in which precision it was measured, and on which device; relabel it.",
        check=_faster_than_peak,
    ),
    Rule(
        id="slower-than-class",
        severity=Severity.SUSPICIOUS,
        title="a model far less efficient than narrower ones on the same device",
        explanation="Wider layers use a device better. Rows that reach less than a third of the "
        "rate of a narrower model were measured with something else: another precision, another "
        "shape, a device that was shared or throttled.",
        advice="Do not fit them together with the others; measure one of the rows again.",
        check=_slower_than_class,
    ),
    Rule(
        id="one-label-two-precisions",
        severity=Severity.SUSPICIOUS,
        title="true float32 and TF32 under one label",
        explanation="Rows of one device and one label differ by what lies between its float32 and "
        "its TF32 rate: torch.backends.cuda.matmul.allow_tf32 was not the same.",
        advice="Split the rows by what they reach, and label both parts.",
        check=_label_of_two,
    ),
)
