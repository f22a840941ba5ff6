"""Which parts a plan uses, and how often they fail.

Defaults, for what the job leaves out: Llama 3 405B, 54 days on 16,384 H100 in hosts of eight
(arXiv 2407.21783, table 5). Its 419 unexpected interruptions by the part that has to be replaced or
started again:

    device   268   faulty GPU 148, HBM 72, SRAM 19, system processor 17, silent corruption 6,
                   thermal interface and sensor 6
    NIC        7
    link      35   switch and cable, one link per device
    host     109   maintenance 32, SSD 3, power supply 3, chassis 2, expansion board 2, CPU 2,
                   memory 2, software 54, NCCL timeouts 7, dependencies 2

They stand for every device kind, as no table by part is known for others. A probability p within a
year is a rate of -log(1 - p) a year.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hetplan.cluster.spec import Cluster, Island
from hetplan.cost.goodput.lost_nic import kept_bandwidth
from hetplan.cost.goodput.renewal import Slowing
from hetplan.cost.goodput.values import PartFailures
from hetplan.job.run import Run
from hetplan.plans.pieces import Devices, Places, stage_array
from hetplan.plans.plan import Plan, Sharding

YEAR_SECONDS = 365.25 * 86400.0
_OBSERVED_SECONDS = 54 * 86400.0
_OBSERVED_DEVICES, _OBSERVED_HOSTS = 16384, 2048
_DEVICE_RATE = 268 / (_OBSERVED_DEVICES * _OBSERVED_SECONDS)
_NIC_RATE = 7 / (_OBSERVED_DEVICES * _OBSERVED_SECONDS)
_LINK_RATE = 35 / (_OBSERVED_DEVICES * _OBSERVED_SECONDS)
_HOST_RATE = 109 / (_OBSERVED_HOSTS * _OBSERVED_SECONDS)

NIC, LINK, LINE, HOST = "NIC", "link", "line between regions", "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedIsland:
    """What a plan uses of an island."""

    island: Island
    devices: int
    hosts: int
    nics: int
    """0 where the whole plan lies in one host."""


def used_islands(plan: Plan, cluster: Cluster) -> tuple[UsedIsland, ...]:
    """Every island with devices in use."""
    places = Places(cluster=cluster)
    devices = np.concatenate([stage_array(stage) for stage in plan.stages])
    nodes, firsts = np.unique(places.nodes(devices), return_index=True)
    count = len(cluster.islands)
    by_island = np.bincount(places.islands(devices), minlength=count)
    hosts = np.bincount(places.islands(devices[firsts]), minlength=count)
    found = []
    for at, island in enumerate(cluster.islands):
        if by_island[at]:
            mine = island.nics.per_node * int(hosts[at]) if island.nics else int(by_island[at])
            found.append(
                UsedIsland(
                    island=island,
                    devices=int(by_island[at]),
                    hosts=int(hosts[at]),
                    nics=mine if len(nodes) > 1 else 0,
                )
            )
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failing:
    """The parts of a plan, and what those that fall back do to its steps."""

    parts: tuple[PartFailures, ...]
    slowings: tuple[Slowing, ...]

    @property
    def restarts_per_second(self) -> float:
        """Failures after which the run starts again."""
        return math.fsum(each.failures_per_second for each in self.parts if not each.falls_back)


def failing(used: tuple[UsedIsland, ...], run: Run, nic_share: float, line_share: float) -> Failing:
    """How the parts of a plan fail.

    Shares: parts of the step in transfers between hosts, of the NICs and of the lines that regions
    share. A path that keeps a part k of its bandwidth makes its transfers 1 / k times as long; what
    compute hides of them today stays hidden.
    """
    parts, slowings = [], []
    for kind in dict.fromkeys(each.island.device.kind for each in used):
        count = sum(each.devices for each in used if each.island.device.kind == kind)
        own = next((each.probability for each in run.kind_failures if each.kind == kind), None)
        given = run.device_failures if own is None else own
        parts.append(_part(kind, count, given, _DEVICE_RATE))
    hosts = sum(each.hosts for each in used)
    parts.append(_part(HOST, hosts, run.host_failures, _HOST_RATE))
    for sort, given, usual in (
        (NIC, run.nic_failures, _NIC_RATE),
        (LINK, run.link_failures, _LINK_RATE),
    ):
        for kept, count in _by_kept(used, run):
            part = _part(sort, count, given, usual, falls_back=kept > 0.0)
            parts.append(part)
            if kept > 0.0:
                slowings.append(_slowing(part, kept, nic_share))
    regions = len({each.island.region for each in used})
    if regions > 1 and run.line_failures is not None:
        kept = (run.kept_bandwidth or 0.0) if run.failover else 0.0
        count = regions * (regions - 1) // 2
        part = _part(LINE, count, run.line_failures, 0.0, falls_back=kept > 0.0)
        parts.append(part)
        if kept > 0.0:
            slowings.append(_slowing(part, kept, line_share))
    return Failing(parts=tuple(parts), slowings=tuple(slowings))


def _by_kept(used: tuple[UsedIsland, ...], run: Run) -> Iterator[tuple[float, int]]:
    """(part of the bandwidth that is left where one fails, NICs); 0: the run starts again."""
    counts: dict[float, int] = {}
    for each in used:
        island, kept = each.island, 0.0
        if run.failover:
            own = island.nics.per_node if island.nics else island.devices_per_node
            kept = kept_bandwidth(own)
            if kept and run.kept_bandwidth is not None:
                kept = run.kept_bandwidth
        counts[kept] = counts.get(kept, 0) + each.nics
    return ((kept, count) for kept, count in counts.items() if count)


def _part(
    name: str, count: int, probability: float | None, usual: float, *, falls_back: bool = False
) -> PartFailures:
    rate = usual if probability is None else -math.log1p(-probability) / YEAR_SECONDS
    return PartFailures(
        part=name,
        count=count,
        failures_per_second=count * rate,
        assumed=probability is None,
        falls_back=falls_back,
    )


def _slowing(part: PartFailures, kept: float, share: float) -> Slowing:
    return Slowing(
        failures_per_second=part.failures_per_second,
        step_factor=1.0 + share * (1.0 / kept - 1.0),
    )


def survives_a_host(plan: Plan, cluster: Cluster) -> bool:
    """Whether every rank's state is on another host too, so that a restart can copy it.

    Weights and optimizer state of a replica's rank are also held by the ranks of its stage with
    the same place in their shard group and in tp. False also where it cannot be told: experts
    that are dealt out, and parts of a stage with unlike tp, hold other slices.
    """
    places = Places(cluster=cluster)
    if len(plan.pipelines) > 1:
        nodes = [
            places.nodes(np.concatenate([stage_array(each) for each in pipeline.stages]))
            for pipeline in plan.pipelines
        ]
        if sum(len(np.unique(each)) for each in nodes) == len(np.unique(np.concatenate(nodes))):
            return True  # whole copies of the model that share no host
    for stage in plan.stages:
        tps = {each.tp for each in stage.replicas}
        if len(tps) > 1 or any(each.ep > 1 or each.etp > 1 for each in stage.replicas):
            return False
        ranks = places.nodes(stage_array(stage)).reshape(-1, tps.pop())
        if not _held_twice(ranks, plan):
            return False
    return True


def _held_twice(nodes: Devices, plan: Plan) -> bool:
    """Nodes by [copy of the weights, tp]: whether each shard lies on two nodes at least."""
    copies = len(nodes)
    shards = 1 if plan.sharding is Sharding.NONE else math.gcd(plan.optimizer_shards, copies)
    groups = nodes.reshape(copies // shards, -1)
    return bool((groups.min(axis=0) < groups.max(axis=0)).all())
