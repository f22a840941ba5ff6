"""How much of a measured link do groups leave each other whose devices share NICs?

A link's bandwidth in the cluster file is one device's share of its node's NICs, so groups that use
their shares do not slow each other (`hetplan.cost.network.group_shares`). Samples are another
thing: they say what one group reached with the NICs to itself. Of k lanes over the busiest NIC,
o of them of one group, that group keeps

    share = min(1, (o / k) * C / min(o * r, C))        C = max(NIC's bandwidth, r)

where r is the rate that one pair reached: o lanes alone get what they ask for, up to the NIC's
rate, and all k together the NIC's rate, each an equal part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.cluster.node import Nics
from hetplan.cluster.spec import Cluster, Link
from hetplan.cost.arrays import Ints
from hetplan.predict.predictor import MEASURED, Predictor


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """Lanes over the busiest NIC of groups that communicate at the same time."""

    link: Link
    """Between their nodes; has samples."""
    lanes: int
    own: int
    """Of one group, the most."""
    bytes_per_second: float
    """Of the NIC."""

    def share(self, predictor: Predictor, message_bytes: float) -> float:
        """Part of its speed alone that a group keeps, at most 1."""
        law = predictor.send(self.link, message_bytes, nodes=2)
        if law.source != MEASURED:
            return 1.0
        rate = 1.0 / law.seconds_per_byte if law.seconds_per_byte > 0 else self.bytes_per_second
        nic = max(self.bytes_per_second, rate)
        return min(1.0, self.own / self.lanes * nic / min(self.own * rate, nic))


def crowd_of(cluster: Cluster, groups: Sequence[Sequence[int]]) -> Crowd | None:
    """The crowd of equal groups that span nodes; None where nothing is measured or shared."""
    islands = {cluster.island_of_device(device).name for device in groups[0]}
    if len(islands) != 1 or len(groups) < 2:
        return None
    island = cluster.island(islands.pop())
    link, nics = island.inter_node, island.nics
    if nics is None or link.samples is None:
        return None
    first = cluster.first_device(island.name)
    devices = np.array([device for each in groups for device in each], dtype=np.int64) - first
    if devices.min() < 0 or devices.max() >= island.num_devices:
        return None  # Other groups of the same kind lie elsewhere.
    owner = np.repeat(np.arange(len(groups)), [len(each) for each in groups])
    used = _nics_of(devices, nics, island.devices_per_node)
    _, place, lanes = np.unique(used, return_inverse=True, return_counts=True)
    busiest = int(lanes.argmax())
    own = np.bincount(owner[place == busiest])
    if lanes[busiest] == own.max():
        return None
    return Crowd(
        link=link,
        lanes=int(lanes[busiest]),
        own=int(own.max()),
        bytes_per_second=nics.bandwidth_bytes_per_second * len(nics.of(0, island.devices_per_node)),
    )


def _nics_of(devices: Ints, nics: Nics, devices_per_node: int) -> Ints:
    """The first NIC of each device, numbered over all nodes of the island."""
    each = devices_per_node
    own = np.array([nics.of(local, each)[0] for local in range(each)], dtype=np.int64)
    found: Ints = devices // each * nics.per_node + own[devices % each]
    return found
