"""Which algorithms does the communication library of a trainer have, by how bytes cross?

A group over whose links a library moves device memory (device-direct: NCCL, RCCL, HCCL) uses that
library; where one of its links is host-staged, gloo takes all of it, as torch calls it.

    device-direct  all_reduce       rings, double binary trees
                   reduce_scatter,  rings
                   all_gather
                   broadcast        a chain, as a ring is one for it (tuning.cc: no tree for it)
                   all_to_all       direct sends (NCCL has grouped sends only)
    host-staged    all_reduce       ring (allreduce.cc: what is asked for where nothing is named;
                                    its bcube is never asked for by torch)
                   reduce_scatter   ring; torch's tensor form is a whole all_reduce of which a part
                                    is kept, twice the bytes: a measured curve shows that, a law
                                    does not
                   all_gather       ring (allgather.cc)
                   broadcast        binomial tree (broadcast.cc)
                   all_to_all       direct (alltoall.cc)

Rings of a device-direct library run node by node, one per channel, each into and out of a node
once, by NICs of its own. So a NIC carries 2 (n - 1) / n S / NICs bytes of an all_reduce, n ranks,
which is the flat ring here (`layout`: lanes). Of its 2 (n - 1) steps 2 (nodes - 1) wait for the
network and the rest for links inside nodes (NCCL, graph/tuning.cc, nInterSteps): so say the laws
of links without samples (`predict.links_prior`), learned from such rings. Samples of links between
single devices say it of the network's steps alone: by them every step of the flat ring waits for
the network, and the two-level form cut at the nodes, which has just the network's steps, stands for
the rings where it is cheaper. Cuts at islands or regions, halving-doubling and parameter servers
are what a library could do, not what these do.

Inside one node and in two nodes of a device-direct library rings are what was measured (two nodes:
Galvatron, `cost.network.ring_nics`; a tree over two would send half as much out of each, which
those times exclude), so trees, whose law is of sends, do not stand against them.

Sources: NCCL 2.2x src/graph/tuning.cc; gloo's files as named; torch ProcessGroupGloo.cpp,
reduce_scatter_tensor_coalesced.
"""

from __future__ import annotations

from hetplan.cluster.spec import Cluster, Link, Transport
from hetplan.cost.collectives.shape import GroupShape
from hetplan.cost.collectives.values import Algorithm
from hetplan.profiling.samples import LinkOperation

ALL = frozenset(Algorithm)
"""Whatever can be done, offered by a library or not."""

_RINGS = frozenset({Algorithm.RING, Algorithm.TWO_LEVEL})
_RING, _TREE, _DIRECT = (
    frozenset({each}) for each in (Algorithm.RING, Algorithm.TREE, Algorithm.DIRECT)
)

_RINGS_ONLY = 2
"""Nodes up to which no tree is taken."""

OFFERED: dict[Transport, dict[LinkOperation, frozenset[Algorithm]]] = {
    Transport.DEVICE_DIRECT: {
        LinkOperation.ALL_REDUCE: _RINGS | _TREE,
        LinkOperation.REDUCE_SCATTER: _RINGS,
        LinkOperation.ALL_GATHER: _RINGS,
        LinkOperation.BROADCAST: _RING,
        LinkOperation.ALL_TO_ALL: _DIRECT,
    },
    Transport.HOST_STAGED: {
        LinkOperation.ALL_REDUCE: _RING,
        LinkOperation.REDUCE_SCATTER: _RING,
        LinkOperation.ALL_GATHER: _RING,
        LinkOperation.BROADCAST: _TREE,
        LinkOperation.ALL_TO_ALL: _DIRECT,
    },
}
"""Two-level stands for measured rings laid node by node, cut at the nodes only."""


def offered(cluster: Cluster, shape: GroupShape, operation: LinkOperation) -> frozenset[Algorithm]:
    """What the library that serves the group has for an operation.

    InputError where neighbouring islands of the group have no link.
    """
    transport = transport_of(cluster, shape)
    found = OFFERED[transport].get(operation, _DIRECT)
    if transport is Transport.DEVICE_DIRECT and shape.num_nodes <= _RINGS_ONLY:
        return found - _TREE if operation is LinkOperation.ALL_REDUCE else found
    return found


def transport_of(cluster: Cluster, shape: GroupShape) -> Transport:
    """Host-staged as soon as one link of the group is: a group uses one library."""
    staged = any(link.transport is Transport.HOST_STAGED for link in _links(cluster, shape))
    return Transport.HOST_STAGED if staged else Transport.DEVICE_DIRECT


def _links(cluster: Cluster, shape: GroupShape) -> list[Link]:
    islands = shape.islands
    found = []
    for each in islands:
        island = cluster.island(each.island)
        if each.most_ranks > 1:
            found.append(island.intra_node)
        if each.num_nodes > 1:
            found.append(island.inter_node)
    for index in range(1, len(islands)):
        found.append(cluster.link_between(islands[index - 1].island, islands[index].island))
    return found
