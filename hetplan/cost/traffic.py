"""Bytes that cross each link in one step of a plan, by purpose.

Per step, summed over all devices, each byte counted once where it is sent:

tp, cp, ep   the collectives of every layer, microbatch and replica (`cost.step_model.layer_calls`)
pp           activations to every rank of the next stage and gradients to every rank of the one
             before, per microbatch; with virtual stages over every hop, the ones from the last
             stage back to the first included
dp           reduction of the gradients of every reduction group: all_reduce; with sharded optimizer
             state reduce_scatter and all_gather inside the shards, and an all_reduce of a shard
             between them (arXiv 1910.02054, 2205.00119); with sharded gradients the reduce_scatter
             of every microbatch, with sharded parameters besides two all_gathers of each; of local
             steps the averaging (`cost.local_steps`)
embedding    the sum of a tied matrix's gradient between first and last stage
checkpoint   parameters and optimizer state, once, over the steps of the job's interval
data         the tokens of a step to the first stage and, as what is to be predicted, to the last

Not counted: the sum of the gradient norm (a number per rank), start-up, logs. Experts are counted
at their mean load.

Of groups only the shapes are kept, and how many groups have each: all that the bytes of a
collective depend on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from hetplan.cluster.spec import Cluster
from hetplan.cost.collectives import Algorithm, GroupShape, collective, group_shape
from hetplan.cost.collectives.direct_levels import summed_by_messages
from hetplan.cost.collectives.values import Routing
from hetplan.cost.local_steps import gatherings
from hetplan.cost.memory.device import weights_at
from hetplan.cost.network.segments import (
    LinkName,
    LinkScope,
    TrafficClass,
    between_islands,
    island_link,
)
from hetplan.cost.step_model.end_of_step import reduction_calls
from hetplan.cost.step_model.groups import Members, held_algorithm, members_of
from hetplan.cost.step_model.hops import received_bytes
from hetplan.cost.step_model.layer_calls import GroupKind, LayerCalls
from hetplan.errors import InputError
from hetplan.job.spec import MAX_TOKENS, Job, Optimizer, Precision
from hetplan.job.trainer import trainer_settings
from hetplan.model.layers import TransformerLayer
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.plans.chosen import Shape
from hetplan.plans.formats import one_format, tied_format
from hetplan.plans.pieces import Devices, Places, device_array, experts_as_the_rest, stage_array
from hetplan.plans.plan import Pipeline, Plan, ReductionGroup, Replica, Sharding, Stage
from hetplan.plans.v_schedules import stage_of
from hetplan.predict.fit import FittedPredictor
from hetplan.predict.predictor import Predictor
from hetplan.profiling.samples import LinkOperation


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

    Sums, gathers and scatters are rings, or the sums what the trainer is held to; with a
    `predictor` they are what is cheapest by it, as in an estimate. Either way what hetplan's own
    trainer sums by messages counts as these. `total_tokens` is the run's length instead of the
    job's. An InputError where that is not from 1 to 10**18 or two islands that must talk have no
    link.
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


SMALL_VOCABULARY = 65_536
"""2**16: vocabularies up to this have token numbers of 2 bytes, larger ones of 4."""

_CLASSES = {
    GroupKind.TENSOR: TrafficClass.TENSOR_PARALLEL,
    GroupKind.CONTEXT: TrafficClass.CONTEXT_PARALLEL,
    GroupKind.EXPERT: TrafficClass.EXPERT_PARALLEL,
    GroupKind.EXPERT_TENSOR: TrafficClass.TENSOR_PARALLEL,
}

Sent = Iterator[tuple[LinkName, TrafficClass, float]]
"""(link, class, bytes per step): what one cause sends."""


@dataclass(frozen=True, kw_only=True)
class TrafficCount:
    """One plan while its traffic is counted."""

    plan: Plan
    model: ModelSpec
    """With the padded vocabulary."""
    cluster: Cluster
    job: Job
    places: Places
    predictor: Predictor | None

    @cached_property
    def _known(
        self,
    ) -> dict[
        tuple[GroupShape, LinkOperation, float, Routing | None],
        tuple[tuple[LinkName, float], ...],
    ]:
        return {}

    @cached_property
    def _figures(self) -> Predictor:
        return FittedPredictor.datasheet_only()

    def everything(self) -> Sent:
        """All traffic of a step, in no order, links and classes many times."""
        for pipeline in self.plan.pipelines:
            for stage in pipeline.stages:
                yield from self._layers(stage, pipeline.num_microbatches)
                yield from self._sharded_layers(stage, pipeline.num_microbatches)
            yield from self._hops(pipeline)
            yield from self._tied(pipeline)
            yield from self._data(pipeline)
        yield from self._reductions()
        yield from self._checkpoints()

    # ---- collectives

    def _sent(
        self,
        groups: Shapes,
        operation: LinkOperation,
        message_bytes: float,
        times: float,
        traffic: TrafficClass,
        routing: Routing | None = None,
    ) -> Sent:
        if message_bytes <= 0 or times <= 0:
            return
        for shape, count in groups.count:
            for link, size in self._collective(shape, operation, message_bytes, routing):
                yield link, traffic, size * count * times

    def _collective(
        self,
        shape: GroupShape,
        operation: LinkOperation,
        message_bytes: float,
        routing: Routing | None,
    ) -> tuple[tuple[LinkName, float], ...]:
        key = (shape, operation, message_bytes, routing)
        if key not in self._known:
            forced = Algorithm.RING
            if operation is LinkOperation.ALL_TO_ALL:
                forced = Algorithm.DIRECT
            own = self._sums_itself(shape, operation)
            held = None
            if operation is LinkOperation.ALL_REDUCE:
                held = held_algorithm(trainer_settings(self.job))
            cost = collective(
                self.cluster,
                shape,
                operation,
                message_bytes,
                self.predictor or self._figures,
                algorithm=None if self.predictor or own or held else forced,
                by_levels=own,
                held=held,
                routing=routing,
            )
            self._known[key] = tuple((each.link, each.bytes) for each in cost.traffic)
        return self._known[key]

    def _sums_itself(self, shape: GroupShape, operation: LinkOperation) -> bool:
        """Whether the trainer sums by messages of its own."""
        return (
            operation is LinkOperation.ALL_REDUCE
            and trainer_settings(self.job).sums_by_messages
            and summed_by_messages(self.cluster, shape) is not None
        )

    # ---- passes

    def _layers(self, stage: Stage, num_microbatches: int) -> Sent:
        for each in stage.replicas:
            calls = LayerCalls(model=self.model, job=self.job, shape=Shape.of(each))
            members = zip(GroupKind, members_of(each), strict=True)
            groups = {kind: shapes_of(self.cluster, every) for kind, every in members}
            for (kind, layer, repeats), count in self._layers_of(stage).items():
                asked = [*calls.of(kind, layer)]
                if repeats and layer is not None:
                    asked += calls.again(layer, stage.recompute)
                for call in asked:
                    yield from self._sent(
                        groups[call.groups],
                        call.operation,
                        call.message_bytes,
                        call.count * count * num_microbatches,
                        _CLASSES[call.groups],
                        call.routing,
                    )

    def _layers_of(self, stage: Stage) -> Counter[tuple[LayerKind, TransformerLayer | None, bool]]:
        """How many layers of the stage are alike; the last entry: whether they recompute."""
        found = Counter[tuple[LayerKind, TransformerLayer | None, bool]]()
        kinds = self._kinds
        for chunk in stage.chunks:
            left = stage.recompute.layers
            for position in range(chunk.start, chunk.stop):
                kind = kinds[position]
                layer = None
                repeats = False
                if kind in (LayerKind.TRANSFORMER, LayerKind.MULTI_TOKEN_PREDICTION):
                    layer = self.model.layer_at(position)
                    repeats = left is None or left > 0
                    left = None if left is None else left - 1
                found[kind, layer, repeats] += 1
        return found

    @cached_property
    def _kinds(self) -> tuple[LayerKind, ...]:
        return self.model.layers

    # ---- boundaries

    def _hops(self, pipeline: Pipeline) -> Sent:
        stages = pipeline.stages
        schedule, count = pipeline.schedule, len(stages)
        at = [stage_of(schedule.name, k, count) for k in range(count * schedule.virtual_stages)]
        hops = Counter(hop for hop in pairwise(at) if hop[0] != hop[1])
        for (left, right), times in hops.items():
            for sender, receiver in ((stages[left], stages[right]), (stages[right], stages[left])):
                yield from self._hop(sender, receiver, times * pipeline.num_microbatches)

    def _hop(self, sender: Stage, receiver: Stage, times: float) -> Sent:
        """Activations, or gradients, to every rank of the receiver."""
        senders, at = stage_array(sender), 0
        ranks = stage_array(receiver)
        position, _ = partners(senders, ranks)
        for each in receiver.replicas:
            message = received_bytes(self.model, self.job, each)
            here = slice(at, at + each.num_devices)
            at += each.num_devices
            for link, count in links_between(self.places, position[here], ranks[here]):
                yield link, TrafficClass.PIPELINE, message * count * times
            scattered = trainer_settings(self.job).scattered_sends and not each.sequence_parallel
            if scattered and each.tp > 1:
                yield from self._sent(
                    shapes_of(self.cluster, members_of(each)[0]),
                    LinkOperation.ALL_GATHER,
                    message * each.tp,
                    times,
                    TrafficClass.TENSOR_PARALLEL,
                )

    def _tied(self, pipeline: Pipeline) -> Sent:
        if not self.model.tied_embeddings or len(pipeline.ends) == 1:
            return
        first, last = pipeline.ends
        ends = sorted((stage_array(first), stage_array(last)), key=lambda each: each.size)
        left, right = partners(*ends)
        tp = max(replica.tp for stage in (first, last) for replica in stage.replicas)
        size = tied_format(self.plan, self.job).bytes_per_element
        matrix = self.model.vocabulary_matrix(tp) * size
        for link, count in links_between(self.places, left, right):
            # All_reduce of two: each sends everything that it has to the other one.
            yield link, TrafficClass.EMBEDDING, 2.0 * matrix * count

    # ---- copies

    def _reductions(self) -> Sent:
        plan = self.plan
        times = 0.0
        if plan.outer is not None:
            times = gatherings(plan.outer.settings, plan.sharding, self.job.precision)
        for group in plan.reduction_groups:
            copies, count = self._copied(group, plan.optimizer_shards)
            yield from self._reduced(copies, count, Precision(group.precision))
            if times:
                yield from self._gathered(copies, count, times, Precision.FLOAT32)
        if plan.outer is None:
            return
        for group in plan.outer.reduction_groups:
            copies, count = self._copied(group, 1)
            size = count * Precision(group.precision).bytes_per_element
            operation, times = LinkOperation.ALL_REDUCE, 1 / plan.outer.settings.sync_steps
            yield from self._sent(copies.whole, operation, size, times, TrafficClass.DATA_PARALLEL)

    def _copied(self, group: ReductionGroup, shards: int) -> tuple[CopyGroups, float]:
        """The copies of a group's layers, and the parameters of the largest."""
        layers = range(group.layers.start, group.layers.stop)
        stages = [
            stage
            for stage in self.plan.stages
            if any(chunk.start <= layers.start < chunk.stop for chunk in stage.chunks)
            and (self.plan.outer is None or group.has(stage))
        ]
        replicas = [replica for stage in stages for replica in stage.replicas]
        copies = copy_groups(self.cluster, replicas, shards, expert=group.expert)
        return copies, self._parameters(layers, replicas, expert=group.expert) * copies.part

    def _reduced(self, copies: CopyGroups, parameters: float, summed: Precision) -> Sent:
        level, gradients = self.plan.sharding, parameters * summed.bytes_per_element
        for group, operation, size in reduction_calls(level, copies.shard.size, gradients):
            groups = getattr(copies, group)
            yield from self._sent(groups, operation, size, 1, TrafficClass.DATA_PARALLEL)
        if level in (Sharding.OPTIMIZER, Sharding.GRADIENTS):
            yield from self._gathered(copies, parameters, 1)

    def _gathered(
        self, copies: CopyGroups, count: float, times: float, precision: Precision | None = None
    ) -> Sent:
        message = count * (precision or self.job.precision).bytes_per_element
        operation, traffic = LinkOperation.ALL_GATHER, TrafficClass.DATA_PARALLEL
        yield from self._sent(copies.shard, operation, message, times, traffic)

    def _sharded_layers(self, stage: Stage, num_microbatches: int) -> Sent:
        """What sharded gradients and parameters move in every microbatch."""
        level = self.plan.sharding
        if level not in (Sharding.GRADIENTS, Sharding.PARAMETERS):
            return
        for expert in (False, True):
            copies = copy_groups(
                self.cluster, stage.replicas, self.plan.optimizer_shards, expert=expert
            )
            count = copies.part * sum(
                self._parameters(range(chunk.start, chunk.stop), stage.replicas, expert=expert)
                for chunk in stage.chunks
            )
            yield from self._sent(
                copies.shard,
                LinkOperation.REDUCE_SCATTER,
                count * one_format(self.plan, self.job).bytes_per_element,
                num_microbatches,
                TrafficClass.DATA_PARALLEL,
            )
            if level is Sharding.PARAMETERS:
                # Before the forward and again before the backward pass.
                yield from self._gathered(copies, count, 2 * num_microbatches)

    def _parameters(
        self, layers: Sequence[int] | range, replicas: Sequence[Replica], *, expert: bool
    ) -> float:
        """On one rank of the replica that cuts them coarsest; expert: only those dealt out apart.

        A tied matrix that one stage holds at both ends counts once.
        """
        apart = not all(map(experts_as_the_rest, replicas))
        if expert and not apart:
            return 0.0
        if expert:
            coarsest = min(replicas, key=lambda each: each.ep * each.etp)
        else:
            coarsest = min(replicas, key=lambda each: each.tp)
        total = 0.0
        for position in layers:
            held = weights_at(self.model, position, coarsest.tp, coarsest.ep, coarsest.etp)
            if expert:
                total += held.routed
            else:
                total += held.dense if apart else self.model.parameters_at(position, coarsest.tp)
        whole = layers[0] == 0 and layers[-1] == len(self._kinds) - 1
        if self.model.tied_embeddings and whole and not expert:
            total -= self.model.vocabulary_matrix(coarsest.tp)
        return total

    # ---- storage

    def _storage(self, stage: Stage) -> LinkName:
        island = self.cluster.island_of_device(stage.replicas[0].devices[0].start).name
        return island_link(island, LinkScope.STORAGE)

    def _checkpoints(self) -> Sent:
        """Every weight once, from the first pipeline that holds it."""
        interval = self.job.checkpoint_interval_steps
        if interval is None:
            return
        sizes = checkpoint_bytes(self.plan, self.model, self.job)
        for stage, size in zip(self.plan.pipelines[0].stages, sizes, strict=True):
            yield self._storage(stage), TrafficClass.CHECKPOINT, size / interval

    def _data(self, pipeline: Pipeline) -> Sent:
        readers = pipeline.ends
        sequences = sum(each.dp * each.microbatch_size for each in readers[0].replicas)
        tokens = sequences * pipeline.num_microbatches * self.job.sequence_length
        size = 2.0 if self.model.vocab_size <= SMALL_VOCABULARY else 4.0
        for stage in dict.fromkeys(readers):
            yield self._storage(stage), TrafficClass.DATA, tokens * size


def checkpoint_bytes(plan: Plan, model: ModelSpec, job: Job) -> tuple[float, ...]:
    """Every weight and its optimizer state once, by the stage of the first pipeline that has it."""
    head, found = len(model.layers) - 1, []
    for stage in plan.pipelines[0].stages:
        count = sum(
            model.parameters_at(position)
            for chunk in stage.chunks
            for position in range(chunk.start, chunk.stop)
        )
        if model.tied_embeddings and any(chunk.stop > head for chunk in stage.chunks):
            count -= model.vocabulary_matrix()
        found.append(float(count * checkpoint_bytes_per_parameter(job)))
    return tuple(found)


def checkpoint_bytes_per_parameter(job: Job) -> int:
    """Weight and optimizer state of one parameter: AdamW's two moments in float32, and a float32
    weight beside a shorter one.
    """
    wide = Precision.FLOAT32.bytes_per_element
    moments = 2 * wide if job.optimizer is Optimizer.ADAMW else 0
    master = 0 if job.precision is Precision.FLOAT32 else wide
    return job.precision.bytes_per_element + master + moments


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Groups that do the same at the same time."""

    size: int
    """Ranks of each."""
    count: tuple[tuple[GroupShape, int], ...]
    """How many groups have which shape; empty where a group is one rank."""


def shapes_of(cluster: Cluster, groups: Members) -> Shapes:
    """The shapes of these groups, which are equally large."""
    size = len(groups[0])
    if size == 1:
        return Shapes(size=1, count=())
    counted = Counter(group_shape(cluster, group) for group in groups)
    return Shapes(size=size, count=tuple(counted.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyGroups:
    """Ranks that hold copies of the same weights."""

    whole: Shapes
    shard: Shapes
    """Ranks that split one copy of what is sharded."""
    across: Shapes
    """Ranks with the same shard."""
    part: float
    """What one group reduces, as a part of what a rank holds where the weights are cut into the
    fewest slices."""


def copy_groups(
    cluster: Cluster, replicas: Sequence[Replica], shards: int, *, expert: bool
) -> CopyGroups:
    """Copies among these replicas, in their order.

    Replicas that cut the weights into different numbers of slices meet in groups of the finest
    common slices: rank i of t holds those from i / t to (i + 1) / t.
    """
    slices = [each.ep * each.etp if expert else each.tp for each in replicas]
    finest = math.lcm(*slices)
    rows = [
        np.repeat(device_array(each.devices).reshape(-1, count), finest // count, axis=1)
        for each, count in zip(replicas, slices, strict=True)
    ]
    groups = np.concatenate(rows).T
    size = groups.shape[1]
    own = math.gcd(shards, size)
    blocks = groups.reshape(finest, size // own, own)
    return CopyGroups(
        whole=shapes_of(cluster, groups.tolist()),
        shard=shapes_of(cluster, blocks.reshape(-1, own).tolist()),
        across=shapes_of(cluster, blocks.transpose(0, 2, 1).reshape(-1, size // own).tolist()),
        part=min(slices) / finest,
    )


def partners(senders: Devices, receivers: Devices) -> tuple[Devices, Devices]:
    """(from, to) of one message to every receiver, from the sender of its position."""
    position = np.arange(receivers.size) * senders.size // receivers.size
    return senders[position], receivers


def links_between(places: Places, left: Devices, right: Devices) -> Iterable[tuple[LinkName, int]]:
    """How many of these pairs of devices use which link; a device itself uses none."""
    islands = places.cluster.islands
    one, two = places.islands(left), places.islands(right)
    scope = np.where(one != two, 2, np.where(places.nodes(left) != places.nodes(right), 1, 0))
    rows, counts = np.unique(
        np.stack([np.where(left == right, -1, scope), one, two]), axis=1, return_counts=True
    )
    for (what, first, second), count in zip(rows.T.tolist(), counts.tolist(), strict=True):
        if what == 2:
            yield between_islands(islands[first].name, islands[second].name), count
        elif what >= 0:
            name, reach = islands[first].name, (LinkScope.NODE, LinkScope.ISLAND)[what]
            yield island_link(name, reach), count
