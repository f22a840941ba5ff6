"""The price of a collective by the cheapest algorithm, or by a forced one.

Cheapest of what the library that serves the group has, since that is what runs. Sums over several
islands that hetplan's own trainer makes are its own (`direct_levels`).

What was measured on a link is not beaten by a law: where a group has one level (one node, or one
rank in each node of an island) and its operation was measured there, that is the price; elsewhere
an algorithm whose parts were all measured stands against others only if theirs were, too.

Algorithms of a trainer's communication library, by how bytes cross.

A group over whose links a library moves device memory (device-direct: NCCL, RCCL, HCCL) uses that
library; where one of its links is host-staged, gloo takes all of it, as torch calls it.

    device-direct  all_reduce       rings, double binary trees
                   reduce_scatter,  rings
                   all_gather
                   all_to_all       direct sends (NCCL has grouped sends only)
    host-staged    all_reduce       ring (allreduce.cc: what is asked for where nothing is named;
                                    its bcube is never asked for by torch)
                   reduce_scatter   ring; torch's tensor form is a whole all_reduce of which a part
                                    is kept, twice the bytes: a measured curve shows that, a law
                                    does not
                   all_gather       ring (allgather.cc)
                   all_to_all       direct (alltoall.cc)

Rings of a device-direct library run node by node, one per channel, each into and out of a node
once, by NICs of its own. So a NIC carries 2 (n - 1) / n S / NICs bytes of an all_reduce, n ranks,
which is the flat ring here (`rings`: lanes). Of its 2 (n - 1) steps 2 (nodes - 1) wait for the
network and the rest for links inside nodes (NCCL, graph/tuning.cc, nInterSteps): so say the laws
of links without samples (`predict.link.prior`), learned from such rings. Samples of links between
single devices say it of the network's steps alone: by them every step of the flat ring waits for
the network, and the two-level form cut at the nodes, which has just the network's steps, stands for
the rings where it is cheaper. Cuts at islands or regions are what a library could do, not what
these do.

Inside one node and in two nodes of a device-direct library rings are what was measured (two nodes:
Galvatron, `cost.network.group_shares`; a tree over two would send half as much out of each, which
those times exclude), so trees, whose law is of sends, do not stand against them.

Sources: NCCL 2.2x src/graph/tuning.cc; gloo's files as named; torch ProcessGroupGloo.cpp,
reduce_scatter_tensor_coalesced.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from hetplan.cluster.spec import Cluster, Transport
from hetplan.cost.collectives.direct_levels import direct_sum, summed_by_messages
from hetplan.cost.collectives.pairwise import direct_all_to_all, dispatch
from hetplan.cost.collectives.rings import (
    NODE,
    RANK,
    RING_OPERATIONS,
    WHOLE,
    describe,
    nontrivial_levels,
    rings,
)
from hetplan.cost.collectives.shape import GroupShape, transport_of
from hetplan.cost.collectives.trees import tree_all_reduce
from hetplan.cost.collectives.values import (
    Algorithm,
    Asking,
    CollectiveCost,
    Routing,
    only_measured,
)
from hetplan.errors import InputError
from hetplan.predict.predictor import Predictor
from hetplan.profiling.samples import LinkOperation

_RINGS = frozenset({Algorithm.RING, Algorithm.TWO_LEVEL})
_RING, _TREE, _DIRECT = (
    frozenset({each}) for each in (Algorithm.RING, Algorithm.TREE, Algorithm.DIRECT)
)
_NODE_BY_NODE = describe(((RANK, NODE), (NODE, WHOLE)))
"""The two-level form that stands for a library's rings."""

_ALGORITHMS = {
    LinkOperation.ALL_REDUCE: _RINGS | _TREE,
    LinkOperation.REDUCE_SCATTER: _RINGS,
    LinkOperation.ALL_GATHER: _RINGS,
    LinkOperation.ALL_TO_ALL: _DIRECT,
}

_RINGS_ONLY = 2
"""Nodes up to which no tree is taken."""

OFFERED: dict[Transport, dict[LinkOperation, frozenset[Algorithm]]] = {
    Transport.DEVICE_DIRECT: {
        LinkOperation.ALL_REDUCE: _RINGS | _TREE,
        LinkOperation.REDUCE_SCATTER: _RINGS,
        LinkOperation.ALL_GATHER: _RINGS,
        LinkOperation.ALL_TO_ALL: _DIRECT,
    },
    Transport.HOST_STAGED: {
        LinkOperation.ALL_REDUCE: _RING,
        LinkOperation.REDUCE_SCATTER: _RING,
        LinkOperation.ALL_GATHER: _RING,
        LinkOperation.ALL_TO_ALL: _DIRECT,
    },
}
"""Two-level stands for measured rings laid node by node, cut at the nodes only."""


def offered(cluster: Cluster, shape: GroupShape, operation: LinkOperation) -> frozenset[Algorithm]:
    """What the library that serves the group has for an operation.

    InputError where neighbouring islands of the group have no link.
    """
    transport = transport_of(cluster, shape)
    found = OFFERED[transport][operation]
    if transport is Transport.DEVICE_DIRECT and shape.num_nodes <= _RINGS_ONLY:
        return found - _TREE if operation is LinkOperation.ALL_REDUCE else found
    return found


def collective(
    cluster: Cluster,
    shape: GroupShape,
    operation: LinkOperation,
    message_bytes: float,
    predictor: Predictor,
    *,
    algorithm: Algorithm | None = None,
    share: float = 1.0,
    by_levels: bool = False,
    held: Algorithm | None = None,
    routing: Routing | None = None,
) -> CollectiveCost:
    """Cost of one collective of a group, by the cheapest algorithm or by the one asked for.

    `message_bytes` as in `LinkSample.message_bytes`. `algorithm` forces one, in its cheapest form.
    `share` is the part of the bandwidth that groups beside this one leave it, on the links between
    nodes, or inside the node where the group is in one. `by_levels`: a sum of hetplan's own
    trainer, by messages where it takes them (`direct_levels`). `held`: ring or tree, the one that a
    device-direct library may take for a sum; what was measured on the links stays, and a tree is
    never cheaper than the library's own choice. `routing`: an
    all_to_all of tokens that go once to each place, of which a rank has `message_bytes`. A group of
    one rank costs nothing. An InputError where the algorithm cannot be used, islands have no link,
    or a number is out of its range.
    """
    _check(operation, message_bytes, share)
    if shape.num_ranks == 1:
        return CollectiveCost(terms=(), algorithm=algorithm or Algorithm.DIRECT, sent=())
    asking = Asking(predictor=predictor, share=share)
    if routing is not None:
        return dispatch(cluster, shape, message_bytes, routing, asking)
    if by_levels and operation is LinkOperation.ALL_REDUCE:
        layout = summed_by_messages(cluster, shape)
        if layout is not None:
            return direct_sum(layout, message_bytes, asking)
    if algorithm is not None:
        _check_algorithm(operation, algorithm)
        found = list(_candidates(cluster, shape, operation, message_bytes, asking, algorithm))
        if not found:
            raise InputError(
                f"two-level {operation.value} needs ranks on two levels; the group has one rank in "
                "each unit, or all in one: choose another"
            )
        return min(found, key=lambda each: each.seconds)
    kept = _held(cluster, shape, operation, held)
    if kept == _TREE:
        free = collective(cluster, shape, operation, message_bytes, predictor, share=share)
        if only_measured(free.terms):
            return free
        (tree,) = _candidates(cluster, shape, operation, message_bytes, asking, Algorithm.TREE)
        # The law of a node's links is of what rings take there, which a tree's hops do not know.
        return max(tree, free, key=lambda each: each.seconds)
    if len(nontrivial_levels(shape)) == 1:
        default = next(
            _candidates(cluster, shape, operation, message_bytes, asking, _default(operation))
        )
        if _library_rings(cluster, shape, operation) or only_measured(default.terms):
            return default
    found = [
        cost
        for each in sorted(offered(cluster, shape, operation) | kept)
        for cost in _candidates(cluster, shape, operation, message_bytes, asking, each)
        if each is not Algorithm.TWO_LEVEL or _stands_for_rings(cost)
    ]
    measured = [cost for cost in found if only_measured(cost.terms)]
    if kept and not measured:
        found = [cost for cost in found if cost.algorithm in kept]
    # Of equal costs the default's; `min` keeps the first.
    found = sorted(measured or found, key=lambda cost: cost.algorithm is not _default(operation))
    return min(found, key=lambda each: each.seconds)


def _held(
    cluster: Cluster, shape: GroupShape, operation: LinkOperation, held: Algorithm | None
) -> frozenset[Algorithm]:
    """The forms of the algorithm that the library is held to; empty: it is held to none.

    Only sums have several: NCCL refuses a tree of any other operation.
    """
    if held is None or operation is not LinkOperation.ALL_REDUCE:
        return frozenset()
    if transport_of(cluster, shape) is not Transport.DEVICE_DIRECT:
        return frozenset()
    return _TREE if held is Algorithm.TREE else _RINGS


def _library_rings(cluster: Cluster, shape: GroupShape, operation: LinkOperation) -> bool:
    """Whether the law of a node's links is one of what this library's rings took there."""
    inside = shape.num_nodes == 1 and operation in RING_OPERATIONS
    return inside and transport_of(cluster, shape) is Transport.DEVICE_DIRECT


def _stands_for_rings(cost: CollectiveCost) -> bool:
    """A two-level form by samples of a node's links and of those between nodes.

    Laws of links without samples have the latencies of rings that run node by node themselves.
    """
    return cost.detail == _NODE_BY_NODE and only_measured(cost.terms)


def _default(operation: LinkOperation) -> Algorithm:
    """What `Predictor.collective` prices."""
    if operation in RING_OPERATIONS:
        return Algorithm.RING
    return Algorithm.DIRECT


def _candidates(
    cluster: Cluster,
    shape: GroupShape,
    operation: LinkOperation,
    message_bytes: float,
    asking: Asking,
    algorithm: Algorithm,
) -> Iterator[CollectiveCost]:
    """Every form of one algorithm that the group can use."""
    if operation is LinkOperation.ALL_TO_ALL:
        yield direct_all_to_all(cluster, shape, message_bytes, asking)
    elif algorithm is Algorithm.TREE:
        yield tree_all_reduce(cluster, shape, message_bytes, asking)
    else:
        for cost in rings(cluster, shape, operation, message_bytes, asking):
            if cost.algorithm is algorithm:
                yield cost


def _check(operation: LinkOperation, message_bytes: float, share: float) -> None:
    if not 0 <= message_bytes < math.inf:
        raise InputError(f"message_bytes is {message_bytes}; it must be at least 0 and finite")
    if not 0 < share <= 1:
        raise InputError(f"share is {share}; it must be above 0 and at most 1")
    if operation not in _ALGORITHMS:
        raise InputError(f"{operation.value} is part of no step; it has no price")


def _check_algorithm(operation: LinkOperation, algorithm: Algorithm) -> None:
    if algorithm not in _ALGORITHMS[operation]:
        names = ", ".join(sorted(_ALGORITHMS[operation]))
        raise InputError(
            f"{operation.value} by {algorithm.value} is not known; choose from {names}"
        )
