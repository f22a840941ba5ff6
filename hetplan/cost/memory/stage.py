"""How much memory does a stage need as a function of its layers, and how many layers fit?

The formulas of `hetplan.cost.memory.device` for models of equal layers, one chunk per stage, and
all else fixed: what the search asks, many times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetplan.cluster.spec import Island
from hetplan.cost.estimate_values import MemoryUse
from hetplan.cost.memory.activations import Cut, cut_of
from hetplan.cost.memory.buffers import boundary_bytes, messages, standing_bytes
from hetplan.cost.memory.chunks import chunk_bytes
from hetplan.cost.memory.state import state_bytes
from hetplan.cost.memory.values import (
    NO_RECOMPUTE,
    RESERVED_OVER_ALLOCATED,
    MemoryLayout,
    TrainerMemory,
    job_memory,
)
from hetplan.job.spec import Job, Optimizer
from hetplan.job.trainer import trainer_settings
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.plans.build import Degrees
from hetplan.plans.plan import LayerRange, Recompute, RecomputeGranularity


@dataclass(frozen=True, slots=True, kw_only=True)
class PerKind:
    """One amount (bytes, or parameters) per kind of layer."""

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
    return state_bytes(job, job_memory(job)).gradient


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
    released_bytes: PerKind
    """Of that, what is free again once the layer's backward pass is over."""
    working_bytes: PerKind
    """Backward pass of one layer, beside all that the stage keeps."""
    message_bytes: float
    """Activations between two stages, one microbatch."""
    sent_bytes: float
    """Kept per microbatch in flight by a stage that has one after it."""
    beside_bytes: float
    """Per neighbour, while a pass runs."""
    receive_buffers: int
    """Preallocated per neighbour that the stage receives from; 0: none beside the activations."""
    buffers: PerKind
    """There all the time; that of transformer layers once, however many there are."""
    update_bytes: float
    """Per parameter, allocated during the update, when no activations are left."""
    reserve_factor: float
    runtime_bytes: float
    available_bytes: float

    def use(
        self, transformer_layers: int, embedding: bool, head: bool, in_flight: int
    ) -> MemoryUse:
        """Bytes on one device with at most `in_flight` microbatches in flight.

        A stage without embedding has a stage before it, one without head a stage after it.
        """
        count, activations, temporary, buffers = self._amounts(
            transformer_layers, embedding, head, in_flight
        )
        return MemoryUse(
            parameter_bytes=count * self.parameter_bytes,
            gradient_bytes=count * self.gradient_bytes,
            optimizer_bytes=count * self.optimizer_bytes,
            activation_bytes=activations,
            temporary_bytes=temporary,
            buffer_bytes=buffers,
            reserve_factor=self.reserve_factor,
            runtime_bytes=self.runtime_bytes,
            available_bytes=self.available_bytes,
        )

    def total_bytes(
        self, transformer_layers: int, embedding: bool, head: bool, in_flight: int
    ) -> float:
        """`use(...).total_bytes`, added up in the same order."""
        count, activations, temporary, buffers = self._amounts(
            transformer_layers, embedding, head, in_flight
        )
        return (
            count * self.parameter_bytes
            + count * self.gradient_bytes
            + count * self.optimizer_bytes
            + activations
            + temporary
            + buffers
        )

    def _amounts(
        self, transformer_layers: int, embedding: bool, head: bool, in_flight: int
    ) -> tuple[float, float, float, float]:
        """Parameters, and bytes of activations, temporary tensors and buffers."""
        parameters, kept, working = self.parameters, self.activation_bytes, self.working_bytes
        count = transformer_layers * parameters.transformer
        activations = transformer_layers * kept.transformer
        buffers = self.buffers.transformer
        # Backward through head, last transformer layer and embedding: the worst of them.
        temporary, neighbours = working.transformer, 2
        if head:
            neighbours = 1
            count += parameters.head
            activations += kept.head
            buffers += self.buffers.head
            temporary = max(working.head, temporary - self.released_bytes.head)
        else:
            activations += self.sent_bytes
        if embedding:
            neighbours -= 1
            count += parameters.embedding
            if head:
                count -= self.shared_parameters
            free = transformer_layers * self.released_bytes.transformer
            if head:
                free += self.released_bytes.head
            temporary = max(temporary, working.embedding - free)
            activations += kept.embedding
        if self.num_microbatches < in_flight:
            in_flight = self.num_microbatches
        activations *= in_flight
        activations += neighbours * self.receive_buffers * self.message_bytes
        temporary += neighbours * self.beside_bytes
        return (
            count,
            activations,
            max(temporary, count * self.update_bytes - activations),
            buffers,
        )

    def max_transformer_layers(self, embedding: bool, head: bool, in_flight: int) -> int:
        """Most transformer layers that fit, at most the model's; 0 where not even one does."""
        room = self.available_bytes
        one, two = (self.total_bytes(n, embedding, head, in_flight) for n in (1, 2))
        if one > room:
            return 0
        # The total is the largest of a few lines in n, so later layers cost at least as much as
        # the second: this may be too many where lines cross, and the check below takes some off.
        most, slope = self.num_layers, two - one
        if slope > 0 and (room - one) / slope < most:
            most = min(most, 1 + math.floor((room - one) / slope))
        while self.total_bytes(most, embedding, head, in_flight) > room:
            most -= 1
        while (
            most < self.num_layers
            and self.total_bytes(most + 1, embedding, head, in_flight) <= room
        ):
            most += 1
        return most


def stage_memory(
    model: ModelSpec,
    island: Island,
    job: Job,
    degrees: Degrees,
    *,
    optimizer_shards: int,
    runtime_bytes: float = 0.0,
) -> StageMemory:
    """Memory of stages on this island; `model` has the padded vocabulary that is trained.

    InputError where the model's transformer layers differ.
    """
    habits = job_memory(job)
    num_microbatches = max(1, job.global_batch_size // (degrees.microbatch_size * degrees.dp))
    layout = degrees_layout(degrees, num_microbatches)
    cut = cut_of(
        layout, job.sequence_length, job.precision.bytes_per_element, job.expert_load_factor
    )
    tokens = float(degrees.microbatch_size * job.sequence_length)
    model.common_layer()
    last = model.num_layers + model.num_mtp_layers + 1
    parts = tuple(
        chunk_bytes(model, LayerRange(start=at, stop=at + 1), cut, habits, tokens)
        for at in (1, 0, last)
    )
    kept = PerKind(transformer=parts[0].kept, embedding=parts[1].kept, head=parts[2].kept)
    each = state_bytes(job, habits)
    message = boundary_bytes(model, cut, tokens)
    between = messages(layout, habits, message, first=True, last=False)
    return StageMemory(
        num_layers=model.num_layers,
        num_microbatches=num_microbatches,
        parameters=stage_parameters(model, degrees.tp),
        shared_parameters=model.vocabulary_matrix(degrees.tp) if model.tied_embeddings else 0.0,
        parameter_bytes=each.parameter,
        gradient_bytes=each.gradient,
        optimizer_bytes=each.optimizer / optimizer_shards,
        activation_bytes=kept,
        released_bytes=kept
        if habits.frees_as_it_goes
        else PerKind(transformer=0.0, embedding=0.0, head=0.0),
        working_bytes=PerKind(
            transformer=parts[0].working, embedding=parts[1].working, head=parts[2].working
        ),
        message_bytes=message,
        sent_bytes=between.sent,
        beside_bytes=between.beside,
        receive_buffers=num_microbatches if habits.receive_buffers else 0,
        buffers=_standing(model, cut, habits, tokens, last),
        update_bytes=habits.update_bytes / optimizer_shards
        if job.optimizer is Optimizer.ADAMW
        else 0.0,
        reserve_factor=RESERVED_OVER_ALLOCATED,
        runtime_bytes=runtime_bytes,
        available_bytes=island.memory_bytes * (1 - job.memory_reserve_fraction),
    )


def degrees_layout(
    degrees: Degrees, num_microbatches: int, chunks: tuple[LayerRange, ...] = ()
) -> MemoryLayout:
    """The layout that a one-pipeline plan's choices mean."""
    full = Recompute(granularity=RecomputeGranularity.FULL)
    return MemoryLayout(
        chunks=chunks,
        tp=degrees.tp,
        etp=degrees.tp,
        dp=degrees.dp,
        microbatch_size=degrees.microbatch_size,
        num_microbatches=num_microbatches,
        recompute=full if degrees.full_recompute else NO_RECOMPUTE,
    )


def _standing(
    model: ModelSpec, cut: Cut, habits: TrainerMemory, tokens: float, last: int
) -> PerKind:
    """Buffers of transformer layers, and what a head adds to them."""
    layers = standing_bytes(model, cut, habits, (1,), tokens)
    with_head = standing_bytes(model, cut, habits, (1, last), tokens)
    return PerKind(transformer=layers, embedding=0.0, head=with_head - layers)


def message_bytes(model: ModelSpec, job: Job, degrees: Degrees) -> float:
    """Activations that one device sends to the next stage, per microbatch.

    Every tensor-parallel rank sends them whole unless the trainer scatters them: else only sequence
    parallelism would divide them.
    """
    tokens = degrees.microbatch_size * job.sequence_length
    whole = float(tokens * model.hidden_size * job.precision.bytes_per_element)
    return whole / (degrees.tp if trainer_settings(job).scattered_sends else 1)
