"""How much work one layer is: floating-point operations and bytes moved.

Everything is per microbatch and per tensor-parallel rank. 2 operations per multiply-add. The
attention core is counted causally, as it is computed by a fused kernel: half of the s x s square,
or of a window w < s the band w s - w^2 / 2 (its diagonal counted half, as the square's is, so that
w = s is the whole triangle). Formulas with the full square have 2 * b * s^2 * h more per layer.
Experts: every token meets `experts_per_token` routed experts, all on this rank's devices (expert
parallelism 1); nothing is dropped or padded.

What a layer keeps for its backward pass depends on the trainer as well and is not said here.

Forms: Narayanan et al., arXiv 2104.04473, section 3.1 (operations); DeepSeek-V2, arXiv 2405.04434,
equations 9 to 19 (latent attention, as trained); arXiv 2401.06066, equations 9 to 11 (experts);
DeepSeek-V3, arXiv 2412.19437, equations 21 to 23 (multi-token prediction).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from hetplan.model.layers import (
    Attention,
    Experts,
    LatentAttention,
    Mlp,
    TransformerLayer,
)
from hetplan.model.spec import LayerKind, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """Work of the forward pass of one layer on one tensor-parallel rank, for one microbatch."""

    matrix_flops: float
    """Operations of the matrix products with weights."""
    attention_flops: float
    """Operations of scores and context."""
    weight_elements: float
    """Parameters read by the matrix products."""
    elementwise_elements: float
    """Elements read or written by everything that is not a matrix product."""

    @property
    def flops(self) -> float:
        """All operations of the forward pass."""
        return self.matrix_flops + self.attention_flops

    def __add__(self, other: LayerWork) -> LayerWork:
        return LayerWork(
            matrix_flops=self.matrix_flops + other.matrix_flops,
            attention_flops=self.attention_flops + other.attention_flops,
            weight_elements=self.weight_elements + other.weight_elements,
            elementwise_elements=self.elementwise_elements + other.elementwise_elements,
        )


def layer_work(
    model: ModelSpec, kind: LayerKind, microbatch_size: int, sequence_length: int, tp: int = 1
) -> LayerWork:
    """Forward work of one layer; the backward pass is twice the operations.

    An InputError where the kind is `transformer` and the model's transformer layers differ at
    this length: ask `layer_work_at` for each.
    """
    b, s, h = microbatch_size, sequence_length, model.hidden_size
    if kind is LayerKind.EMBEDDING:
        return _embedding(model, b * s)
    if kind is LayerKind.HEAD:
        return _head(model, b * s, tp)
    if kind is LayerKind.TRANSFORMER:
        return transformer_work(model.common_layer(s), h, b, s, tp)
    return _multi_token_prediction(model, b, s, tp)


def layer_work_at(
    model: ModelSpec, position: int, microbatch_size: int, sequence_length: int, tp: int = 1
) -> LayerWork:
    """Forward work of the layer at this position of the row, whatever the others are."""
    kind = model.kind_at(position)
    if kind is LayerKind.TRANSFORMER:
        layer, h = model.layer_at(position), model.hidden_size
        return transformer_work(layer, h, microbatch_size, sequence_length, tp)
    return layer_work(model, kind, microbatch_size, sequence_length, tp)


@lru_cache(maxsize=4096)
def transformer_work(
    layer: TransformerLayer, hidden: int, microbatch_size: int, sequence_length: int, tp: int = 1
) -> LayerWork:
    """Forward work of one transformer layer."""
    b, s, h = microbatch_size, sequence_length, hidden
    # norms read and write h each, two residual additions read and write h each (an addition's
    # second operand, just written, is not counted; efficiencies are measured against this count).
    residual = LayerWork(
        matrix_flops=0.0,
        attention_flops=0.0,
        weight_elements=0.0,
        elementwise_elements=b * s * (2.0 * layer.num_norms + 4.0) * h,
    )
    mlp = layer.mlp
    return (
        residual
        + _attention(layer.attention, h, b, s, tp)
        + (_mlp(mlp, h, b * s, tp) if isinstance(mlp, Mlp) else _experts(mlp, h, b * s, tp))
    )


def attended(sequence_length: int, window: int | None) -> float:
    """Query-key pairs of one head in one sequence."""
    s = float(sequence_length)
    w = s if window is None else min(float(window), s)
    return w * s - w * w / 2.0


def _attention(
    attention: Attention | LatentAttention, h: int, b: int, s: int, tp: int
) -> LayerWork:
    tokens = b * s
    weights = float(attention.matrix_parameters(h, tp))
    if isinstance(attention, LatentAttention):
        query, value = attention.slice_sizes(tp)
        pairs = attended(s, None)
        latents = (attention.query_rank or 0) + attention.kv_rank
        # queries, keys, values and context once; the latents' norms read and write them, and one
        # more copy of the keys puts their two parts side by side.
        moved = 3.0 * query + 2.0 * value + 2.0 * latents
    else:
        query, kv = attention.slice_sizes(tp)
        value = query
        pairs = attended(s, attention.window)
        moved = 2.0 * query + 2.0 * kv
        if attention.qk_norm:
            moved += 2.0 * (query + kv)
    return LayerWork(
        matrix_flops=2.0 * tokens * weights,
        attention_flops=2.0 * b * pairs * (query + value),
        weight_elements=weights,
        elementwise_elements=tokens * moved,
    )


def _mlp(mlp: Mlp, h: int, tokens: float, tp: int) -> LayerWork:
    weights = float(mlp.matrix_parameters(h, tp))
    inner = (3.0 if mlp.gated else 2.0) * (mlp.ffn_hidden_size // tp)
    return LayerWork(
        matrix_flops=2.0 * tokens * weights,
        attention_flops=0.0,
        weight_elements=weights,
        elementwise_elements=tokens * inner,
    )


def _experts(experts: Experts, h: int, tokens: float, tp: int) -> LayerWork:
    """Router, the experts that the tokens go to, shared experts, and moving tokens to and fro."""
    copies = experts.experts_per_token
    router = float(experts.router_parameters(h))
    routed = _mlp(experts.expert, h, tokens * copies, tp)
    met = min(experts.num_experts, tokens * copies)  # no more experts than copies of tokens
    work = LayerWork(
        matrix_flops=2.0 * tokens * router + routed.matrix_flops,
        attention_flops=0.0,
        weight_elements=router + met * routed.weight_elements,
        # logits written, read by the softmax, its result read by the choice; each copy of a token
        # is read and written on its way to its expert and back.
        elementwise_elements=routed.elementwise_elements
        + tokens * (3.0 * experts.num_experts + 4.0 * copies * h),
    )
    shared = experts.shared
    return work + _mlp(shared, h, tokens, tp) if shared else work


def _embedding(model: ModelSpec, tokens: int) -> LayerWork:
    projection = float(model.hidden_size * (model.embedding_size or 0))
    return LayerWork(
        matrix_flops=2.0 * tokens * projection,
        attention_flops=0.0,
        weight_elements=projection,
        elementwise_elements=2.0 * tokens * model.hidden_size,
    )


def _head(model: ModelSpec, tokens: int, tp: int) -> LayerWork:
    weights = float(model.vocabulary_matrix(tp) + model.hidden_size * (model.embedding_size or 0))
    norm = 0.0 if model.final_norm is None else 2.0 * model.hidden_size
    return LayerWork(
        matrix_flops=2.0 * tokens * weights,
        attention_flops=0.0,
        weight_elements=weights,
        # logits written, read by the softmax, its gradient kept; norm reads and writes h.
        elementwise_elements=tokens * (3.0 * model.vocabulary_slice(tp) + norm),
    )


def _multi_token_prediction(model: ModelSpec, b: int, s: int, tp: int) -> LayerWork:
    """Two norms, the merge [h, 2 h], its transformer layer, and a pass through the shared head."""
    h, inside = model.hidden_size, model.mtp_layer
    if inside is None:
        return transformer_work(model.layer_at(model.num_layers + 1), h, b, s, tp)  # refuses
    merge = 2.0 * h * -(-h // tp)
    own = LayerWork(
        matrix_flops=2.0 * b * s * merge,
        attention_flops=0.0,
        weight_elements=merge,
        elementwise_elements=b * s * 4.0 * h,
    )
    return own + transformer_work(inside, h, b, s, tp) + _head(model, b * s, tp)


def largest_matrix(layer: TransformerLayer, hidden: int, tp: int) -> int:
    """Elements of the largest matrix of one rank, fused query-key-value included.

    The experts' matrices of one kind count as one: their gradients come from one grouped product.
    """
    attention, mlp = layer.attention, layer.mlp
    if isinstance(attention, LatentAttention):
        query, value = attention.slice_sizes(tp)
        keys = attention.num_heads // tp * attention.nope_head_dim
        queries = (attention.query_rank or hidden) * query
        found = max(queries, attention.kv_rank * (keys + value), value * hidden)
    else:
        query, kv = attention.slice_sizes(tp)
        found = hidden * (query + 2 * kv)
    if isinstance(mlp, Mlp):
        return max(found, hidden * (mlp.ffn_hidden_size // tp))
    routed = mlp.num_experts * (mlp.expert_ffn_hidden_size // tp)
    return max(found, hidden * max(routed, mlp.shared_ffn_hidden_size // tp))
