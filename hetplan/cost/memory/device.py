"""What does one microbatch need in a range of layers, and which moment of a step is the worst?

Candidates are all backward passes of a stage's order, and in each of them all layers, from the last
one back. When the backward pass of a layer runs, what the later layers kept is free already, so it
is taken off; not for a trainer that frees nothing before the pass of the whole stage is over.

How much memory does one device of a stage need at the worst moment of a step?

The sum of what is there:

    state         parameters, gradients, optimizer state             `memory.state`
    activations   what all microbatches in flight keep               `memory.activations`
    temporary     what the backward pass of one layer needs besides  `memory.activations`
    buffers       what belongs to no microbatch                      `memory.buffers`

How many microbatches are in flight follows from the order of the stage's passes
(`hetplan.cost.schedules`). The worst moment is in one of its backward passes (`memory.chunks`), or
it is the update of the weights: then no activations are left, but the update allocates of its own.

`total_bytes` is what the allocator hands out. `reserved_bytes` is what it takes from the device:
times a measured factor (`RESERVED_OVER_ALLOCATED`) and what the runtime takes beside it; a fit is
judged by the total against the device's memory less the job's `memory_reserve_fraction`.

The search asks the same of every number of layers at once: `memory.lines`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from hetplan.cost.estimate_values import MemoryUse
from hetplan.cost.memory.activations import (
    Cut,
    LayerBytes,
    cut_of,
    embedding_bytes,
    head_bytes,
    matrix_bytes,
    transformer_bytes,
)
from hetplan.cost.memory.state import (
    State,
    StateBytes,
    boundary_bytes,
    gradient_bytes_per_parameter,
    messages,
    standing_bytes,
    state,
    state_bytes,
)
from hetplan.cost.memory.values import (
    NO_RECOMPUTE,
    RESERVED_OVER_ALLOCATED,
    MemoryLayout,
    TrainerMemory,
    job_memory,
)
from hetplan.cost.schedules import Pass, passes
from hetplan.errors import InputError
from hetplan.job.spec import Job, Optimizer
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import LayerRange


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Bytes of one microbatch in one layer range."""

    kept: float
    """From the start of its forward pass to the end of its backward pass."""
    for_weights: float
    """Still kept from then until the gradients of the weights are made, where that is a pass of its
    own."""
    working: float
    """Most that its backward pass needs beside all that the chunk keeps."""


@lru_cache(maxsize=4096)
def chunk_bytes(
    model: ModelSpec, layers: LayerRange, cut: Cut, habits: TrainerMemory, tokens: float
) -> Chunk:
    """One microbatch of `tokens` tokens of a rank in these layers."""
    kept = for_weights = released = working = 0.0
    first = layers.start + (layers.start == 0)
    again = layers.stop if cut.recompute.layers is None else first + cut.recompute.layers
    keeps = replace(cut, recompute=NO_RECOMPUTE)
    for at in reversed(range(layers.start, layers.stop)):
        one, matrix = layer_bytes(model, at, cut if at < again else keeps, habits)
        one = one.times(tokens)
        working = max(working, one.loss - released, one.working + matrix - released)
        kept += one.kept
        for_weights += one.for_weights
        if habits.frees_as_it_goes:
            released += one.kept
    return Chunk(kept=kept, for_weights=for_weights, working=working)


def layer_bytes(
    model: ModelSpec, at: int, cut: Cut, habits: TrainerMemory
) -> tuple[LayerBytes, float]:
    """What a layer needs per token, and for the gradient of its largest matrix."""
    vocabulary = float(cut.element_bytes * model.vocabulary_matrix(cut.tp))
    if at == 0:
        return embedding_bytes(model, cut, habits), vocabulary
    head = head_bytes(model, cut, habits)
    head_matrix = 0.0 if habits.fused_weight_gradients else vocabulary
    if at > model.num_layers + model.num_mtp_layers:
        return head, head_matrix
    layer, h = model.layer_at(at), model.hidden_size
    inside = transformer_bytes(layer, h, cut, habits)
    matrix = matrix_bytes(layer, h, cut, habits)
    if at <= model.num_layers:
        return inside, matrix
    # Multi-token prediction: both normed halves and their inputs; the layer; the head's own pass.
    halves = 4.0 * h * cut.element_bytes * cut.replicated
    whole = LayerBytes(
        kept=halves + inside.kept + head.kept,
        working=max(head.working, inside.working - head.kept * habits.frees_as_it_goes),
        for_weights=halves + inside.for_weights + head.for_weights,
        loss=head.loss,
    )
    return whole, max(matrix, head_matrix)


def worst_moment(order: tuple[Pass, ...], chunks: tuple[Chunk, ...]) -> tuple[float, float]:
    """(bytes kept, bytes that the pass needs besides) when their sum is largest in this order."""
    splits = any(one.kind == "W" for one in order)
    now, worst = 0.0, (0.0, 0.0)
    for one in order:
        chunk = chunks[one.chunk]
        if one.kind == "F":
            now += chunk.kept
            worst = max(worst, (now, 0.0), key=sum)
        elif one.kind == "B":
            worst = max(worst, (now, chunk.working), key=sum)
            now -= chunk.kept - (chunk.for_weights if splits else 0.0)
            worst = max(worst, (now, 0.0), key=sum)
        else:
            now -= chunk.for_weights
    return worst


__all__ = ["MemoryLayout", "device_memory", "gradient_bytes_per_parameter"]


def device_memory(
    model: ModelSpec,
    job: Job,
    layout: MemoryLayout,
    memory_bytes: float,
    *,
    habits: TrainerMemory | None = None,
    reserve_factor: float = RESERVED_OVER_ALLOCATED,
    runtime_bytes: float = 0.0,
) -> MemoryUse:
    """Bytes on the fullest rank of a stage; `model` has the padded vocabulary that is trained.

    habits: of the job's target and trainer options unless given. runtime_bytes: what driver and
    communication library take outside of the allocator; 0 leaves them to the job's reserve.
    InputError for layer ranges that the model does not have and for schedules that do not exist.
    """
    own = job_memory(job) if habits is None else habits
    each = state_bytes(job, own)
    asked = _Asked(
        sequence_length=job.sequence_length,
        load_factor=job.expert_load_factor,
        adamw=job.optimizer is Optimizer.ADAMW,
        each=each,
    )
    held, kept, working, buffers = _amounts(model, asked, layout, own)
    return MemoryUse(
        parameter_bytes=held.parameter_bytes,
        gradient_bytes=held.gradient_bytes,
        optimizer_bytes=held.optimizer_bytes,
        activation_bytes=kept,
        temporary_bytes=working + held.gathered_bytes,
        buffer_bytes=buffers,
        reserve_factor=reserve_factor,
        runtime_bytes=runtime_bytes,
        available_bytes=memory_bytes * (1 - job.memory_reserve_fraction),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What of a job decides memory."""

    sequence_length: int
    load_factor: float
    adamw: bool
    each: StateBytes


@lru_cache(maxsize=8192)
def _amounts(
    model: ModelSpec, asked: _Asked, layout: MemoryLayout, habits: TrainerMemory
) -> tuple[State, float, float, float]:
    """State, and bytes kept, of working memory and of buffers."""
    cut = cut_of(layout, asked.sequence_length, asked.each.parameter, asked.load_factor)
    tokens = layout.microbatch_size * asked.sequence_length / layout.cp
    positions = _positions(model, layout.chunks)
    held = state(model, layout, asked.each, positions)
    end = model.num_layers + model.num_mtp_layers + 2
    between = messages(
        layout,
        habits,
        boundary_bytes(model, cut, tokens),
        first=layout.chunks[0].start == 0,
        last=layout.chunks[-1].stop == end,
    )
    chunks = tuple(
        _with_message(
            chunk_bytes(model, chunk, cut, habits, tokens),
            0.0 if chunk.stop == end else between.sent,
        )
        for chunk in layout.chunks
    )
    kept, working = _worst(layout, chunks)
    kept += between.received
    working += between.beside
    if asked.adamw and habits.update_bytes:
        count = held.optimizer_bytes / asked.each.optimizer  # what this rank updates
        working = max(working, count * habits.update_bytes - kept)
    return held, kept, working, standing_bytes(model, cut, habits, positions, tokens)


def _positions(model: ModelSpec, chunks: tuple[LayerRange, ...]) -> tuple[int, ...]:
    end = model.num_layers + model.num_mtp_layers + 2
    for chunk in chunks:
        if not 0 <= chunk.start < chunk.stop <= end:
            raise InputError(
                f"layers {chunk.start} to {chunk.stop} of {model.name}, which has layers 0 to {end}"
            )
    return tuple(at for chunk in chunks for at in range(chunk.start, chunk.stop))


def _with_message(chunk: Chunk, message: float) -> Chunk:
    return replace(chunk, kept=chunk.kept + message) if message else chunk


def _worst(layout: MemoryLayout, chunks: tuple[Chunk, ...]) -> tuple[float, float]:
    """Bytes kept, and needed besides, at the worst backward pass of the stage's order."""
    if layout.schedule == "1f1b" and len(chunks) == 1:
        return layout.in_flight * chunks[0].kept, chunks[0].working
    order = passes(
        layout.schedule,
        stage=layout.stage,
        num_stages=layout.num_stages,
        num_microbatches=layout.num_microbatches,
        virtual_stages=len(chunks),
        warmup=layout.warmup if layout.schedule == "1f1b" else None,
    )
    return worst_moment(order, chunks)
