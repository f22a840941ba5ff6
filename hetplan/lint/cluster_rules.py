"""Figures of a cluster file beside those of its devices: does a link fit what hangs on it?"""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.spec import Island, Link
from hetplan.lint.evidence import Evidence
from hetplan.lint.findings import Severity
from hetplan.lint.rows import Place
from hetplan.lint.rule import Rule, Sighting, sighting
from hetplan.units import format_bandwidth, format_seconds

# Switches that add in the network let all_reduce show up to about a tenth more than a device sends.
_ABOVE = 1.2
_EXACT = 1e-3
# One fast network: RDMA takes microseconds, TCP over Ethernet some tens of them.
_SLOW_SECONDS = 1e-3


def _unlike(evidence: Evidence) -> Iterator[Sighting]:
    for file, cluster in evidence.material.clusters:
        for island in cluster.islands:
            for words in _findings(island):
                yield sighting([Place(file=file, line=0)], words)


def _findings(island: Island) -> Iterator[str]:
    """What is odd about the links inside an island, in words."""
    links = [("inside a node", island.intra_node)] if island.devices_per_node > 1 else []
    links += [("between nodes", island.inter_node)] if island.nodes > 1 else []
    for where, link in links:
        subject = f"{island.name}, {where}"
        yield from (f"{subject}: {words}" for words in _odd(link, island.device))
    fabric = island.device.scale_up.bandwidth_bytes_per_second if island.device.scale_up else 0.0
    rate = island.intra_node.bandwidth_bytes_per_second
    if island.devices_per_node > 1 and fabric and abs(8 * rate / fabric - 1) < _EXACT:
        words = f"{format_bandwidth(rate)} is an eighth of {format_bandwidth(fabric)} (catalogue)"
        yield f"{island.name}, inside a node: {words}, as bits taken for bytes"


def _odd(link: Link, device: DeviceKind) -> Iterator[str]:
    rate = link.bandwidth_bytes_per_second
    fabric = device.scale_up.bandwidth_bytes_per_second if device.scale_up else 0.0
    host = device.host.bandwidth_bytes_per_second if device.host else 0.0
    most = max(fabric, host)
    shown = f"one {device.kind} sends at most {format_bandwidth(most)} (catalogue)"
    if most and rate > _ABOVE * most:
        yield f"{format_bandwidth(rate)}, {shown}"
    if link.latency_seconds > _SLOW_SECONDS:
        yield f"a latency of {format_seconds(link.latency_seconds)}"


RULES = (
    Rule(
        id="link-unlike-its-devices",
        severity=Severity.SUSPICIOUS,
        title="links of an island that do not fit its devices",
        explanation="Inside an island a bandwidth is what one device sends in one direction, so it "
        "cannot pass the device's own links, and one fast network answers within microseconds. "
        "Usual causes: bits for bytes, both directions or all devices added, ms for us.",
        advice="Check the unit and whose figure it is.",
        check=_unlike,
    ),
)
