"""What the hosts of a run write and read: checkpoints and tokens, by the storage of their sites.

The job's `run.storage` serves all hosts. Else each site's hosts have the site's storage, and others
what a host of Llama 3's cluster had. Every storage takes the shards of the ranks beside it, all at
once.

Over the NICs of training (`shares_uplink`) a storage gives and takes no more than these. While an
asynchronous checkpoint is written, a host's training and its checkpoint have max-min fair shares of
them: with a rate w of the storage for each host and NICs of c, the checkpoint gets min(w, c / 2),
and transfers between hosts, a part f of the step, are 1 / (1 - min(w, c / 2) / c) times as long.

Tokens: 2 bytes each in vocabularies below 65,500 words, else 4, as Megatron-LM's indexed data sets
have them (`DType.optimal_dtype`). With `run.data_readers` they are read once and sent on; else by
every context-parallel rank of the first and the last stage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hetplan.cluster.spec import Cluster, Island, Site, Storage
from hetplan.cost.goodput.parts import UsedIsland
from hetplan.job.run import Run
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import Plan

STORAGE_BYTES_PER_HOST_SECOND = 2e12 / (24000 / 8)
"""Llama 3's Tectonic sustains 2 TB/s for a cluster of 24,000 GPUs in hosts of eight
(arXiv 2407.21783, section 3.3.1)."""
_SHORT_VOCABULARY = 65500


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """One storage and the hosts of a plan that use it."""

    islands: tuple[str, ...]
    storage: Storage
    hosts: int
    uplink_bytes_per_second: float
    """Of the NICs of one host, the fewest of its islands."""
    assumed: bool
    """Whether its bandwidth is the default."""

    def _over_uplinks(self, rate: float, part: float = 1.0) -> float:
        if not self.storage.shares_uplink:
            return rate
        return min(rate, self.hosts * self.uplink_bytes_per_second * part)

    @property
    def read_bytes_per_second(self) -> float:
        """All hosts together, training standing still."""
        return self._over_uplinks(self.storage.read_bytes_per_second)

    def write_bytes_per_second(self, *, beside_training: bool) -> float:
        """All hosts together."""
        return self._over_uplinks(
            self.storage.write_bytes_per_second, 0.5 if beside_training else 1.0
        )

    @property
    def kept_bandwidth(self) -> float:
        """Part of a host's NICs that training has while a checkpoint is written beside it."""
        if not self.storage.shares_uplink:
            return 1.0
        rate = self.write_bytes_per_second(beside_training=True) / self.hosts
        return 1.0 - rate / self.uplink_bytes_per_second


def stores_of(used: Sequence[UsedIsland], cluster: Cluster, run: Run) -> tuple[Store, ...]:
    """Every storage that a plan's hosts use."""
    groups: dict[Site | None, list[UsedIsland]] = {}
    for each in used:
        site = cluster.site_of(each.island.region)
        own = site if site and site.storage and not run.storage_bytes_per_second else None
        groups.setdefault(own, []).append(each)
    found = []
    for site, mine in groups.items():
        hosts = sum(each.hosts for each in mine)
        rate = run.storage_bytes_per_second or hosts * STORAGE_BYTES_PER_HOST_SECOND
        usual = Storage(read_bytes_per_second=rate, write_bytes_per_second=rate)
        store = Store(
            islands=tuple(each.island.name for each in mine),
            storage=(site.storage if site else None) or usual,
            hosts=hosts,
            uplink_bytes_per_second=min(_uplink(each.island) for each in mine),
            assumed=site is None and not run.storage_bytes_per_second,
        )
        found.append(store)
    return tuple(found)


def _uplink(island: Island) -> float:
    nics = island.nics
    if nics is not None:
        return nics.per_node * nics.bandwidth_bytes_per_second
    return island.devices_per_node * island.inter_node.bandwidth_bytes_per_second


def bytes_at(
    stores: Sequence[Store], plan: Plan, cluster: Cluster, stages: Sequence[float]
) -> list[float]:
    """Bytes of all stages, by the storage beside the devices that hold them in equal parts."""
    found: list[list[float]] = [[] for _ in stores]
    for stage, size in zip(plan.stages, stages, strict=False):
        whole = sum(each.num_devices for each in stage.replicas)
        names = [
            (cluster.island_of_device(each.devices[0].start).name, each.num_devices)
            for each in stage.replicas
        ]
        for store, parts in zip(stores, found, strict=True):
            mine = sum(count for name, count in names if name in store.islands)
            parts.append(size * (mine / whole))
    return [math.fsum(parts) for parts in found]


def data_seconds(stores: Sequence[Store], plan: Plan, model: ModelSpec, job: Job) -> float:
    """Until the tokens of a step are read and handed on; 0 where every storage is assumed."""
    known = [each for each in stores if not each.assumed]
    if not known:
        return 0.0
    size = job.global_batch_size * job.sequence_length * bytes_per_token(model)
    readers = job.run.data_readers
    if readers is not None:
        sending = readers * min(each.uplink_bytes_per_second for each in stores)
        return max(size / sending, *(size / each.read_bytes_per_second for each in known))
    copies = 0
    for pipeline in plan.pipelines[:1]:
        ends = {id(stage): stage for stage in (pipeline.stages[0], pipeline.stages[-1])}
        copies = sum(max(each.cp for each in stage.replicas) for stage in ends.values())
    return max(copies * size / each.read_bytes_per_second for each in known)


def bytes_per_token(model: ModelSpec) -> int:
    """Of a stored token."""
    return 2 if model.vocab_size < _SHORT_VOCABULARY else 4
