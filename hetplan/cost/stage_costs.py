"""What a stage and a boundary cost under given degrees, before anyone knows the plan.

Times of one microbatch are linear in the number n of transformer layers, plus a constant for the
embedding and for the head:

    forward  = n * layer_forward  + embedding_forward  + head_forward
    backward = n * layer_backward + embedding_backward + head_backward

The layers are priced as those of a plan are (`hetplan.cost.priced.layers`), on the first devices of
the island, as all stages of an island lie alike; so is the end of the step (`priced.end_of_step`).
A search that adds these up gets what `hetplan.cost.estimate` says of the plan. For models of equal
transformer layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hetplan.cluster.spec import Cluster, Island, Link
from hetplan.cost.components.step import clips_gradients
from hetplan.cost.estimate_values import MemoryUse
from hetplan.cost.memory.device import PerKind, StageMemory, message_bytes, stage_memory
from hetplan.cost.priced.end_of_step import EndSeconds
from hetplan.cost.priced.groups import KnownCollectives
from hetplan.cost.priced.hops import Hop, Sides, gathered_seconds, hop_over, node_ports
from hetplan.cost.priced.step import norm_depth, norm_rounds, scalar_term
from hetplan.cost.priced.units import Settings, Unit, make_unit
from hetplan.cost.priced.values import Part, seconds_of_parts
from hetplan.cost.terms import Term, seconds_of
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.build import Degrees, stage_link
from hetplan.plans.plan import (
    OverlapSettings,
    Recompute,
    RecomputeGranularity,
    Replica,
    Sharding,
    compress,
)
from hetplan.plans.rules import experts_of
from hetplan.plans.targets import target
from hetplan.predict.predictor import Predictor

BoundaryCosts = Hop
"""One microbatch's transfers between two neighbouring stages."""


@dataclass(slots=True)
class KnownUnits:
    """What stages of one model, job and predictor under several degrees have in common."""

    units: dict[tuple[str, int, int, bool, int], Unit] = field(default_factory=dict)
    collectives: dict[str, KnownCollectives] = field(default_factory=dict)
    passes: dict[int, tuple[PassTerms, PassTerms, PerKind]] = field(default_factory=dict)
    norms: dict[tuple[str, int], float] = field(default_factory=dict)

    def passes_of(self, unit: Unit) -> tuple[PassTerms, PassTerms, PerKind]:
        """Terms by kind of layer; units that were made of one another share their costs."""
        key = id(unit.costs)
        found = self.passes.get(key)
        if found is None:
            found = self.passes[key] = _passes(unit)
        return found

    def norm_of(self, island: Island, job: Job, degrees: Degrees, predictor: Predictor) -> float:
        """The sum of the norms inside a stage."""
        key = (island.name, degrees.tp * degrees.dp)
        found = self.norms.get(key)
        if found is None:
            found = self.norms[key] = _norm_inside(island, job, degrees, predictor)
        return found

    def collectives_of(self, cluster: Cluster, predictor: Predictor) -> KnownCollectives:
        """Those inside one island."""
        found = self.collectives.get(cluster.name)
        if found is None:
            found = self.collectives[cluster.name] = KnownCollectives(cluster, predictor)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTerms:
    """The parts of one pass, forward or backward, by kind of layer."""

    transformer: tuple[Term, ...]
    embedding: tuple[Term, ...]
    head: tuple[Term, ...]

    def of(self, transformer_layers: int, embedding: bool, head: bool) -> tuple[Term, ...]:
        """The parts of a stage's pass."""
        found = tuple(term.times(transformer_layers) for term in self.transformer)
        if embedding:
            found += self.embedding
        if head:
            found += self.head
        return found

    def seconds(self) -> PerKind:
        """Central values."""
        return PerKind(
            transformer=seconds_of(self.transformer),
            embedding=seconds_of(self.embedding),
            head=seconds_of(self.head),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Everything about a stage on one island under given degrees, as functions of its layers."""

    island: str
    device: str
    degrees: Degrees
    forward: PassTerms
    backward: PassTerms
    forward_per_kind: PerKind
    """Seconds; communication included, as below."""
    backward_per_kind: PerKind
    communication_per_kind: PerKind
    """Tensor-parallel communication inside the two above, together."""
    unit: Unit = field(repr=False, compare=False)
    norm_seconds: float
    """Of the sum of all gradients' norms, what is inside the stage; 0 without clipping."""
    memory_model: StageMemory

    @property
    def layer_forward_seconds(self) -> float:
        """One transformer layer, one microbatch."""
        return self.forward_per_kind.transformer

    @property
    def layer_backward_seconds(self) -> float:
        """One transformer layer, one microbatch, recomputation included."""
        return self.backward_per_kind.transformer

    @property
    def embedding_forward_seconds(self) -> float:
        """One microbatch."""
        return self.forward_per_kind.embedding

    @property
    def embedding_backward_seconds(self) -> float:
        """One microbatch."""
        return self.backward_per_kind.embedding

    @property
    def head_forward_seconds(self) -> float:
        """One microbatch, loss included."""
        return self.forward_per_kind.head

    @property
    def head_backward_seconds(self) -> float:
        """One microbatch, loss included."""
        return self.backward_per_kind.head

    def forward_seconds(self, transformer_layers: int, embedding: bool, head: bool) -> float:
        """Forward pass of one microbatch."""
        return self.forward_per_kind.of(transformer_layers, embedding, head)

    def backward_seconds(self, transformer_layers: int, embedding: bool, head: bool) -> float:
        """Backward pass of one microbatch, recomputation included."""
        return self.backward_per_kind.of(transformer_layers, embedding, head)

    def communication_seconds(self, transformer_layers: int, embedding: bool, head: bool) -> float:
        """Tensor-parallel communication of both passes of one microbatch."""
        return self.communication_per_kind.of(transformer_layers, embedding, head)

    def _end(self, transformer_layers: int, embedding: bool, head: bool) -> EndSeconds:
        first = 0 if embedding else 1
        last = len(self.unit.kind_at) if head else 1 + transformer_layers
        plain, experts = self.unit.held(((first, 1 + transformer_layers), (last - head, last)))
        return self.unit.end.seconds(plain, experts)

    def reduction_seconds(self, transformer_layers: int, embedding: bool, head: bool) -> float:
        """Reduction of the stage's gradients over its data-parallel ranks."""
        return self._end(transformer_layers, embedding, head).reduction

    def optimizer_seconds(self, transformer_layers: int, embedding: bool, head: bool) -> float:
        """Update of the stage's weights, norm and scaling of its own gradients before it."""
        return self._end(transformer_layers, embedding, head).update

    def leaving_seconds(self, transformer_layers: int, embedding: bool, head: bool) -> float:
        """Update and gathering of the parameters: what comes after the norm of all gradients."""
        found = self._end(transformer_layers, embedding, head)
        return found.update + found.gathering

    def after_seconds(self, transformer_layers: int, embedding: bool, head: bool) -> float:
        """Reduction, update and gathering; the tied matrix and the sum of norms are not in it."""
        return self._end(transformer_layers, embedding, head).after

    def memory(
        self, transformer_layers: int, embedding: bool, head: bool, in_flight: int
    ) -> MemoryUse:
        """Bytes on one device with at most `in_flight` microbatches in flight."""
        return self.memory_model.use(transformer_layers, embedding, head, in_flight)

    def max_transformer_layers(self, embedding: bool, head: bool, in_flight: int) -> int:
        """Most transformer layers that fit, at most the model's; 0 where not even one does."""
        return self.memory_model.max_transformer_layers(embedding, head, in_flight)


def stage_costs(
    model: ModelSpec,
    island: Island,
    job: Job,
    degrees: Degrees,
    predictor: Predictor,
    *,
    optimizer_shards: int | None = None,
    known: KnownUnits | None = None,
) -> StageCosts:
    """Costs of stages on this island; `known` keeps what stages under other degrees share.

    The vocabulary is padded as the job's target does it. `optimizer_shards`: ranks that share the
    optimizer state; None: all data-parallel ranks where the target can.
    """
    trainer = target(job.target)
    if optimizer_shards is None:
        optimizer_shards = degrees.dp if trainer.optimizer_sharding else 1
    real = model.vocab_size
    model = padded(model, job, degrees.tp)
    known = KnownUnits() if known is None else known
    unit = _unit(model, real, island, job, degrees, predictor, optimizer_shards, known)
    forward, backward, shared = known.passes_of(unit)
    return StageCosts(
        island=island.name,
        device=island.device.kind,
        degrees=degrees,
        forward=forward,
        backward=backward,
        forward_per_kind=forward.seconds(),
        backward_per_kind=backward.seconds(),
        communication_per_kind=shared,
        unit=unit,
        norm_seconds=known.norm_of(island, job, degrees, predictor),
        memory_model=stage_memory(model, island, job, degrees, optimizer_shards=optimizer_shards),
    )


def _passes(unit: Unit) -> tuple[PassTerms, PassTerms, PerKind]:
    """(forward, backward, communication of both) by kind of layer."""
    kinds = (unit.kind_at[1], unit.kind_at[0], unit.kind_at[-1])
    forward, backward = (
        PassTerms(
            transformer=_terms(parts[kinds[0]]),
            embedding=_terms(parts[kinds[1]]),
            head=_terms(parts[kinds[2]]),
        )
        for parts in (
            [cost.forward for cost in unit.costs],
            [(*cost.backward, *cost.again) for cost in unit.costs],
        )
    )
    shared = [
        seconds_of_parts(
            part
            for part in (*unit.costs[kind].forward, *unit.costs[kind].backward,
                         *unit.costs[kind].again)
            if not part.computes
        )
        for kind in kinds
    ]  # fmt: skip
    return (
        forward,
        backward,
        PerKind(transformer=shared[0], embedding=shared[1], head=shared[2]),
    )


def _terms(parts: tuple[Part, ...]) -> tuple[Term, ...]:
    return tuple(part.term for part in parts)


def _unit(
    model: ModelSpec,
    real_vocab_size: int,
    island: Island,
    job: Job,
    degrees: Degrees,
    predictor: Predictor,
    shards: int,
    known: KnownUnits,
) -> Unit:
    """The costs of layers do not depend on dp; the end of the step is made when it is asked for."""
    size = degrees.tp * degrees.dp
    needed = -(-size // island.devices_per_node)
    if needed > len(island.usable_nodes):
        island = replace(island, nodes=needed, nodes_out=(), node_names=())
    nodes = island.usable_nodes[:needed]
    each = island.devices_per_node
    devices = [node * each + local for node in nodes for local in range(each)][:size]
    cluster = Cluster(name=island.name, islands=(island,))
    settings = Settings(
        model=model,
        real_vocab_size=real_vocab_size,
        cluster=cluster,
        job=job,
        predictor=predictor,
        sharding=Sharding.NONE if shards == 1 else Sharding.OPTIMIZER,
        shards=shards,
        offload=0.0,
        overlap=OverlapSettings(),
        known=known.collectives_of(cluster, predictor),
    )
    experts = bool(experts_of(model, 0, len(model.layers)))
    replica = Replica(
        devices=compress(devices),
        tp=degrees.tp,
        etp=degrees.tp if experts else 1,
        microbatch_size=degrees.microbatch_size,
    )
    key = (
        island.name,
        degrees.tp,
        degrees.microbatch_size,
        degrees.full_recompute,
        size if island.speed_spread else 0,
    )
    layers = known.units.get(key)
    if layers is None:
        granularity = RecomputeGranularity.NONE
        if degrees.full_recompute:
            granularity = RecomputeGranularity.FULL
        layers = known.units[key] = make_unit(
            settings,
            replace(replica, devices=compress(devices[: degrees.tp])),
            Recompute(granularity=granularity),
            ranks=size,
        )
    return replace(layers, settings=settings, replica=replica)


def _norm_inside(island: Island, job: Job, degrees: Degrees, predictor: Predictor) -> float:
    if not clips_gradients(job):
        return 0.0
    size = degrees.tp * degrees.dp
    hop = scalar_term(stage_link(island, size), predictor)
    return norm_rounds(job) * norm_depth(size) * hop.seconds


def padded(model: ModelSpec, job: Job, tp: int) -> ModelSpec:
    """The model with the vocabulary that the job's target trains under this tp."""
    size = target(job.target).padded_vocab_size(model.vocab_size, tp)
    return replace(model, vocab_size=size)


def boundary_link(cluster: Cluster, left: Island, right: Island, degrees: Degrees) -> Link:
    """The link between a stage on `left` and the next one on `right`.

    Inside one island: the link inside a node where two stages fit in one node, between nodes
    otherwise. That is the faster choice for the boundaries of such an island that do lie between
    two nodes, so a search that uses it can only be too fast there.
    """
    if left.name != right.name:
        return cluster.link_between(left.name, right.name)
    return stage_link(left, 2 * degrees.tp * degrees.dp)


def boundary_costs(
    model: ModelSpec,
    cluster: Cluster,
    left: Island,
    right: Island,
    job: Job,
    degrees: Degrees,
    predictor: Predictor,
) -> BoundaryCosts:
    """Transfers from a stage on `left` to the next stage on `right` (`boundary_link`)."""
    link = boundary_link(cluster, left, right, degrees)
    return boundary_costs_over(link, model, job, degrees, predictor, (left, right))


def boundary_costs_over(
    link: Link,
    model: ModelSpec,
    job: Job,
    degrees: Degrees,
    predictor: Predictor,
    ends: tuple[Island, Island] | None = None,
) -> BoundaryCosts:
    """Transfers between two stages over this link, which joins `ends`.

    A capacity that the link shares is divided by the devices of a stage, which all send at once.
    """
    message = message_bytes(model, job, degrees)
    replica = Replica(devices=(), tp=degrees.tp, microbatch_size=degrees.microbatch_size)
    gathering = max(
        (gathered_seconds(model, job, island, replica, predictor) for island in ends or ()),
        default=0.0,
    )
    senders = degrees.tp * degrees.dp
    # Two stages inside one node cross no NIC.
    apart = ends if ends and link != ends[0].intra_node else ()
    sides = Sides(
        forward_bytes=message,
        backward_bytes=message,
        senders=senders,
        islands=ends,
        gathering_seconds=gathering,
        ports=tuple(port for island in apart for port in node_ports(island, senders)),
    )
    return hop_over(link, sides, predictor)
