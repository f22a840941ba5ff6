"""Limits outside the devices: which a cluster sets, and which a plan breaks.

Each is a sum over nodes that may not be above a number, so that fewer nodes keep it. What a plan
draws is known once it is priced (`hetplan.cost.energy.energy`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from hetplan.cluster.spec import Cluster
from hetplan.job.spec import Job
from hetplan.plans.pieces import used_devices
from hetplan.plans.plan import Plan
from hetplan.units import format_power


class LimitKind(StrEnum):
    """The key of a cluster file that sets the limit."""

    POWER = "power_limit"
    NODES = "max_nodes"
    CORES = "cpu_cores"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One limit of a cluster, and what a plan takes of it."""

    kind: LimitKind
    place: str
    """Site or island; empty: the whole cluster."""
    most: float
    islands: tuple[str, ...]
    """Whose nodes count."""
    used: float = 0.0
    per_node: tuple[float, ...] = ()
    """What a node of each of its islands adds that has a device in use; infinity: power not known.
    """
    per_device: tuple[float, ...] = ()
    """What each device in use adds to that; of cores in one node, as that has the limit."""
    unknown: str = ""
    """Island in use whose power is not known: nobody can say that the limit holds."""

    @property
    def name(self) -> str:
        """`power_limit of A`."""
        return f"{self.kind} of {self.place}" if self.place else self.kind.value

    def figure(self, value: float) -> str:
        """A value of the limit in words."""
        return format_power(value) if self.kind is LimitKind.POWER else f"{value:g}"

    def words(self, plan: str = "the plan") -> str:
        """`power_limit of A: 1.2 MW, the plan takes 1.4 MW`."""
        if self.unknown:
            return f"{self.name}: power of {self.unknown} is not known; say `power` of the island"
        return f"{self.name}: {self.figure(self.most)}, {plan} takes {self.figure(self.used)}"

    @property
    def is_broken(self) -> bool:
        """Whether the plan takes more; watts of many islands are summed in another order."""
        return bool(self.unknown) or self.used > self.most * (1.0 + 1e-9)


def limits_of(cluster: Cluster, job: Job) -> Iterator[Limit]:
    """Every limit that is set."""
    found: list[tuple[LimitKind, str, float | None, tuple[str, ...]]] = []
    for site in cluster.sites:
        mine = tuple(each.name for each in cluster.islands if each.region in site.regions)
        found.append((LimitKind.POWER, site.name, site.power_limit_watts, mine))
        found.append((LimitKind.NODES, site.name, site.max_nodes, mine))
    every = tuple(each.name for each in cluster.islands)
    found.append((LimitKind.NODES, "", cluster.max_nodes, every))
    for each in cluster.islands if job.cpu_cores_per_device else ():
        found.append((LimitKind.CORES, each.name, each.cpu_cores, (each.name,)))
    for kind, place, most, islands in found:
        if most is not None:
            yield Limit(kind=kind, place=place, most=most, islands=islands)


def used_in_part(cluster: Cluster, job: Job) -> set[str]:
    """Islands whose nodes a search may use in part: within limits on power or cores."""
    parted = {each.name for each in cluster.islands if each.node_parts}
    for limit in limits_of(cluster, job):
        if limit.kind is not LimitKind.NODES:
            parted.update(limit.islands)
    return parted


def with_limit(cluster: Cluster, limit: Limit, most: float | None) -> Cluster:
    """The cluster where this limit has another value; None: it is not set."""
    count = None if most is None else int(most)
    if limit.kind is LimitKind.CORES:
        return cluster.with_island(replace(cluster.island(limit.place), cpu_cores=count))
    if not limit.place:
        return replace(cluster, max_nodes=count)
    sites = {each.name: each for each in cluster.sites}
    if limit.kind is LimitKind.POWER:
        sites[limit.place] = replace(sites[limit.place], power_limit_watts=most)
    else:
        sites[limit.place] = replace(sites[limit.place], max_nodes=count)
    return replace(cluster, sites=tuple(sites.values()))


def unlimited(cluster: Cluster, job: Job) -> Cluster:
    """The cluster without limits."""
    for limit in limits_of(cluster, job):
        cluster = with_limit(cluster, limit, None)
    return cluster


def node_use(plan: Plan, cluster: Cluster, job: Job) -> Iterator[Limit]:
    """What a plan takes of every limit of nodes and cores."""
    limits = [each for each in limits_of(cluster, job) if each.kind is not LimitKind.POWER]
    used = {island.name: mine for island, mine in used_devices(plan, cluster)} if limits else {}
    for limit in limits:
        if limit.kind is LimitKind.NODES:
            count = sum(int(used[name].any(axis=1).sum()) for name in limit.islands)
            ones = (1.0,) * len(limit.islands)
            yield replace(limit, used=count, per_node=ones, per_device=(0.0,) * len(ones))
        else:
            ranks = int(used[limit.place].sum(axis=1).max())
            each = job.cpu_cores_per_device or 0
            yield replace(limit, used=each * ranks, per_node=(0.0,), per_device=(each,))
