"""How much work one layer is: floating-point operations, bytes moved, activations kept.

Everything is per microbatch and per tensor-parallel rank. 2 operations per multiply-add. The
attention core is counted causally (half of the s x s square), as it is computed by a fused
kernel; `facts` that quote the full square differ by 2 * b * s^2 * h per layer.
Forms: Narayanan et al., arXiv 2104.04473 (operations); Korthikanti et al., arXiv 2205.05198
(activations).
"""

from __future__ import annotations

from dataclasses import dataclass

from hetplan.model.spec import Architecture, LayerKind, ModelSpec


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
    num_matrix_products: int

    @property
    def flops(self) -> float:
        """All operations of the forward pass."""
        return self.matrix_flops + self.attention_flops


def layer_work(
    model: ModelSpec, kind: LayerKind, microbatch_size: int, sequence_length: int, tp: int = 1
) -> LayerWork:
    """Forward work of one layer; the backward pass is twice the operations."""
    tokens = microbatch_size * sequence_length
    h = model.hidden_size
    vocab = -(-model.vocab_size // tp)
    if kind is LayerKind.EMBEDDING:
        return LayerWork(
            matrix_flops=0.0,
            attention_flops=0.0,
            weight_elements=0.0,
            elementwise_elements=2.0 * tokens * h,
            num_matrix_products=0,
        )
    if kind is LayerKind.HEAD:
        return LayerWork(
            matrix_flops=2.0 * tokens * h * vocab,
            attention_flops=0.0,
            weight_elements=float(h * vocab),
            # logits written, read by the softmax, its gradient kept; norm reads and writes h.
            elementwise_elements=tokens * (3.0 * vocab + 2.0 * h),
            num_matrix_products=1,
        )
    query = model.attention_size // tp
    kv = max(1, model.num_kv_heads // tp) * model.head_dim
    ffn = model.ffn_hidden_size // tp
    weights = float(h * (query + 2 * kv) + query * h + model.mlp_matrices * h * ffn)
    activation_reads = 3.0 * ffn if model.architecture is Architecture.LLAMA else 2.0 * ffn
    return LayerWork(
        matrix_flops=2.0 * tokens * weights,
        attention_flops=2.0 * tokens * sequence_length * query,
        weight_elements=weights,
        # two norms and two residual additions (4 reads, 4 writes of h), projections in and out.
        elementwise_elements=tokens * (8.0 * h + 2.0 * query + 2.0 * kv + activation_reads),
        num_matrix_products=4 + (model.mlp_matrices - 2),
    )


def activation_elements(
    model: ModelSpec,
    kind: LayerKind,
    microbatch_size: int,
    sequence_length: int,
    tp: int = 1,
    *,
    full_recompute: bool = False,
) -> float:
    """Elements that one layer keeps for its backward pass, per microbatch and rank.

    No sequence parallelism: what is replicated over tp is not divided by it. Fused attention
    keeps queries, keys, values and the context, not the s x s scores. Under full recompute only
    the layer's input is kept.
    """
    tokens = float(microbatch_size * sequence_length)
    h = model.hidden_size
    if kind is LayerKind.EMBEDDING:
        return tokens
    if kind is LayerKind.HEAD:
        # norm input and output, logits and their softmax.
        return tokens * (2.0 * h + 2.0 * -(-model.vocab_size // tp))
    if full_recompute:
        return tokens * h
    query = model.attention_size // tp
    kv = max(1, model.num_kv_heads // tp) * model.head_dim
    ffn = model.ffn_hidden_size // tp
    mlp = 4.0 * ffn if model.architecture is Architecture.LLAMA else 2.0 * ffn
    # inputs of both norms and both norms' outputs (4h); q, k, v and context; the MLP's inner.
    return tokens * (4.0 * h + 2.0 * query + 2.0 * kv + mlp)
