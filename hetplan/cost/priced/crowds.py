"""How much of a measured link do groups leave each other whose devices share network cards?

A link's bandwidth in the cluster file is one device's share of its node's cards, so groups that use
their shares do not slow each other (`hetplan.cost.network.group_shares`). Samples are another
thing: they say what one group reached with the cards to itself. Of k lanes over the busiest card,
o of them of one group, that group keeps

    share = min(1, (o / k) * C / min(o * r, C))        C = max(card's bandwidth, r)

where r is the rate that one pair reached: o lanes alone get what they ask for, up to the card's
rate, and all k together the card's rate, each an equal part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.cluster.spec import Cluster, Island, Link
from hetplan.cost.arrays import Ints
from hetplan.predict.predictor import Predictor

_MEASURED = "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """Lanes over the busiest card of groups that communicate at the same time."""

    link: Link
    """Between their nodes; has samples."""
    lanes: int
    own: int
    """Of one group, the most."""
    bytes_per_second: float
    """Of the card."""

    def share(self, predictor: Predictor, message_bytes: float) -> float:
        """Part of its speed alone that a group keeps, at most 1."""
        law = predictor.send(self.link, message_bytes, nodes=2)
        rate = 1.0 / law.seconds_per_byte if law.seconds_per_byte > 0 else self.bytes_per_second
        if law.source != _MEASURED:
            return 1.0
        card = max(self.bytes_per_second, rate)
        return min(1.0, self.own / self.lanes * card / min(self.own * rate, card))


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
    card = _cards(island, devices)
    _, place, lanes = np.unique(card, return_inverse=True, return_counts=True)
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


def _cards(island: Island, devices: Ints) -> Ints:
    """The first card of each device, numbered over all nodes of the island."""
    nics, each = island.nics, island.devices_per_node
    if nics is None:
        return devices
    own = np.array([nics.of(local, each)[0] for local in range(each)], dtype=np.int64)
    found: Ints = devices // each * nics.per_node + own[devices % each]
    return found
