"""How much memory one device of a stage needs, and how many layers fit.

State, bytes per parameter (Rajbhandari et al., arXiv 1910.02054; Megatron-LM's
theoretical_memory_usage.py counts 18, and 6 + 12 / d with its distributed optimizer):

    precision        parameters  gradients  AdamW            SGD
    float32          4           4          8 (m, v)         0
    16 bit           2           4          12 (master, m, v)  4 (master)

Gradients are summed in float32; optimizer state is divided by the ranks that share it.
Activations: `hetplan.model.work.activation_elements` per microbatch in flight (Korthikanti et al.,
arXiv 2205.05198, with fused attention), at the stage's position min(warm-up depth, m) of them,
and one boundary tensor each for the output that a stage keeps until its backward pass.
Native trainer besides: torch.distributed.pipelining.PipelineStage (torch 2.13) allocates one
receive buffer per microbatch of the step for activations and one for gradients, and the data
parallel reduction copies all gradients into one flat buffer.

Temporary: the backward pass of the stage's largest layer (gradients of what it kept, what it
recomputes, the gradient of its largest matrix before that is added up) and one message each way;
or the flat buffer, where that is more than the activations it replaces. The allocator's waste and
the communication library are the job's `memory_reserve_fraction`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetplan.cluster.spec import Island
from hetplan.cost.estimate_values import MemoryUse
from hetplan.job.spec import Job, Optimizer, Precision
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.model.work import activation_elements
from hetplan.plans.build import Degrees
from hetplan.plans.targets import target

GRADIENT_BYTES = 4
"""Of one parameter's gradient, kept and reduced in float32."""
_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PerKind:
    """One amount per kind of layer."""

    transformer: float
    embedding: float
    head: float

    def of(self, transformer_layers: int, embedding: bool, head: bool) -> float:
        """Sum over a stage's layers."""
        total = transformer_layers * self.transformer
        if embedding:
            total += self.embedding
        if head:
            total += self.head
        return total

    def largest(self, embedding: bool, head: bool) -> float:
        """Largest of the layers of a stage, which has at least one transformer layer."""
        present = [self.transformer]
        if embedding:
            present.append(self.embedding)
        if head:
            present.append(self.head)
        return max(present)


def optimizer_bytes_per_parameter(optimizer: Optimizer, precision: Precision) -> int:
    """Optimizer state of one parameter, not shared among ranks."""
    moments = 2 * _FLOAT32_BYTES if optimizer is Optimizer.ADAMW else 0
    master = 0 if precision is Precision.FLOAT32 else _FLOAT32_BYTES
    return moments + master


def stage_parameters(model: ModelSpec, tp: int) -> PerKind:
    """Parameters on one tensor-parallel rank."""
    return PerKind(
        transformer=model.parameters(LayerKind.TRANSFORMER, tp),
        embedding=model.parameters(LayerKind.EMBEDDING, tp),
        head=model.parameters(LayerKind.HEAD, tp),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Memory of one device of a stage as a function of the stage's layers and position."""

    num_layers: int
    """Transformer layers of the model: the most that a stage can hold."""
    num_microbatches: int
    parameters: PerKind
    shared_parameters: float
    """Counted once, not twice, where embedding and head are on one stage (tied)."""
    parameter_bytes: float
    """Per parameter, as the two below."""
    gradient_bytes: float
    optimizer_bytes: float
    activation_bytes: PerKind
    """Kept per microbatch in flight."""
    working_bytes: PerKind
    """Backward pass of one layer."""
    message_bytes: float
    """Activations between two stages, one microbatch."""
    receive_buffers: int
    """Preallocated per neighbour that the stage receives from; 0: none beside the activations."""
    flat_gradients: bool
    """Whether a second copy of all gradients exists during their reduction."""
    available_bytes: float

    def use(
        self, transformer_layers: int, embedding: bool, head: bool, in_flight: int
    ) -> MemoryUse:
        """Bytes on one device with at most `in_flight` microbatches in flight.

        A stage without embedding has a stage before it, one without head a stage after it.
        """
        count = self.parameters.of(transformer_layers, embedding, head)
        if embedding and head:
            count -= self.shared_parameters
        neighbours = (not embedding) + (not head)
        activations = (
            min(in_flight, self.num_microbatches)
            * (
                self.activation_bytes.of(transformer_layers, embedding, head)
                + (0.0 if head else self.message_bytes)
            )
            + neighbours * self.receive_buffers * self.message_bytes
        )
        working = self.working_bytes.largest(embedding, head) + neighbours * self.message_bytes
        flat = count * self.gradient_bytes if self.flat_gradients else 0.0
        return MemoryUse(
            parameter_bytes=count * self.parameter_bytes,
            gradient_bytes=count * self.gradient_bytes,
            optimizer_bytes=count * self.optimizer_bytes,
            activation_bytes=activations,
            temporary_bytes=max(working, flat - activations),
            available_bytes=self.available_bytes,
        )

    def max_transformer_layers(self, embedding: bool, head: bool, in_flight: int) -> int:
        """Most transformer layers that fit, at most the model's; 0 where not even one does."""
        one, two = (self.use(n, embedding, head, in_flight) for n in (1, 2))
        if not one.fits:
            return 0
        # The total is the larger of two lines in n, so later layers cost at least as much as the
        # second: this may be too many where the lines cross, and the check below takes some off.
        slope = two.total_bytes - one.total_bytes
        room = (self.available_bytes - one.total_bytes) / slope
        most = self.num_layers if room >= self.num_layers else 1 + math.floor(room)
        most = min(most, self.num_layers)
        while not self.use(most, embedding, head, in_flight).fits:
            most -= 1
        while most < self.num_layers and self.use(most + 1, embedding, head, in_flight).fits:
            most += 1
        return most


def stage_memory(
    model: ModelSpec,
    island: Island,
    job: Job,
    degrees: Degrees,
    *,
    optimizer_shards: int,
) -> StageMemory:
    """Memory of stages on this island; `model` has the padded vocabulary that is trained."""
    native = target(job.target).name == "native"
    size = job.precision.bytes_per_element
    sequence = job.sequence_length
    num_microbatches = max(1, job.global_batch_size // (degrees.microbatch_size * degrees.dp))

    def kept(kind: LayerKind, full_recompute: bool) -> float:
        return size * activation_elements(
            model,
            kind,
            degrees.microbatch_size,
            sequence,
            degrees.tp,
            full_recompute=full_recompute,
        )

    vocabulary = -(-model.vocab_size // degrees.tp) * model.hidden_size
    layer = kept(LayerKind.TRANSFORMER, False)
    return StageMemory(
        num_layers=model.num_layers,
        num_microbatches=num_microbatches,
        parameters=stage_parameters(model, degrees.tp),
        shared_parameters=vocabulary if model.tied_embeddings else 0.0,
        parameter_bytes=size,
        gradient_bytes=GRADIENT_BYTES,
        optimizer_bytes=optimizer_bytes_per_parameter(job.optimizer, job.precision)
        / optimizer_shards,
        activation_bytes=PerKind(
            transformer=kept(LayerKind.TRANSFORMER, degrees.full_recompute),
            embedding=kept(LayerKind.EMBEDDING, False),
            head=kept(LayerKind.HEAD, False),
        ),
        working_bytes=PerKind(
            transformer=layer * (2 if degrees.full_recompute else 1)
            + size * _largest_matrix(model, degrees.tp),
            embedding=size * vocabulary,
            head=kept(LayerKind.HEAD, False) + size * vocabulary,
        ),
        message_bytes=message_bytes(model, job, degrees),
        receive_buffers=num_microbatches if native else 0,
        flat_gradients=native and degrees.dp > 1,
        available_bytes=island.memory_bytes * (1 - job.memory_reserve_fraction),
    )


def message_bytes(model: ModelSpec, job: Job, degrees: Degrees) -> float:
    """Activations that one device sends to the next stage, per microbatch.

    Every tensor-parallel rank sends them whole: only sequence parallelism would divide them.
    """
    tokens = degrees.microbatch_size * job.sequence_length
    return float(tokens * model.hidden_size * job.precision.bytes_per_element)


def _largest_matrix(model: ModelSpec, tp: int) -> float:
    query = model.attention_size // tp
    kv = max(1, model.num_kv_heads // tp) * model.head_dim
    return float(model.hidden_size * max(query + 2 * kv, model.ffn_hidden_size // tp))
