"""How many bytes of parameters, gradients and optimizer state does one device keep?

Bytes per parameter (Rajbhandari et al., arXiv 1910.02054; Megatron-LM's
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

What does a device hold that belongs to no microbatch, and what lies between stages?

placeholders   one tensor per shape of a weight, in place of gradients that went elsewhere
               (Transformer Engine, pytorch/module/base.py, get_dummy_wgrad; Megatron-LM's
               output layer takes one too)
workspace      of the matrix library
gathering      whole copy of the head's input under sequence parallelism, allocated once
               (Megatron-LM, get_global_memory_buffer)
messages       receive buffers, and what was sent and is still kept
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from hetplan.cost.memory.activations import Cut
from hetplan.cost.memory.values import FLOAT32_BYTES, MemoryLayout, TrainerMemory, job_memory
from hetplan.job.spec import Job, Optimizer, Precision
from hetplan.model.layers import Experts, LatentAttention, TransformerLayer
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import Sharding


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


def state(
    model: ModelSpec, layout: MemoryLayout, each: StateBytes, positions: tuple[int, ...]
) -> State:
    """State of the layers at these positions."""
    layers = tuple(weights_at(model, at, layout.tp, layout.ep, layout.etp) for at in positions)
    total = Weights(dense=0.0)
    for one in layers:
        total = total + one
    if tied_on_one_stage(model, positions):
        total = total + Weights(dense=-float(model.vocabulary_matrix(layout.tp)))
    level = tuple(Sharding).index(layout.sharding)
    largest = max((one.total for one in layers), default=0.0)
    gathered = 0.0
    if level >= 2:
        # One layer's gradients are whole until they are reduced to the shards.
        gathered += largest * each.gradient
    if level >= 3:
        # The layer that runs, and the next one, which is gathered meanwhile.
        gathered += 2 * largest * each.parameter
    return State(
        parameter_bytes=each.parameter * _share(total, layout, level >= 3),
        gradient_bytes=each.gradient * _share(total, layout, level >= 2),
        optimizer_bytes=each.optimizer * _share(total, layout, level >= 1) * (1 - layout.offload),
        gathered_bytes=gathered,
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
