"""Does a stage fit? Bytes of its fullest device, written from the papers and the trainers' habits.

One microbatch of T tokens on a rank keeps, per token and layer (arXiv 2205.05198, section 4, with
fused attention), inputs and outputs of two norms, queries, keys, values, result, and the MLP's
columns; with experts the permuted copies of the token. State per parameter: weights, gradients,
optimizer (arXiv 1910.02054). The worst moment is a layer's backward pass, or the update.

For models of RMSNorm, rotary attention with shared key-value heads, gated MLPs or gated experts
without shared ones and biases, and AdamW: what `oracle_instances` makes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from oracle_replay import UP, eager_order

from hetplan.job.spec import Job, Precision
from hetplan.model.layers import Attention, Experts
from hetplan.model.spec import ModelSpec
from hetplan.plans.chosen import Shape
from hetplan.plans.plan import Recompute, RecomputeGranularity, RecomputeModule, Sharding

MIB = 2**20


@dataclass(frozen=True)
class Habits:
    """What differs between trainers, in bytes per parameter, per column, per logit or in all."""

    gradient: int | None
    """None: as wide as the weight."""
    beside_moments: int
    """Float32 copies of 16-bit weights (and gradients) in the optimizer's state."""
    columns: float
    """Elements kept per column of a gated MLP."""
    logits_narrow: float
    """More than the float32 softmax while the loss is made, 16-bit logits."""
    logits_wide: float
    keeps_more: bool
    """RMSNorm's result before its scale, the result of shared heads; what was sent; buffers for
    all microbatches; matrix gradients apart."""
    packed: bool
    """Beside rotated queries and keys the projection that they are views of."""
    update: int
    """AdamW's temporary tensors: a root and a quotient of each updated parameter's size."""
    standing: float
    experts_standing: float
    placeholders: bool


# Megatron-LM: float32 gradients, a float32 master copy, fused activation (gate, up, product),
# cuBLAS and Transformer Engine workspaces of 32 MiB each, four more for grouped products.
MEGATRON = Habits(4, 4, 3.0, 2.0, 0.0, False, False, 0, 64.0 * MIB, 128.0 * MIB, True)
# hetplan's own layers: gradients as weights, float32 copies of both, activation not fused.
NATIVE = Habits(None, 8, 4.0, 6.0, 4.0, True, True, 8, 0.0, 0.0, False)
# torch's layers with FSDP2: float32 sums of gradients, a fused optimizer, three projections.
TORCHTITAN = Habits(4, 4, 4.0, 6.0, 4.0, True, False, 0, 0.0, 0.0, False)
HABITS = {
    "native": NATIVE,
    "megatron": MEGATRON,
    "flagscale": MEGATRON,
    "torchtitan": TORCHTITAN,
    "any": MEGATRON,
}


@dataclass(frozen=True)
class Held:
    """What a device of a stage runs."""

    shape: Shape
    chunks: tuple[tuple[int, int], ...]
    """Layer positions, half open; 0 is the embedding."""
    recompute: Recompute
    copies: int
    """Ranks over which a dense weight's optimizer state is split; 1: not at all."""
    stage: int
    stages: int
    microbatches: int
    depth: int
    """Of 1F1B with one chunk."""
    early: bool = False
    """Sends do not wait: receives are posted for what is in flight."""
    offload: float = 0.0
    """Part of the optimizer that is in host memory."""
    sharding: Sharding = Sharding.OPTIMIZER


@dataclass(frozen=True)
class _Layer:
    kept: float
    working: float
    loss: float = 0.0
    matrix: float = 0.0


@lru_cache(maxsize=100000)
def peak_bytes(model: ModelSpec, job: Job, held: Held) -> float:
    """Most bytes that the allocator hands out; `model` has the padded vocabulary."""
    habits, shape = HABITS[job.target], held.shape
    e = job.precision.bytes_per_element
    last = model.num_layers + model.num_mtp_layers + 1
    tokens = shape.microbatch_size * job.sequence_length / shape.cp
    here = [at for start, stop in held.chunks for at in range(start, stop)]
    dense, routed = _weights(model, shape, here)
    gradient = e if habits.gradient is None else habits.gradient
    own = _mine(held, dense, routed)
    mine = own * (1.0 - held.offload)
    state = (dense + routed) * (e + gradient) + mine * _optimizer(job)
    if held.sharding in (Sharding.GRADIENTS, Sharding.PARAMETERS) and held.copies > 1:
        # Whole are the gradients of one layer, and the parameters of one and of the next.
        largest = max(sum(parameters_at(model, shape, at)) for at in here)
        state += (own - dense - routed + largest) * gradient
        if held.sharding is Sharding.PARAMETERS:
            state += (own - dense - routed + 2 * largest) * e
    cut = 1.0 / shape.tp if shape.sequence_parallel else 1.0
    message = tokens * model.hidden_size * e * cut
    keeps = habits.keeps_more
    each = []
    for start, stop in held.chunks:
        kept, working = _chunk(model, job, held, start, stop, tokens)
        if keeps and stop <= last:
            kept += message
        each.append((kept, working))
    kept, working = _worst(held, each)
    neighbours = (here[0] > 0) + (here[-1] < last)
    if keeps:
        posted = min(held.depth, held.microbatches) if held.early else held.microbatches
        kept += neighbours * posted * message
        working += neighbours * message
        working = max(working, mine * habits.update - kept)
    elif len(held.chunks) > 1:
        working += 2 * message
    buffers = habits.standing
    if any(0 < at < last and isinstance(model.layer_at(at).mlp, Experts) for at in here):
        buffers += habits.experts_standing
    if habits.placeholders:
        buffers += e * _placeholders(model, shape, tuple(here))
    if shape.sequence_parallel and here[-1] == last:
        buffers += tokens * model.hidden_size * e
    return state + kept + working + buffers


def host_bytes(model: ModelSpec, job: Job, held: Held) -> float:
    """Of a device's part of the optimizer: state, gradients that came down, weights that go up."""
    e, gradient = job.precision.bytes_per_element, HABITS[job.target].gradient
    here = [at for start, stop in held.chunks for at in range(start, stop)]
    each = e + (e if gradient is None else gradient) + _optimizer(job)
    return held.offload * each * _mine(held, *_weights(model, held.shape, here))


def _optimizer(job: Job) -> int:
    copies = 0 if job.precision is Precision.FLOAT32 else HABITS[job.target].beside_moments
    return 8 + copies


def _mine(held: Held, dense: float, routed: float) -> float:
    """Parameters whose optimizer state is this rank's."""
    shape = held.shape
    expert_ranks = shape.num_devices // (shape.ep * shape.etp)
    alike = shape.ep == 1 and shape.etp == shape.tp
    shared = _gcd(held.copies, expert_ranks) if not alike else held.copies
    return dense / held.copies + routed / shared


def _gcd(one: int, two: int) -> int:
    while two:
        one, two = two, one % two
    return one


def parameters_at(model: ModelSpec, shape: Shape, at: int) -> tuple[float, float]:
    """(weights of every rank of a tensor-parallel position, routed experts' apart) of one layer."""
    whole = float(model.parameters_at(at, shape.tp))
    if not 1 <= at <= model.num_layers + model.num_mtp_layers:
        return whole, 0.0
    mlp, h = model.layer_at(at).mlp, model.hidden_size
    if not isinstance(mlp, Experts):
        return whole, 0.0
    inside = mlp.num_experts * mlp.expert.parameters(h, shape.tp)
    return whole - inside, mlp.num_experts // shape.ep * mlp.expert.parameters(h, shape.etp)


def _weights(model: ModelSpec, shape: Shape, here: list[int]) -> tuple[float, float]:
    pairs = [parameters_at(model, shape, at) for at in here]
    dense, routed = (sum(column) for column in zip(*pairs, strict=True))
    last = model.num_layers + model.num_mtp_layers + 1
    if model.tied_embeddings and 0 in here and last in here:
        dense -= model.vocabulary_matrix(shape.tp)
    return dense, routed


def _worst(held: Held, each: list[tuple[float, float]]) -> tuple[float, float]:
    if len(each) == 1:
        return min(held.depth, held.microbatches) * each[0][0], each[0][1]
    now = most = 0.0
    found = (0.0, 0.0)
    order = eager_order(held.stages, held.microbatches, len(each), held.stage, 0)
    for way, chunk, _ in order:
        kept, working = each[chunk]
        if way == UP:
            moment = (now, working)
            now -= kept
        else:
            now += kept
            moment = (now, 0.0)
        if sum(moment) > most:
            most, found = sum(moment), moment
    return found


def _chunk(
    model: ModelSpec, job: Job, held: Held, start: int, stop: int, tokens: float
) -> tuple[float, float]:
    """(kept, needed besides in the backward pass): what later layers kept is free by then."""
    kept = working = 0.0
    for at in range(stop - 1, start - 1, -1):
        one = _layer(model, job, held.shape, held.recompute, at)
        needed = max(one.loss * tokens, one.working * tokens + one.matrix)
        working = max(working, needed - kept)
        kept += one.kept * tokens
    return kept, working


def _layer(model: ModelSpec, job: Job, shape: Shape, recompute: Recompute, at: int) -> _Layer:
    habits, e, h = HABITS[job.target], job.precision.bytes_per_element, model.hidden_size
    apart = 1.0 if habits.keeps_more else 0.0
    vocabulary = float(e * model.vocabulary_matrix(shape.tp))
    cut = 1.0 / shape.tp if shape.sequence_parallel else 1.0
    if at == 0:
        return _Layer(float(e), 0.0, matrix=vocabulary)
    if at > model.num_layers:
        assert not model.num_mtp_layers
        logits = model.vocab_size // shape.tp
        return _Layer(
            kept=(2 + apart) * h * e * cut + 4.0 * logits,
            working=h * e + (h * e * cut if shape.sequence_parallel else 0.0),
            loss=logits * (habits.logits_narrow if e < 4 else habits.logits_wide),
            matrix=apart * vocabulary,
        )
    return _transformer(model, job, shape, recompute, at)


def _transformer(model: ModelSpec, job: Job, shape: Shape, recompute: Recompute, at: int) -> _Layer:
    habits, e, h = HABITS[job.target], job.precision.bytes_per_element, model.hidden_size
    apart = 1.0 if habits.keeps_more else 0.0
    layer = model.layer_at(at)
    attention = layer.attention
    assert isinstance(attention, Attention)
    cut = 1.0 / shape.tp if shape.sequence_parallel else 1.0
    output = h * e * cut
    whole = h * e if shape.sequence_parallel else 0.0
    query, keys = attention.slice_sizes(shape.tp)
    result = query
    norms = (4 + 2 * apart) * h * e * cut + 2 * 4 * cut
    core = attention.num_heads / shape.tp * 4.0
    if attention.num_kv_heads < attention.num_heads:
        core += apart * result * e
    # Scores are written where attention is not fused.
    scores = 0.0
    if job.trainer.fused_attention is False:
        scores = attention.num_heads / shape.tp * (job.sequence_length / shape.cp) * e
    core += scores
    packed = habits.packed * (query + keys) * e
    around = (query + 2 * keys + result) * e + packed
    ring = shape.cp * (2 * keys + result) * e if shape.cp > 1 else 0.0
    gradients = (2 * (query + 2 * keys) + result) * e + 4 * query
    attends = max(ring, output + gradients + 2 * scores + whole)
    again = 0.0
    modules = recompute.modules
    if RecomputeModule.CORE_ATTENTION in modules:
        again, core = core, 0.0
    outputs = 2 * output if RecomputeModule.NORMS in modules else 0.0
    mlp_kept, mlp_working, product = _mlp(model, job, shape, at, output, whole)
    mine = RecomputeModule.EXPERTS if isinstance(layer.mlp, Experts) else RecomputeModule.MLP
    mlp_again = mlp_kept if mine in modules else 0.0
    if RecomputeModule.ACTIVATION in modules and mine not in modules:
        mlp_again = product
    mlp_kept -= mlp_again
    kept = norms - outputs + around + core + mlp_kept
    working = max(mlp_working + mlp_again, attends + again - mlp_kept) + outputs
    if recompute.granularity is RecomputeGranularity.FULL:
        return _Layer(output, working + kept - output, matrix=apart * _largest(model, shape, at, e))
    return _Layer(kept, working, matrix=apart * _largest(model, shape, at, e))


def _mlp(
    model: ModelSpec, job: Job, shape: Shape, at: int, output: float, whole: float
) -> tuple[float, float, float]:
    """(kept, needed besides, of what is kept the product of gate and up)."""
    habits, e, h = HABITS[job.target], job.precision.bytes_per_element, model.hidden_size
    mlp = model.layer_at(at).mlp
    if not isinstance(mlp, Experts):
        width = mlp.ffn_hidden_size // shape.tp * e
        working = max(output + whole + width, output + 2 * width, output + h * e + whole - width)
        return habits.columns * width, working, width
    cut = 1.0 / shape.tp if shape.sequence_parallel else 1.0
    busiest = job.expert_load_factor if shape.ep > 1 else 1.0
    copies = mlp.experts_per_token * cut * shape.etp * busiest
    width = mlp.expert_ffn_hidden_size // shape.etp * e
    each = h * e + habits.columns * width + 4 + (h * e if habits.keeps_more else 0.0)
    kept = 8.0 * mlp.num_experts * cut + copies * each
    working = output + copies * max(2.0 * h * e, h * e + width, 2 * width)
    return kept, working, copies * width


def _largest(model: ModelSpec, shape: Shape, at: int, e: int) -> float:
    layer, h = model.layer_at(at), model.hidden_size
    assert isinstance(layer.attention, Attention)
    query, keys = layer.attention.slice_sizes(shape.tp)
    wide = query + 2 * keys
    mlp = layer.mlp
    if isinstance(mlp, Experts):
        wide = max(wide, mlp.num_experts * (mlp.expert_ffn_hidden_size // shape.tp))
    else:
        wide = max(wide, mlp.ffn_hidden_size // shape.tp)
    return float(e * h * wide)


def _placeholders(model: ModelSpec, shape: Shape, here: tuple[int, ...]) -> float:
    """Elements of one tensor per different shape of a weight."""
    h, last = model.hidden_size, model.num_layers + model.num_mtp_layers + 1
    shapes = set()
    for at in here:
        if at == last:
            shapes.add((model.vocab_size // shape.tp, h))
        elif at > 0:
            layer = model.layer_at(at)
            assert isinstance(layer.attention, Attention)
            query, keys = layer.attention.slice_sizes(shape.tp)
            mlp = layer.mlp
            if isinstance(mlp, Experts):
                width = mlp.expert_ffn_hidden_size // shape.etp
            else:
                width = mlp.ffn_hidden_size // shape.tp
            shapes |= {(query + 2 * keys, h), (h, query), (2 * width, h), (h, width)}
    return float(sum(a * b for a, b in shapes))
