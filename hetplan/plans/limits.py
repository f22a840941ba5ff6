"""Limits outside the devices: which a cluster sets, and which a plan breaks.

    power_limit   watts of all nodes of a plan in one site (`hetplan.cost.energy.energy`)
    max_nodes     nodes of a plan under one control plane: a site's, or the whole cluster's
    cpu_cores     cores of a node's host, where the job says how many each device needs

Each is a sum over nodes that may not be above a number, so that fewer nodes keep it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from hetplan.cluster.spec import Cluster, Site
from hetplan.errors import Fault
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
    """One limit of a cluster."""

    kind: LimitKind
    place: str
    """Site or island; empty: the whole cluster."""
    most: float
    islands: tuple[str, ...]
    """Whose nodes count."""

    @property
    def name(self) -> str:
        """`power_limit of A`."""
        return f"{self.kind} of {self.place}" if self.place else self.kind.value

    def figure(self, value: float) -> str:
        """A value of the limit in words."""
        return format_power(value) if self.kind is LimitKind.POWER else f"{value:g}"

    @property
    def words(self) -> str:
        """`power_limit of A: 1.2 MW`."""
        return f"{self.name}: {self.figure(self.most)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrun:
    """A limit that a plan breaks."""

    limit: Limit
    used: float
    """By the plan."""
    per_node: tuple[float, ...]
    """What a node of each of the limit's islands adds; of cores, infinity: no node will do."""

    @property
    def words(self) -> str:
        """The limit, and what the plan takes."""
        return self.said_of("the plan")

    def said_of(self, plan: str) -> str:
        """The same of a plan in these words."""
        figure = self.limit.figure(self.used)
        takes = {
            LimitKind.POWER: f"draws {figure}",
            LimitKind.NODES: f"has {figure}",
            LimitKind.CORES: f"needs {figure} in a node",
        }
        return f"{self.limit.words}, {plan} {takes[self.limit.kind]}"


def limits_of(cluster: Cluster, job: Job) -> Iterator[Limit]:
    """Every limit that is set, those of sites in file order first."""
    for site in cluster.sites:
        names = islands_of(site, cluster)
        for kind, most in (
            (LimitKind.POWER, site.power_limit_watts),
            (LimitKind.NODES, site.max_nodes),
        ):
            if most is not None:
                yield Limit(kind=kind, place=site.name, most=most, islands=names)
    if cluster.max_nodes is not None:
        every = tuple(island.name for island in cluster.islands)
        yield Limit(kind=LimitKind.NODES, place="", most=cluster.max_nodes, islands=every)
    for island in cluster.islands if job.cpu_cores_per_device else ():
        if island.cpu_cores is not None:
            names = (island.name,)
            yield Limit(
                kind=LimitKind.CORES, place=island.name, most=island.cpu_cores, islands=names
            )


def islands_of(site: Site, cluster: Cluster) -> tuple[str, ...]:
    """Names of the site's islands."""
    return tuple(each.name for each in cluster.islands if each.region in site.regions)


def with_limit(cluster: Cluster, limit: Limit, most: float | None) -> Cluster:
    """The cluster where this limit has another value; None: it is not set."""
    count = None if most is None else int(most)
    if limit.kind is LimitKind.CORES:
        return cluster.with_island(replace(cluster.island(limit.place), cpu_cores=count))
    if not limit.place:
        return replace(cluster, max_nodes=count)
    site = next(each for each in cluster.sites if each.name == limit.place)
    if limit.kind is LimitKind.POWER:
        changed = replace(site, power_limit_watts=most)
    else:
        changed = replace(site, max_nodes=count)
    sites = (changed if each is site else each for each in cluster.sites)
    return replace(cluster, sites=tuple(sites))


def unlimited(cluster: Cluster, job: Job) -> Cluster:
    """The cluster without limits."""
    for limit in limits_of(cluster, job):
        cluster = with_limit(cluster, limit, None)
    return cluster


def overruns(plan: Plan, cluster: Cluster, job: Job) -> Iterator[Overrun]:
    """Limits of nodes and cores that the plan breaks."""
    limits = [each for each in limits_of(cluster, job) if each.kind is not LimitKind.POWER]
    used = {island.name: mine for island, mine in used_devices(plan, cluster)} if limits else {}
    for limit in limits:
        if limit.kind is LimitKind.NODES:
            count = sum(int(used[name].any(axis=1).sum()) for name in limit.islands)
            per_node = (1.0,) * len(limit.islands)
        else:
            ranks = int(used[limit.place].sum(axis=1).max())
            count, per_node = ranks * (job.cpu_cores_per_device or 0), (float("inf"),)
        if count > limit.most:
            yield Overrun(limit=limit, used=count, per_node=per_node)


def as_fault(overrun: Overrun) -> Fault:
    """The overrun for a person who gave the plan."""
    return Fault(message=f"{overrun.words}; use fewer nodes there, or correct the limit")
