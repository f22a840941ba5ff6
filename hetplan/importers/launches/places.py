"""On which device of the cluster is each rank of a launch?

Hosts are found by their names in the cluster file, or by their addresses in its launch domains. A
launch without a list of hosts is put on the cluster's usable nodes in their order.
"""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.cluster.spec import Cluster, Island
from hetplan.errors import Fault, InputError
from hetplan.importers.launches.values import LaunchFacts, LaunchHost, visible_devices
from hetplan.importers.lines import shown


def devices_of_ranks(
    facts: LaunchFacts, cluster: Cluster, islands: tuple[str, ...] = ()
) -> tuple[int, ...]:
    """Device number of every rank; an InputError where hosts or devices are missing.

    `islands`: those whose nodes are taken where no hosts are named, in this order; empty: all.
    """
    if facts.text.hosts:
        devices = [*_of_hosts(facts, cluster)]
    else:
        devices = [*_in_order(facts, cluster, tuple(map(cluster.island, islands)))]
    if len(devices) != facts.world_size:
        raise InputError(
            Fault(
                file=facts.text.hosts[0].file if facts.text.hosts else "",
                message=f"the hosts have {len(devices)} devices, the launch starts "
                f"{facts.world_size} ranks",
            )
        )
    return tuple(devices)


def _of_hosts(facts: LaunchFacts, cluster: Cluster) -> Iterator[int]:
    nodes = _nodes_by_name(cluster)
    seen: set[int] = set()
    for host in _in_mesh_order(facts):
        found = nodes.get(host.name)
        if found is None:
            raise InputError(_unknown_host(host, cluster))
        island, node = found
        first = cluster.first_device(island.name) + node * island.devices_per_node
        count = host.devices if host.devices is not None else facts.text.devices_per_node
        local = host.local_devices or _local(facts, count or island.devices_per_node)
        if max(local) >= island.devices_per_node:
            message = (
                f"{host.name} has {island.devices_per_node} devices in the cluster file; the "
                f"launch wants number {max(local)}"
            )
            raise InputError(Fault(file=host.file, line=host.line, message=message))
        for each in local:
            if first + each in seen:
                message = f"device {each} of {host.name} is given to two ranks"
                raise InputError(Fault(file=host.file, line=host.line, message=message))
            seen.add(first + each)
            yield first + each


def _local(facts: LaunchFacts, count: int) -> tuple[int, ...]:
    """Devices of a host in the order of its ranks: those that it lets processes see, or the first.

    A process takes the device of its local rank among the visible ones.
    """
    for setting in reversed(facts.text.environment):
        # A name with a dot, HOST.NAME, is one host's.
        of_all = "." not in setting.name
        if of_all and setting.name.endswith("_VISIBLE_DEVICES") and setting.values:
            found = visible_devices(setting.values[0])
            if len(found) >= count:
                return found[:count]
    return tuple(range(count))


def _in_mesh_order(facts: LaunchFacts) -> tuple[LaunchHost, ...]:
    """FlagScale's order: by the first mesh with a host's type, then as they stand.

    flagscale/train/hetero/parallel_context.py, RankMapper.
    """
    types = [mesh.device_type for mesh in facts.meshes]
    hosts = facts.text.hosts
    if not any(types) or not all(host.type for host in hosts):
        return hosts
    for host in hosts:
        if host.type not in types:
            message = f"type {shown(host.type)} is no device type of a mesh: {', '.join(types)}"
            raise InputError(Fault(file=host.file, line=host.line, message=message))
    return tuple(sorted(hosts, key=lambda host: types.index(host.type)))


def _nodes_by_name(cluster: Cluster) -> dict[str, tuple[Island, int]]:
    """Nodes by their names and by the addresses of their domain; a name goes before an address."""
    found: dict[str, tuple[Island, int]] = {}
    for island in cluster.islands:
        domain = cluster.domain_of_island(island.name)
        for number, name in enumerate(island.names_of_nodes):
            found.setdefault(domain.address_of(name), (island, number))
    for island in cluster.islands:
        for number, name in enumerate(island.names_of_nodes):
            found[name] = (island, number)
    return found


def _unknown_host(host: LaunchHost, cluster: Cluster) -> Fault:
    unnamed = [island.name for island in cluster.islands if not island.node_names]
    mend = "add it to an island's node_names"
    if unnamed:
        mend = f"island {unnamed[0]} has no node_names: give them in the cluster file"
    return Fault(
        file=host.file,
        line=host.line,
        message=f"{shown(host.name)} is no node of cluster {cluster.name}; {mend}, or give other "
        "hosts with --hosts FILE",
    )


def _in_order(facts: LaunchFacts, cluster: Cluster, islands: tuple[Island, ...]) -> Iterator[int]:
    """Usable nodes as the cluster file has them, those of a mesh's type where its name says one."""
    per_node = facts.text.devices_per_node
    left = facts.world_size
    for island, nodes in _rows(facts, cluster, islands):
        for node in nodes:
            if left <= 0:
                return
            count = island.devices_per_node if per_node is None else per_node
            if count > island.devices_per_node:
                message = (
                    f"the launch starts {count} ranks on each node, and those of island "
                    f"{island.name} have {island.devices_per_node} devices; name the hosts with "
                    "--hosts FILE, or islands with --island"
                )
                raise InputError(Fault(message=message))
            first = cluster.first_device(island.name) + node * island.devices_per_node
            for local in _local(facts, min(count, left)):
                if local >= island.devices_per_node:
                    message = f"the launch wants device {local} of a node; {island.name} has none"
                    raise InputError(Fault(message=message))
                yield first + local
            left -= count
    if left > 0:
        where = ", ".join(each.name for each in islands or cluster.islands)
        message = (
            f"the launch starts {facts.world_size} ranks; the usable nodes of {where} have room "
            f"for {facts.world_size - left}"
        )
        raise InputError(Fault(message=message))


def _rows(
    facts: LaunchFacts, cluster: Cluster, chosen: tuple[Island, ...]
) -> Iterator[tuple[Island, tuple[int, ...]]]:
    """Islands that were chosen; otherwise those of the meshes' types in the order of the meshes,
    where all types name some; or all as they stand.
    """
    types = [*dict.fromkeys(mesh.device_type for mesh in facts.meshes)]
    named = [
        [each for each in cluster.islands if kind in (each.name, each.device.kind)]
        for kind in types
    ]
    if not chosen and len(types) > 1 and all(named):
        for kind, islands in zip(types, named, strict=True):
            left = sum(
                mesh.tp * mesh.cp * mesh.dp * mesh.pp
                for mesh in facts.meshes
                if mesh.device_type == kind
            )
            for island in islands:
                nodes = island.usable_nodes[: -(-left // island.devices_per_node)]
                left -= len(nodes) * island.devices_per_node
                yield island, nodes
        return
    for island in chosen or cluster.islands:
        yield island, island.usable_nodes


def stage_ranks(facts: LaunchFacts) -> Iterator[range | list[int]]:
    """Ranks of every stage in the order (dp, cp, tp).

    Megatron-LM counts tp, cp, dp, pp (megatron/core/parallel_state.py, RankGenerator), or with
    --use-tp-pp-dp-mapping tp, cp, pp, dp; torchtitan as the first, FlagScale so in each mesh.
    """
    start = 0
    for mesh in facts.meshes:
        slice_ = mesh.tp * mesh.cp
        size = slice_ * mesh.dp
        for stage in range(mesh.pp):
            if not facts.data_outermost:
                yield range(start + stage * size, start + (stage + 1) * size)
                continue
            yield [
                start + slice_ * (stage + mesh.pp * copy) + at
                for copy in range(mesh.dp)
                for at in range(slice_)
            ]
        start += size * mesh.pp
