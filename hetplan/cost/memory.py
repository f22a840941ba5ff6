"""How much memory one device of a stage needs, and how many layers fit.

State, bytes per parameter, by trainer and precision (Rajbhandari et al., arXiv 1910.02054;
Megatron-LM's theoretical_memory_usage.py counts 18, and 6 + 12 / d with its distributed optimizer;
native: hetplan.profiling.updating):

                     parameters  gradients  AdamW              SGD
    float32          4           4          8 (m, v)           0
    16 bit, Megatron 2           4          12 (master, m, v)  4 (master)
    16 bit, native   2           2          16 and 8: 4 more for a float32 copy of the gradients

Optimizer state is divided by the ranks that share it.
Activations: `hetplan.model.work.activation_elements` per microbatch in flight (Korthikanti et al.,
arXiv 2205.05198, with fused attention), at the stage's position min(warm-up depth, m) of them,
and one boundary tensor each for the output that a stage keeps until its backward pass.
Native trainer besides: torch.distributed.pipelining.PipelineStage (torch 2.13) allocates one
receive buffer per microbatch of the step for activations and one for gradients.

Temporary: the backward pass of the stage's largest layer (gradients of what it kept, what it
recomputes, the gradient of its largest matrix before that is added up) and one message each way;
or what the update allocates, where that is more than the activations it replaces (torch's AdamW,
for one tensor: a root and a quotient of its size in float32). The allocator's waste and the
communication library are the job's `memory_reserve_fraction`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetplan.cluster.spec import Island
from hetplan.cost.estimate_values import MemoryUse
from hetplan.job.spec import Job, Optimizer, Precision
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.model.work import activation_elements, largest_matrix
from hetplan.plans.build import Degrees
from hetplan.plans.targets import target

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


def gradient_bytes_per_parameter(job: Job) -> int:
    """One parameter's gradient as it is kept and reduced."""
    return job.precision.bytes_per_element if _is_native(job) else _FLOAT32_BYTES


def optimizer_bytes_per_parameter(job: Job) -> int:
    """Optimizer state of one parameter, not shared among ranks."""
    moments = 2 * _FLOAT32_BYTES if job.optimizer is Optimizer.ADAMW else 0
    if job.precision is Precision.FLOAT32:
        return moments
    return moments + _FLOAT32_BYTES * (2 if _is_native(job) else 1)


def _is_native(job: Job) -> bool:
    return target(job.target).name == "native"


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
    update_bytes: float
    """Per parameter, allocated during the update, when no activations are left."""
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
        return MemoryUse(
            parameter_bytes=count * self.parameter_bytes,
            gradient_bytes=count * self.gradient_bytes,
            optimizer_bytes=count * self.optimizer_bytes,
            activation_bytes=activations,
            temporary_bytes=max(working, count * self.update_bytes - activations),
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
    native = _is_native(job)
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

    vocabulary = model.vocabulary_matrix(degrees.tp)
    layer = kept(LayerKind.TRANSFORMER, False)
    return StageMemory(
        num_layers=model.num_layers,
        num_microbatches=num_microbatches,
        parameters=stage_parameters(model, degrees.tp),
        shared_parameters=vocabulary if model.tied_embeddings else 0.0,
        parameter_bytes=size,
        gradient_bytes=gradient_bytes_per_parameter(job),
        optimizer_bytes=optimizer_bytes_per_parameter(job) / optimizer_shards,
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
        update_bytes=2 * _FLOAT32_BYTES if native and job.optimizer is Optimizer.ADAMW else 0,
        available_bytes=island.memory_bytes * (1 - job.memory_reserve_fraction),
    )


def message_bytes(model: ModelSpec, job: Job, degrees: Degrees) -> float:
    """Activations that one device sends to the next stage, per microbatch.

    Every tensor-parallel rank sends them whole: only sequence parallelism would divide them.
    """
    tokens = degrees.microbatch_size * job.sequence_length
    return float(tokens * model.hidden_size * job.precision.bytes_per_element)


def _largest_matrix(model: ModelSpec, tp: int) -> float:
    return float(largest_matrix(model.common_layer(), model.hidden_size, tp))
