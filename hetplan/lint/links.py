"""Rules about collectives, transfers, fitted bandwidths and the links of cluster files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from statistics import median

from hetplan.cluster.names import guessed_kinds
from hetplan.cluster.spec import Island
from hetplan.errors import Fault
from hetplan.files.reading import read_document
from hetplan.lint.evidence import CollectiveRow, Evidence, fastest_link, is_sentinel, known_device
from hetplan.lint.findings import Check, Finding, at, finding, grouped
from hetplan.units import format_bandwidth, format_seconds

GIB_SLIP = 2**30 / 1e9
BITS = 8.0
SLIP_TOLERANCE = 0.02  # medians of a ratio of two columns; 1.0737 must not be taken for 1.05
DISAGREE = 0.05  # columns of one row come from one clock: 5 % is more than their rounding
LINK_MARGIN = 1.02  # figures of links are exact; rounded times are not
# Switches that add in the network let all_reduce show up to about a tenth more than a device sends.
_ABOVE = 1.2
_EXACT = 1e-3
_NEAR = 0.1  # makers round: 50 and 64 GB/s are printed of one link
# One fast network: RDMA takes microseconds, TCP over Ethernet some tens of them.
_SLOW_SECONDS = 1e-3
_FASTEST_NIC = 1e11  # bytes/s: NVIDIA ConnectX-8, one port of 800 Gbit/s

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
    if not row.ranks.isdecimal() or len(row.ranks) > 6 or int(row.ranks) < 2:
        return None
    name = row.operation.lower()
    return next((share(int(row.ranks)) for names, share in _SHARES if name in names), None)


def _failed(row: CollectiveRow) -> bool:
    return (row.seconds is not None and is_sentinel(row.seconds)) or row.bus_bytes_per_second == 0


def _series(evidence: Evidence) -> Iterable[list[CollectiveRow]]:
    """Rows with a size and a time that are no failures, that differ in size only."""
    rows = [
        row
        for row in evidence.inputs.collectives
        if row.size_bytes and row.seconds and not _failed(row)
    ]
    return grouped(rows, _series_key).values()


def _series_key(row: CollectiveRow) -> tuple[str, ...]:
    return (row.place.file, row.source, row.device, row.operation, row.ranks, row.scope)


def _sentinels(evidence: Evidence) -> Iterator[Fault]:
    for row in evidence.inputs.collectives:
        if row.seconds is not None and is_sentinel(row.seconds):
            yield at(row.place, f"{row.seconds:g} s on {row.device} is a round power of ten")
        elif row.bus_bytes_per_second == 0:
            yield at(row.place, f"a bandwidth of zero on {row.device}")


def _not_positive(evidence: Evidence) -> Iterator[Fault]:
    for row in evidence.inputs.collectives:
        values = (row.bus_bytes_per_second, row.seconds, row.size_bytes)
        if any(value is not None and value < 0 for value in values) or row.seconds == 0:
            yield at(row.place, "bandwidth, time or size below zero, or no time")


def _missing_size(evidence: Evidence) -> Iterator[Fault]:
    for row in evidence.inputs.collectives:
        if row.size_bytes is None:
            source = f" of {row.source}" if row.source else ""
            yield at(row.place, f"{row.operation}{source} without a size")


def _above_link(evidence: Evidence) -> Iterator[Fault]:
    found: list[tuple[CollectiveRow, float, float]] = []
    for row in evidence.inputs.collectives:
        share, speed = _bus_share(row), row.bus_bytes_per_second
        if speed is None and share and row.size_bytes and row.seconds and not _failed(row):
            speed = share * row.size_bytes / row.seconds
        device = known_device(row.device)
        limit = (device.link_bytes_per_second if device is not None else 0.0) or fastest_link()
        if speed is not None and speed > limit * LINK_MARGIN and row.ranks.isdecimal():
            found.append((row, speed, limit))
    for row, speed, limit in sorted(found, key=lambda entry: -entry[1] / entry[2]):
        yield at(row.place, _above_words(row.device, speed, limit))
    for sample_row in evidence.inputs.link_samples:
        sample = sample_row.sample
        speed = sample.message_bytes / sample.median_seconds
        # Whose link it is, a sample does not say. Half of an all-gather's bytes may be the rank's
        # own: no operation moves less.
        if speed > 2 * fastest_link() * LINK_MARGIN:
            yield at(sample_row.place, _above_words(sample.link, speed, fastest_link()))


def _above_words(name: str, speed: float, limit: float) -> str:
    hint = "; 8 times would be bits" if abs(speed / limit - BITS) < 1 else ""
    return (
        f"{speed / 1e9:.4g} GB/s on {name}, whose links together carry {limit / 1e9:.4g} GB/s in "
        f"one direction{hint}"
    )


def _columns(evidence: Evidence) -> list[tuple[list[CollectiveRow], float]]:
    """(rows, median of stated over computed bus bandwidth) of every series that has both."""
    found = []
    for group in _series(evidence):
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


def _unit_slip(evidence: Evidence) -> Iterator[Fault]:
    found = [(rows, ratio) for rows, ratio in _columns(evidence) if _slip(ratio)]
    for group in grouped(found, lambda entry: entry[0][0].place.file).values():
        rows, ratio = group[0]
        yield finding(
            (row.place for each, _ in group for row in each),
            f"bandwidth is {ratio:.4f} times what size and time give: {_slip(ratio)} "
            f"({rows[0].operation} of {rows[0].ranks} on {rows[0].device})",
        )


def _columns_disagree(evidence: Evidence) -> Iterator[Fault]:
    for rows, series_ratio in _columns(evidence):
        share = _bus_share(rows[0]) or 1.0
        for row in rows:
            if _slip(series_ratio):
                break
            if row.bus_bytes_per_second and row.size_bytes and row.seconds:
                ratio = row.bus_bytes_per_second / (share * row.size_bytes / row.seconds)
                # A time written in whole microseconds and a rate with two decimals are rounded.
                coarse = 1e-6 / row.seconds + 0.01e9 / row.bus_bytes_per_second
                if abs(ratio - 1) > DISAGREE + coarse:
                    words = f"bandwidth is {ratio:.2f} times what size and time give"
                    yield at(row.place, f"{words} ({row.device})")


def _unlike(evidence: Evidence) -> Iterator[Fault]:
    for path, cluster in evidence.inputs.clusters:
        for island in cluster.islands:
            for message in _messages(island):
                yield Finding(file=str(path), message=message)


def _messages(island: Island) -> Iterator[str]:
    """What is odd about the links inside an island."""
    device = island.device
    fabric = device.scale_up.bandwidth_bytes_per_second if device.scale_up else 0.0
    host = device.host.bandwidth_bytes_per_second if device.host else 0.0
    most = max(fabric, host)
    links = [("inside a node", island.intra_node)] if island.devices_per_node > 1 else []
    links += [("between nodes", island.inter_node)] if island.nodes > 1 else []
    for where, link in links:
        rate = link.bandwidth_bytes_per_second
        if most and rate > _ABOVE * most:
            limit = f"one {device.kind} sends at most {format_bandwidth(most)} (catalogue)"
            yield f"{island.name}, {where}: {format_bandwidth(rate)}, {limit}"
        if link.latency_seconds > _SLOW_SECONDS:
            latency = format_seconds(link.latency_seconds)
            yield f"{island.name}, {where}: a latency of {latency}"
    rate = island.inter_node.bandwidth_bytes_per_second
    if island.nodes > 1 and most and _ABOVE * _FASTEST_NIC < rate <= _ABOVE * most:
        yield (
            f"{island.name}, between nodes: {format_bandwidth(rate)} for one device; the fastest "
            f"NIC has {format_bandwidth(_FASTEST_NIC)} (800 Gbit/s): bits taken for bytes?"
        )
    rate = island.intra_node.bandwidth_bytes_per_second
    pair = device.scale_up.one_peer_bytes_per_second if device.scale_up else 0.0
    if island.devices_per_node > 2 and pair and abs(rate / pair - 1) < _NEAR:
        yield (
            f"{island.name}, inside a node: {format_bandwidth(rate)} is what one pair has; a "
            f"device has {format_bandwidth(fabric)} to all others together (catalogue), which "
            "collectives use: write that"
        )
    if rate and fabric and abs(rate / fabric / 2 - 1) < _NEAR:
        yield (
            f"{island.name}, inside a node: {format_bandwidth(rate)} is twice "
            f"{format_bandwidth(fabric)} (catalogue), as both directions together"
        )
    if island.devices_per_node > 1 and fabric and abs(8 * rate / fabric - 1) < _EXACT:
        eighth = f"{format_bandwidth(rate)} is an eighth of {format_bandwidth(fabric)} (catalogue)"
        yield f"{island.name}, inside a node: {eighth}, as bits taken for bytes"


def _estimated(evidence: Evidence) -> Iterator[Fault]:
    for path, cluster in evidence.inputs.clusters:
        for kind in dict.fromkeys(island.device for island in cluster.islands):
            if kind.estimated_note:
                yield Finding(file=str(path), message=kind.estimated_note)


def _guessed(evidence: Evidence) -> Iterator[Fault]:
    for path, _ in evidence.inputs.clusters:
        for fault in guessed_kinds(read_document(path)):
            yield Finding(file=fault.file, line=fault.line, message=fault.message)


CHECKS: Mapping[str, Check] = {
    "failure-as-number": _sentinels,
    "bandwidth-not-positive": _not_positive,
    "missing-size": _missing_size,
    "bandwidth-above-link": _above_link,
    "unit-slip": _unit_slip,
    "columns-disagree": _columns_disagree,
    "link-unlike-its-devices": _unlike,
    "estimated-figures": _estimated,
    "short-kind-name": _guessed,
}
