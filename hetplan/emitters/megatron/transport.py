"""Which of Megatron-LM's process groups need another network than the rest?

`--nccl-communicator-config-path` takes a YAML file in which a group's `net_name` is IB or Socket
(megatron/core/parallel_state.py, get_nccl_options). A plan says of every link between nodes whether
the device's library moves device memory over it, or bytes are staged through host memory: staged
groups get Socket, which NCCL stages through host memory; IB is named only where every host's domain
names its RDMA devices. One network is for all groups of a kind: with one staged boundary all
boundaries use sockets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import yaml
from numpy.typing import NDArray

from hetplan.cluster.spec import Cluster, Transport
from hetplan.emitters.megatron.parallel import Degrees, degrees_of
from hetplan.emitters.sheet import LaunchSheet
from hetplan.plans.pieces import Devices, Places, stage_array
from hetplan.plans.plan import Plan

TRANSPORT_FILE = "transport.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNetwork:
    """Network of one kind of process group."""

    group: str
    """As get_nccl_options names it."""
    staged: bool
    """Any group of the kind has a link that is staged through host memory."""


def group_networks(plan: Plan, cluster: Cluster) -> tuple[GroupNetwork, ...]:
    """Every kind of group that leaves a node, with its network."""
    degrees = degrees_of(plan)
    places = Places(cluster=cluster)
    found = []
    for name, groups in _groups(plan, degrees):
        networks = [places.transports(group) for group in _unlike(places, groups)]
        if networks:
            staged = any(Transport.HOST_STAGED in network for network in networks)
            found.append(GroupNetwork(group=name, staged=staged))
    return tuple(found)


def _groups(plan: Plan, degrees: Degrees) -> Iterator[tuple[str, Devices]]:
    """(name, one row per group) of every kind with more than one rank."""
    devices = np.stack([stage_array(stage) for stage in plan.pipelines[0].stages])
    ranks = devices.reshape(degrees.pp, degrees.dp, degrees.cp, degrees.tp)
    kinds: list[tuple[str, Devices]] = [
        ("tp", _rows(ranks, 3)),
        ("cp", _rows(ranks, 2)),
        ("tp_cp", _rows(ranks, 2, 3)),
        ("dp", _rows(ranks, 1)),
        ("dp_cp", _rows(ranks, 1, 2)),
        ("tp_dp", _rows(ranks, 1, 3)),
        ("tp_dp_cp", _rows(ranks, 1, 2, 3)),
        ("pp", _rows(ranks, 0)),
        ("embd", _rows(ranks[[0, -1]] if degrees.pp > 1 else ranks[:1], 0)),
        ("mp", _rows(ranks, 0, 3)),
        ("intra_dist_opt_instance", _rows(ranks, 0, 1, 2, 3)),
    ]
    if degrees.ep > 1 or degrees.etp > 1:
        experts = devices.reshape(degrees.pp, degrees.expert_copies, degrees.ep, degrees.etp)
        kinds += [
            ("ep_tp", _rows(experts, 3)),
            ("ep", _rows(experts, 2)),
            ("tp_ep_mp", _rows(experts, 2, 3)),
            ("tp_ep_pp", _rows(experts, 0, 2, 3)),
            ("ep_dp", _rows(experts, 1)),
        ]
    yield from ((name, rows) for name, rows in kinds if rows.shape[1] > 1)


def _rows(ranks: Devices, *axes: int) -> Devices:
    """One row per group over these axes."""
    last = tuple(range(ranks.ndim - len(axes), ranks.ndim))
    size = int(np.prod([ranks.shape[axis] for axis in axes]))
    found: Devices = np.moveaxis(ranks, axes, last).reshape(-1, size)
    return found


def _unlike(places: Places, groups: Devices) -> Iterator[Devices]:
    """One group of every set of islands among those that leave a node."""
    nodes = places.nodes(groups)
    leaving = groups[(nodes != nodes[:, :1]).any(axis=1)]
    if not leaving.size:
        return
    islands: NDArray[np.int64] = places.islands(leaving)
    _, first = np.unique(islands, axis=0, return_index=True)
    seen: set[frozenset[int]] = set()
    for at in first.tolist():
        key = frozenset(islands[at].tolist())
        if key not in seen:
            seen.add(key)
            yield leaving[at]


def transport_text(plan: Plan, cluster: Cluster, sheet: LaunchSheet) -> str:
    """The file's text; empty where the groups need no networks of their own."""
    networks = group_networks(plan, cluster)
    if not any(network.staged for network in networks):
        return ""
    fabric = all(agent.host.domain.fabric_devices for agent in sheet.agents)
    chosen = {
        network.group: {"net_name": "Socket" if network.staged else "IB"}
        for network in networks
        if network.staged or fabric
    }
    return (
        "# Network of every kind of process group (--nccl-communicator-config-path): Socket where\n"
        "# the plan stages a link through host memory.\n"
        + yaml.safe_dump(chosen, sort_keys=True, default_flow_style=False)
    )


def transport_remarks(plan: Plan, cluster: Cluster) -> Iterator[str]:
    """What the file cannot say."""
    networks = group_networks(plan, cluster)
    staged = [network.group for network in networks if network.staged]
    if staged and len(staged) < len(networks):
        yield (
            f"{TRANSPORT_FILE}: groups {', '.join(staged)} use sockets, the others the hosts' "
            "own fabric. Barriers use the default group, for which Megatron-LM has no such "
            "setting: where all hosts have RDMA devices and their fabrics are not joined, NCCL "
            "takes those and the first barrier waits until the timeout. NCCL_NET=Socket for all "
            "ranks avoids that and puts every group on sockets."
        )
