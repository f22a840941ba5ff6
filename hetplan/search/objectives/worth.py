"""What a plan is worth by every aim that a job can have: time, its quantile, money, devices.

    usd_per_step = sum over nodes in use of price per device hour x devices x step
                   + sum over links of bytes that cross x price per byte

A node of which a plan uses some devices is paid whole. Nothing is known of a price that is not
given: without prices of all islands in use a plan has none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hetplan.cluster.spec import Cluster
from hetplan.cost.estimate import step_quantile
from hetplan.cost.network.segments import LinkScope
from hetplan.cost.step_model.pricer import Pricer
from hetplan.cost.traffic import ledger
from hetplan.plans.plan import Plan, expand

_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """One plan by every aim; smaller is better."""

    step_seconds: float
    quantile_seconds: float
    """What the step stays below with the probability that was asked, else with 0.9."""
    usd_per_step: float | None
    """None where a price is not given."""
    devices: int
    """In use."""


def worth(pricer: Pricer, plan: Plan, step_seconds: float, quantile: float) -> Worth:
    """All aims of a legal plan whose estimate is `step_seconds`."""
    return Worth(
        step_seconds=step_seconds,
        quantile_seconds=step_quantile(pricer, plan, quantile),
        usd_per_step=usd_per_step(pricer, plan, step_seconds),
        devices=sum(
            replica.num_devices
            for pipeline in plan.pipelines
            for stage in pipeline.stages
            for replica in stage.replicas
        ),
    )


def usd_per_step(pricer: Pricer, plan: Plan, step_seconds: float) -> float | None:
    """Dollars of one step; None where an island in use has no price."""
    cluster = pricer.cluster
    per_hour = rent_usd_per_hour(plan, cluster)
    if per_hour is None:
        return None
    traffic = 0.0
    if _any_link_has_a_price(cluster):
        found = ledger(plan, pricer.model, cluster, pricer.job, None)
        for entry in found.entries:
            if entry.link.scope is LinkScope.ISLANDS:
                link = cluster.link_between(entry.link.left, entry.link.right)
                traffic += entry.bytes_per_step * (link.price_usd_per_byte or 0.0)
    return per_hour / _SECONDS_PER_HOUR * step_seconds + traffic


def _any_link_has_a_price(cluster: Cluster) -> bool:
    links = [each.link for each in cluster.links]
    links += [each.link for each in cluster.region_links]
    links += [each for each in (cluster.within_region, cluster.across_regions) if each is not None]
    return any(link.price_usd_per_byte for link in links)


def rent_usd_per_hour(plan: Plan, cluster: Cluster) -> float | None:
    """Price of the nodes in use; None where one has none."""
    used = np.zeros(cluster.num_devices, dtype=np.bool_)
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for replica in stage.replicas:
                used[list(expand(replica.devices))] = True
    prices = []
    for island in cluster.islands:
        first, each = cluster.first_device(island.name), island.devices_per_node
        mine = used[first : first + island.num_devices].reshape(island.nodes, each)
        nodes = int(mine.any(axis=1).sum())
        if nodes:
            if island.price_usd_per_device_hour is None:
                return None
            prices.append(nodes * each * island.price_usd_per_device_hour)
    return math.fsum(prices)
