"""What a step of a plan, and a whole run, take from the meter and cost.

    joules = sum over islands of PUE x (computing watts x seconds in passes
             + communicating watts x the rest of the step, of every device of the plan,
             + idle watts x the step, of the other devices of its nodes)

    dollars = rent of the nodes x step + bytes over priced links + joules x price of the site

A whole run takes as much for the time of its steps, repeated ones and slower ones too; while it
stands still (start-up, saving, failures, waits for data) devices draw their idle watts, and rent
goes on.

Nodes without a device of the plan are not counted, nor are switches between nodes. A node of which
a plan uses some devices is paid whole. A plan has no cost where one of its islands has neither a
price nor a site with one, and no energy where the power of one is unknown (`power_law`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hetplan.cluster.power import PowerLaw, power_law
from hetplan.cluster.spec import Cluster, Island
from hetplan.cost.estimate_values import Estimate
from hetplan.cost.goodput.run import goodput
from hetplan.cost.goodput.values import SECONDS_PER_DAY, Cause, Goodput
from hetplan.cost.network.segments import LinkScope
from hetplan.cost.traffic import ledger
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.limits import Limit, LimitKind, limits_of
from hetplan.plans.pieces import used_devices
from hetplan.plans.plan import Plan

JOULES_PER_KWH = 3.6e6
SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandEnergy:
    """What the nodes of one island that a plan uses draw in a step, with the site's overhead."""

    island: str
    site: str
    """Empty: not described."""
    law: PowerLaw
    nodes: int
    devices: int
    """In use."""
    computing_share: float
    """Of the step, mean over its devices in use."""
    joules_per_step: float
    mean_watts: float
    idle_watts: float
    """Of its nodes, while the run stands still."""
    usd_per_joule: float | None
    """None: energy has no price there."""

    @property
    def kwh_per_step(self) -> float:
        """In the unit that is sold."""
        return self.joules_per_step / JOULES_PER_KWH


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """Of one step of a plan, at the meters of its sites."""

    islands: tuple[IslandEnergy, ...]
    log_halfwidth: float
    """Of the 90 % interval: the step's and the watts', taken as independent."""

    @property
    def joules_per_step(self) -> float:
        """All islands together."""
        return math.fsum(each.joules_per_step for each in self.islands)

    @property
    def kwh_per_step(self) -> float:
        """The same in the unit that is sold."""
        return self.joules_per_step / JOULES_PER_KWH

    @property
    def mean_watts(self) -> float:
        """All islands together."""
        return math.fsum(each.mean_watts for each in self.islands)

    @property
    def kwh_range(self) -> tuple[float, float]:
        """The 90 % interval of a step's kWh."""
        factor = math.exp(self.log_halfwidth)
        return self.kwh_per_step / factor, self.kwh_per_step * factor


def energy_of(plan: Plan, estimate: Estimate, cluster: Cluster) -> Energy | None:
    """Energy of a priced plan; None where the power of one of its islands is unknown."""
    found = _by_island(plan, estimate, cluster)
    parts = [each for each in found.values() if each is not None]
    if len(parts) < len(found):
        return None
    joules = math.fsum(each.joules_per_step for each in parts)
    watts = math.fsum(each.law.log_halfwidth * each.joules_per_step for each in parts) / joules
    low, high, _ = estimate.step_range
    return Energy(
        islands=tuple(parts),
        log_halfwidth=math.hypot(watts, 0.5 * math.log(high / low)),
    )


def _by_island(plan: Plan, estimate: Estimate, cluster: Cluster) -> dict[str, IslandEnergy | None]:
    """Of every island in use; None where its power is unknown."""
    computing = {island.name: 0.0 for island in cluster.islands}
    for stage, cost in zip(plan.stages, estimate.stages, strict=True):
        for replica in stage.replicas:
            name = cluster.island_of_device(replica.devices[0].start).name
            computing[name] += replica.num_devices * cost.busy_seconds
    found: dict[str, IslandEnergy | None] = {}
    for island, mine in used_devices(plan, cluster):
        devices, nodes = int(mine.sum()), int(mine.any(axis=1).sum())
        if not devices:
            continue
        law = power_law(cluster, island)
        if law is None:
            found[island.name] = None
            continue
        step = estimate.step_seconds
        busy = min(1.0, computing[island.name] / (devices * step))
        found[island.name] = _part(cluster, island, law, (nodes, devices), busy, step)
    return found


def _part(
    cluster: Cluster,
    island: Island,
    law: PowerLaw,
    used: tuple[int, int],
    busy: float,
    step: float,
) -> IslandEnergy:
    site, (nodes, devices) = cluster.site_of(island.region), used
    every = nodes * island.devices_per_node
    mean_watts = law.meter_watts(devices, busy, unused=every - devices)
    return IslandEnergy(
        island=island.name,
        site="" if site is None else site.name,
        law=law,
        nodes=nodes,
        devices=devices,
        computing_share=busy,
        joules_per_step=mean_watts * step,
        mean_watts=mean_watts,
        idle_watts=law.meter_watts(0, unused=every),
        usd_per_joule=None if site is None else site.price_usd_per_joule,
    )


def power_use(plan: Plan, estimate: Estimate, cluster: Cluster, job: Job) -> Iterator[Limit]:
    """What a priced plan draws of every power limit, by its mean."""
    limits = [each for each in limits_of(cluster, job) if each.kind is LimitKind.POWER]
    found = _by_island(plan, estimate, cluster) if limits else {}
    parts = {name: part for name, part in found.items() if part is not None}
    for limit in limits:
        unknown = next((each for each in limit.islands if each in found.keys() - parts), "")
        mine = {name: parts[name] for name in limit.islands if name in parts}
        watts = math.fsum(each.mean_watts for each in mine.values())
        loads = {name: part.computing_share for name, part in mine.items()}
        adds = [
            _adds(cluster, cluster.island(name), loads.get(name, 1.0)) for name in limit.islands
        ]
        yield replace(
            limit,
            used=watts,
            per_node=tuple(node for node, _ in adds),
            per_device=tuple(device for _, device in adds),
            unknown=unknown,
        )


def _adds(cluster: Cluster, island: Island, load: float) -> tuple[float, float]:
    """Watts of a node whose devices are idle, and what each device in use adds to them."""
    law = power_law(cluster, island)
    if law is None:
        return math.inf, 0.0
    idle = law.meter_watts(0, unused=1)
    return island.devices_per_node * idle, law.meter_watts(1, load) - idle


def most_node_watts(cluster: Cluster, island: Island) -> float:
    """No node draws more: all of its devices compute; infinite where their power is unknown."""
    law = power_law(cluster, island)
    return math.inf if law is None else law.meter_watts(island.devices_per_node)


def rent_usd_per_hour(plan: Plan, cluster: Cluster) -> float | None:
    """Price of the nodes in use; None where one has neither a price nor a site with one."""
    prices = []
    for island, mine in used_devices(plan, cluster):
        nodes = int(mine.any(axis=1).sum())
        if nodes:
            each = hourly_price(cluster, island)
            if each is None:
                return None
            prices.append(nodes * island.devices_per_node * each)
    return math.fsum(prices)


def hourly_price(cluster: Cluster, island: Island) -> float | None:
    """Dollars of one device for one hour, energy apart: 0 where that alone has a price."""
    site = cluster.site_of(island.region)
    if island.price_usd_per_device_hour is None and site is not None and site.price_usd_per_joule:
        return 0.0
    return island.price_usd_per_device_hour


def usd_per_step(
    plan: Plan, estimate: Estimate, model: ModelSpec, cluster: Cluster, job: Job
) -> float | None:
    """Dollars of one step of a priced plan; None where a price, or a power that is paid, is not
    known.
    """
    per_hour = rent_usd_per_hour(plan, cluster)
    if per_hour is None:
        return None
    dollars = [per_hour / SECONDS_PER_HOUR * estimate.step_seconds]
    if any(site.price_usd_per_joule for site in cluster.sites):
        energy = energy_of(plan, estimate, cluster)
        if energy is None:
            return None
        dollars += [each.joules_per_step * (each.usd_per_joule or 0.0) for each in energy.islands]
    if _any_link_has_a_price(cluster):
        for entry in ledger(plan, model, cluster, job, None).entries:
            if entry.link.scope is LinkScope.ISLANDS:
                link = cluster.link_between(entry.link.left, entry.link.right)
                dollars.append(entry.bytes_per_step * (link.price_usd_per_byte or 0.0))
    return math.fsum(dollars)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRun:
    """All tokens of a job under one plan, with all that the run loses."""

    goodput: Goodput
    kwh: float | None
    """None: not known, or the run never ends."""
    usd: float | None
    """The same."""

    @property
    def days(self) -> float:
        """Expected; infinite where failures come faster than the run recovers."""
        return self.goodput.seconds / SECONDS_PER_DAY


def whole_run(
    plan: Plan, estimate: Estimate, model: ModelSpec, cluster: Cluster, job: Job
) -> WholeRun | None:
    """The run of a priced plan; None where the job does not say its tokens."""
    if job.total_tokens is None:
        return None
    run = goodput(plan, estimate, model, cluster, job)
    again, slower = run.lost_to(Cause.LOST_WORK), run.lost_to(Cause.FAILOVER)
    still, kwh = run.seconds - run.work_seconds - again - slower, None
    if math.isinf(still):
        return WholeRun(goodput=run, kwh=None, usd=None)
    energy, rent = energy_of(plan, estimate, cluster), rent_usd_per_hour(plan, cluster)
    usd = usd_per_step(plan, estimate, model, cluster, job)
    steps = (run.work_seconds + again) / estimate.step_seconds
    beside = [
        (each.mean_watts * slower + each.idle_watts * still, each.usd_per_joule or 0.0)
        for each in (energy.islands if energy else ())
    ]
    if energy is not None:
        joules = steps * energy.joules_per_step + math.fsum(joules for joules, _ in beside)
        kwh = joules / JOULES_PER_KWH
    if usd is not None and rent is not None:
        usd = steps * usd + rent / SECONDS_PER_HOUR * (slower + still)
        usd += math.fsum(joules * price for joules, price in beside)
    return WholeRun(goodput=run, kwh=kwh, usd=usd)


def _any_link_has_a_price(cluster: Cluster) -> bool:
    links = [each.link for each in cluster.links]
    links += [each.link for each in cluster.region_links]
    links += [each for each in (cluster.within_region, cluster.across_regions) if each is not None]
    return any(link.price_usd_per_byte for link in links)
