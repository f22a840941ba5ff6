"""Rules about cluster files: does a link fit the devices that it joins?"""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.cluster.spec import Island
from hetplan.errors import Fault
from hetplan.lint.evidence import Evidence
from hetplan.lint.findings import Finding, Rule, Severity
from hetplan.units import format_bandwidth, format_seconds

# Switches that add in the network let all_reduce show up to about a tenth more than a device sends.
_ABOVE = 1.2
_EXACT = 1e-3
# One fast network: RDMA takes microseconds, TCP over Ethernet some tens of them.
_SLOW_SECONDS = 1e-3


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
    rate = island.intra_node.bandwidth_bytes_per_second
    if island.devices_per_node > 1 and fabric and abs(8 * rate / fabric - 1) < _EXACT:
        eighth = f"{format_bandwidth(rate)} is an eighth of {format_bandwidth(fabric)} (catalogue)"
        yield f"{island.name}, inside a node: {eighth}, as bits taken for bytes"


RULES = (
    Rule(
        id="link-unlike-its-devices",
        severity=Severity.WARNING,
        title="links of an island that do not fit its devices",
        explanation="Inside an island a bandwidth is what one device sends in one direction, so it "
        "cannot pass the device's own links, and one fast network answers within microseconds. "
        "Usual causes: bits for bytes, both directions or all devices added, ms for us.",
        advice="Check the unit and whose figure it is.",
        check=_unlike,
    ),
)
