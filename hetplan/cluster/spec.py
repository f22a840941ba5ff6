"""What the model is trained on: devices in nodes, nodes in islands, islands in regions, links.

Every device of the cluster has a number: islands in file order, in each island node by node, in
each node by its local number. Plans name devices by these numbers. Questions about one device or
one pair of islands take a time that does not grow with the devices (`hetplan.cluster.hosts`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Annotated, TypeAlias

from pydantic import Field

from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.launch_domains import (
    DEFAULT_DOMAIN,
    LaunchDomain,
    LaunchedIsland,
    launch_faults,
)
from hetplan.cluster.links import Link, Transport
from hetplan.cluster.node import Nics, count_names, expand_names
from hetplan.errors import InputError
from hetplan.files.encoding import UNWRITTEN
from hetplan.files.quantities import Count, NonNegative, Positive, Ratio, check_limits

__all__ = [
    "MAX_DEVICES",
    "Cluster",
    "Island",
    "IslandLink",
    "Link",
    "RegionLink",
    "Site",
    "Storage",
    "Transport",
    "too_many_devices",
]

MAX_DEVICES = 1 << 21
"""Most devices of a cluster: twenty times the largest that was built, and a plan of them still
takes seconds and fits in memory. More is a slip in a count."""

ClockRatio: TypeAlias = Annotated[float, Field(gt=0, le=1.5)]
"""A sustained clock over the one of the printed rates, which no device holds by half."""

LogSpread: TypeAlias = Annotated[float, Field(ge=0, le=1)]
"""Standard deviation of the logarithm of times; at 1 one device in six takes e times the median."""

_MAX_NAMES_SHOWN = 20


def too_many_devices(count: int) -> str:
    """The fault of a cluster with more devices than can be."""
    return (
        f"{count:,} devices; a cluster has at most {MAX_DEVICES:,}: check nodes and "
        "devices_per_node"
    )


@dataclass(frozen=True, kw_only=True)
class Island:
    """Devices of one kind on one fast fabric."""

    name: str
    region: str
    device: DeviceKind
    nodes: Count
    devices_per_node: Count
    intra_node: Link
    inter_node: Link
    """Between nodes of the island, per device; the link inside the node where there is one node."""
    memory_bytes: Positive
    """Memory of one device that a job may use."""
    nodes_out: tuple[int, ...] = ()
    """Nodes that exist and must not be used; they keep their device numbers."""
    nics: Nics | None = None
    """Network cards of a node; None: not described."""
    switch_of_device: tuple[int, ...] = ()
    """PCIe switch of each device of a node; empty: not described."""
    numa_node_of_device: tuple[int, ...] = ()
    """NUMA node of each device of a node; empty: not described."""
    node_names: tuple[str, ...] = ()
    """Names of the nodes in order, ranges as they were written; empty: the nodes have none."""
    price_usd_per_device_hour: NonNegative | None = None
    power_watts: Positive | None = None
    """What one device draws under load, with its part of the node; None: not given."""
    host_launch_seconds: Positive | None = None
    """Time of the host to launch one operator of a forward pass, for layers that are summed from
    operators; None: as most hosts."""
    host_memory_bytes: Positive | None = None
    """Memory of one node's host that a job may use; None: unknown. Its devices have equal parts."""
    power_cap_watts: Positive | None = None
    """Limit that is set on each device, below its kind's `max_power_watts`; None: not set."""
    clock_ratio: ClockRatio = 1.0
    """Sustained clock over the clock at which times of this kind were measured or its peak rates
    are given."""
    speed_spread: LogSpread | None = None
    """Standard deviation of the logarithm of a device's times around its kind's; None: unknown."""
    cpu_cores: Count | None = None
    """Cores of one node's host that a job may use; None: unknown."""
    node_parts: tuple[int, ...] = field(default=(), metadata=UNWRITTEN)
    """Devices of each node that a search within limits may use, its first ones; empty: all. Nodes
    in use have equal parts, but that the last one's may be smaller. It is in no file."""

    def __post_init__(self) -> None:
        check_limits(self)
        wrong = [node for node in self.nodes_out if not 0 <= node < self.nodes]
        if wrong:
            raise InputError(
                f"nodes_out has {wrong[0]}; the island has the nodes 0 to {self.nodes - 1}"
            )
        if self.node_parts and len(self.node_parts) != self.nodes:
            raise InputError(f"node_parts has {len(self.node_parts)} of {self.nodes} nodes")
        if self.node_parts:
            _check_parts(self.usable_parts, self.devices_per_node)
        lists = [
            ("switch_of_device", self.switch_of_device),
            ("numa_node_of_device", self.numa_node_of_device),
            ("nics.of_device", self.nics.of_device if self.nics else ()),
        ]
        for name, entries in lists:
            if entries and len(entries) != self.devices_per_node:
                raise InputError(
                    f"{name} has {len(entries)} entries for {self.devices_per_node} devices"
                )
        if self.node_names and sum(map(count_names, self.node_names)) != self.nodes:
            named = sum(map(count_names, self.node_names))
            raise InputError(f"node_names stands for {named} names; the nodes are {self.nodes}")
        cap, board = self.power_cap_watts, self.device.max_power_watts
        if cap is not None and board and cap > board:
            raise InputError(
                f"power_cap_watts is {cap:g}, more than the {board:g} W of {self.device.kind}"
            )

    @cached_property
    def ports(self) -> tuple[float, ...]:
        """`Link.by_senders_bytes_per_second` of its NICs; empty where none are described."""
        return () if self.nics is None else self.nics.by_senders(self.devices_per_node)

    @property
    def node_bytes_per_second(self) -> float:
        """Of all NICs of a node, in one direction."""
        if self.nics is None:
            return self.devices_per_node * self.inter_node.bandwidth_bytes_per_second
        return self.nics.per_node * self.nics.bandwidth_bytes_per_second

    @property
    def host_bytes_per_device(self) -> float | None:
        """Host memory that a job may use for each device; None: unknown."""
        if self.host_memory_bytes is None:
            return None
        return self.host_memory_bytes / self.devices_per_node

    @property
    def can_offload(self) -> bool:
        """Whether it is known what its hosts can keep, and how fast they are reached."""
        return self.host_memory_bytes is not None and self.device.host is not None

    @property
    def num_devices(self) -> int:
        """Devices of the island, those of nodes that are out included."""
        return self.nodes * self.devices_per_node

    @property
    def num_usable_devices(self) -> int:
        """Devices that may be used."""
        return sum(part * nodes for part, nodes in self.part_counts)

    @cached_property
    def usable_nodes(self) -> tuple[int, ...]:
        """Node numbers that may be used."""
        return tuple(node for node in range(self.nodes) if node not in self._out)

    @cached_property
    def usable_parts(self) -> tuple[int, ...]:
        """Devices of each usable node that may be used."""
        parts = self.node_parts or (self.devices_per_node,) * self.nodes
        return tuple(parts[node] for node in self.usable_nodes)

    @cached_property
    def part_counts(self) -> tuple[tuple[int, int], ...]:
        """(devices that may be used, nodes that have so many) of usable nodes."""
        if not self.node_parts:
            return ((self.devices_per_node, self.nodes - len(self._out)),)
        return tuple(Counter(self.usable_parts).items())

    @cached_property
    def part_starts(self) -> tuple[int, ...]:
        """Usable devices before each usable node, and all."""
        return tuple(accumulate(self.usable_parts, initial=0))

    @property
    def filled_node(self) -> int:
        """Devices of a node that a stage over several nodes fills."""
        return next((part for part, _ in self.part_counts), self.devices_per_node)

    @cached_property
    def _out(self) -> frozenset[int]:
        return frozenset(self.nodes_out).union(
            node for node, part in enumerate(self.node_parts) if not part
        )

    def is_out(self, node: int) -> bool:
        """Whether the node of this number must not be used."""
        return node in self._out

    @cached_property
    def names_of_nodes(self) -> tuple[str, ...]:
        """Name of every node, ranges written out; empty: the nodes have none."""
        return tuple(expand_names(self.node_names))


def _check_parts(parts: tuple[int, ...], per_node: int) -> None:
    wrong = [part for part in parts if not 0 <= part <= per_node]
    if wrong:
        raise InputError(f"node_parts has {wrong[0]} of the {per_node} devices of a node")
    if any(after > before for before, after in pairwise(parts)):
        raise InputError(f"node_parts of usable nodes are {parts}; the largest must come first")


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandLink:
    """The link between devices of two islands, the same both ways."""

    between: tuple[str, str]
    link: Link


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionLink:
    """The link between devices of two regions, the same both ways."""

    between: tuple[str, str]
    link: Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """What keeps a site's checkpoints and data, for all of its hosts together."""

    read_bytes_per_second: Positive
    write_bytes_per_second: Positive
    shares_uplink: bool = False
    """Whether it is reached over the NICs that training uses."""

    def __post_init__(self) -> None:
        check_limits(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A place with one supply of power; it holds regions."""

    name: str
    regions: tuple[str, ...]
    power_limit_watts: Positive | None = None
    """Most that the nodes of a plan may draw there, at the meter; None: not given."""
    price_usd_per_joule: NonNegative | None = None
    """Of energy that is paid apart from device-hours; None: not given."""
    pue: Ratio = 1.0
    """Energy of the site over that of its nodes."""
    max_nodes: Count | None = None
    """Most nodes of one plan that its control plane has room for; None: any number."""
    storage: Storage | None = None
    """None: not described."""

    def __post_init__(self) -> None:
        check_limits(self)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Everything the job may use."""

    name: str
    islands: tuple[Island, ...]
    links: tuple[IslandLink, ...] = ()
    """Links of single pairs of islands; they come before those of regions and the defaults."""
    region_links: tuple[RegionLink, ...] = ()
    """Links between islands of two regions; they come before `across_regions`."""
    within_region: Link | None = None
    """Between any other two islands of one region."""
    across_regions: Link | None = None
    """Between any other two islands of different regions."""
    sites: tuple[Site, ...] = ()
    launch_domains: tuple[LaunchDomain, ...] = ()
    """How the hosts of islands are started; islands that none names are plain hosts."""
    max_nodes: Count | None = None
    """Most nodes of one plan, of all sites together; None: any number."""

    def __post_init__(self) -> None:
        if len({island.name for island in self.islands}) < len(self.islands):
            raise InputError(f"two islands have one name; the names are {self._names()}")
        if self.num_devices > MAX_DEVICES:
            raise InputError(too_many_devices(self.num_devices))
        if self.launch_domains:
            self._check_launch()

    def _check_launch(self) -> None:
        islands = [
            LaunchedIsland(
                name=island.name,
                device=island.device.kind,
                vendor=island.device.vendor,
                node_names=island.node_names,
            )
            for island in self.islands
        ]
        faults = [
            replace(fault, field=f"launch_domains[{at}].{fault.field}")
            for at, fault in launch_faults(self.launch_domains, islands, whole=False)
        ]
        if faults:
            raise InputError(*faults)

    @property
    def num_devices(self) -> int:
        """Devices of all islands."""
        return self._starts[-1]

    @property
    def regions(self) -> tuple[str, ...]:
        """Region names in file order."""
        return tuple(dict.fromkeys(island.region for island in self.islands))

    def island(self, name: str) -> Island:
        """The island of this name."""
        return self.islands[self._place(name)]

    def with_island(self, island: Island) -> Cluster:
        """The cluster where this island takes the place of the one of the same name."""
        islands = tuple(island if each.name == island.name else each for each in self.islands)
        return replace(self, islands=islands)

    def first_device(self, name: str) -> int:
        """Number of the first device of the island of this name."""
        return self._starts[self._place(name)]

    def island_of_device(self, device: int) -> Island:
        """The island that holds the device of this number."""
        return self.islands[self._place_of_device(device)]

    def node_of_device(self, device: int) -> int:
        """Number of the device's node inside its island."""
        place = self._place_of_device(device)
        return (device - self._starts[place]) // self.islands[place].devices_per_node

    def link_between(self, left: str, right: str) -> Link:
        """The link between two islands; inside one island, the link between its nodes.

        Of a link whose whole capacity one device could take, a device gets no more than its own
        port to the network of its island, and those of a node share its NICs.
        """
        found = self._found_links.get((left, right))
        if found is None:
            found = self._found_links[left, right] = self._find_link(left, right)
        return found

    @cached_property
    def _found_links(self) -> dict[tuple[str, str], Link]:
        return {}

    def _find_link(self, left: str, right: str) -> Link:
        one, two = self.island(left), self.island(right)
        ports = min((each.ports for each in (one, two) if each.ports), key=min, default=())
        if one is two:
            return replace(one.inter_node, by_senders_bytes_per_second=ports)
        link = self._links.get((left, right)) or self._regional(one, two)
        if link is None:
            raise InputError(f"the cluster has no link between islands {left} and {right}")
        shared = link.shared_bandwidth_bytes_per_second
        if shared is None or link.bandwidth_bytes_per_second < shared:
            return link
        own = (each.inter_node.bandwidth_bytes_per_second for each in (one, two))
        return replace(
            link,
            bandwidth_bytes_per_second=min(shared, *own),
            by_senders_bytes_per_second=ports,
        )

    def lists_link(self, left: str, right: str) -> bool:
        """Whether these two islands have a link of their own, not that of their regions."""
        return (left, right) in self._links

    def site_of(self, region: str) -> Site | None:
        """The site of a region; None: not described."""
        return next((site for site in self.sites if region in site.regions), None)

    def domain_of_island(self, name: str) -> LaunchDomain:
        """How the hosts of the island of this name are started; one domain for all that none
        names.
        """
        return self._domains[self.island(name).name]

    def _regional(self, one: Island, two: Island) -> Link | None:
        if one.region == two.region:
            return self.within_region
        return self._region_links.get((one.region, two.region)) or self.across_regions

    def _place(self, name: str) -> int:
        place = self._places.get(name)
        if place is None:
            raise InputError(f"no island is named {name}; the cluster has {self._names()}")
        return place

    def _place_of_device(self, device: int) -> int:
        starts = self._starts
        if not 0 <= device < starts[-1]:
            raise InputError(f"there is no device {device}; the cluster has 0 to {starts[-1] - 1}")
        return bisect_right(starts, device) - 1

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """First device of every island, and the number of all devices."""
        return tuple(accumulate((island.num_devices for island in self.islands), initial=0))

    @cached_property
    def _places(self) -> dict[str, int]:
        return {island.name: place for place, island in enumerate(self.islands)}

    @cached_property
    def _links(self) -> dict[tuple[str, str], Link]:
        return _both_ways(self.links)

    @cached_property
    def _region_links(self) -> dict[tuple[str, str], Link]:
        return _both_ways(self.region_links)

    @cached_property
    def _domains(self) -> dict[str, LaunchDomain]:
        named = {name: domain for domain in self.launch_domains for name in domain.islands}
        others = tuple(island.name for island in self.islands if island.name not in named)
        if not others:
            return named
        plain = LaunchDomain(name=DEFAULT_DOMAIN, islands=others)
        return named | dict.fromkeys(others, plain)

    def _names(self) -> str:
        names = [island.name for island in self.islands[:_MAX_NAMES_SHOWN]]
        more = len(self.islands) - len(names)
        return ", ".join(names) + (f" and {more} more" if more else "")


def _both_ways(
    entries: tuple[IslandLink, ...] | tuple[RegionLink, ...],
) -> dict[tuple[str, str], Link]:
    """By ordered pair of names; the first entry of a pair counts."""
    found: dict[tuple[str, str], Link] = {}
    for entry in entries:
        left, right = entry.between
        found.setdefault((left, right), entry.link)
        found.setdefault((right, left), entry.link)
    return found
