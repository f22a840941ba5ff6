"""The operators that one layer runs (`layer_operators`), and how much each has to do.

A layer is a row of operators: products with weights, attention, norms, elementwise passes. Their
measured times add up to the layer (`hetplan.predict.layer.composed`). Everything is per microbatch
and per tensor-parallel rank, forward; the backward pass of an operator follows from its class
(`operator_flops`, `operator_bytes`). Communication is not a layer's operator.

Columns of a matrix are cut before attention and MLP, rows after them (Shoeybi et al., arXiv
1909.08053, section 3). Norms and residual additions run on all tokens of every rank, or, with
sequence parallelism, on 1 / tp of them (Korthikanti et al., arXiv 2205.05198, section 4.2).
Sources of the layers' forms: `hetplan.model.layers`.

Only the backward pass runs `gradient_operators`: at each of a layer's two forks the gradients of
the residual and of the branch are added, and the gradient of every bias is a sum over tokens of its
product's (PyTorch's autograd and `linear`; Megatron-LM's layers as well). Biases of products in
8 bit cost nothing more: Transformer Engine sums them where it quantises the gradient
(`cast_transpose_dbias`).

With fused kernels the products' operations are those of `hetplan.model.work`, but attention is
counted as the full square (a causal kernel's law is fitted against the same count).

Symbols: M tokens of a microbatch, h hidden, b microbatch size, s sequence length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from hetplan.errors import InputError
from hetplan.model.layers import Attention, Experts, LatentAttention, Mlp, TransformerLayer
from hetplan.model.spec import LayerKind, ModelSpec


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
    ROUTER = "router"
    """A pass of a router, over m tokens and n experts: so small that it costs its launch."""
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

ADDITION_FUSED, ADDITION_DROPOUT, ADDITION_APART = 0, 1, 3  # `k` of an addition


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Which kernels a trainer runs where several compute the same, and how ranks share work."""

    fused_attention: bool = True
    """One causal kernel; otherwise scores and probabilities are written to memory."""
    tuned_attention: bool = True
    """That kernel is the device's fastest; otherwise PyTorch's own."""
    attention_dropout: bool = False
    hidden_dropout: bool = False
    fused_loss: bool = True
    """One pass over the logits for softmax and loss, in place; otherwise a float32 copy is made."""
    fused_elementwise: bool = True
    """A norm, a rotation and a gated activation are a kernel each; otherwise PyTorch's separate
    operators."""
    sequence_parallel: bool = False
    """Norms and additions run on 1 / tp of the tokens (arXiv 2205.05198, section 4.2.2)."""
    expert_parallel: int = 1
    """Ranks that share a layer's experts: each has fewer of them, each of these more tokens."""
    expert_tensor_parallel: int | None = None
    """Ranks that cut every expert; None: all tensor-parallel ranks."""
    sorts_copies: bool = True
    """Tokens arrive in the order of their ranks and are sorted by expert, and back before they
    leave (Megatron-core's alltoall dispatcher, moe/token_dispatcher.py, `sort_chunks_by_idxs`);
    narrow products pad every expert's then, and cut it off (moe/experts.py, `Fp8Padding`)."""
    host_launch_seconds: float | None = None
    """For one operator of a forward pass; None: as most hosts (`hetplan.predict.datasheet`)."""
    host_counts: bool = True
    """The host waits for the device to read how many tokens every expert has (token_dispatcher.py,
    `_maybe_dtoh_and_synchronize`; DeepEP's dispatch likewise), then launches a product for each
    (Transformer Engine, common/gemm/cublaslt_gemm.cu, `multi_stream_cublas_gemm`)."""
    product_format: str = ""
    """Number format of products with weights where it is narrower than what they work on; a
    `hetplan.job.spec.ProductFormat` value. Routers and logits keep the wider one."""


DEFAULT_KERNELS = Kernels()


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of a layer's forward pass; `OperatorClass` says what m, n and k are."""

    operator: OperatorClass
    what: str
    """Where in the layer it stands, as in `query-key-value projection`."""
    m: int
    n: int
    k: int = 0
    count: int = 1
    """How often it runs, each with a launch of its own."""
    batch: int = 1
    float32_copy: bool = False
    """Of a loss: it works on a float32 copy of the logits."""
    dispatched: bool = False
    """Of experts: it works on tokens that were dispatched to them."""


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
    OperatorClass.ROUTER: (2.0, 2.0, 0.0),
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
    """Whether a kernel of its own runs in a layer's backward pass; a router's are counted apart."""
    fused = op.operator is OperatorClass.ADDITION and op.k == ADDITION_FUSED
    return op.operator is not OperatorClass.ROUTER and not fused


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


def layer_operators(
    model: ModelSpec,
    kind: LayerKind,
    layer: TransformerLayer | None = None,
    *,
    microbatch_size: int,
    sequence_length: int,
    tp: int = 1,
    kernels: Kernels = DEFAULT_KERNELS,
) -> tuple[Operator, ...]:
    """Operators of one layer's forward pass, in order.

    `layer` is the transformer layer that is meant; None: the model's common one (an InputError
    where its layers differ), or the one inside its multi-token prediction.
    """
    rows = _Rows(microbatch_size, sequence_length, tp, kernels)
    if kind is LayerKind.EMBEDDING:
        return tuple(_embedding(model, rows))
    if kind is LayerKind.HEAD:
        return tuple(_head(model, rows))
    layer = layer or _layer_of(model, kind, sequence_length)
    if kind is LayerKind.TRANSFORMER:
        return tuple(_transformer(layer, model.hidden_size, rows))
    return tuple(_multi_token_prediction(model, layer, rows))


def _layer_of(model: ModelSpec, kind: LayerKind, sequence_length: int) -> TransformerLayer:
    if kind is LayerKind.TRANSFORMER:
        return model.common_layer(sequence_length)
    if model.mtp_layer is None:
        raise InputError(f"{model.name} has no multi-token prediction layers")
    return model.mtp_layer


def gradient_operators(
    model: ModelSpec,
    kind: LayerKind,
    layer: TransformerLayer | None = None,
    *,
    microbatch_size: int,
    sequence_length: int,
    tp: int = 1,
    kernels: Kernels = DEFAULT_KERNELS,
) -> tuple[Operator, ...]:
    """What one layer's backward pass runs besides that of its operators; as `layer_operators`."""
    if kind in (LayerKind.EMBEDDING, LayerKind.HEAD):
        return ()
    layer = layer or _layer_of(model, kind, sequence_length)
    rows = _Rows(microbatch_size, sequence_length, tp, kernels)
    return tuple(_gradients(layer, model.hidden_size, rows))


def _gradients(layer: TransformerLayer, h: int, rows: _Rows) -> Iterator[Operator]:
    yield Operator(
        OperatorClass.GRADIENT_ADDITION,
        "residual and branch gradients",
        rows.cut_tokens,
        h,
        count=2,
    )
    if isinstance(layer.mlp, Experts):
        yield _router_passes(layer.mlp, rows, backward=True)
    if rows.kernels.product_format:
        return
    for what, tokens, columns in (
        *_attention_biases(layer.attention, h, rows),
        *_mlp_biases(layer.mlp, h, rows),
    ):
        yield Operator(OperatorClass.BIAS_GRADIENT, what, tokens, columns)


def _attention_biases(
    attention: Attention | LatentAttention, h: int, rows: _Rows
) -> Iterator[tuple[str, int, int]]:
    """Where a bias stands, tokens and columns; those of row-cut matrices meet a rank's tokens."""
    if isinstance(attention, LatentAttention):
        if attention.bias:
            latents = (attention.query_rank or 0) + attention.kv_rank + attention.rope_head_dim
            yield "latents' biases", rows.cut_tokens, latents
            yield "attention output bias", rows.cut_tokens, h
        return
    if attention.qkv_bias:
        query, kv = attention.slice_sizes(rows.tp)
        yield "query-key-value bias", rows.tokens, query + 2 * kv
    if attention.output_bias:
        yield "attention output bias", rows.cut_tokens, h


def _mlp_biases(mlp: Mlp | Experts, h: int, rows: _Rows) -> Iterator[tuple[str, int, int]]:
    if isinstance(mlp, Mlp):
        parts = [("", mlp, rows.tokens, rows.cut_tokens, rows.tp)]
    else:
        copies = rows.copies(mlp)
        parts = [("experts' ", mlp.expert, copies, copies, rows.etp)]
        if mlp.shared:
            parts.append(("shared experts' ", mlp.shared, rows.tokens, rows.cut_tokens, rows.tp))
    for of, part, tokens, after, cut in parts:
        if part.bias:
            inner = part.ffn_hidden_size // cut
            yield f"{of}up bias", tokens, 2 * inner if part.gated else inner
            yield f"{of}down bias", after, h


class _Rows:
    """Sizes that all operators of a layer share."""

    __slots__ = ("batch", "cut_tokens", "etp", "kernels", "length", "tokens", "tp")

    def __init__(self, batch: int, length: int, tp: int, kernels: Kernels) -> None:
        self.batch, self.length, self.tp, self.kernels = batch, length, tp, kernels
        self.etp = kernels.expert_tensor_parallel or tp
        self.tokens = batch * length
        # Tokens of norms and additions between the tensor-parallel regions.
        self.cut_tokens = -(-self.tokens // tp) if kernels.sequence_parallel else self.tokens

    def copies(self, experts: Experts) -> int:
        """Copies of tokens that meet this rank's experts, loads being equal.

        Ranks that cut experts gather each other's.
        """
        return -(-self.tokens * experts.experts_per_token * self.etp // self.tp)


def _product(what: str, m: int, n: int, k: int) -> Operator:
    return Operator(OperatorClass.MATRIX_PRODUCT, what, m, n, k)


# Without a kernel of its own PyTorch's RMSNorm takes a float32 copy (2 + 4 bytes per element read
# and written), its squares (8), their mean (4), the product with it (8), a copy back (6) and the
# product with the weights (4): 36 bytes where one kernel moves 4; its gradient's operators move 72
# where one moves 10. A rotation takes a float32 copy (6), a complex product (8) and a copy back
# (6): 20 for 4, both ways. Counted as so many launches of the one kernel: 9 and 7 make 8.
_NORM_LAUNCHES_APART, _ROTATION_LAUNCHES_APART = 8, 5


def _transformer(layer: TransformerLayer, h: int, rows: _Rows) -> Iterator[Operator]:
    kernels = rows.kernels
    norms = layer.num_norms * (1 if kernels.fused_elementwise else _NORM_LAUNCHES_APART)
    yield Operator(OperatorClass.NORM, "norm", rows.cut_tokens, h, count=norms)
    if isinstance(layer.attention, LatentAttention):
        yield from _latent_attention(layer.attention, h, rows)
    else:
        yield from _attention(layer.attention, h, rows)
    if isinstance(layer.mlp, Experts):
        yield from _experts(layer.mlp, h, rows)
    else:
        yield from _mlp(layer.mlp, h, rows.tokens, rows, "")
    yield Operator(
        OperatorClass.ADDITION,
        "residual addition",
        rows.cut_tokens,
        h,
        ADDITION_DROPOUT if kernels.hidden_dropout else ADDITION_FUSED,
        count=2,
    )


def _attention(attention: Attention, h: int, rows: _Rows) -> Iterator[Operator]:
    query, kv = attention.slice_sizes(rows.tp)
    width = attention.head_dim
    yield _product("query-key-value projection", rows.tokens, query + 2 * kv, h)
    if attention.qk_norm:
        # One row per head: queries' and keys' norms are a launch each, counted as one operator.
        yield Operator(
            OperatorClass.NORM, "query and key norm", rows.tokens * (query + kv) // width, width
        )
    if attention.rotary:
        launches = 1 if rows.kernels.fused_elementwise else _ROTATION_LAUNCHES_APART
        yield Operator(
            OperatorClass.ROTATION, "rotary positions", rows.tokens, query + kv, count=launches
        )
    yield from _core(query // width, width, width, rows, attention.window)
    yield _product("attention output", rows.tokens, h, query)


def _latent_attention(attention: LatentAttention, h: int, rows: _Rows) -> Iterator[Operator]:
    """Arithmetic of arXiv 2405.04434, equations 9 to 19.

    Latents' projections are whole, of the tokens that norms have: with sequence parallelism the
    latents are gathered, not what they come from (Megatron-core, multi_latent_attention.py).
    """
    tokens, own = rows.tokens, rows.cut_tokens
    query, value = attention.slice_sizes(rows.tp)
    heads = attention.num_heads // rows.tp
    rotated, latent = attention.rope_head_dim, attention.kv_rank
    if attention.query_rank is None:
        yield _product("query projection", tokens, query, h)
    else:
        yield _product("query latent", own, attention.query_rank, h)
        yield Operator(OperatorClass.NORM, "query latent norm", own, attention.query_rank)
        yield _product("queries from latent", tokens, query, attention.query_rank)
    yield _product("key-value latent", own, latent + rotated, h)
    yield Operator(OperatorClass.NORM, "key-value latent norm", own, latent)
    keys = heads * attention.nope_head_dim
    yield _product("keys and values from latent", tokens, keys + value, latent)
    # Rotation of each head's part, with the copy that puts a key's two parts side by side.
    yield Operator(
        OperatorClass.ROTATION,
        "rotary positions and keys put together",
        tokens,
        heads * rotated + query,
    )
    yield from _core(heads, attention.key_head_dim, attention.value_head_dim, rows, None)
    yield _product("attention output", tokens, h, value)


def _core(
    heads: int, key_width: int, value_width: int, rows: _Rows, window: int | None
) -> Iterator[Operator]:
    """Scores to context; a window w < s is a band: its full square is s * (2 w - w^2 / s)."""
    batch, s = rows.batch * heads, rows.length
    keys = s
    if window is not None and window < s:
        keys = max(1, round(2 * window - window * window / s))
    if rows.kernels.fused_attention:
        yield Operator(
            OperatorClass.FUSED_ATTENTION,
            "attention",
            s,
            keys,
            (key_width + value_width) // 2,
            batch=batch,
        )
        return
    # Without a fused kernel the whole square is computed, whatever the window.
    yield Operator(OperatorClass.ATTENTION_SCORE, "scores", s, s, key_width, batch=batch)
    yield Operator(OperatorClass.SOFTMAX, "softmax", batch * s, s)
    if rows.kernels.attention_dropout:
        yield Operator(OperatorClass.ATTENTION_DROPOUT, "attention dropout", batch * s, s)
    yield Operator(OperatorClass.ATTENTION_CONTEXT, "context", s, value_width, s, batch=batch)


def _mlp(mlp: Mlp, h: int, tokens: int, rows: _Rows, of: str) -> Iterator[Operator]:
    inner = mlp.ffn_hidden_size // rows.tp
    read = 2 * inner if mlp.gated else inner
    # Gate and up projection read the same input: one product, as trainers run it.
    yield _product(f"{of}up projection", tokens, read, h)
    if mlp.gated and not rows.kernels.fused_elementwise:
        # The activation of the gate, then its product with the other half.
        yield Operator(OperatorClass.ACTIVATION, f"{of}gate", tokens, inner, inner)
    yield Operator(OperatorClass.ACTIVATION, f"{of}activation", tokens, inner, read)
    yield _product(f"{of}down projection", tokens, h, inner)


# Kernels of Megatron-core's router and dispatcher over [tokens, experts] or less, none of them
# fused: moe/{router,moe_utils,token_dispatcher}.py of core_v0.15.1. Forward: choice 9 (top-k and
# its order, cast, two tables of zeros and scatters, a flag), auxiliary loss 14 (softmax, choice and
# flag again, counts, their product and sum, scale, record), counts 7 (per expert, rank, source),
# copies of them to the host 4, indices of permutation and sorting 6. Backward: of scatter, choice,
# scores and loss.
_ROUTER_FORWARD, _ROUTER_BACKWARD = 40, 12
# Messages of counts and of probabilities between ranks: 12 to 18 us each among 4 and 8 B200
# (nccl-tests, in AIConfigurator's tables), as five of these kernels take. Backward: the latter's.
_MESSAGE = 5


def _router_passes(experts: Experts, rows: _Rows, *, backward: bool) -> Operator:
    kernels = rows.kernels
    count = _ROUTER_BACKWARD if backward else _ROUTER_FORWARD
    if kernels.sorts_copies and kernels.expert_parallel > 1:
        count += _MESSAGE * (1 if backward else 2)
    return Operator(
        OperatorClass.ROUTER, "router passes", rows.cut_tokens, experts.num_experts, count=count
    )


def _experts(experts: Experts, h: int, rows: _Rows) -> Iterator[Operator]:
    """Routers and the places of copies have a rank's own tokens, experts what all ranks send."""
    kernels, tokens = rows.kernels, rows.cut_tokens
    copies = rows.copies(experts)
    inner = experts.expert_ffn_hidden_size // rows.etp
    read = 2 * inner if experts.gated else inner
    held = max(1, experts.num_experts // kernels.expert_parallel)
    met = min(held, copies)
    each = -(-copies // met)
    yield _product("router", tokens, experts.num_experts + experts.shared_gate, h)
    yield Operator(OperatorClass.SOFTMAX, "router softmax", tokens, experts.num_experts)
    yield _router_passes(experts, rows, backward=False)
    moved, grouped = OperatorClass.ROUTING, OperatorClass.GROUPED_PRODUCT
    yield Operator(moved, "routing", tokens * experts.experts_per_token, h)
    dispatched = partial(Operator, dispatched=True)
    if kernels.sorts_copies and held > 1:
        yield dispatched(moved, "sorting by expert", copies, h)
    if kernels.sorts_copies and kernels.product_format:
        yield dispatched(moved, "padding of experts' tokens", copies, h)
    yield dispatched(grouped, "experts' up projection", each, read, h, batch=met)
    yield dispatched(OperatorClass.ACTIVATION, "experts' activation", copies, inner, read)
    yield dispatched(grouped, "experts' down projection", each, h, inner, batch=met)
    if experts.shared:
        yield from _mlp(experts.shared, h, rows.tokens, rows, "shared experts' ")


def _embedding(model: ModelSpec, rows: _Rows) -> Iterator[Operator]:
    yield Operator(
        OperatorClass.EMBEDDING,
        "embedding",
        rows.tokens,
        model.embedding_width,
        model.vocabulary_slice(rows.tp),
    )
    if model.embedding_size is not None:
        yield _product("embedding projection", rows.tokens, model.hidden_size, model.embedding_size)


def _head(model: ModelSpec, rows: _Rows) -> Iterator[Operator]:
    h, vocabulary = model.hidden_size, model.vocabulary_slice(rows.tp)
    if model.final_norm is not None:
        yield Operator(OperatorClass.NORM, "final norm", rows.cut_tokens, h)
    if model.embedding_size is not None:
        yield _product("head projection", rows.tokens, model.embedding_size, h)
    yield _product("logits", rows.tokens, vocabulary, model.embedding_width)
    yield Operator(
        OperatorClass.LOSS,
        "loss",
        rows.tokens,
        vocabulary,
        float32_copy=not rows.kernels.fused_loss,
    )


def _multi_token_prediction(
    model: ModelSpec, inside: TransformerLayer, rows: _Rows
) -> Iterator[Operator]:
    """Two norms, the merge [2 h, h], a transformer layer, the shared head."""
    h = model.hidden_size
    yield Operator(OperatorClass.NORM, "norms of state and embedding", rows.cut_tokens, h, count=2)
    yield _product("merge", rows.tokens, -(-h // rows.tp), 2 * h)
    yield from _transformer(inside, h, rows)
    yield from _head(model, rows)
