"""Rules about hetplan's own samples: one row of a profile store, and populations side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import TypeAlias

from hetplan.errors import Fault
from hetplan.job.spec import Precision
from hetplan.lint.evidence import Evidence, SampleRow
from hetplan.lint.findings import Check, at, finding, grouped
from hetplan.model.spec import LayerKind
from hetplan.profiling.samples import LayerSample, LinkSample, OperatorSample, Phase

MAX_OUTLIERS = 0.5  # above half of the runs the median itself is one of them
MIN_ACTIVATIONS = 0.9  # of the layer's input, which every backward pass needs; 10 % for rounding
CLOCK_RANGE = 1.10  # boost clocks move by a few per cent under load; 10 % is another setting
POPULATIONS_DIFFER = 1.5  # drivers change times by a few per cent, not by half
MIN_COMMON = 5
FLAT_SIZES = 16.0  # sizes a factor of 16 apart
FLAT_GROWTH = 1.02
LATENCY_SECONDS = 5e-3  # above the round trip of one region; a longer time is bandwidth
WHOLLY_FLAT_SIZES = 1000.0  # over which even the fastest link's time grows severalfold,
WHOLLY_FLAT_BYTES = 1 << 20  # from where on bandwidth counts beside any latency of a region
FASTER_SIZES, FASTER = 4.0, 5.0  # noise slows a message fivefold, but hardly below a larger one
LinkRow: TypeAlias = SampleRow[LinkSample]
AnyRow: TypeAlias = SampleRow[LayerSample] | LinkRow | SampleRow[OperatorSample]


def _rows(evidence: Evidence) -> list[AnyRow]:
    inputs = evidence.inputs
    return [*inputs.layer_samples, *inputs.link_samples, *inputs.operator_samples]


def _quantiles(evidence: Evidence) -> Iterator[Fault]:
    for row in _rows(evidence):
        low, middle, high = (
            row.sample.p10_seconds,
            row.sample.median_seconds,
            row.sample.p90_seconds,
        )
        if not low <= middle <= high:
            yield at(row.place, f"p10 {low:g}, median {middle:g}, p90 {high:g} s")


def _outliers(evidence: Evidence) -> Iterator[Fault]:
    for row in _rows(evidence):
        sample = row.sample
        if sample.outliers > MAX_OUTLIERS * sample.repeats:
            yield at(row.place, f"{sample.outliers} outliers of {sample.repeats} runs")


def _activations(evidence: Evidence) -> Iterator[Fault]:
    for row in evidence.inputs.layer_samples:
        sample = row.sample
        if sample.phase != Phase.FORWARD or sample.layer != LayerKind.TRANSFORMER:
            continue
        elements = sample.microbatch_size * sample.sequence_length * sample.hidden_size
        known = sample.precision in set(Precision)
        least = float(elements * (Precision(sample.precision).bytes_per_element if known else 2))
        if 0 < sample.activation_bytes < MIN_ACTIVATIONS * least:
            kept = f"{sample.activation_bytes:,.0f} bytes kept"
            yield at(row.place, f"{kept}; the layer's input alone has {least:,.0f}")


def _clocks(evidence: Evidence) -> Iterator[Fault]:
    rows = [row for row in evidence.inputs.layer_samples if row.sample.clock_hertz > 0]
    for group in grouped(rows, lambda row: (row.population, row.sample.device)).values():
        clocks = [row.sample.clock_hertz for row in group]
        middle = median(clocks)
        far = [
            row
            for row in group
            if not middle / CLOCK_RANGE <= row.sample.clock_hertz <= middle * CLOCK_RANGE
        ]
        if far:
            yield finding(
                (row.place for row in far),
                f"clocks from {min(clocks) / 1e6:.0f} to {max(clocks) / 1e6:.0f} MHz in one "
                f"population (median {middle / 1e6:.0f})",
            )


def _disagree(evidence: Evidence) -> Iterator[Fault]:
    """Populations of one device that share shapes and differ by far more than a driver."""
    paced = {
        population.name: population.provenance.paced + str(population.provenance.together)
        for population in evidence.inputs.populations
    }
    by_device = grouped(
        evidence.inputs.layer_samples,
        lambda row: (row.sample.device, paced.get(row.population, "")),
    )
    for (device, _), rows in by_device.items():
        populations = list(grouped(rows, lambda row: row.population).items())
        for position, (_, first) in enumerate(populations):
            known = {row.sample.shape: row.sample.median_seconds for row in first}
            for name, second in populations[position + 1 :]:
                ratios = [
                    row.sample.median_seconds / known[row.sample.shape]
                    for row in second
                    if row.sample.shape in known
                ]
                if len(ratios) < MIN_COMMON:
                    continue
                ratio = median(ratios)
                if not 1 / POPULATIONS_DIFFER <= ratio <= POPULATIONS_DIFFER:
                    yield finding(
                        (row.place for row in second if row.sample.shape in known),
                        f"{device} takes {ratio:.2f} times as long in {name} as in "
                        f"{first[0].population} (median of {len(ratios)} shapes)",
                    )


def _links_flat(evidence: Evidence) -> Iterator[Fault]:
    groups = grouped(
        evidence.inputs.link_samples,
        lambda row: (
            row.population,
            row.sample.link,
            row.sample.operation,
            row.sample.backend,
            row.sample.group_size,
        ),
    )
    for rows in groups.values():
        ordered = sorted(rows, key=lambda row: row.sample.message_bytes)
        if len(ordered) > 1 and (pair := _contradiction(ordered)):
            row, smaller = pair
            yield at(row.place, f"{_duration(row)}, and {_duration(smaller)}")


def _duration(row: LinkRow) -> str:
    sample = row.sample
    message = f"{sample.operation} of {sample.message_bytes} bytes"
    return f"{message} takes {sample.median_seconds:.3g} s"


def _contradiction(ordered: Sequence[LinkRow]) -> tuple[LinkRow, LinkRow] | None:
    """A row, and one of a smaller message that takes as long or far longer."""
    last = ordered[-1]
    flat = next(
        (
            row
            for row in ordered
            if 0 < row.sample.message_bytes * FLAT_SIZES <= last.sample.message_bytes
            and row.sample.median_seconds > LATENCY_SECONDS
            and row.sample.median_seconds * FLAT_GROWTH > last.sample.median_seconds
        ),
        None,
    )
    flat = flat or _wholly_flat(ordered)
    if flat is not None:
        return last, flat
    for row in (last, *ordered[:-1]):
        if slower := _slower_than(ordered, row):
            return row, slower
    return None


def _wholly_flat(ordered: Sequence[LinkRow]) -> LinkRow | None:
    """The first row, where all of the series takes as long although its last is a large message."""
    first, last = ordered[0].sample, ordered[-1].sample
    times = [row.sample.median_seconds for row in ordered]
    large = last.message_bytes >= max(WHOLLY_FLAT_BYTES, WHOLLY_FLAT_SIZES * first.message_bytes)
    return ordered[0] if large and max(times) < FLAT_GROWTH * min(times) else None


def _slower_than(ordered: Sequence[LinkRow], row: LinkRow) -> LinkRow | None:
    """A row of a much smaller message that takes much longer."""
    least = FASTER * row.sample.median_seconds
    size = row.sample.message_bytes / FASTER_SIZES
    return next(
        (
            each
            for each in ordered
            if 0 < each.sample.message_bytes <= size and each.sample.p10_seconds > least
        ),
        None,
    )


CHECKS: Mapping[str, Check] = {
    "quantiles-out-of-order": _quantiles,
    "more-outliers-than-runs": _outliers,
    "activations-below-input": _activations,
    "clocks-differ": _clocks,
    "populations-disagree": _disagree,
    "link-times-do-not-grow": _links_flat,
}
