"""How fast the hosts of a run write and read checkpoints and tokens.

The job's `run.storage` serves all hosts; else each site's hosts have the site's storage, and others
what a host of Llama 3's cluster had. Hosts hold equal parts, and the slowest site is waited for.

Over the NICs of training (`shares_uplink`) a storage gives and takes no more than these. While an
asynchronous checkpoint is written at a rate w for each host with NICs of c, training and checkpoint
have max-min fair shares: the checkpoint gets min(w, c / 2), training keeps the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from hetplan.cluster.spec import Cluster, Site
from hetplan.cost.goodput.parts import UsedIsland
from hetplan.job.run import Run
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec

BYTES_PER_HOST_SECOND = 2e12 / (24000 / 8)
"""Llama 3's Tectonic sustains 2 TB/s for a cluster of 24,000 GPUs in hosts of eight
(arXiv 2407.21783, section 3.3.1)."""
_SHORT_VOCABULARY = 65500
"""Megatron-LM's data sets have 2 bytes a token below it, else 4 (`DType.optimal_dtype`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageRates:
    """Of all hosts together."""

    read_bytes_per_second: float
    write_bytes_per_second: float
    kept_bandwidth: float = 1.0
    """Least part of a host's NICs that training has while a checkpoint is written beside it."""
    reader_bytes_per_second: float = 0.0
    """What one host can pass on; 0: no storage is given."""


def storage_rates(used: Iterable[UsedIsland], cluster: Cluster, run: Run) -> StorageRates:
    """Of what a plan uses."""
    sites: dict[Site | None, list[UsedIsland]] = {}
    for each in used:
        sites.setdefault(cluster.site_of(each.island.region), []).append(each)
    hosts = sum(each.hosts for mine in sites.values() for each in mine)
    given = run.storage_bytes_per_second
    read = write = given or math.inf
    kept, uplink, known = 1.0, math.inf, given is not None
    for site, mine in sites.items():
        own, count = site.storage if site else None, sum(each.hosts for each in mine)
        port = min(each.island.node_bytes_per_second for each in mine)
        uplink = min(uplink, port)
        if given is not None or own is None:
            usual = math.inf if given else hosts * BYTES_PER_HOST_SECOND
            read, write = min(read, usual), min(write, usual)
            continue
        known, part = True, 0.5 if run.asynchronous_saving else 1.0
        most = port if own.shares_uplink else math.inf
        read = min(read, hosts * min(most, own.read_bytes_per_second / count))
        each_writes = min(part * most, own.write_bytes_per_second / count)
        write = min(write, hosts * each_writes)
        if own.shares_uplink and run.asynchronous_saving:
            kept = min(kept, 1.0 - each_writes / port)
    return StorageRates(
        read_bytes_per_second=read,
        write_bytes_per_second=write,
        kept_bandwidth=kept,
        reader_bytes_per_second=uplink if known else 0.0,
    )


def data_seconds(storage: StorageRates, copies: int, model: ModelSpec, job: Job) -> float:
    """Until the tokens of a step are there: read by every context-parallel rank of the first and
    last stage, so many copies, or once by `data_readers` that send them on; 0: not known.
    """
    if not storage.reader_bytes_per_second:
        return 0.0
    rate, readers = storage.read_bytes_per_second, job.run.data_readers
    if readers is not None:
        rate, copies = min(rate, readers * storage.reader_bytes_per_second), 1
    width = 2 if model.vocab_size < _SHORT_VOCABULARY else 4
    return copies * job.global_batch_size * job.sequence_length * width / rate
