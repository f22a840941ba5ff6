"""What other kernels than the default ones cost a layer: bytes moved, launches, square attention.

The default layer has one causal attention kernel, no dropout, and a loss in place
(`hetplan.model.operators.DEFAULT_KERNELS`). Per microbatch and tensor-parallel rank, with b
sequences of s tokens, a heads, width h, vocabulary V, degree t and e bytes per element, what
another choice reads and writes besides:

    scores in memory        b (a / t) s^2 elements. Forward: scores written, read by the softmax,
                            probabilities written, read by the context: 4 e. Backward: gradient of
                            the probabilities written; it and the probabilities read, gradient of
                            the scores written by the softmax; that read by the queries' and the
                            keys' gradients, the probabilities by the values': 7 e.
    dropout of them         each way a tensor read, one written, and a mask of one byte: 2 e + 1;
                            in a fused kernel the mask is drawn again: nothing moves
    dropout of the residual a mask of one byte per element, each way, of both additions (the
                            addition itself is one kernel); of the embedding 2 e + 1 each way
    sequence parallelism    norms and additions of b s / t tokens: less than nothing
    backward passes         both gradients read and their sum written at the two residual forks, and
                            every bias's gradient summed (`gradient_operators`). Without dropout an
                            addition has no kernel of its own: its passes are taken off.
    loss with a copy        b s V / t logits in float32. Forward: copied (e + 4); read by maximum
                            and sum (8), read and written by difference, exponential and quotient
                            (24): 36 + e. Backward: read and written once, converted (12 + e). The
                            default's passes, with which it is counted already, are taken off.

Measured on an A100 (16 bit, an operator profile's slopes at 1.555 TB/s): scores 7.8 of 8 B forward
and 13 of 14 B backward, dropout 6.7 and 5.5 of 5 B, loss 51 of 38 B and 17 of 14 B.
Passes: Megatron-LM, megatron/core/tensor_parallel/cross_entropy.py; arXiv 2205.05198, section 4.1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetplan.model.layers import LatentAttention, TransformerLayer
from hetplan.model.operators import (
    BACKWARD,
    FORWARD,
    Kernels,
    Operator,
    OperatorClass,
    gradient_operators,
    operator_bytes,
)
from hetplan.model.spec import LayerKind, ModelSpec

_MASK_BYTES = 1
# More than one causal kernel, forward and backward: scores, softmax, context for one; two products
# each for scores and context and the softmax's gradient for one.
_SCORE_LAUNCHES = (2, 4)
# Maximum, difference, exponential with its sum, quotient; the softmax scaled and copied back.
_LOSS_LAUNCHES = (4, 1)
_DEFAULT_LOSS_PASSES = 3.0
"""Over the logits, of `layer_work` for a head: written, read, and their gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCosts:
    """What one pass of a layer does beyond that with default kernels."""

    moved_bytes: float = 0.0
    launches: int = 0
    square_flops: float = 0.0
    """Of one forward pass: scores and context as products over the full square, in place of the
    causal kernel's operations; 0: there is that kernel."""


def kernel_costs(
    model: ModelSpec,
    kind: LayerKind,
    kernels: Kernels,
    *,
    microbatch_size: int,
    sequence_length: int,
    tp: int,
    bytes_per_element: int,
    backward: bool,
) -> KernelCosts:
    """Of one pass. The transformer layers of the model must be equal where the kind is one."""
    tokens = float(microbatch_size * sequence_length)
    if kind is LayerKind.HEAD:
        return _loss(model, kernels, tokens, tp, bytes_per_element, backward)
    if kind is LayerKind.EMBEDDING:
        if not kernels.hidden_dropout:
            return KernelCosts()
        moved = tokens * model.hidden_size * (2 * bytes_per_element + _MASK_BYTES)
        return KernelCosts(moved_bytes=moved, launches=1)
    layer = model.common_layer(sequence_length)
    found = _layer(
        layer, model.hidden_size, kernels, tokens, sequence_length, tp, bytes_per_element, backward
    )
    if not backward:
        return found
    gradients = gradient_operators(
        model,
        kind,
        layer,
        microbatch_size=microbatch_size,
        sequence_length=sequence_length,
        tp=tp,
        kernels=kernels,
    )
    more = sum(op.count * operator_bytes(op, BACKWARD, bytes_per_element) for op in gradients)
    return replace(found, moved_bytes=found.moved_bytes + more)


def _layer(
    layer: TransformerLayer,
    hidden: int,
    kernels: Kernels,
    tokens: float,
    sequence_length: int,
    tp: int,
    e: int,
    backward: bool,
) -> KernelCosts:
    moved, launches, square = 0.0, 0, 0.0
    if not kernels.fused_attention:
        query, other = layer.attention.slice_sizes(tp)
        value = other if isinstance(layer.attention, LatentAttention) else query
        square = 2.0 * tokens * sequence_length * (query + value)
        scores = layer.attention.num_heads / tp * tokens * sequence_length
        moved += scores * e * (7 if backward else 4)
        launches += _SCORE_LAUNCHES[backward]
        if kernels.attention_dropout:
            moved += scores * (2 * e + _MASK_BYTES)
            launches += 1
    cut = 1.0 / tp if kernels.sequence_parallel else 1.0
    if kernels.hidden_dropout:
        moved += 2.0 * tokens * hidden * _MASK_BYTES * cut
    # As `layer_work` counts them; backward passes have twice that.
    norms, additions = (tokens * hidden * e * each for each in (2.0 * layer.num_norms, 4.0))
    if backward:
        norms, additions = 2.0 * norms, 2.0 * additions
        if not kernels.hidden_dropout:
            moved -= additions
            additions = 0.0
    moved -= (1.0 - cut) * (norms + additions)
    return KernelCosts(moved_bytes=moved, launches=launches, square_flops=square)


def _loss(
    model: ModelSpec, kernels: Kernels, tokens: float, tp: int, e: int, backward: bool
) -> KernelCosts:
    if kernels.fused_loss:
        return KernelCosts()
    loss = Operator(
        operator=OperatorClass.LOSS,
        what="loss",
        m=int(tokens),
        n=model.vocabulary_slice(tp),
        float32_copy=True,
    )
    moved = operator_bytes(loss, BACKWARD if backward else FORWARD, e)
    # Logits are written whatever reads them; backward passes count twice the forward's.
    counted = _DEFAULT_LOSS_PASSES * e * (2.0 if backward else 1.0) - (0.0 if backward else e)
    return KernelCosts(
        moved_bytes=max(0.0, moved - counted * loss.m * loss.n),
        launches=_LOSS_LAUNCHES[backward],
    )
