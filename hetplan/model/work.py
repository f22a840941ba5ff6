"""How much work one layer is: floating-point operations, bytes moved, activations kept.

Everything is per microbatch and per tensor-parallel rank. 2 operations per multiply-add. The
attention core is counted causally (half of the s x s square), as it is computed by a fused
kernel; formulas with the full square have 2 * b * s^2 * h more per layer.
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
    vocab = model.vocabulary_slice(tp)
    if kind is LayerKind.EMBEDDING:
        return LayerWork(
            matrix_flops=0.0,
            attention_flops=0.0,
            weight_elements=0.0,
            elementwise_elements=2.0 * tokens * h,
        )
    if kind is LayerKind.HEAD:
        return LayerWork(
            matrix_flops=2.0 * tokens * h * vocab,
            attention_flops=0.0,
            weight_elements=float(h * vocab),
            # logits written, read by the softmax, its gradient kept; norm reads and writes h.
            elementwise_elements=tokens * (3.0 * vocab + 2.0 * h),
        )
    query, kv, ffn = model.slice_sizes(tp)
    weights = float(h * (query + 2 * kv) + query * h + model.mlp_matrices * h * ffn)
    activation_reads = 3.0 * ffn if model.architecture is Architecture.LLAMA else 2.0 * ffn
    return LayerWork(
        matrix_flops=2.0 * tokens * weights,
        attention_flops=2.0 * tokens * sequence_length * query,
        weight_elements=weights,
        # two norms and two residual additions: 4 reads and 4 writes of h (an addition's second
        # operand, just written, is not counted; efficiencies are measured against this same count);
        # projections in and out.
        elementwise_elements=tokens * (8.0 * h + 2.0 * query + 2.0 * kv + activation_reads),
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
        return tokens  # their numbers; eight bytes each, too few beside [b, s, h] to tell apart
    if kind is LayerKind.HEAD:
        # norm input and output, and per logit two elements: in 16 bits that is the float32 softmax
        # that the loss keeps; in float32 it is twice that, on the safe side.
        return tokens * (2.0 * h + 2.0 * model.vocabulary_slice(tp))
    if full_recompute:
        return tokens * h
    query, kv, ffn = model.slice_sizes(tp)
    mlp = 4.0 * ffn if model.architecture is Architecture.LLAMA else 2.0 * ffn
    # inputs of both norms and both norms' outputs (4h); q, k, v and context; the MLP's inner.
    return tokens * (4.0 * h + 2.0 * query + 2.0 * kv + mlp)
