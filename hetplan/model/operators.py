"""Which operators one layer runs, and how much each has to do.

A layer is a row of operators: products with weights, attention, norms, elementwise passes. Their
measured times add up to the layer's (`hetplan.predict.composed`). Everything is per microbatch and
per tensor-parallel rank, forward; what an operator's backward pass does follows from its class
(`operator_flops`, `operator_bytes`). The rows of every kind of layer are in `layer_operators`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class OperatorClass(StrEnum):
    """Operators whose time follows one law on one kind of device."""

    MATRIX_PRODUCT = "matrix_product"
    """Activations times weights: [m, k] x [k, n]."""
    GROUPED_PRODUCT = "grouped_product"
    """The same for each of `batch` experts in one launch."""
    ATTENTION_SCORE = "attention_score"
    """Queries times keys, written to memory: `batch` products [m, k] x [k, n], full square."""
    ATTENTION_CONTEXT = "attention_context"
    """Scores times values: `batch` products [m, k] x [k, n], full square."""
    FUSED_ATTENTION = "fused_attention"
    """Scores, softmax and context in one causal kernel: `batch` heads, m = n = tokens, k = width of
    a head (the mean of a key's and a value's); counted as the full square."""
    SOFTMAX = "softmax"
    """Scale, causal mask and softmax over scores in memory: m rows of n."""
    ATTENTION_DROPOUT = "attention_dropout"
    """Dropout of probabilities in memory: m rows of n."""
    NORM = "norm"
    """LayerNorm or RMSNorm over m tokens of width n."""
    ACTIVATION = "activation"
    """GELU, or the gated SwiGLU, with its bias: m tokens, n columns of its result, k columns read
    (2 n with a gate; 0 stands for n)."""
    ADDITION = "addition"
    """Residual addition with its bias: m tokens of width n. k = 0: one kernel; 1: one kernel with
    dropout; 3: bias, dropout and addition in three kernels, as some were measured."""
    GRADIENT_ADDITION = "gradient_addition"
    """Backward pass only: the two gradients of a tensor that two operators read, added: m tokens of
    width n (PyTorch's autograd sums what meets at one input of a node)."""
    BIAS_GRADIENT = "bias_gradient"
    """Backward pass only: the sum over m tokens of the gradient of a result with n columns."""
    ROTATION = "rotation"
    """Rotary positions of queries and keys: m tokens, n elements of both together."""
    ROUTING = "routing"
    """Tokens to their experts' places and back: m copies of tokens of width n."""
    EMBEDDING = "embedding"
    """Look-up, positions and dropout: m tokens of width n, k rows of the table."""
    LOSS = "loss"
    """Softmax cross-entropy: m tokens, n columns of the vocabulary's slice. Samples of logits and
    loss together have k = hidden; a layer's own row has k = 0, its product stands apart."""
    OPTIMIZER = "optimizer"
    """Update of m parameters."""


PRODUCTS = frozenset(
    {
        OperatorClass.MATRIX_PRODUCT,
        OperatorClass.GROUPED_PRODUCT,
        OperatorClass.ATTENTION_SCORE,
        OperatorClass.ATTENTION_CONTEXT,
        OperatorClass.FUSED_ATTENTION,
    }
)
"""Classes that multiply; the others are passes over memory."""

BACKWARD_ONLY = frozenset({OperatorClass.GRADIENT_ADDITION, OperatorClass.BIAS_GRADIENT})
"""Kernels that a framework adds to a layer's backward pass: no operator of a profile has them."""

ADDITION_FUSED, ADDITION_DROPOUT, ADDITION_APART = 0, 1, 3
"""What `k` of an addition says: one kernel, one with dropout, three kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Which kernels a trainer runs where several compute the same, and how ranks share work."""

    fused_attention: bool = True
    """One causal kernel; otherwise scores and probabilities are written to memory."""
    attention_dropout: bool = False
    hidden_dropout: bool = False
    fused_loss: bool = True
    """One pass over the logits for softmax and loss, in place; otherwise a float32 copy is made."""
    sequence_parallel: bool = False
    """Norms and additions run on 1 / tp of the tokens (arXiv 2205.05198, section 4.2.2)."""
    expert_parallel: int = 1
    """Ranks that share a layer's experts: each has fewer of them, each of these more tokens."""
    product_format: str = ""
    """Number format of products with weights where it is narrower than what they work on; a
    `hetplan.job.spec.ProductFormat` value. Routers and logits keep the wider one."""


DEFAULT_KERNELS = Kernels()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator of a layer's forward pass."""

    operator: OperatorClass
    what: str
    """Where in the layer it stands, as in `query-key-value projection`."""
    count: int = 1
    """How often it runs, each with a launch of its own."""
    batch: int = 1
    m: int
    n: int
    k: int = 0
    float32_copy: bool = False
    """Of a loss: it works on a float32 copy of the logits."""


FORWARD, BACKWARD = "forward", "backward"
"""Passes of an operator; backward is all of it: for a product with weights both gradients."""
INPUT_GRADIENT, WEIGHT_GRADIENT = "input_gradient", "weight_gradient"
"""The two halves of a product's backward pass."""

WITH_WEIGHTS = frozenset({OperatorClass.MATRIX_PRODUCT, OperatorClass.GROUPED_PRODUCT})
"""Products whose backward pass is two products, one of them the weights' gradient."""

# Forward and backward operations, in products of the operator's own shape. Fused attention
# computes the scores again in its backward pass: 5 products against 2 (arXiv 2307.08691, 2.3.2).
_ONE_PRODUCT, _FUSED_PRODUCTS = (1.0, 2.0), (2.0, 5.0)

# Float32 traffic of a cross-entropy that copies its logits, in bytes per logit: written as float32
# (4), read for the maximum (4), maximum subtracted (8), exponential (8), sum (4), division (8)
# [Megatron-LM core/tensor_parallel/cross_entropy.py, forward]; backward scales the kept softmax (8)
# and reads it for the copy back (4). The 16-bit logits are read, and their gradient written, once.
_FLOAT32_LOSS_BYTES = (36.0, 12.0)

# Optimizers' least traffic per parameter is said in `hetplan.predict.datasheet`; here AdamW in
# float32: gradient read (4), parameter and two moments read and written (24).
ADAMW_UPDATE_BYTES = 28.0


def operator_flops(op: Operator, phase: str) -> float:
    """Operations of one launch in this pass, 2 per multiply-add; attention as the full square.

    `phase` is `forward`, `backward` or, for products with weights and their samples,
    `input_gradient` or `weight_gradient`.
    """
    kind = op.operator
    if kind not in PRODUCTS and kind is not OperatorClass.LOSS:
        return 0.0
    one = 2.0 * op.batch * op.m * op.n * op.k
    forward, backward = _FUSED_PRODUCTS if kind is OperatorClass.FUSED_ATTENTION else _ONE_PRODUCT
    return one * (backward if phase == BACKWARD else forward)


def operator_bytes(
    op: Operator, phase: str, element_bytes: float, output_bytes: float | None = None
) -> float:
    """Least bytes that one launch reads and writes in this pass.

    `output_bytes` is the size of an element of what a product writes (a weight gradient is often
    float32); None: as its inputs. In the pass `backward` of a product with weights it is that of
    the weights' gradient.
    """
    kind = op.operator
    if kind in PRODUCTS:
        out = element_bytes if output_bytes is None else output_bytes
        return _product_bytes(op, phase, element_bytes, out)
    if kind is OperatorClass.OPTIMIZER:
        return op.m * ADAMW_UPDATE_BYTES
    if kind is OperatorClass.LOSS:
        return _loss_bytes(op, phase, element_bytes)
    if kind is OperatorClass.EMBEDDING:
        # Rows read and written; backward the table's gradient is written, however few are used.
        table = op.n * op.k if phase != FORWARD else 0
        return element_bytes * (2.0 * op.m * op.n + table)
    forward, backward, mask = _PASSES[kind]
    elements = float(op.batch) * op.m * op.n
    if kind is OperatorClass.ACTIVATION:
        reads = float(op.k or op.n) / op.n
        forward, backward = 1.0 + reads, 1.0 + 2.0 * reads
    elif kind is OperatorClass.ADDITION:
        forward, backward, mask = _ADDITIONS.get(op.k, _ADDITIONS[ADDITION_FUSED])
    return elements * (element_bytes * (forward if phase == FORWARD else backward) + mask)


# (forward, backward) elements read or written per element, and bytes of a dropout's mask.
_PASSES: dict[OperatorClass, tuple[float, float, float]] = {
    OperatorClass.SOFTMAX: (2.0, 3.0, 0.0),  # backward: result and its gradient read, written
    OperatorClass.ATTENTION_DROPOUT: (2.0, 2.0, 1.0),
    OperatorClass.NORM: (2.0, 5.0, 0.0),  # backward: once for the input, once for the weights
    OperatorClass.ACTIVATION: (2.0, 3.0, 0.0),
    OperatorClass.ADDITION: (3.0, 4.0, 0.0),  # see _ADDITIONS
    OperatorClass.GRADIENT_ADDITION: (0.0, 3.0, 0.0),  # both read, their sum written
    OperatorClass.BIAS_GRADIENT: (0.0, 1.0, 0.0),  # read; one row of sums is written
    OperatorClass.ROTATION: (2.0, 2.0, 0.0),
    OperatorClass.ROUTING: (4.0, 4.0, 0.0),  # to the experts' places and back, each read, written
}
# By an addition's k. Backward: without dropout the gradient goes to both branches as it is, and
# what a sample of it alone holds is two copies (`has_backward`); with dropout its gradient is read
# and written, with the mask; three kernels sum the bias's gradient as well.
_ADDITIONS = {
    ADDITION_FUSED: (3.0, 4.0, 0.0),
    ADDITION_DROPOUT: (3.0, 2.0, 1.0),
    ADDITION_APART: (7.0, 3.0, 1.0),
}


def has_backward(op: Operator) -> bool:
    """Whether a kernel of its own runs in a layer's backward pass."""
    return op.operator is not OperatorClass.ADDITION or op.k != ADDITION_FUSED


def _product_bytes(op: Operator, phase: str, el: float, out: float) -> float:
    m, n, k = float(op.m), float(op.n), float(op.k)
    if op.operator is OperatorClass.FUSED_ATTENTION:
        # q, k, v, o once; backward these, the gradient of o, and three gradients written.
        return op.batch * el * (m + n) * k * (4.0 if phase == BACKWARD else 2.0)
    if phase != BACKWARD:
        return op.batch * (el * (m * k + k * n) + out * m * n)
    last = out if op.operator in WITH_WEIGHTS else el
    return op.batch * (el * (2.0 * m * n + 2.0 * m * k + k * n) + last * k * n)


def _loss_bytes(op: Operator, phase: str, el: float) -> float:
    """Of the loss alone: a product before it in one sample is limited by its operations."""
    own = el + _FLOAT32_LOSS_BYTES[phase != FORWARD] if op.float32_copy else 2.0 * el
    return own * op.m * op.n
