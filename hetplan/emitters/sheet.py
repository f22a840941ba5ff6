"""Which host starts which ranks: a plan's ranks as calls of torchrun, in their order.

torchrun numbers ranks by agents: an agent (one torchrun call) of node rank n gets the ranks after
those of all agents before it, in the order of its local devices. The order of agents therefore *is*
the placement. Devices of a host whose ranks are not consecutive need several agents there, each
with its own visible devices.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetplan.cluster.launch_domains import LaunchDomain


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
class LaunchSheet:
    """Everything that starts a plan's ranks, whatever the scheduler."""

    agents: tuple[Agent, ...]
    """By node rank."""
    port: int
    """Of the rendezvous, on the host of agent 0, inside the port range of its domain."""
    barrier_port: int
    """Of the barrier at which all agents meet before torchrun starts, on the same host."""
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
