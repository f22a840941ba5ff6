"""What is left of a cluster when one NIC port of a node is down and its traffic takes a backup.

The devices of the lost NIC send over another one of their node. If all that traffic moved to one
NIC, that NIC would carry twice its load and a synchronous collective would keep 1/2 of its speed;
if it were spread over all n - 1 that are left, it would keep (n - 1) / n. Measured with VCCL's
primary and backup queue pairs on nodes of 8 NICs (Hopper, 400 Gbit/s each): all_reduce keeps 0.766
of its bandwidth (reduce_scatter 0.581). For other numbers of NICs the measurement is carried over
as the same part of the way between the two bounds.

One slow node slows every collective and pipeline that it takes part in, and the step waits for
them; so the figures are changed for the whole island, which is pessimistic for transfers that do
not touch the node. A node without another NIC is cut off, and is taken out of the cluster.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetplan.cluster.spec import Cluster, Island, IslandLink, Link
from hetplan.cost.network.segments import nic_bytes_per_second
from hetplan.errors import InputError

DETECTION_SECONDS = 10.0
"""Retries before the backup takes over (VCCL); ports were down for 4 to 19 s in its tests."""

_MEASURED_NICS = 8
_KEPT_OF_ALL_REDUCE = 0.766  # VCCL, one of eight ports on its backup


@dataclass(frozen=True, slots=True, kw_only=True)
class LostNic:
    """A cluster before and after, comparable with each other."""

    before: Cluster
    """Without the samples of links whose figures change: they hold for all NICs only."""
    after: Cluster
    kept: float
    """Part of a device's network bandwidth that is left; 0 where the node is cut off."""
    devices: range
    """Of the node; a plan that uses none of them is not affected."""
    detection_seconds: float
    """For which training stands still, once."""
    notes: tuple[str, ...]


def kept_bandwidth(nics: int) -> float:
    """Part of its network bandwidth that an all_reduce keeps with one of so many NICs down.

    0 without another NIC.
    """
    if nics < 1:
        raise InputError(f"{nics} NICs; a node has at least 1")
    if nics == 1:
        return 0.0
    way = (_KEPT_OF_ALL_REDUCE - 0.5) / ((_MEASURED_NICS - 1) / _MEASURED_NICS - 0.5)
    return 0.5 + way * ((nics - 1) / nics - 0.5)


def without_nic(cluster: Cluster, island: str, node: int, nic: int) -> LostNic:
    """The cluster with one NIC of a node down.

    Where the cluster does not describe NICs every device has one of its own. An InputError where
    there is no such island, node or NIC, or the node is out already.
    """
    found = cluster.island(island)
    count = found.nics.per_node if found.nics else found.devices_per_node
    if not 0 <= node < found.nodes:
        raise InputError(f"island {island} has no node {node}; it has 0 to {found.nodes - 1}")
    if not 0 <= nic < count:
        raise InputError(f"a node of island {island} has no NIC {nic}; it has 0 to {count - 1}")
    if found.is_out(node):
        raise InputError(f"node {node} of island {island} is out already; name one that is used")
    first = cluster.first_device(island) + node * found.devices_per_node
    devices = range(first, first + found.devices_per_node)
    where = f"NIC {nic} of node {node} of {island}"
    before, after, kept = cluster, cluster, kept_bandwidth(count)
    if count == 1:
        after = cluster.with_island(replace(found, nodes_out=(*found.nodes_out, node)))
        notes = [f"{where} is the node's only one: the node is out"]
    else:
        notes = [
            f"{where} is down: its devices use another of the {count}; all_reduce keeps "
            f"{kept:.3f} of a device's bandwidth, between 0.5 and {(count - 1) / count:.3f} "
            "(measured with VCCL on 8 NICs)",
            f"all transfers between nodes of {island} are taken as slow as those of node {node}",
        ]
        port = nic_bytes_per_second(cluster, found)
        if found.nics is not None:
            port = found.nics.share_bytes_per_second(found.devices_per_node)
        before, after = _slower(cluster, found, port * kept, notes)
    return LostNic(
        before=before,
        after=after,
        kept=kept,
        devices=devices,
        detection_seconds=DETECTION_SECONDS,
        notes=tuple(notes),
    )


def _slower(
    cluster: Cluster, island: Island, most: float, notes: list[str]
) -> tuple[Cluster, Cluster]:
    """The cluster before and after no device of the island sends more than `most` outside."""
    before, after = cluster, cluster
    if island.nodes > 1 and island.inter_node.bandwidth_bytes_per_second > most:
        if island.inter_node.samples:
            notes.append(
                f"figures replace the samples {island.inter_node.samples} in both estimates: they "
                "were measured with every NIC"
            )
        plain = replace(island.inter_node, samples=None)
        slow = replace(plain, bandwidth_bytes_per_second=most)
        before = before.with_island(replace(island, inter_node=plain))
        after = after.with_island(replace(island, inter_node=slow))
    plains, slows = [], []
    for other in cluster.islands:
        # What one device could take of a whole line is already limited by its port to the island.
        link = None if other.name == island.name else _own_figure(after, island, other)
        if link is None or link.bandwidth_bytes_per_second <= most:
            continue
        if link.shared_bandwidth_bytes_per_second is not None and island.region != other.region:
            notes.append(f"the shared line to {other.name} keeps its figure")
            continue
        plain = replace(link, samples=None)
        slow = replace(plain, bandwidth_bytes_per_second=most)
        between = (island.name, other.name)
        plains.append(IslandLink(between=between, link=plain))
        slows.append(IslandLink(between=between, link=slow))
    # The first entry of a pair counts.
    before = replace(before, links=(*plains, *before.links))
    return before, replace(after, links=(*slows, *after.links))


def _own_figure(cluster: Cluster, one: Island, two: Island) -> Link | None:
    """The link of two islands; None where they have none."""
    try:
        return cluster.link_between(one.name, two.name)
    except InputError:
        return None
