"""How many bytes cross which links in one step of a plan, and what for?

Per step, summed over all devices, each byte counted once where it is sent:

tp, cp, ep   the collectives of every layer, microbatch and replica (`hetplan.cost.traffic.layers`)
pp           activations to every rank of the next stage and gradients to every rank of the one
             before, per microbatch; with virtual stages over every hop, the ones from the last
             stage back to the first included
dp           reduction of the gradients of every reduction group: all_reduce; with sharded optimizer
             state reduce_scatter and all_gather inside the shards, and an all_reduce of a shard
             between them (arXiv 1910.02054, 2205.00119); with sharded gradients the reduce_scatter
             of every microbatch, with sharded parameters besides two all_gathers of each
embedding    the sum of a tied matrix's gradient between first and last stage
checkpoint   parameters and optimizer state, once, over the steps of the job's interval
data         the tokens of a step to the first stage and, as what is to be predicted, to the last

Not counted: the sum of the gradient norm (a number per rank), start-up, logs. Experts are counted
at their mean load.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from hetplan.cluster.spec import Cluster
from hetplan.cost.network.segments import LinkName, LinkScope, TrafficClass
from hetplan.cost.traffic.count import TrafficCount
from hetplan.errors import InputError
from hetplan.job.spec import MAX_TOKENS, Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.pieces import Places
from hetplan.plans.plan import Plan
from hetplan.predict.predictor import Predictor


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class TrafficEntry:
    """Bytes of one class over all links of one name."""

    link: LinkName
    traffic: TrafficClass
    bytes_per_step: float
    """Of all devices and both directions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The traffic of one step, and of a whole run where its length is known."""

    entries: tuple[TrafficEntry, ...]
    """In order of link and class; none of 0 bytes."""
    tokens_per_step: int
    total_tokens: int | None
    """Of the run; None: not known."""

    @property
    def steps(self) -> float | None:
        """Steps of the run."""
        return None if self.total_tokens is None else self.total_tokens / self.tokens_per_step

    @property
    def bytes_per_step(self) -> float:
        """All links and classes."""
        return sum(entry.bytes_per_step for entry in self.entries)

    @property
    def links(self) -> tuple[LinkName, ...]:
        """Every link that carries anything."""
        return tuple(dict.fromkeys(entry.link for entry in self.entries))

    def of_class(self, traffic: TrafficClass) -> float:
        """Bytes per step of one class over all links."""
        return sum(each.bytes_per_step for each in self.entries if each.traffic is traffic)

    def over(self, link: LinkName) -> float:
        """Bytes per step of all classes over the links of one name."""
        return sum(each.bytes_per_step for each in self.entries if each.link == link)

    def switched(self, island: str) -> float:
        """Bytes per step that the network of an island carries: between its nodes, to other
        islands and to storage. What stays inside a node is left out.
        """
        return sum(
            entry.bytes_per_step
            for entry in self.entries
            if entry.link.scope is not LinkScope.NODE
            and island in (entry.link.left, entry.link.right)
        )


def ledger(
    plan: Plan,
    model: ModelSpec,
    cluster: Cluster,
    job: Job,
    predictor: Predictor | None = None,
    *,
    total_tokens: int | None = None,
) -> Ledger:
    """The traffic of a legal plan.

    Sums, gathers and scatters are rings; with a `predictor` they are what is cheapest by it, as in
    an estimate. Either way what hetplan's own trainer sums by messages counts as these.
    `total_tokens` is the run's length instead of the job's. An InputError where that is not from 1
    to 10**18 or two islands that must talk have no link.
    """
    if total_tokens is not None and not 1 <= total_tokens <= MAX_TOKENS:
        raise InputError(
            f"a run of {total_tokens} tokens; it has at least 1 and at most {MAX_TOKENS:,}"
        )
    count = TrafficCount(
        plan=plan,
        model=replace(model, vocab_size=plan.padded_vocab_size),
        cluster=cluster,
        job=replace(job, target=plan.target),
        places=Places(cluster=cluster),
        predictor=predictor,
    )
    found = Counter[tuple[LinkName, TrafficClass]]()
    for link, traffic, size in count.everything():
        found[link, traffic] += size  # type: ignore[assignment]
    entries = (
        TrafficEntry(link=link, traffic=traffic, bytes_per_step=float(size))
        for (link, traffic), size in found.items()
        if size > 0
    )
    return Ledger(
        entries=tuple(sorted(entries)),
        tokens_per_step=job.global_batch_size * job.sequence_length,
        total_tokens=job.total_tokens if total_tokens is None else total_tokens,
    )


def all_classes(ledger: Ledger) -> Iterable[TrafficClass]:
    """Classes that carry anything, in the order of `TrafficClass`."""
    found = {entry.traffic for entry in ledger.entries}
    return (each for each in TrafficClass if each in found)
