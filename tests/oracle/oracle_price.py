"""What does a plan cost? The oracle's own sum over what single layers, hops and collectives take.

Taken from the product are single numbers only: seconds of one layer on given devices, of one
message between two stages, of one collective, of one update. Put together here, from docs/cost.md:

    step = max(end in the pipeline + reduction [+ tied matrix]) + norm + max(update + gathering)

with clipping, the largest sum without. Ends come from `oracle_replay`, memory from `oracle_memory`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from oracle_memory import Held, host_bytes, parameters_at, peak_bytes
from oracle_overlap import hidden_beside, hidden_part
from oracle_replay import Floats, Program, pipeline_ends, program

from hetplan.cluster.spec import Cluster, Link
from hetplan.cost.step_model.end_of_step import tied_embedding_parts
from hetplan.cost.step_model.groups import Copies, Group, KnownCollectives, copies_of
from hetplan.cost.step_model.hops import Hop, hop_between
from hetplan.cost.step_model.units import Settings, Unit, make_unit
from hetplan.cost.terms import seconds_of, seconds_of_parts
from hetplan.job.spec import Job, Precision
from hetplan.job.trainer import trainer_settings
from hetplan.model.spec import ModelSpec
from hetplan.plans.chosen import Shape
from hetplan.plans.plan import (
    OverlapSettings,
    Recompute,
    Replica,
    Sharding,
    expand,
)
from hetplan.plans.targets import TARGETS
from hetplan.predict.predictor import Predictor
from hetplan.profiling.samples import LinkOperation

Range = tuple[int, int]
Replicas = tuple[Replica, ...]
Holders = tuple[tuple[tuple[int, ...], int], ...]
"""(devices, tp) of replicas."""


class State(NamedTuple):
    """Where the state of the weights lies."""

    sharding: Sharding
    offload: float = 0.0
    """Part of the optimizer in host memory."""
    ranks: int = 0
    """That share what `sharding` says; 0: all copies."""

    @property
    def splits(self) -> bool:
        """Whether every microbatch reduces gradients."""
        return self.sharding in (Sharding.GRADIENTS, Sharding.PARAMETERS)

    def shards(self, every: int) -> int:
        """Ranks that split one copy, of so many."""
        return 1 if self.sharding is Sharding.NONE else self.ranks or every


@dataclass(frozen=True)
class PlacedStage:
    """A stage with its devices."""

    replicas: tuple[Replica, ...]
    chunks: tuple[Range, ...]
    """Positions in the row of layers; 0 is the embedding."""
    recompute: Recompute
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
    state: State
    shards: int
    known: KnownCollectives
    hops: dict[tuple[Replicas, Replicas], Hop]
    """Kept for all of an instance, as the following two."""
    rows: dict[tuple[object, ...], tuple[Unit, Floats, Floats]]
    held: dict[tuple[int, ...], tuple[float, float]]
    padded: ModelSpec = field(init=False)
    groups: dict[Holders, Copies] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.padded = replace(self.model, vocab_size=self.vocabulary)

    @property
    def sharding(self) -> Sharding:
        """What copies share."""
        return self.state.sharding

    @property
    def settings(self) -> Settings:
        """What the product's single numbers depend on: layers on what microbatches reduce and
        gather of their weights, updates on no sharding.
        """
        splits = self.state.splits
        asked, beside = trainer_settings(self.job), OverlapSettings()
        if splits:
            beside = OverlapSettings(
                reduction=asked.overlap_grad_reduce, gathering=asked.overlap_param_gather
            )
        return Settings(
            model=self.padded,
            real_vocab_size=self.model.vocab_size,
            cluster=self.cluster,
            job=self.job,
            reduction_precision=self.summed,
            tied_precision=self.summed,
            predictor=self.predictor,
            sharding=self.sharding if splits else Sharding.NONE,
            shards=self.shards if splits else 1,
            offload=self.state.offload,
            overlap=beside,
            known=self.known,
        )

    def layers(self, replica: Replica, recompute: Recompute) -> tuple[Unit, Floats, Floats]:
        """(its unit, forward and backward seconds of the layers before each position)."""
        key = (replica, recompute, self.vocabulary, self.state)
        found = self.rows.get(key)
        if found is None:
            unit = make_unit(self.settings, replica, recompute)
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
        if self.state.splits:  # inside the shards every microbatch did
            return self.collective(ranks.across, LinkOperation.ALL_REDUCE, size / ranks.shard.size)
        if self.sharding is Sharding.NONE or ranks.shard.size == 1:
            return self.collective(ranks.whole, LinkOperation.ALL_REDUCE, size)
        return self.collective(ranks.shard, LinkOperation.REDUCE_SCATTER, size) + self.collective(
            ranks.across, LinkOperation.ALL_REDUCE, size / ranks.shard.size
        )

    def gathering(self, ranks: Copies, count: float) -> float:
        """Seconds until all have the updated weights."""
        if self.sharding in (Sharding.NONE, Sharding.PARAMETERS):
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


@dataclass(frozen=True)
class Step:
    """What the oracle says of a plan."""

    seconds: float
    """Infinite where stages wait for each other for ever."""
    fits: bool


@dataclass
class Prices:
    """Prices plans of one instance."""

    model: ModelSpec
    cluster: Cluster
    job: Job
    predictor: Predictor
    known: KnownCollectives = field(init=False)
    costs: dict[tuple[int, State, int], Costs] = field(default_factory=dict)
    scalars: dict[Link, float] = field(default_factory=dict)
    hops_kept: dict[tuple[Replicas, Replicas], Hop] = field(default_factory=dict)
    rows_kept: dict[tuple[object, ...], tuple[Unit, Floats, Floats]] = field(default_factory=dict)
    held_kept: dict[tuple[int, ...], tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Who makes the sums is a fact about the trainer.
        own = self.job.target == "native"
        self.known = KnownCollectives(self.cluster, self.predictor, by_levels=own)
        trainer = TARGETS[self.job.target]
        self.rendezvous = trainer.rendezvous_sends
        self.batched = trainer.batched_interleaving
        clips = self.job.gradient_clipping
        self.clips = trainer.clips_gradients if clips is None else clips

    def of(self, tps: Sequence[int], state: State, shards: int) -> Costs:
        """The numbers for stages of these tensor-parallel degrees."""
        multiple = TARGETS[self.job.target].vocab_multiple * math.lcm(*tps)
        vocabulary = -(-self.model.vocab_size // multiple) * multiple
        key = (vocabulary, state, shards)
        found = self.costs.get(key)
        if found is None:
            found = self.costs[key] = Costs(
                self.model,
                self.cluster,
                self.job,
                self.predictor,
                vocabulary,
                state,
                shards,
                self.known,
                self.hops_kept,
                self.rows_kept,
                self.held_kept,
            )
        return found

    def of_plan(self, pipelines: Sequence[PlacedPipeline], state: State) -> Costs:
        """The numbers for the stages of a plan."""
        stages = [stage for each in pipelines for stage in each.stages]
        tps = [replica.tp for stage in stages for replica in stage.replicas]
        return self.of(tps, state, state.shards(math.lcm(*map(copies, stages))))

    def plan(self, pipelines: Sequence[PlacedPipeline], state: State) -> Step:
        """Step and whether it fits, of any plan."""
        costs = self.of_plan(pipelines, state)
        fits = all(
            self.fits(costs, each, s, replica)
            for each in pipelines
            for s, stage in enumerate(each.stages)
            for replica in stage.replicas
        )
        slow, ends = [], []
        for each in pipelines:
            times = [costs.stage(stage) for stage in each.stages]
            found = self.ends(costs, each, times)
            if found is None:
                return Step(math.inf, fits)
            slow.append([part for part, _, _ in times])
            ends.append(found)
        return Step(self.compose(costs, pipelines, slow, ends), fits)

    def ends(
        self,
        costs: Costs,
        pipeline: PlacedPipeline,
        times: Sequence[tuple[int, tuple[float, ...], tuple[float, ...]]],
    ) -> Floats | None:
        """When every stage leaves the pipeline."""
        hops = self.hops(costs, pipeline)
        seconds = np.array([[*fore, *back] for _, fore, back in times])
        send = np.array(
            [x for hop in hops for x in (hop.send_forward_seconds, hop.send_backward_seconds)]
        )
        latency = np.array([hop.wire_latency_seconds for hop in hops])
        extra = np.array([hop.rendezvous_extra_seconds for hop in hops])
        run = self.program(
            len(pipeline.stages),
            pipeline.microbatches,
            pipeline.chunks,
            tuple(stage.depth for stage in pipeline.stages),
            early=pipeline.early,
        )
        waits = self.rendezvous and not pipeline.early
        return pipeline_ends(run, seconds, send, latency, extra, waits)

    def program(
        self, stages: int, m: int, chunks: int, depths: tuple[int, ...], *, early: bool
    ) -> Program:
        """What every stage does."""
        depths = depths if chunks == 1 else (0,) * stages
        return program(stages, m, chunks, depths, self.rendezvous and not early, self.batched)

    def hops(self, costs: Costs, pipeline: PlacedPipeline) -> list[Hop]:
        """Of all virtual stages."""
        count = len(pipeline.stages)
        if count == 1:
            return []
        return [
            costs.hop(
                pipeline.stages[k % count].replicas, pipeline.stages[(k + 1) % count].replicas
            )
            for k in range(count * pipeline.chunks - 1)
        ]

    def fits(self, costs: Costs, pipeline: PlacedPipeline, s: int, replica: Replica) -> bool:
        """Whether the fullest of these devices has room, and its host."""
        island = self.cluster.island_of_device(replica.devices[0].start)
        held = self.held(costs, pipeline, s, replica)
        if held.offload and island.host_memory_bytes is not None:
            away = host_bytes(costs.padded, self.job, held) * island.devices_per_node
            if away > island.host_memory_bytes * (1 + 1e-12):
                return False
        return peak_bytes(costs.padded, self.job, held) <= self.room(replica)

    def room(self, replica: Replica) -> float:
        """Bytes that a plan may fill of one of these devices."""
        island = self.cluster.island_of_device(replica.devices[0].start)
        return island.memory_bytes * (1 - self.job.memory_reserve_fraction)

    def peak(self, costs: Costs, pipeline: PlacedPipeline, s: int, replica: Replica) -> float:
        """Most bytes on one of these devices."""
        return peak_bytes(costs.padded, self.job, self.held(costs, pipeline, s, replica))

    def held(self, costs: Costs, pipeline: PlacedPipeline, s: int, replica: Replica) -> Held:
        """What one of these devices runs."""
        stage = pipeline.stages[s]
        return Held(
            shape=shape_of(replica),
            chunks=stage.chunks,
            recompute=stage.recompute,
            copies=costs.state.shards(copies(stage)),
            sharding=costs.sharding,
            stage=s,
            stages=len(pipeline.stages),
            microbatches=pipeline.microbatches,
            depth=stage.depth,
            early=pipeline.early,
            offload=costs.state.offload,
        )

    def compose(
        self,
        costs: Costs,
        pipelines: Sequence[PlacedPipeline],
        slow: Sequence[Sequence[int]],
        ends: Sequence[Floats],
    ) -> float:
        """The step once all have left their pipelines."""
        arrive = [[float(end) for end in each] for each in ends]
        leave = [[0.0] * len(each) for each in ends]
        own = [[0.0] * len(each) for each in ends]
        held = [[0.0] * len(each) for each in ends]
        lead = [
            [stage.replicas[slow[p][s]] for s, stage in enumerate(each.stages)]
            for p, each in enumerate(pipelines)
        ]
        for p, each in enumerate(pipelines):
            for s, stage in enumerate(each.stages):
                own[p][s] = held[p][s] = sum(costs.parameters(lead[p][s], stage.chunks))
        beside = trainer_settings(self.job).overlap_grad_reduce
        alone = all(len(stage.replicas) == 1 for each in pipelines for stage in each.stages)
        reduced = [[0.0] * len(each) for each in ends]
        for ranks, members in self.reductions(costs, pipelines, lead):
            seconds = costs.reduction(ranks, max(count for _, _, count in members))
            start = max(arrive[p][s] for p, s, _ in members)
            for p, s, count in members:
                if not beside:
                    arrive[p][s] = start + seconds
                elif alone:
                    reduced[p][s] += seconds
                else:
                    part = count / held[p][s]
                    arrive[p][s] = start + hidden_part(costs, pipelines[p], s, seconds, part)
                leave[p][s] += costs.gathering(ranks, count)
                own[p][s] += count / costs.sharded_by(ranks) - count
        for p, each in enumerate(pipelines) if beside else ():
            for s in range(len(each.stages)):
                if alone:
                    arrive[p][s] += hidden_beside(costs, each, s, reduced[p][s], gathers=False)
                leave[p][s] = hidden_beside(costs, each, s, leave[p][s], gathers=True)
        for p, each in enumerate(pipelines):
            for s, stage in enumerate(each.stages):
                unit = costs.layers(lead[p][s], stage.recompute)[0]
                update = unit.end.update_of(own[p][s], held[p][s])
                leave[p][s] += sum(part.seconds for part in update)
            if self.model.tied_embeddings and len(each.stages) > 1:
                tied = self.tied(costs, lead[p][0], lead[p][-1])
                arrive[p][0] += tied
                arrive[p][-1] += tied
        loading = self.job.data_loading_seconds
        if self.clips:
            norm = self.norm(costs, pipelines, [each[0] for each in lead])
            return max(map(max, arrive)) + norm + max(map(max, leave)) + loading
        both = [
            a + b for x, y in zip(arrive, leave, strict=True) for a, b in zip(x, y, strict=True)
        ]
        return max(both) + loading

    def reductions(
        self,
        costs: Costs,
        pipelines: Sequence[PlacedPipeline],
        lead: Sequence[Sequence[Replica]],
    ) -> list[tuple[Copies, list[tuple[int, int, float]]]]:
        """(ranks, [(pipeline, stage, parameters)]) of every group, in the order of reducing."""
        if len(pipelines) == 1 and all(len(stage.replicas) == 1 for stage in pipelines[0].stages):
            return self._alone(costs, pipelines[0])
        total = len(self.model.layers)
        cuts = sorted(
            {0, total}
            | {cut for each in pipelines for stage in each.stages for cut, _ in stage.chunks}
        )
        found = []
        for start, stop in reversed([*pairwise(cuts)]):
            members, holders = [], []
            for p, each in enumerate(pipelines):
                for s, stage in enumerate(each.stages):
                    if any(a <= start and stop <= b for a, b in stage.chunks):
                        count = sum(costs.parameters(lead[p][s], ((start, stop),)))
                        members.append((p, s, count))
                        holders += [(expand(one.devices), one.tp) for one in stage.replicas]
            if sum(len(devices) // tp for devices, tp in holders) > 1:
                found.append((costs.ranks(tuple(holders)), members))
        return found

    def _alone(
        self, costs: Costs, pipeline: PlacedPipeline
    ) -> list[tuple[Copies, list[tuple[int, int, float]]]]:
        """Every stage by itself: its weights, and its experts where others hold the same ones."""
        found = []
        for s, stage in enumerate(pipeline.stages):
            replica = stage.replicas[0]
            devices = expand(replica.devices)
            dense, routed = costs.parameters(replica, stage.chunks)
            found.append((costs.ranks(((devices, replica.tp),)), [(0, s, dense)]))
            if routed:
                ranks = costs.ranks(((devices, replica.ep * replica.etp),))
                found.append((ranks, [(0, s, routed)]))
        return found

    def tied(self, costs: Costs, first: Replica, last: Replica) -> float:
        """Seconds in which first and last stage sum a tied matrix's gradients."""
        tp = min(first.tp, last.tp)
        pairs = min(first.num_devices, last.num_devices)
        parts = tied_embedding_parts(
            costs.padded,
            self.cluster,
            self.cluster.island_of_device(first.devices[0].start),
            self.cluster.island_of_device(last.devices[0].start),
            costs.summed,
            tp,
            tp * max(1, pairs // tp),
            self.known,
        )
        return seconds_of_parts(parts)

    def norm(
        self, costs: Costs, pipelines: Sequence[PlacedPipeline], heads: Sequence[Replica]
    ) -> float:
        """One number up and down a tree over the ranks of a stage, and one over all stages.

        heads: the slowest part of every pipeline's first stage; pipelines meet there.
        """
        inside, links = 0.0, set()
        for each in pipelines:
            for stage in each.stages:
                levels = (sum(one.num_devices for one in stage.replicas) - 1).bit_length()
                for one in stage.replicas:
                    island = self.cluster.island_of_device(one.devices[0].start)
                    wide = one.num_devices > island.devices_per_node
                    link = island.inter_node if wide else island.intra_node
                    inside = max(inside, levels * self._scalar(link))
            links |= {hop.path for hop in self.hops(costs, each)}
        for other in heads[1:]:
            links.add(self._link(heads[0].devices[0].start, other.devices[0].start))
        levels = (sum(len(each.stages) for each in pipelines) - 1).bit_length()
        across = max((levels * self._scalar(link) for link in links), default=0.0)
        rounds = 4 if self.job.precision is Precision.FLOAT16 else 2
        return rounds * (inside + across)

    def _scalar(self, link: Link) -> float:
        found = self.scalars.get(link)
        if found is None:
            law = self.predictor.send(link, 4.0)
            found = self.scalars[link] = law.wire_latency_seconds + 4.0 * law.seconds_per_byte
        return found

    def _link(self, one: int, two: int) -> Link:
        left, right = self.cluster.island_of_device(one), self.cluster.island_of_device(two)
        if left.name != right.name:
            return self.cluster.link_between(left.name, right.name)
        first = self.cluster.first_device(left.name)
        nodes = {(device - first) // left.devices_per_node for device in (one, two)}
        return left.intra_node if len(nodes) == 1 else left.inter_node
