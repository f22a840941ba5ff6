"""Which NICs do the rings of groups use that have several devices in a node?

A library lays the rings of one group without knowing of the others. A group with one device in a
node leaves it by that device's NIC, and one with all of its devices by all NICs. Of a group with
some of them it depends on the machine (`cluster.node.RingNics`):

    own            every ring by the NIC of a device of its own
    first-device   all rings of a group by the NIC of its first device in the node
    one            all rings of all such groups by the node's first NIC, and those of groups of
                   more than two whole nodes

all_reduce in two nodes of 8 A100 with two NICs of 25 GB/s each, one group at a time (Galvatron,
`allreduce_bandwidth_2nodes_8gpus_per_node`): bus bandwidth 8.1, 16.2, 20.8 and 44.7 GB/s with one,
two, four and eight devices in each node, where one device alone sends 8.1 GB/s: four of eight reach
one NIC's rate and not that of their own two, all eight that of both. Hence the first device's NIC
where nothing else is said and devices share NICs; a NIC for each device, or rails, were not
measured, and rings are taken to use their own.

What lanes get is the part of `Link.bandwidth` that the NICs leave them:

    share = least over NICs of  NIC's bandwidth / (lanes over it * one device's bandwidth)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetplan.cluster.node import RingNics
from hetplan.cluster.spec import Cluster, Island, Transport
from hetplan.cost.arrays import Ints


def ring_share(cluster: Cluster, groups: Sequence[Sequence[int]]) -> float:
    """Part of their devices' bandwidth between nodes that rings of these groups get, at most 1.

    All groups communicate at the same time.
    """
    islands = [each for each in cluster.islands if _matters(each)]
    if not islands:
        return 1.0
    owner = np.repeat(np.arange(len(groups)), [len(each) for each in groups])
    devices = np.array([device for each in groups for device in each], dtype=np.int64)
    least = 1.0
    for island in islands:
        first = cluster.first_device(island.name)
        here = (devices >= first) & (devices < first + island.num_devices)
        if here.any():
            least = min(least, _share_in(island, owner[here], devices[here] - first))
    return least


def _matters(island: Island) -> bool:
    """Whether rings use other NICs there than those of their devices."""
    direct = island.inter_node.transport is Transport.DEVICE_DIRECT
    if island.nics is None or not direct:
        return False
    return island.nics.ring_nics(island.devices_per_node) is not RingNics.OWN


def _share_in(island: Island, owner: Ints, devices: Ints) -> float:
    nics = island.nics
    if nics is None:
        return 1.0
    each = island.devices_per_node
    node, local = devices // each, devices % each
    # Devices of one group in one node follow each other.
    order = np.lexsort((local, node, owner))
    owner, node, local = owner[order], node[order], local[order]
    begins = np.flatnonzero(np.append(True, (owner[1:] != owner[:-1]) | (node[1:] != node[:-1])))
    lanes = np.diff(np.append(begins, owner.size))
    part = np.repeat(np.arange(begins.size), lanes)
    own = np.array([nics.of(number, each)[0] for number in range(each)], dtype=np.int64)
    one = nics.ring_nics(each) is RingNics.ONE
    # Whole nodes, two of them, reach the rate of all their NICs (Galvatron's table above).
    many = np.bincount(owner[begins], minlength=int(owner.max()) + 1)[owner[begins]] > 2
    moved = (lanes > 1) & ((lanes < each) | (one & many))
    to = np.zeros(begins.size, dtype=np.int64) if one else own[local[begins]]
    nic = node * nics.per_node + np.where(moved[part], to[part], own[local])
    # Between nodes of unequal parts there are as many lanes as the smaller has.
    fewest = np.full(int(owner.max()) + 1, each)
    np.minimum.at(fewest, owner[begins], lanes)
    weight = fewest[owner] / lanes[part]
    _, place = np.unique(nic, return_inverse=True)
    fullest = float(np.bincount(place, weights=weight).max())
    demand = fullest * island.inter_node.bandwidth_bytes_per_second
    return min(1.0, nics.bandwidth_bytes_per_second / demand)
