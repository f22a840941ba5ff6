"""Single numbers of one instance: the only ones that the oracle takes from the product.

Seconds of one layer on given devices, of one message between two stages, of one collective over
given ranks; and how a plan is written down here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from oracle_memory import parameters_at
from oracle_replay import Floats

from hetplan.cluster.spec import Cluster
from hetplan.cost.step_model.groups import Copies, Group, KnownCollectives, copies_of
from hetplan.cost.step_model.hops import Hop, hop_between
from hetplan.cost.step_model.units import Settings, Unit, make_unit
from hetplan.cost.terms import seconds_of
from hetplan.job.spec import Job, Precision
from hetplan.model.spec import ModelSpec
from hetplan.plans.chosen import Shape
from hetplan.plans.plan import (
    OverlapSettings,
    Recompute,
    RecomputeGranularity,
    RecomputeModule,
    Replica,
    Sharding,
)
from hetplan.predict.predictor import Predictor
from hetplan.profiling.samples import LinkOperation

Range = tuple[int, int]
Replicas = tuple[Replica, ...]
Holders = tuple[tuple[tuple[int, ...], int], ...]
"""(devices, tp) of replicas."""
GRANULARITIES = {
    RecomputeGranularity.NONE: Recompute(),
    RecomputeGranularity.FULL: Recompute(granularity=RecomputeGranularity.FULL),
    RecomputeGranularity.SELECTIVE: Recompute(
        granularity=RecomputeGranularity.SELECTIVE, modules=(RecomputeModule.CORE_ATTENTION,)
    ),
}


@dataclass(frozen=True)
class PlacedStage:
    """A stage with its devices."""

    replicas: tuple[Replica, ...]
    chunks: tuple[Range, ...]
    """Positions in the row of layers; 0 is the embedding."""
    recompute: RecomputeGranularity
    depth: int


@dataclass(frozen=True)
class PlacedPipeline:
    """A pipeline with its devices."""

    stages: tuple[PlacedStage, ...]
    microbatches: int
    early: bool = False
    """Sends do not hold their stage, whatever the trainer does by default."""

    @property
    def chunks(self) -> int:
        """Virtual stages."""
        return len(self.stages[0].chunks)


def copies(stage: PlacedStage) -> int:
    """Ranks of a stage that hold the same weights."""
    return sum(each.dp * each.cp for each in stage.replicas)


def shape_of(replica: Replica) -> Shape:
    """Its degrees."""
    return Shape(
        tp=replica.tp,
        cp=replica.cp,
        dp=replica.dp,
        microbatch_size=replica.microbatch_size,
        ep=replica.ep,
        etp=replica.etp,
        sequence_parallel=replica.sequence_parallel,
    )


@dataclass
class Costs:
    """Single numbers of one instance under one padded vocabulary, sharding and shard count."""

    model: ModelSpec
    """As it is; `padded` has the vocabulary that is trained."""
    cluster: Cluster
    job: Job
    predictor: Predictor
    vocabulary: int
    sharding: Sharding
    shards: int
    known: KnownCollectives
    hops: dict[tuple[Replicas, Replicas], Hop]
    """Kept for all of an instance, as the following two."""
    rows: dict[tuple[Replica, RecomputeGranularity, int], tuple[Unit, Floats, Floats]]
    held: dict[tuple[int, ...], tuple[float, float]]
    padded: ModelSpec = field(init=False)
    groups: dict[Holders, Copies] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.padded = replace(self.model, vocab_size=self.vocabulary)

    @property
    def settings(self) -> Settings:
        """What the product's single numbers depend on; layers and updates on no sharding."""
        return Settings(
            model=self.padded,
            real_vocab_size=self.model.vocab_size,
            cluster=self.cluster,
            job=self.job,
            reduction_precision=self.summed,
            tied_precision=self.summed,
            predictor=self.predictor,
            sharding=Sharding.NONE,
            shards=1,
            offload=0.0,
            overlap=OverlapSettings(),
            known=self.known,
        )

    def layers(
        self, replica: Replica, recompute: RecomputeGranularity
    ) -> tuple[Unit, Floats, Floats]:
        """(its unit, forward and backward seconds of the layers before each position)."""
        key = (replica, recompute, self.vocabulary)
        found = self.rows.get(key)
        if found is None:
            unit = make_unit(self.settings, replica, GRANULARITIES[recompute])
            each = [unit.costs[kind] for kind in unit.kind_at]
            forward = [one.forward_seconds for one in each]
            backward = [one.backward_seconds + one.again_seconds for one in each]
            found = self.rows[key] = (
                unit,
                np.cumsum([0.0, *forward]),
                np.cumsum([0.0, *backward]),
            )
        return found

    def stage(self, stage: PlacedStage) -> tuple[int, tuple[float, ...], tuple[float, ...]]:
        """(its slowest part, forward and backward seconds of every chunk there)."""
        best: tuple[float, int, tuple[float, ...], tuple[float, ...]] = (-1.0, 0, (), ())
        for at, replica in enumerate(stage.replicas):
            _, forward, backward = self.layers(replica, stage.recompute)
            fore = tuple(float(forward[b] - forward[a]) for a, b in stage.chunks)
            back = tuple(float(backward[b] - backward[a]) for a, b in stage.chunks)
            whole = sum(fore) + sum(back)
            if whole > best[0] * (1 + 1e-12):
                best = (whole, at, fore, back)
        return best[1:]

    def hop(self, left: tuple[Replica, ...], right: tuple[Replica, ...]) -> Hop:
        """One microbatch from one stage to another, and back."""
        found = self.hops.get((left, right))
        if found is None:
            found = self.hops[left, right] = hop_between(
                self.cluster, self.padded, self.job, left, right, self.predictor
            )
        return found

    def parameters(self, replica: Replica, ranges: Sequence[Range]) -> tuple[float, float]:
        """(weights, routed experts apart) on a rank; a tied matrix that is whole here once."""
        flat = [edge for pair in ranges for edge in pair]
        key = (self.vocabulary, replica.tp, replica.ep, replica.etp, *flat)
        found = self.held.get(key)
        if found is None:
            shape = shape_of(replica)
            here = [at for start, stop in ranges for at in range(start, stop)]
            pairs = [parameters_at(self.padded, shape, at) for at in here]
            dense, routed = (sum(column) for column in zip(*pairs, strict=True))
            if replica.ep == 1 and replica.etp == replica.tp:
                dense, routed = dense + routed, 0.0
            both = 0 in here and len(self.padded.layers) - 1 in here
            if both and self.padded.tied_embeddings:
                dense -= self.padded.vocabulary_matrix(replica.tp)
            found = self.held[key] = (dense, routed)
        return found

    def collective(self, group: Group, what: LinkOperation, message_bytes: float) -> float:
        """Seconds of one collective."""
        return seconds_of(self.known.of(group, what, message_bytes, what.value))

    def reduction(self, ranks: Copies, count: float) -> float:
        """Seconds until the gradients of so many parameters are summed over these ranks."""
        size = count * self.summed.bytes_per_element
        if self.sharding is Sharding.NONE or ranks.shard.size == 1:
            return self.collective(ranks.whole, LinkOperation.ALL_REDUCE, size)
        return self.collective(ranks.shard, LinkOperation.REDUCE_SCATTER, size) + self.collective(
            ranks.across, LinkOperation.ALL_REDUCE, size / ranks.shard.size
        )

    def gathering(self, ranks: Copies, count: float) -> float:
        """Seconds until all have the updated weights."""
        if self.sharding is Sharding.NONE:
            return 0.0
        size = count * self.job.precision.bytes_per_element
        return self.collective(ranks.shard, LinkOperation.ALL_GATHER, size)

    @property
    def summed(self) -> Precision:
        """Number format in which gradients are reduced: float32 with Megatron-LM."""
        return self.job.precision if self.job.target == "native" else Precision.FLOAT32

    def ranks(self, holders: Holders) -> Copies:
        """The ranks that hold the same weights."""
        found = self.groups.get(holders)
        if found is None:
            found = self.groups[holders] = copies_of(self.cluster, holders, self.shards)
        return found

    def sharded_by(self, ranks: Copies) -> int:
        """Ranks that split one copy of the state."""
        return 1 if self.sharding is Sharding.NONE else ranks.shard.size
