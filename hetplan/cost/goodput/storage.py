"""How fast the hosts of a run write and read checkpoints and tokens.

The job's `run.storage` serves all hosts; else each site's hosts have the site's storage, and others
what a host of Llama 3's cluster had. Hosts hold equal parts, and the slowest site is waited for.

Over the NICs of training (`shares_uplink`) a storage gives and takes no more than these. While an
asynchronous checkpoint is written at a rate w for each host with NICs of c, training and checkpoint
have max-min fair shares: the checkpoint gets min(w, c / 2), training keeps the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hetplan.cluster.spec import Cluster, Storage
from hetplan.cost.goodput.parts import UsedIsland
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import Plan

BYTES_PER_HOST_SECOND = 2e12 / (24000 / 8)
"""Llama 3's Tectonic sustains 2 TB/s for a cluster of 24,000 GPUs in hosts of eight
(arXiv 2407.21783, section 3.3.1)."""
_SHORT_VOCABULARY = 65500
"""Megatron-LM's data sets have 2 bytes a token below it, else 4 (`DType.optimal_dtype`)."""


def storage_of(used: Sequence[UsedIsland], cluster: Cluster, job: Job) -> tuple[Storage, float]:
    """(rates of all hosts together, least part of a host's NICs that training has meanwhile)."""
    hosts, given = sum(each.hosts for each in used), job.run.storage_bytes_per_second
    reads, writes, kept = [math.inf], [math.inf], 1.0
    for site in dict.fromkeys(cluster.site_of(each.island.region) for each in used):
        mine = [each for each in used if cluster.site_of(each.island.region) == site]
        count, port = sum(e.hosts for e in mine), min(e.island.node_bytes_per_second for e in mine)
        read = write = BYTES_PER_HOST_SECOND if given is None else given / hosts
        if site is not None and site.storage is not None and given is None:
            read = site.storage.read_bytes_per_second / count
            write = site.storage.write_bytes_per_second / count
            if site.storage.shares_uplink:
                beside = job.run.asynchronous_saving
                read, write = min(read, port), min(write, port / 2 if beside else port)
                kept = min(kept, 1.0 - write / port if beside else 1.0)
        reads.append(hosts * read)
        writes.append(hosts * write)
    rates = Storage(
        read_bytes_per_second=given or min(reads), write_bytes_per_second=given or min(writes)
    )
    return rates, kept


def data_seconds(
    used: Sequence[UsedIsland], read: float, plan: Plan, model: ModelSpec, job: Job
) -> float:
    """Until the tokens of a step are there: read by every context-parallel rank of the first and
    the last stage, or once by `data_readers`, which send them on over their NICs.
    """
    stages, readers = plan.pipelines[0].stages, job.run.data_readers
    ends = stages if len(stages) == 1 else (stages[0], stages[-1])
    copies = sum(max(each.cp for each in stage.replicas) for stage in ends)
    if readers is not None:
        port = min(each.island.node_bytes_per_second for each in used)
        read, copies = min(read, readers * port), 1
    width = 2 if model.vocab_size < _SHORT_VOCABULARY else 4
    return copies * job.global_batch_size * job.sequence_length * width / read
