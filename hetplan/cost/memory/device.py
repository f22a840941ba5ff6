"""Memory that one device of a stage needs at the worst moment of a step.

The sum of what is there:

    state         parameters, gradients, optimizer state
    activations   what all microbatches in flight keep               `memory.activations`
    temporary     what the backward pass of one layer needs besides  `memory.activations`
    buffers       what belongs to no microbatch

How many microbatches are in flight follows from the order of the stage's passes
(`hetplan.cost.schedules`). The worst moment is in one of its backward passes, or it is the update
of the weights: then no activations are left, but the update allocates of its own. In a backward
pass all layers are candidates, from the last one back: what the later layers kept is free already,
so it is taken off; not for a trainer that frees nothing before the pass of the whole stage is over.

`total_bytes` is what the allocator hands out. `reserved_bytes` is what it takes from the device:
times a measured factor (`RESERVED_OVER_ALLOCATED`) and what the runtime takes beside it; a fit is
judged by the total against the device's memory less the job's `memory_reserve_fraction`. The search
asks the same of every number of layers at once: `memory.lines`.

State in bytes per parameter (Rajbhandari et al., arXiv 1910.02054; Megatron-LM's
theoretical_memory_usage.py counts 18, and 6 + 12 / d with its distributed optimizer; native:
hetplan.profiling.weights):

                     parameters  gradients  AdamW              SGD
    float32          4           4          8 (m, v)           0
    16 bit, Megatron 2           4          12 (master, m, v)  4 (master)
    16 bit, native   2           2          16 and 8: 4 more for a float32 copy of the gradients

Divided by the ranks that share them: the optimizer's from level `optimizer` on (ZeRO-1), gradients
from `gradients` on, parameters with `parameters`. Routed experts' weights are on fewer ranks than
the rest, tp / (ep * etp) as many, and shared by as many fewer. What is cut has to be whole while a
layer runs: `gathered_bytes`.

Buffers, and what lies between stages:

placeholders   one tensor per shape of a weight, in place of gradients that went elsewhere
               (Transformer Engine, pytorch/module/base.py, get_dummy_wgrad; Megatron-LM's
               output layer takes one too)
workspace      of the matrix library
gathering      whole copy of the head's input under sequence parallelism, allocated once
               (Megatron-LM, get_global_memory_buffer)
messages       receive buffers, and what was sent and is still kept
"""

from __future__ import annotations

from collections.abc import Iterable
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
from hetplan.cost.memory.values import (
    FLOAT32_BYTES,
    RESERVED_OVER_ALLOCATED,
    MemoryLayout,
    TrainerMemory,
    job_memory,
)
from hetplan.cost.schedules import passes
from hetplan.errors import InputError
from hetplan.job.spec import Job, Optimizer, Precision
from hetplan.model.layers import Experts, LatentAttention, TransformerLayer
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import NO_RECOMPUTE, LayerRange, Sharding
from hetplan.plans.v_schedules import Pass, is_v


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Parameters on one rank."""

    dense: float
    """Everything but routed experts."""
    routed: float = 0.0

    def __add__(self, other: Weights) -> Weights:
        return Weights(dense=self.dense + other.dense, routed=self.routed + other.routed)

    @property
    def total(self) -> float:
        """Both."""
        return self.dense + self.routed


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes per parameter that is not shared among ranks."""

    parameter: int
    gradient: int
    optimizer: int

    @property
    def host(self) -> int:
        """Where the optimizer is in host memory: there lie its state, the gradient that came down
        and the weight that goes up (megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py).
        """
        return self.parameter + self.gradient + self.optimizer


def state_bytes(job: Job, habits: TrainerMemory) -> StateBytes:
    """What one parameter costs under this job and trainer."""
    size = job.precision.bytes_per_element
    moments = 2 * FLOAT32_BYTES if job.optimizer is Optimizer.ADAMW else 0
    copies = 0 if job.precision is Precision.FLOAT32 else habits.master_bytes
    gradient = size if habits.gradient_bytes is None else habits.gradient_bytes
    return StateBytes(parameter=size, gradient=gradient, optimizer=moments + copies)


def gradient_bytes_per_parameter(job: Job) -> int:
    """One parameter's gradient as it is kept and reduced."""
    return state_bytes(job, job_memory(job)).gradient


@lru_cache(maxsize=4096)
def weights_at(
    model: ModelSpec, position: int, tp: int = 1, ep: int = 1, etp: int | None = None
) -> Weights:
    """Parameters that one rank holds of the layer at this position; `etp` is tp unless given."""
    whole = model.parameters_at(position, tp)
    if not 1 <= position <= model.num_layers + model.num_mtp_layers:
        return Weights(dense=float(whole))
    mlp = model.layer_at(position).mlp
    if not isinstance(mlp, Experts):
        return Weights(dense=float(whole))
    h = model.hidden_size
    here = mlp.num_experts * mlp.expert.parameters(h, tp)
    mine = -(-mlp.num_experts // ep) * mlp.expert.parameters(h, tp if etp is None else etp)
    return Weights(dense=float(whole - here), routed=float(mine))


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Bytes of one device's state, and what it gathers while a layer runs."""

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    gathered_bytes: float
    host_bytes: float


def state(
    model: ModelSpec, layout: MemoryLayout, each: StateBytes, positions: tuple[int, ...]
) -> State:
    """State of the layers at these positions."""
    shape = layout.shape
    layers = tuple(weights_at(model, at, shape.tp, shape.ep, shape.etp) for at in positions)
    total = Weights(dense=0.0)
    for one in layers:
        total = total + one
    if tied_on_one_stage(model, positions):
        total = total + Weights(dense=-float(model.vocabulary_matrix(shape.tp)))
    level = tuple(Sharding).index(layout.sharding)
    largest = max((one.total for one in layers), default=0.0)
    gathered = 0.0
    if level >= 2 and layout.shards > 1:
        # One layer's gradients are whole until they are reduced to the shards.
        gathered += largest * each.gradient
    if level >= 3 and layout.shards > 1:
        # The layer that runs, and the next one, which is gathered meanwhile.
        gathered += 2 * largest * each.parameter
    own = _share(total, layout, level >= 1)
    return State(
        parameter_bytes=each.parameter * _share(total, layout, level >= 3),
        gradient_bytes=each.gradient * _share(total, layout, level >= 2),
        optimizer_bytes=each.optimizer * own * (1 - layout.offload),
        gathered_bytes=gathered,
        host_bytes=each.host * own * layout.offload,
    )


def _share(total: Weights, layout: MemoryLayout, split: bool) -> float:
    if not split:
        return total.total
    return total.dense / layout.shards + total.routed / layout.routed_shards


def tied_on_one_stage(model: ModelSpec, positions: tuple[int, ...]) -> bool:
    """Whether embedding and head share one matrix here."""
    last = model.num_layers + model.num_mtp_layers + 1
    return model.tied_embeddings and 0 in positions and last in positions


@lru_cache(maxsize=1024)
def weight_shapes(
    layer: TransformerLayer, hidden: int, tp: int, etp: int
) -> frozenset[tuple[int, int]]:
    """Shapes of a layer's matrices on one rank; every routed expert has the same ones.

    The router is no matrix of these: its gradient is taken in float32, apart.
    """
    h, attention, mlp = hidden, layer.attention, layer.mlp
    shapes = []
    if isinstance(attention, LatentAttention):
        query, value = attention.slice_sizes(tp)
        keys = attention.num_heads // tp * attention.nope_head_dim
        rank = attention.query_rank
        shapes += [(query, h)] if rank is None else [(rank, h), (query, rank)]
        shapes += [(attention.kv_rank + attention.rope_head_dim, h)]
        shapes += [(keys + value, attention.kv_rank), (h, value)]
    else:
        query, kv = attention.slice_sizes(tp)
        shapes += [(query + 2 * kv, h), (h, query)]
    parts = [(mlp, tp)] if not isinstance(mlp, Experts) else [(mlp.expert, etp)]
    if isinstance(mlp, Experts) and mlp.shared is not None:
        parts.append((mlp.shared, tp))
    for part, degree in parts:
        columns = part.ffn_hidden_size // degree
        shapes += [((2 if part.gated else 1) * columns, h), (h, columns)]
    return frozenset(shapes)


@lru_cache(maxsize=1024)
def placeholder_elements(
    model: ModelSpec, layout_tp: int, layout_etp: int, positions: tuple[int, ...]
) -> float:
    """Elements of one tensor for each different shape of a weight on the stage."""
    h, last = model.hidden_size, model.num_layers + model.num_mtp_layers + 1
    shapes: set[tuple[int, int]] = set()
    for at in positions:
        if at == last:
            shapes.add((model.vocabulary_slice(layout_tp), model.embedding_width))
        elif at > 0:
            shapes |= weight_shapes(model.layer_at(at), h, layout_tp, layout_etp)
            if at > model.num_layers:
                shapes.add((-(-h // layout_tp), 2 * h))
    return float(sum(rows * columns for rows, columns in shapes))


def standing_bytes(
    model: ModelSpec,
    cut: Cut,
    habits: TrainerMemory,
    positions: tuple[int, ...],
    tokens: float,
) -> float:
    """Bytes that are there during all of a step, whatever is in flight."""
    last = model.num_layers + model.num_mtp_layers + 1
    total = habits.workspace_bytes
    if any(0 < at < last and isinstance(model.layer_at(at).mlp, Experts) for at in positions):
        total += habits.experts_workspace_bytes
    if habits.placeholder_gradients:
        total += cut.element_bytes * placeholder_elements(model, cut.tp, cut.etp, positions)
    if cut.gathers and habits.frees_as_it_goes and positions[-1] == last:
        total += tokens * model.hidden_size * cut.element_bytes
    return total


def boundary_bytes(model: ModelSpec, cut: Cut, tokens: float) -> float:
    """One microbatch's activations between two stages, on one rank."""
    return tokens * model.hidden_size * cut.element_bytes * cut.replicated


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """Bytes for what crosses the stage's boundaries."""

    received: float
    """Buffers that are there all the time."""
    sent: float
    """Kept with every microbatch in flight, in every chunk but the model's last."""
    beside: float
    """While a pass runs."""


def messages(
    layout: MemoryLayout, habits: TrainerMemory, message: float, *, first: bool, last: bool
) -> Messages:
    """Messages of a stage: `first` has no stage before it, `last` none after.

    A received gradient is the working memory of the layer that it enters, a received input is
    kept by the layer that reads it; neither is counted here.
    """
    neighbours = (not first) + (not last)
    if is_v(layout.schedule):
        # Down and up again; nothing is sent where the V turns.
        edges = (layout.stage > 0) + (layout.stage < layout.num_stages - 1)
        neighbours = 2 * edges
    if habits.receive_buffers:
        # Receives that are posted when there is room need no buffers for later microbatches.
        posted = layout.in_flight if layout.early_sends else layout.num_microbatches
        return Messages(
            received=neighbours * posted * message,
            sent=message if habits.keeps_output else 0.0,
            beside=neighbours * message,
        )
    # With several chunks the next pass's inputs are received while this one runs, in both
    # directions (Megatron-LM's interleaved schedule); with one chunk sends and receives end first.
    ahead = 2.0 * message if len(layout.chunks) > 1 else 0.0
    return Messages(received=0.0, sent=message if habits.keeps_output else 0.0, beside=ahead)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Backward passes of layers from the last one on."""

    tokens: float
    frees: bool
    kept: float = 0.0
    for_weights: float = 0.0
    released: float = 0.0
    working: float = 0.0
    """The worst moment's."""

    def add(self, layers: Iterable[tuple[LayerBytes, float]]) -> Moments:
        """The moments with these layers, as `layer_bytes` gives them, in front."""
        kept, for_weights = self.kept, self.for_weights
        released, working = self.released, self.working
        for per_token, matrix in layers:
            one = per_token.times(self.tokens)
            working = max(working, one.loss - released, one.working + matrix - released)
            kept += one.kept
            for_weights += one.for_weights
            released += one.kept * self.frees
        return replace(self, kept=kept, for_weights=for_weights, released=released, working=working)


@lru_cache(maxsize=4096)
def chunk_bytes(
    model: ModelSpec, layers: LayerRange, cut: Cut, habits: TrainerMemory, tokens: float
) -> Chunk:
    """One microbatch of `tokens` tokens of a rank in these layers."""
    first = layers.start + (layers.start == 0)
    again = layers.stop if cut.recompute.layers is None else first + cut.recompute.layers
    keeps = replace(cut, recompute=NO_RECOMPUTE)
    found = Moments(tokens=tokens, frees=habits.frees_as_it_goes).add(
        layer_bytes(model, at, cut if at < again else keeps, habits)
        for at in reversed(range(layers.start, layers.stop))
    )
    return Chunk(kept=found.kept, for_weights=found.for_weights, working=found.working)


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
        elif one.kind != "W":
            worst = max(worst, (now, chunk.working), key=sum)
            now -= chunk.kept - (chunk.for_weights if splits and one.kind == "B" else 0.0)
            worst = max(worst, (now, 0.0), key=sum)
        else:
            now -= chunk.for_weights
    return worst


def device_memory(
    model: ModelSpec,
    job: Job,
    layout: MemoryLayout,
    memory_bytes: float,
    host_bytes: float | None = None,
) -> MemoryUse:
    """Bytes on the fullest rank of a stage; `model` has the padded vocabulary that is trained.

    `host_bytes`: the device's part of its host's memory, where that is known. What driver and
    communication library take outside of the allocator is left to the job's reserve. InputError for
    layer ranges that the model does not have and for schedules that do not exist.
    """
    habits = job_memory(job)
    use = _use(
        model,
        layout,
        habits,
        state_bytes(job, habits),
        job.sequence_length,
        job.expert_load_factor,
        job.optimizer is Optimizer.ADAMW,
    )
    room = memory_bytes * (1 - job.memory_reserve_fraction)
    return replace(use, available_bytes=room, host_available_bytes=host_bytes)


@lru_cache(maxsize=8192)
def _use(
    model: ModelSpec,
    layout: MemoryLayout,
    habits: TrainerMemory,
    each: StateBytes,
    sequence_length: int,
    load_factor: float,
    adamw: bool,
) -> MemoryUse:
    """`device_memory` on a device of no size."""
    cut = cut_of(layout, sequence_length, each.parameter, load_factor)
    tokens = layout.shape.microbatch_size * sequence_length / layout.shape.cp
    positions = _positions(model, layout.chunks)
    held = state(model, layout, each, positions)
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
    if adamw and habits.update_bytes:
        count = held.optimizer_bytes / each.optimizer  # what this rank updates
        working = max(working, count * habits.update_bytes - kept)
    return MemoryUse(
        parameter_bytes=held.parameter_bytes,
        gradient_bytes=held.gradient_bytes,
        optimizer_bytes=held.optimizer_bytes,
        activation_bytes=kept,
        temporary_bytes=working + held.gathered_bytes,
        buffer_bytes=standing_bytes(model, cut, habits, positions, tokens),
        reserve_factor=RESERVED_OVER_ALLOCATED,
        available_bytes=0.0,
        host_bytes=held.host_bytes,
    )


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
