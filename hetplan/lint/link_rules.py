"""Rules about collectives, transfers and fitted bandwidths."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from hetplan.lint.evidence import Evidence, is_sentinel
from hetplan.lint.findings import Severity
from hetplan.lint.known import fastest_link, known_device
from hetplan.lint.rows import CollectiveRow, Polynomial
from hetplan.lint.rule import Rule, Sighting, grouped, per_file, sighting, some

MIB = 2**20
GIB_SLIP = 2**30 / 1e9
BITS = 8.0
SLIP_TOLERANCE = 0.02  # medians of a ratio of two columns; 1.0737 must not be taken for 1.05
DISAGREE = 0.05  # columns of one row come from one clock: 5 % is more than their rounding
FLAT_GROWTH = 1.025  # at most 2.5 % more time for four times the bytes ...
STEEP_GROWTH = 1.35  # ... and at least 35 % for the next doubling: no latency explains both
FLAT_SPAN, STEEP_SPAN = 4.0, 2.5  # sizes grow by 2 or 4; a doubling may be rounded up
MIN_MESSAGE = MIB  # latency shows below it; gradients of norms and small stages are there too
MANY = 10  # sizes of a series: one that has so many was a sweep, and was begun too late
# From 1 KiB, one activation row of a small model, to 1 GiB, the largest message of a step.
FITTED_BYTES = tuple(2.0**power for power in range(10, 31))
LINK_MARGIN = 1.02  # figures of links are exact; rounded times are not

_SHARES = (
    # busbw / algbw: bytes on the wire per byte of the message (nccl-tests, doc/PERFORMANCE.md).
    (("all_reduce", "allreduce"), lambda ranks: 2.0 * (ranks - 1) / ranks),
    (("all_gather", "allgather"), lambda ranks: (ranks - 1) / ranks),
    (("reduce_scatter", "reducescatter"), lambda ranks: (ranks - 1) / ranks),
    (("all_to_all", "all2all", "alltoall"), lambda ranks: (ranks - 1) / ranks),
    (("p2p", "send_recv", "sendrecv", "broadcast"), lambda ranks: 1.0),
)


def _bus_share(row: CollectiveRow) -> float | None:
    """Bytes per byte of the message that busbw counts; None where the operation is not known."""
    if not row.ranks.isdecimal() or not 2 <= int(row.ranks) < 10**6:
        return None
    name = row.operation.lower()
    return next((share(int(row.ranks)) for names, share in _SHARES if name in names), None)


def _failed(row: CollectiveRow) -> bool:
    return (row.seconds is not None and is_sentinel(row.seconds)) or row.bus_bytes_per_second == 0


def _series(row: CollectiveRow) -> tuple[str, ...]:
    return (row.place.file, row.source, row.device, row.operation, row.ranks, row.scope)


def _sized(evidence: Evidence) -> dict[tuple[str, ...], list[CollectiveRow]]:
    """Rows with a size and a time that are no failures, by series, by size."""
    rows = [
        row
        for row in evidence.material.collectives
        if row.size_bytes and row.seconds and not _failed(row)
    ]
    groups = grouped(rows, _series)
    return {
        key: sorted(group, key=lambda row: row.size_bytes or 0.0) for key, group in groups.items()
    }


def _sentinels(evidence: Evidence) -> Iterator[Sighting]:
    rows = [row for row in evidence.material.collectives if _failed(row)]
    yield from per_file(
        rows,
        lambda row: row.place,
        lambda group: (
            f"{sum(1 for row in group if row.seconds and is_sentinel(row.seconds))} times round "
            f"powers of ten, up to {max((row.seconds or 0.0) for row in group):g} s, "
            f"{sum(1 for row in group if row.bus_bytes_per_second == 0)} of zero bandwidth; "
            f"devices: {some(row.device for row in group)}"
        ),
    )


def _not_positive(evidence: Evidence) -> Iterator[Sighting]:
    rows = [
        row
        for row in evidence.material.collectives
        if (row.bus_bytes_per_second is not None and row.bus_bytes_per_second < 0)
        or (row.seconds is not None and row.seconds <= 0)
        or (row.size_bytes is not None and row.size_bytes < 0)
    ]
    yield from per_file(
        rows, lambda row: row.place, lambda group: "bandwidth, time or size below zero, or no time"
    )
    cities = [
        pair
        for pair in evidence.material.cities
        if pair.bandwidth_bytes_per_second <= 0 or pair.delay_seconds < 0
    ]
    yield from per_file(
        cities,
        lambda pair: pair.place,
        lambda group: (
            f"{group[0].ends[0]} to {group[0].ends[1]}: "
            f"{group[0].bandwidth_bytes_per_second * 8e-9:g} Gbit/s, {group[0].delay_seconds:g} s"
        ),
    )


def _missing_size(evidence: Evidence) -> Iterator[Sighting]:
    rows = [row for row in evidence.material.collectives if row.size_bytes is None]
    yield from per_file(
        rows,
        lambda row: row.place,
        lambda group: f"rows without a size: {some((row.source for row in group), 2)}",
    )


def _above_link(evidence: Evidence) -> Iterator[Sighting]:
    rows: list[tuple[CollectiveRow, float, float]] = []
    for row in evidence.material.collectives:
        share, speed = _bus_share(row), row.bus_bytes_per_second
        if speed is None and share and row.size_bytes and row.seconds and not _failed(row):
            speed = share * row.size_bytes / row.seconds
        device = known_device(row.device)
        limit = device.link_bytes_per_second if device is not None else 0.0
        limit = (limit or fastest_link()) * LINK_MARGIN
        if speed is not None and speed > limit and row.ranks.isdecimal():
            rows.append((row, speed, limit))
    yield from per_file(
        rows,
        lambda entry: entry[0].place,
        lambda group: _above_words([(row.device, speed, limit) for row, speed, limit in group]),
    )
    yield from _samples_above_link(evidence)
    fits: list[tuple[Polynomial, float, float]] = []
    for fit in evidence.material.polynomials:
        ends = [known_device(name) for name in fit.ends]
        limits = [end.link_bytes_per_second for end in ends if end is not None]
        limit = min((each for each in limits if each), default=0.0) * LINK_MARGIN
        if limit and fit.most_bytes_per_second > limit:
            fits.append((fit, fit.most_bytes_per_second, limit))
    yield from per_file(
        fits,
        lambda entry: entry[0].place,
        lambda group: _above_words([(fit.ends[0], speed, limit) for fit, speed, limit in group]),
    )


def _samples_above_link(evidence: Evidence) -> Iterator[Sighting]:
    """Samples of a link faster than any device's links: their device is not known."""
    limit = fastest_link() * LINK_MARGIN
    rows = [
        (row, row.sample.message_bytes / row.sample.median_seconds)
        for row in evidence.material.link_samples
        # Half of an all-gather's bytes may be the rank's own: no operation moves less.
        if row.sample.message_bytes / row.sample.median_seconds > 2 * limit
    ]
    yield from per_file(
        rows,
        lambda entry: entry[0].place,
        lambda group: _above_words([(row.sample.link, speed, limit) for row, speed in group]),
    )


def _above_words(entries: Sequence[tuple[str, float, float]]) -> str:
    name, speed, limit = max(entries, key=lambda entry: entry[1] / entry[2])
    hint = "; 8 times would be bits" if abs(speed / limit - BITS) < 1 else ""
    return (
        f"{speed / 1e9:.4g} GB/s on {name}, whose links together carry "
        f"{limit / LINK_MARGIN / 1e9:.4g} GB/s in one direction{hint}"
    )


def _columns(evidence: Evidence) -> list[tuple[list[CollectiveRow], float]]:
    """(rows, median of stated over computed bus bandwidth) of every series that has both."""
    found = []
    for group in _sized(evidence).values():
        share = _bus_share(group[0])
        ratios = [
            row.bus_bytes_per_second / (share * row.size_bytes / row.seconds)
            for row in group
            if share and row.bus_bytes_per_second and row.size_bytes and row.seconds
        ]
        if ratios:
            found.append((group, median(ratios)))
    return found


def _slip(ratio: float) -> str:
    """Which slip of units makes such a ratio; empty: none that is known."""
    for factor, words in (
        (1 / GIB_SLIP, "bandwidth in GiB/s beside a header that says GB/s"),
        (GIB_SLIP, "size in GiB read as GB"),
        (BITS, "bandwidth in Gbit/s beside a header that says GB/s"),
        (1 / BITS, "size in bits, or bandwidth divided by 8 twice"),
    ):
        if abs(ratio / factor - 1) < SLIP_TOLERANCE:
            return words
    return ""


def _unit_slip(evidence: Evidence) -> Iterator[Sighting]:
    found = [(rows, ratio) for rows, ratio in _columns(evidence) if _slip(ratio)]
    for group in grouped(found, lambda entry: entry[0][0].place.file).values():
        rows, ratio = group[0]
        yield sighting(
            (row.place for each, _ in group for row in each),
            f"bandwidth is {ratio:.4f} times what size and time give: {_slip(ratio)} "
            f"({rows[0].operation} of {rows[0].ranks} on {rows[0].device})",
        )


def _columns_disagree(evidence: Evidence) -> Iterator[Sighting]:
    wrong: list[tuple[CollectiveRow, float]] = []
    for rows, ratio in _columns(evidence):
        if _slip(ratio):
            continue
        share = _bus_share(rows[0]) or 1.0
        for row in rows:
            if row.bus_bytes_per_second and row.size_bytes and row.seconds:
                each = row.bus_bytes_per_second / (share * row.size_bytes / row.seconds)
                # A time written in whole microseconds and a rate with two decimals are rounded.
                coarse = 1e-6 / row.seconds + 0.01e9 / row.bus_bytes_per_second
                if abs(each - 1) > DISAGREE + coarse:
                    wrong.append((row, each))
    yield from per_file(
        wrong,
        lambda entry: entry[0].place,
        lambda group: (
            f"bandwidth is {min(each for _, each in group):.2f} to "
            f"{max(each for _, each in group):.2f} times what size and time give (devices: "
            f"{some(row.device for row, _ in group)})"
        ),
    )


def _flat(evidence: Evidence) -> Iterator[Sighting]:
    found: list[tuple[CollectiveRow, CollectiveRow, CollectiveRow]] = []
    for rows in _sized(evidence).values():
        for position, first in enumerate(rows):
            last = next(
                (row for row in rows[position:] if _size(row) >= FLAT_SPAN * _size(first)), None
            )
            if last is None or any(
                _time(row) > FLAT_GROWTH * _time(first)
                for row in rows[position : rows.index(last, position) + 1]
            ):
                continue
            after = next((row for row in rows if _size(row) >= 2 * _size(last)), None)
            if (
                after is not None
                and _size(after) <= STEEP_SPAN * _size(last)
                and _time(after) >= STEEP_GROWTH * _time(last)
            ):
                found.append((first, last, after))
                break
    yield from per_file(
        found,
        lambda entry: entry[0].place,
        lambda group: "; ".join(
            f"{first.device}, {first.ranks} ranks: {_time(first) * 1e6:.4g} us at "
            f"{_size(first) / MIB:g} MiB, {_time(last) * 1e6:.4g} at {_size(last) / MIB:g}, "
            f"{_time(after) * 1e6:.4g} at {_size(after) / MIB:g}"
            for first, last, after in group[:3]
        ),
    )


def _size(row: CollectiveRow) -> float:
    return row.size_bytes or 0.0


def _time(row: CollectiveRow) -> float:
    return row.seconds or 0.0


def _no_small(evidence: Evidence) -> Iterator[Sighting]:
    series = [
        rows
        for rows in _sized(evidence).values()
        if len(rows) >= MANY and _size(rows[0]) >= MIN_MESSAGE
    ]
    for group in grouped(series, lambda rows: rows[0].place.file).values():
        smallest = min(_size(rows[0]) for rows in group)
        yield sighting(
            (rows[0].place for rows in group),
            f"the smallest message of {len(group)} series is {smallest / MIB:g} MiB or more; "
            f"devices: {some(rows[0].device for rows in group)}",
        )


def fitted(fit: Polynomial, size_bytes: float) -> float:
    """Bytes per second that the polynomial gives for a message."""
    a, b, c = fit.coefficients
    log = math.log2(size_bytes / 1e6)
    return (a * log * log + b * log + c) * 1e9


def _negative_fit(evidence: Evidence) -> Iterator[Sighting]:
    bad: list[tuple[Polynomial, float]] = []
    for fit in evidence.material.polynomials:
        below = [size for size in FITTED_BYTES if fitted(fit, size) <= 0]
        if below or fit.most_bytes_per_second <= 0:
            bad.append((fit, max(below, default=0.0)))
    yield from per_file(
        bad,
        lambda entry: entry[0].place,
        lambda group: (
            f"bandwidth at or below zero for messages up to "
            f"{max(size for _, size in group) / 1024:.0f} KiB, as in {'/'.join(group[0][0].path)}"
        ),
    )


RULES = (
    Rule(
        id="failure-as-number",
        severity=Severity.IMPOSSIBLE,
        title="failed measurements written as numbers",
        explanation="A time that is a round power of ten of seconds, or a bandwidth of zero, is "
        "what profilers write when a message did not fit in memory. A fit takes it for a time.",
        advice="Drop these rows.",
        check=_sentinels,
    ),
    Rule(
        id="bandwidth-not-positive",
        severity=Severity.IMPOSSIBLE,
        title="bandwidth, time or size below zero",
        explanation="No link moves less than nothing.",
        advice="Find what wrote the number; leave the row out.",
        check=_not_positive,
    ),
    Rule(
        id="missing-size",
        severity=Severity.SUSPICIOUS,
        title="a bandwidth without the size of the message",
        explanation="Bandwidth depends on size by a factor of a hundred. Without the size the row "
        "says little: usually it stands for the largest message.",
        advice="Take it as a ceiling, not as a sample.",
        check=_missing_size,
    ),
    Rule(
        id="bandwidth-above-link",
        severity=Severity.IMPOSSIBLE,
        title="more bandwidth than the device's links have",
        explanation="The bandwidth on the wire exceeds what all links of the device carry in one "
        "direction. Usual causes: bits for bytes, both directions added, the wrong device's name.",
        advice="Check the unit and the device.",
        check=_above_link,
    ),
    Rule(
        id="unit-slip",
        severity=Severity.IMPOSSIBLE,
        title="GB for GiB, or bits for bytes",
        explanation="Bandwidth, size and time of a row are one equation. In most rows the "
        "bandwidth differs from it by exactly the factor between two units.",
        advice="Correct the unit of the column that is off.",
        check=_unit_slip,
    ),
    Rule(
        id="columns-disagree",
        severity=Severity.SUSPICIOUS,
        title="bandwidth that size and time of the same row do not give",
        explanation="Bandwidth, size and time of a row are one equation (nccl-tests, "
        "PERFORMANCE.md, for each operation). Where they differ, the columns are averages of "
        "different runs, or the row was edited.",
        advice="Use the time; compute the bandwidth from it.",
        check=_columns_disagree,
    ),
    Rule(
        id="flat-then-steep",
        severity=Severity.SUSPICIOUS,
        title="times that do not grow over a stretch of sizes and then do",
        explanation="Four times the bytes take the same time, and the next doubling takes a third "
        "more. A latency that hides the first cannot be so small for the second: another "
        "algorithm was used, or the times are rounded up.",
        advice="Measure the stretch again with more repeats; do not extrapolate below it.",
        check=_flat,
    ),
    Rule(
        id="no-small-messages",
        severity=Severity.SUSPICIOUS,
        title="no message below 1 MiB",
        explanation="The latency of a collective shows in small messages. A fit of large ones "
        "guesses it, and training sends many small ones.",
        advice="Measure from a few kilobytes on.",
        check=_no_small,
    ),
    Rule(
        id="fit-goes-negative",
        severity=Severity.IMPOSSIBLE,
        title="a fitted bandwidth that is negative for small messages",
        explanation="A parabola through measured points says nothing outside them; this one "
        "crosses zero for messages that training sends.",
        advice="Use it only between the sizes that were measured, or fit latency and bandwidth.",
        check=_negative_fit,
    ),
)
