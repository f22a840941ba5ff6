"""What a stage and a boundary cost under given degrees, before anyone knows the plan.

Times of one microbatch are linear in the number n of transformer layers, plus a constant for the
embedding and for the head:

    forward  = n * layer_forward  + embedding_forward  + head_forward
    backward = n * layer_backward + embedding_backward + head_backward

Each is the predicted time of the layer on one tensor-parallel rank plus its tensor-parallel
communication over the link inside a node (Shoeybi et al., arXiv 1909.08053, section 3; the calls
of `hetplan.profiling.layers`), b microbatch size, s sequence length, h hidden size:

    transformer  forward 2, backward 2 all_reduces of [b, s, h]; where tp exceeds the key-value
                 heads, the native trainer also sums the gradients of their copies in every
                 backward pass (other trainers are not charged for it)
    embedding    forward 1 all_reduce of [b, s, h]
    head         forward all_reduces of the softmax's [b, s] maximum and of its [2, b, s] sums, in
                 float32; backward 1 all_reduce of [b, s, h]

Full recomputation adds one forward pass of the transformer layers, communication included, to the
backward pass; embedding and head are not recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetplan.cluster.spec import Cluster, Island, Link, Transport
from hetplan.cost.end_of_step import EndOfStep
from hetplan.cost.estimate_values import MemoryUse
from hetplan.cost.memory import PerKind, StageMemory, message_bytes, stage_memory
from hetplan.cost.terms import Term, link_cause, seconds_of
from hetplan.job.spec import Job
from hetplan.model.spec import Architecture, LayerKind, ModelSpec
from hetplan.plans.build import Degrees, stage_link
from hetplan.plans.targets import target
from hetplan.predict.predictor import Predictor, SendLaw
from hetplan.profiling.samples import LinkOperation

_FLOAT32_BYTES = 4


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
    end: EndOfStep
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

    def reduction_seconds(self, transformer_layers: int, embedding: bool, head: bool) -> float:
        """Reduction of the stage's gradients over its data-parallel ranks."""
        return self.end.seconds(transformer_layers, embedding, head)[0]

    def optimizer_seconds(self, transformer_layers: int, embedding: bool, head: bool) -> float:
        """Update of the stage's weights."""
        return self.end.seconds(transformer_layers, embedding, head)[1]

    def after_seconds(self, transformer_layers: int, embedding: bool, head: bool) -> float:
        """Reduction and update; the tied matrix between first and last stage is not in it."""
        return sum(self.end.seconds(transformer_layers, embedding, head))

    def memory(
        self, transformer_layers: int, embedding: bool, head: bool, in_flight: int
    ) -> MemoryUse:
        """Bytes on one device with at most `in_flight` microbatches in flight."""
        return self.memory_model.use(transformer_layers, embedding, head, in_flight)

    def max_transformer_layers(self, embedding: bool, head: bool, in_flight: int) -> int:
        """Most transformer layers that fit, at most the model's; 0 where not even one does."""
        return self.memory_model.max_transformer_layers(embedding, head, in_flight)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryCosts:
    """One microbatch's transfers between two neighbouring stages."""

    link: str
    """Name under which the link's predictions err together."""
    transport: Transport
    message_bytes: float
    """Per device and direction; every device sends to the one of the same position."""
    send_forward_seconds: float
    """How long the activations occupy the wire."""
    send_backward_seconds: float
    wire_latency_seconds: float
    """From leaving the wire to having arrived."""
    rendezvous_extra_seconds: float
    """From the receiver's post to the first byte, where the sender waits for that."""
    law: SendLaw


def stage_costs(
    model: ModelSpec,
    island: Island,
    job: Job,
    degrees: Degrees,
    predictor: Predictor,
    *,
    optimizer_shards: int | None = None,
) -> StageCosts:
    """Costs of stages on this island.

    The vocabulary is padded as the job's target does it. `optimizer_shards`: ranks that share the
    optimizer state; None: all data-parallel ranks where the target can.
    """
    trainer = target(job.target)
    if optimizer_shards is None:
        optimizer_shards = degrees.dp if trainer.optimizer_sharding else 1
    model = padded(model, job, degrees.tp)
    forward, backward = _passes(model, island, job, degrees, predictor)
    memory = stage_memory(model, island, job, degrees, optimizer_shards=optimizer_shards)
    return StageCosts(
        island=island.name,
        device=island.device.kind,
        degrees=degrees,
        forward=forward,
        backward=backward,
        forward_per_kind=forward.seconds(),
        backward_per_kind=backward.seconds(),
        communication_per_kind=_communication(island, forward, backward),
        end=EndOfStep(
            device=island.device,
            link=stage_link(island, degrees.tp * degrees.dp),
            job=job,
            dp=degrees.dp,
            optimizer_shards=optimizer_shards,
            memory=memory,
            predictor=predictor,
        ),
        memory_model=memory,
    )


def padded(model: ModelSpec, job: Job, tp: int) -> ModelSpec:
    """The model with the vocabulary that the job's target trains under this tp."""
    size = target(job.target).padded_vocab_size(model.vocab_size, tp)
    return replace(model, vocab_size=size)


def _passes(
    model: ModelSpec, island: Island, job: Job, degrees: Degrees, predictor: Predictor
) -> tuple[PassTerms, PassTerms]:
    tokens = degrees.microbatch_size * job.sequence_length
    hidden = float(tokens * model.hidden_size * job.precision.bytes_per_element)

    def compute(kind: LayerKind, backward: bool) -> Term:
        ask = predictor.backward if backward else predictor.forward
        return Term(
            what=f"{kind.value} {'backward' if backward else 'forward'}",
            cause=island.device.kind,
            count=1,
            prediction=ask(
                island.device,
                model,
                kind,
                microbatch_size=degrees.microbatch_size,
                sequence_length=job.sequence_length,
                tp=degrees.tp,
                precision=job.precision,
            ),
        )

    def sums(count: int, message: float) -> tuple[Term, ...]:
        if degrees.tp == 1:
            return ()
        found = predictor.collective(
            island.intra_node, LinkOperation.ALL_REDUCE.value, degrees.tp, message
        )
        cause = link_cause(island.intra_node)
        return (
            Term(what="tensor-parallel all_reduce", cause=cause, count=count, prediction=found),
        )

    layer_forward = (compute(LayerKind.TRANSFORMER, False), *sums(2, hidden))
    layer_backward = (
        compute(LayerKind.TRANSFORMER, True),
        *sums(2, hidden),
        *(
            term
            for message in _copied_heads_bytes(model, job, degrees.tp)
            for term in sums(1, message)
        ),
        *(layer_forward if degrees.full_recompute else ()),
    )
    softmax = float(tokens * _FLOAT32_BYTES)
    forward = PassTerms(
        transformer=layer_forward,
        embedding=(compute(LayerKind.EMBEDDING, False), *sums(1, hidden)),
        head=(compute(LayerKind.HEAD, False), *sums(1, softmax), *sums(1, 2 * softmax)),
    )
    backward = PassTerms(
        transformer=layer_backward,
        embedding=(compute(LayerKind.EMBEDDING, True),),
        head=(compute(LayerKind.HEAD, True), *sums(1, hidden)),
    )
    return forward, backward


def _copied_heads_bytes(model: ModelSpec, job: Job, tp: int) -> tuple[float, ...]:
    """Messages that sum the gradients of key and value projections that several ranks hold."""
    if target(job.target).name != "native" or tp <= model.num_kv_heads:
        return ()
    biases = float(2 * model.kv_size * job.precision.bytes_per_element)
    weights = biases * model.hidden_size
    return (weights, biases) if model.architecture is Architecture.GPT else (weights,)


def _communication(island: Island, forward: PassTerms, backward: PassTerms) -> PerKind:
    def among_devices(*passes: tuple[Term, ...]) -> float:
        return seconds_of(term for part in passes for term in part if term.cause != device)

    device = island.device.kind
    return PerKind(
        transformer=among_devices(forward.transformer, backward.transformer),
        embedding=among_devices(forward.embedding, backward.embedding),
        head=among_devices(forward.head, backward.head),
    )


def boundary_costs(
    model: ModelSpec,
    cluster: Cluster,
    left: Island,
    right: Island,
    job: Job,
    degrees: Degrees,
    predictor: Predictor,
) -> BoundaryCosts:
    """Transfers from a stage on `left` to the next stage on `right`.

    Inside one island: over the link inside a node where two stages fit in one node, between nodes
    otherwise. That is the faster choice for the boundaries of such an island that do lie between
    two nodes, so a search that uses it can only be too fast there; `boundary_costs_over` prices
    the link that the devices of a plan really use.
    """
    if left.name != right.name:
        link = cluster.link_between(left.name, right.name)
    else:
        link = stage_link(left, 2 * degrees.tp * degrees.dp)
    return boundary_costs_over(link, model, job, degrees, predictor)


def boundary_costs_over(
    link: Link, model: ModelSpec, job: Job, degrees: Degrees, predictor: Predictor
) -> BoundaryCosts:
    """Transfers between two stages over this link.

    A capacity that the link shares is divided by the devices of a stage, which all send at once.
    Other boundaries and other traffic over the same link are not modelled.
    """
    link = link.among(degrees.tp * degrees.dp)
    message = message_bytes(model, job, degrees)
    law = predictor.send(link, message)
    wire = message * law.seconds_per_byte
    return BoundaryCosts(
        link=link_cause(link),
        transport=link.transport,
        message_bytes=message,
        send_forward_seconds=wire,
        send_backward_seconds=wire,
        wire_latency_seconds=law.wire_latency_seconds,
        rendezvous_extra_seconds=max(
            0.0, law.rendezvous_latency_seconds - law.wire_latency_seconds
        ),
        law=law,
    )
