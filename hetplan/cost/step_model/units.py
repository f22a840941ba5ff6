"""What a stage costs per microbatch and at the end of the step, for any range of its layers.

A unit is one replica entry of a stage with its recomputation: times and parameters of every layer
of the row as it would be there, summed up from the first, so that a chunk is the difference of two
entries. Units know nothing of the cuts of a plan. Entries that lie alike, each on nodes of its own,
have one unit (`on_first_nodes`).

Sharded gradients (ZeRO-2) are reduce-scattered in every backward pass; sharded parameters (ZeRO-3)
are gathered in every forward pass and again, with the reduce-scatter, in every backward pass (arXiv
1910.02054, section 7). Both hide behind the layers' compute where the trainer overlaps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate

from hetplan.cluster.spec import Cluster, Island
from hetplan.cost.estimate_values import Component
from hetplan.cost.step_model.end_of_step import EndOfStep
from hetplan.cost.step_model.groups import (
    ALL_KEPT,
    Copies,
    Kept,
    KnownCollectives,
    copies_of,
    groups_of,
    holders_of,
    known_of,
)
from hetplan.cost.step_model.layer_compute import layer_parameters
from hetplan.cost.step_model.layers import LayerCost, LayerPricer, hidden_beside
from hetplan.cost.step_model.overlap import in_buckets, slowdowns
from hetplan.cost.terms import Part, compute_seconds, repeated, seconds_of_parts
from hetplan.job.kernels import job_on
from hetplan.job.spec import Job, Precision
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.plans.chosen import Shape
from hetplan.plans.formats import one_format, tied_format
from hetplan.plans.pieces import experts_as_the_rest
from hetplan.plans.plan import DeviceRange, OverlapSettings, Plan, Recompute, Replica, Sharding
from hetplan.predict.predictor import Predictor
from hetplan.profiling.samples import LinkOperation


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a plan says of all its stages."""

    model: ModelSpec
    """With the vocabulary that the plan pads to."""
    real_vocab_size: int
    cluster: Cluster
    job: Job
    """With the plan's target."""
    reduction_precision: Precision
    """In which gradients are summed; a plan of several formats has each with its group
    (`hetplan.cost.step_model.plan`)."""
    tied_precision: Precision
    """Number format in which first and last stage sum a tied matrix's gradients."""
    predictor: Predictor
    sharding: Sharding
    shards: int
    offload: float
    overlap: OverlapSettings
    known: KnownCollectives = field(repr=False, compare=False)


def settings_of(
    plan: Plan, model: ModelSpec, cluster: Cluster, job: Job, predictor: Predictor
) -> Settings:
    """The plan decides padding, target and formats, whatever model and job say."""
    job = replace(job, target=plan.target)
    return Settings(
        model=replace(model, vocab_size=plan.padded_vocab_size),
        real_vocab_size=model.vocab_size,
        cluster=cluster,
        job=job,
        reduction_precision=one_format(plan, job),
        tied_precision=tied_format(plan, job),
        predictor=predictor,
        sharding=plan.sharding,
        shards=plan.optimizer_shards,
        offload=plan.optimizer_offload,
        overlap=plan.overlap,
        known=known_of(cluster, job, predictor),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Unit:
    """One replica entry, or several that lie alike: costs of all layers of the row there."""

    settings: Settings
    replica: Replica
    """On the first nodes of its island: its degrees, not where an entry lies."""
    pricer: LayerPricer
    costs: tuple[LayerCost, ...]
    """Of each kind of layer."""
    kind_at: tuple[int, ...]
    """Position in `costs` of every layer of the row."""
    forward: tuple[float, ...]
    """Seconds of the layers before each position, [layers + 1]; the following ones likewise."""
    backward: tuple[float, ...]
    again: tuple[float, ...]
    weight: tuple[float, ...]
    parameters: tuple[float, ...]
    """On one rank, routed experts left out where they are cut or copied otherwise."""
    expert_parameters: tuple[float, ...]
    shared_parameters: float
    """Counted once, not twice, where embedding and head are on one stage (tied)."""
    kept: Kept = ALL_KEPT
    """Shares that contention from other stages leaves its groups."""

    @property
    def island(self) -> Island:
        """Where it lies."""
        return self.pricer.island

    @property
    def recompute(self) -> Recompute:
        """Of its layers."""
        return self.pricer.recompute

    @cached_property
    def end(self) -> EndOfStep:
        """The end of the step on these ranks; made when it is first asked for."""
        settings = self.settings
        dense, experts = copies_within(settings, self.replica, self.pricer.shape, self.kept)
        return EndOfStep(
            known=settings.known,
            island=self.island,
            job=settings.job,
            reduction_precision=settings.reduction_precision,
            dense=dense,
            experts=experts,
            sharding=settings.sharding,
            offload=settings.offload,
            predictor=settings.predictor,
        )

    def repeated_range(self, start: int, stop: int) -> tuple[int, int]:
        """The layers of a chunk that recompute."""
        count = self.recompute.layers
        if count is None:
            return start, stop
        first = max(1, start)
        return first, min(stop, first + count)

    def held(self, ranges: Sequence[tuple[int, int]]) -> tuple[float, float]:
        """(parameters, those of routed experts apart) of these layer ranges, on one rank."""
        plain, experts = self.parameters, self.expert_parameters
        count = expert_count = 0.0
        first = last = False
        for start, stop in ranges:
            count += plain[stop] - plain[start]
            expert_count += experts[stop] - experts[start]
            first = first or start == 0
            last = last or stop == len(self.kind_at)
        if first and last:
            count -= self.shared_parameters
        return count, expert_count

    def parts(self, start: int, stop: int, *, backward: bool) -> tuple[Part, ...]:
        """One pass of the layers in this range, equal parts together."""
        counts = [0] * len(self.costs)
        for kind in self.kind_at[start:stop]:
            counts[kind] += 1
        found: list[Part] = []
        for cost, count in zip(self.costs, counts, strict=True):
            if count:
                found += repeated(cost.backward if backward else cost.forward, count)
        if backward:
            counts = [0] * len(self.costs)
            again = self.repeated_range(start, stop)
            for kind in self.kind_at[again[0] : again[1]]:
                counts[kind] += 1
            for cost, count in zip(self.costs, counts, strict=True):
                if count:
                    found += repeated(cost.again, count)
        return tuple(found)


def on_first_nodes(cluster: Cluster, replica: Replica) -> Replica:
    """The replica on the first nodes of its islands.

    Nodes keep their order, and devices their numbers in a node. All nodes of an island are alike,
    so replicas that come out equal have equal groups. One whose devices are not listed by nodes
    stays where it is.
    """
    used: dict[str, list[tuple[int, int]]] = {}
    for part in replica.devices:
        island = cluster.island_of_device(part.start)
        if part.stride > 1 or cluster.island_of_device(part.last) is not island:
            return replica
        nodes = cluster.node_of_device(part.start), cluster.node_of_device(part.last)
        used.setdefault(island.name, []).append(nodes)
    shifts = {name: _shifts(runs) for name, runs in used.items()}

    def moved(part: DeviceRange) -> DeviceRange:
        island = cluster.island_of_device(part.start)
        nodes = shifts[island.name][cluster.node_of_device(part.start)]
        return replace(part, start=part.start - nodes * island.devices_per_node)

    return replace(replica, devices=tuple(map(moved, replica.devices)))


def _shifts(runs: Sequence[tuple[int, int]]) -> dict[int, int]:
    """How many nodes below the first one of each run (first, last) are in none of them."""
    found, shift, behind = {}, 0, 0
    for first, last in sorted(runs):
        shift += max(0, first - behind)
        behind = max(behind, last + 1)
        found[first] = shift
    return found


def make_unit(
    settings: Settings, replica: Replica, recompute: Recompute, *, kept: Kept = ALL_KEPT
) -> Unit:
    """The costs of this replica entry; `kept`: what the groups of other stages leave its own."""
    model = settings.model
    island = settings.cluster.island_of_device(replica.devices[0].start)
    pricer = LayerPricer(
        model=model,
        real_vocab_size=settings.real_vocab_size,
        island=island,
        job=job_on(island.device, settings.job),
        shape=Shape.of(replica),
        recompute=recompute,
        overlap=settings.overlap,
        groups=groups_of(settings.cluster, replica).beside(kept),
        known=settings.known,
        predictor=settings.predictor,
    )
    kinds, kind_at = layer_kinds(model, settings.job.sequence_length)
    held = [layer_parameters(model, position, pricer.shape) for position in kinds]
    costs = tuple(map(pricer.at, kinds))
    if settings.sharding in (Sharding.GRADIENTS, Sharding.PARAMETERS):
        copies = copies_within(settings, replica, pricer.shape, kept)
        costs = tuple(
            with_sharding(settings, cost, counts, copies, pricer.island)
            for cost, counts in zip(costs, held, strict=True)
        )

    def summed(of_kind: Sequence[float]) -> tuple[float, ...]:
        """Of the layers before each position."""
        return tuple(accumulate((of_kind[kind] for kind in kind_at), initial=0.0))

    return Unit(
        settings=settings,
        replica=replica,
        pricer=pricer,
        costs=costs,
        kind_at=kind_at,
        forward=summed([cost.forward_seconds for cost in costs]),
        backward=summed([cost.backward_seconds for cost in costs]),
        again=summed([cost.again_seconds for cost in costs]),
        weight=summed([cost.weight_seconds for cost in costs]),
        parameters=summed([plain for plain, _ in held]),
        expert_parameters=summed([experts for _, experts in held]),
        shared_parameters=float(
            model.vocabulary_matrix(replica.tp) if model.tied_embeddings else 0
        ),
        kept=kept,
    )


def copies_within(
    settings: Settings, replica: Replica, shape: Shape, kept: Kept = ALL_KEPT
) -> tuple[Copies, Copies]:
    """The ranks of a replica that hold the same weights, and those that hold the same experts."""
    cluster, shards = settings.cluster, settings.shards
    dense = copies_of(cluster, holders_of((replica,), expert=False), shards)
    if experts_as_the_rest(shape):
        return dense.beside(kept.dense), dense.beside(kept.dense)
    experts = copies_of(cluster, holders_of((replica,), expert=True), shards)
    return dense.beside(kept.dense), experts.beside(kept.experts)


def with_sharding(
    settings: Settings,
    cost: LayerCost,
    counts: tuple[float, float],
    copies: tuple[Copies, Copies],
    island: Island,
) -> LayerCost:
    """The layer with what sharded gradients and parameters move in every microbatch."""
    overlap = settings.overlap

    def collectives(
        component: Component, operation: LinkOperation, precision: Precision
    ) -> tuple[Part, ...]:
        return tuple(
            Part(component=component, term=term)
            for each, count in zip(copies, counts, strict=True)
            for term in settings.known.of(
                each.shard,
                operation,
                count * precision.bytes_per_element,
                f"sharded {operation.value}",
            )
        )

    def beside(
        parts: tuple[Part, ...], layer: tuple[Part, ...], overlapped: bool
    ) -> tuple[Part, ...]:
        # Everything that computes, as if alone: what other overlap makes it longer hides nothing.
        own = [part for part in layer if part.computes and part.component is not Component.SLOWED]
        whole, compute = seconds_of_parts(parts), compute_seconds(own)
        if not overlapped or whole <= 0 or compute <= 0:
            return parts
        # One layer's message runs beside the next layer's compute: no layer waits for its own.
        found = in_buckets(whole, compute, float("inf"), slowdowns(island.device))
        return hidden_beside(parts, own, found)

    scattered = collectives(
        Component.DATA_PARALLEL, LinkOperation.REDUCE_SCATTER, settings.reduction_precision
    )
    gathered: tuple[Part, ...] = ()
    if settings.sharding is Sharding.PARAMETERS:
        precision = settings.job.precision
        gathered = collectives(Component.GATHERING, LinkOperation.ALL_GATHER, precision)
    both = overlap.gathering and overlap.reduction
    return replace(
        cost,
        forward=(*cost.forward, *beside(gathered, cost.forward, overlap.gathering)),
        backward=(
            *cost.backward,
            # One link carries both, so one compute hides their sum.
            *(
                beside((*gathered, *scattered), cost.backward, overlapped=True)
                if both
                else (
                    *beside(gathered, cost.backward, overlap.gathering),
                    *beside(scattered, cost.backward, overlap.reduction),
                )
            ),
        ),
    )


@lru_cache(maxsize=64)
def layer_kinds(model: ModelSpec, sequence_length: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(one position of each kind of layer, position in that of every layer of the row)."""
    known: dict[object, int] = {}
    firsts: list[int] = []
    kind_at = []
    layers = model.layers
    for position, kind in enumerate(layers):
        key: object = kind
        if kind is LayerKind.TRANSFORMER:
            key = (kind, model.layer_at(position).at(sequence_length))
        if key not in known:
            known[key] = len(firsts)
            firsts.append(position)
        kind_at.append(known[key])
    return tuple(firsts), tuple(kind_at)
