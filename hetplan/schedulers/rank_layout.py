"""Which host starts which ranks: a plan's ranks as calls of torchrun, in their order.

torchrun numbers ranks by agents: an agent (one torchrun call) of node rank n gets the ranks after
those of all agents before it, in the order of its local devices. The order of agents therefore is
the placement. Devices of a host whose ranks are not consecutive need several agents there, each
with its own visible devices.

The plan says the device of every rank; the numbering of ranks is chosen here. Where the trainer has
both (Megatron-LM's default tp-cp-ep-dp-pp, and tp-cp-ep-pp-dp of --use-tp-pp-dp-mapping), the one
with fewer agents is taken, and the default of two that are alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.cluster.launch_domains import LaunchDomain, Scheduler, address_fault
from hetplan.cluster.libraries import library_of
from hetplan.cluster.places import unknown
from hetplan.cluster.spec import Cluster, Island
from hetplan.errors import Fault, InputError
from hetplan.job.spec import CollectiveAlgorithm
from hetplan.plans.pieces import Devices, Places, stage_array
from hetplan.plans.plan import Plan
from hetplan.schedulers.vendors import vendor_of

_MAX_SHOWN = 8
"""Names in one message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A node of the cluster that holds ranks."""

    name: str
    """Name of the node in the cluster file."""
    address: str
    """By which hosts of all domains reach it."""
    domain: LaunchDomain
    island: str
    node: int
    """In its island."""
    region: str
    device_kind: str
    vendor: str
    """Vendor of its devices, as in the catalogue."""
    devices_per_node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """One call of torchrun: consecutive ranks on one host."""

    node_rank: int
    host: Host
    first_rank: int
    local_devices: tuple[int, ...]
    """Devices of the host, in the order of its ranks."""

    @property
    def num_ranks(self) -> int:
        """Ranks that the agent starts."""
        return len(self.local_devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """Everything that starts a plan's ranks, whatever the scheduler."""

    agents: tuple[Agent, ...]
    """By node rank."""
    port: int
    """Of the rendezvous, on the host of agent 0, inside the port range of its domain."""
    data_outermost: bool = False
    """Ranks count tp, cp, pp, dp (a data-parallel copy's whole pipeline is contiguous; Megatron-LM:
    --use-tp-pp-dp-mapping) instead of tp, cp, dp, pp."""
    remarks: tuple[str, ...] = ()
    """What a reader should know about the placement, a line each."""

    @property
    def master(self) -> Host:
        """The host of rank 0."""
        return self.agents[0].host

    @property
    def world_size(self) -> int:
        """All ranks."""
        return sum(agent.num_ranks for agent in self.agents)

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Every host once, in the order of their first agents."""
        return tuple({agent.host.name: agent.host for agent in self.agents}.values())

    @property
    def domains(self) -> tuple[LaunchDomain, ...]:
        """Every launch domain with ranks once, in the order of their first agents."""
        return tuple({host.domain.name: host.domain for host in self.hosts}.values())


def rank_layout(plan: Plan, cluster: Cluster, *, data_outermost: bool = False) -> RankLayout:
    """Hosts and agents of a legal plan; `data_outermost`: the trainer can number ranks so as well.

    An InputError where hosts have no names, or ones that two hosts share or no host can have.
    Fields are those of a plan file (`inputs.cluster.islands[0]...`).
    """
    places = Places(cluster=cluster)
    devices, outermost = ranked_devices(plan), False
    hosts = _hosts(places, devices)
    starts = _starts(places, hosts, devices)
    if data_outermost and can_be_outermost(plan):
        other = ranked_devices(plan, data_outermost=True)
        fewer = _starts(places, hosts, other)
        if len(fewer) < len(starts):
            devices, starts, outermost = other, fewer, True
    agents = tuple(_agents(places, hosts, devices, starts))
    domain = agents[0].host.domain
    return RankLayout(
        agents=agents,
        port=domain.first_port,
        data_outermost=outermost,
        remarks=(*_repeated(agents), *_parts_of_hosts(agents)),
    )


def ranked_devices(plan: Plan, *, data_outermost: bool = False) -> Devices:
    """Device of every rank: pipelines and stages in order, in a stage (dp, cp, tp), tp fastest; or
    with dp outside of the stages.
    """
    rows = [stage_array(stage) for pipeline in plan.pipelines for stage in pipeline.stages]
    if not data_outermost:
        return np.concatenate(rows)
    dp = sum(replica.dp for replica in plan.pipelines[0].stages[0].replicas)
    found: Devices = np.stack(rows).reshape(len(rows), dp, -1).transpose(1, 0, 2).reshape(-1)
    return found


def can_be_outermost(plan: Plan) -> bool:
    """Whether Megatron-LM can number this plan's ranks with dp outside of the stages.

    One pipeline, degrees alike on all stages, and as many copies of an expert as of the other
    weights of a context-parallel rank: megatron/core/parallel_state.py (0.16.1) asserts equal
    data-parallel sizes for every order that does not end with pp, with or without experts.
    """
    shapes = {
        (sum(each.dp for each in stage.replicas), each.tp, each.cp, each.ep, each.etp)
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for each in stage.replicas
    }
    if len(plan.pipelines) != 1 or len(shapes) != 1:
        return False
    ((_, tp, cp, ep, etp),) = shapes
    if cp > 1:
        return False
    # Without experts ep and etp are 1 and the trainer's expert groups are the tp groups.
    dense = ep == etp == 1 and not any(group.expert for group in plan.reduction_groups)
    return dense or ep * etp == tp


def _hosts(places: Places, devices: Devices) -> dict[int, Host]:
    """Host of every node (counted through the cluster) that holds one of these devices."""
    cluster = places.cluster
    used = [cluster.islands[at] for at in np.unique(places.islands(devices))]
    faults = (
        *_domain_faults(cluster),
        *(fault for island in used for fault in _island_faults(cluster, island)),
    )
    if faults:
        raise InputError(*faults)
    domains = {island.name: cluster.domain_of_island(island.name) for island in used}
    nodes, at = np.unique(places.nodes(devices), return_index=True)
    found: dict[int, Host] = {}
    for node, device in zip(nodes.tolist(), devices[at].tolist(), strict=True):
        island, number = cluster.island_of_device(device), cluster.node_of_device(device)
        name, domain = island.names_of_nodes[number], domains[island.name]
        found[node] = Host(
            name=name,
            address=domain.address_of(name),
            domain=domain,
            island=island.name,
            node=number,
            region=island.region,
            device_kind=island.device.kind,
            vendor=island.device.vendor,
            devices_per_node=island.devices_per_node,
        )
    faults = tuple(_host_faults(cluster, found.values()))
    if faults:
        raise InputError(*faults)
    return found


def _names_field(cluster: Cluster, island: str) -> str:
    at = next(at for at, each in enumerate(cluster.islands) if each.name == island)
    return f"inputs.cluster.islands[{at}].node_names"


def _domain_faults(cluster: Cluster) -> Iterator[Fault]:
    """Launch domains of islands that the cluster does not have: a host would be started otherwise.

    Parts of a cluster may keep such domains; what is launched is never a part.
    """
    known = {island.name for island in cluster.islands}
    for at, domain in enumerate(cluster.launch_domains):
        for position, name in enumerate(domain.islands):
            if name not in known:
                yield Fault(
                    field=f"inputs.cluster.launch_domains[{at}].islands[{position}]",
                    message=unknown(name, known, "island"),
                )


def _island_faults(cluster: Cluster, island: Island) -> Iterator[Fault]:
    if not island.node_names:
        yield Fault(
            field=_names_field(cluster, island.name),
            message=f"island {island.name} has no names for its nodes, so nothing says which hosts "
            "to start: give the island node_names in the cluster file, as in [node[001-016]], and "
            "emit with --cluster FILE, or plan again",
        )


def _host_faults(cluster: Cluster, hosts: Iterable[Host]) -> Iterator[Fault]:
    """Names and addresses that no host can have, or two of these hosts have."""
    named: dict[str, Host] = {}
    reached: dict[str, Host] = {}
    for host in hosts:
        message = address_fault(host.name)
        if not message and host.name in named:
            message = f"{host.name} is a node of island {named[host.name].island} as well"
        elif not message and host.address in reached:
            message = f"{host.name} has the address of {reached[host.address].name}, {host.address}"
        named.setdefault(host.name, host)
        reached.setdefault(host.address, host)
        if message:
            yield Fault(field=_names_field(cluster, host.island), message=message)


def _starts(places: Places, hosts: dict[int, Host], devices: Devices) -> Devices:
    """First rank of every agent: where the next rank lies on another host.

    Some vendors' software lists visible devices in ascending order only: there a smaller device
    starts an agent too.
    """
    nodes = places.nodes(devices)
    turns = np.diff(nodes) != 0
    falling = np.diff(devices) < 0
    if falling.any():
        ascending = [
            node
            for node, host in hosts.items()
            if vendor_of(host.vendor, host.device_kind).ascending_only
        ]
        turns |= falling & np.isin(nodes[1:], ascending)
    found: Devices = np.concatenate([[0], np.flatnonzero(turns) + 1]).astype(np.int64)
    return found


def _agents(
    places: Places, hosts: dict[int, Host], devices: Devices, starts: Devices
) -> Iterator[Agent]:
    cluster = places.cluster
    nodes = places.nodes(devices[starts]).tolist()
    stops = [*starts[1:].tolist(), len(devices)]
    for number, (node, first, stop) in enumerate(zip(nodes, starts.tolist(), stops, strict=True)):
        host = hosts[node]
        base = cluster.first_device(host.island) + host.node * host.devices_per_node
        yield Agent(
            node_rank=number,
            host=host,
            first_rank=first,
            local_devices=tuple((devices[first:stop] - base).tolist()),
        )


def _repeated(agents: tuple[Agent, ...]) -> Iterator[str]:
    """Hosts with several agents."""
    counts = Counter(agent.host.name for agent in agents)
    several = [name for name, count in counts.items() if count > 1]
    if several:
        yield (
            f"{len(several)} of {len(counts)} hosts run several agents ({listed(several)}): their "
            "ranks do not follow each other, so torchrun is started there once for each run of "
            "ranks, with its own visible devices"
        )


def _parts_of_hosts(agents: tuple[Agent, ...]) -> Iterator[str]:
    """Hosts of which the plan leaves devices free."""
    used: Counter[str] = Counter()
    for agent in agents:
        used[agent.host.name] += agent.num_ranks
    free = tuple(
        dict.fromkeys(
            agent.host.name
            for agent in agents
            if used[agent.host.name] < agent.host.devices_per_node
        )
    )
    if free:
        hosts = "host" if len(free) == 1 else "hosts"
        yield f"the plan leaves devices of {len(free)} {hosts} free: {listed(free)}"


def listed(names: Sequence[str], between: str = ", ") -> str:
    """The first names, and how many more there are."""
    more = len(names) - _MAX_SHOWN
    return between.join(names[:_MAX_SHOWN]) + (f" and {more} more" if more > 0 else "")


def used_devices(ranks: RankLayout) -> dict[str, tuple[int, ...]]:
    """By host its devices that hold ranks, ascending."""
    devices: dict[str, list[int]] = {}
    for agent in ranks.agents:
        devices.setdefault(agent.host.name, []).extend(agent.local_devices)
    return {host: tuple(sorted(numbers)) for host, numbers in devices.items()}


def uniform_groups(hosts: Iterable[Host], used: dict[str, tuple[int, ...]]) -> list[list[Host]]:
    """Hosts that have and use as many devices of one kind together, in their order."""
    groups: dict[tuple[str, int, int], list[Host]] = {}
    for host in hosts:
        key = (host.device_kind, host.devices_per_node, len(used[host.name]))
        groups.setdefault(key, []).append(host)
    return list(groups.values())


ALGORITHM_WORDS = {
    CollectiveAlgorithm.RING: "Ring",
    CollectiveAlgorithm.TREE: "allreduce:tree",
}
"""NCCL's own words (`hetplan.schedulers.vendors`)."""


def vendor_environment(
    agent: Agent, held: CollectiveAlgorithm | None = None
) -> tuple[tuple[str, str], ...]:
    """Variables of all ranks of an agent: interface, RDMA devices, visible devices, and the
    algorithm that its library is held to.

    Interfaces and RDMA devices only where the host's domain names them. Visible devices only where
    the agent does not have all devices of its host in their order; under Kubernetes never, where a
    pod sees no other devices than its own.
    """
    host = agent.host
    vendor, domain = vendor_of(host.vendor, host.device_kind), host.domain
    found = []
    if domain.interface:
        found.append(("GLOO_SOCKET_IFNAME", domain.interface))
        if vendor.interface:
            found.append((vendor.interface, vendor.exact + domain.interface))
    if domain.fabric_devices and vendor.fabric:
        names = ",".join(domain.fabric_devices)
        found.append((vendor.fabric, vendor.exact + names))
    whole = agent.local_devices == tuple(range(host.devices_per_node))
    if not whole and vendor.visible and domain.scheduler is not Scheduler.KUBERNETES:
        found.append((vendor.visible, ",".join(map(str, agent.local_devices))))
    if held is not None and vendor.algorithm:
        found.append((vendor.algorithm, ALGORITHM_WORDS[held]))
    return tuple(found)


def libraries(agents: tuple[Agent, ...]) -> tuple[str, ...]:
    """Collective libraries of the agents' devices, each once; more than one cannot make a group."""
    return tuple(dict.fromkeys(_library(agent.host) for agent in agents))


def _library(host: Host) -> str:
    return library_of(host.vendor, host.device_kind)


def held_library_faults(ranks: RankLayout, held: CollectiveAlgorithm | None) -> Iterator[Fault]:
    """A fault for each library that cannot be held to the job's algorithm."""
    hosts = {_library(each): each for each in ranks.hosts}
    for library, host in hosts.items():
        if held is not None and not vendor_of(host.vendor, host.device_kind).algorithm:
            yield Fault(
                field="inputs.job.trainer.collective_algorithm",
                message=f"{held}; no variable is known that tells {library} of {host.device_kind} "
                "so: leave it out",
            )


def held_library_remarks(held: CollectiveAlgorithm | None) -> Iterator[str]:
    """What the library has to be for the job's algorithm."""
    if held is CollectiveAlgorithm.TREE:
        yield f"NCCL_ALGO={ALGORITHM_WORDS[held]} needs NCCL 2.24 or newer."
