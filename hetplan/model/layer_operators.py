"""The row of operators of every kind of layer, with their shapes on one tensor-parallel rank.

Columns of a matrix are cut before attention and MLP, rows after them (Shoeybi et al., arXiv
1909.08053, section 3). Norms and residual additions run on all tokens of every rank, or, with
sequence parallelism, on 1 / tp of them (Korthikanti et al., arXiv 2205.05198, section 4.2).
Sources of the layers' forms: `hetplan.model.layers`. Communication is not a layer's operator.

What only a backward pass runs (`gradient_operators`): at each of a layer's two forks the gradients
of the residual and of the branch are added, and the gradient of every bias is a sum over tokens of
its product's (PyTorch's autograd and `linear`; Megatron-LM's layers as well). Biases of products in
8 bit cost nothing more: Transformer Engine sums them where it quantises the gradient
(`cast_transpose_dbias`).

With fused kernels the products' operations are those of `hetplan.model.work`, but attention is
counted as the full square (a causal kernel's law is fitted against the same count).

Symbols: M tokens of a microbatch, h hidden, b microbatch size, s sequence length.
"""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.errors import InputError
from hetplan.model.layers import Attention, Experts, LatentAttention, Mlp, TransformerLayer
from hetplan.model.operators import (
    ADDITION_DROPOUT,
    ADDITION_FUSED,
    DEFAULT_KERNELS,
    Kernels,
    Operator,
    OperatorClass,
)
from hetplan.model.spec import LayerKind, ModelSpec


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
    if kind is LayerKind.TRANSFORMER:
        shape = layer if layer is not None else model.common_layer(sequence_length)
        return tuple(_transformer(shape, model.hidden_size, rows))
    inside = layer if layer is not None else model.mtp_layer
    if inside is None:
        raise InputError(f"{model.name} has no multi-token prediction layers")
    return tuple(_multi_token_prediction(model, inside, rows))


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
    if layer is None:
        of_model = kind is LayerKind.TRANSFORMER
        layer = model.common_layer(sequence_length) if of_model else model.mtp_layer
    if layer is None:
        raise InputError(f"{model.name} has no multi-token prediction layers")
    rows = _Rows(microbatch_size, sequence_length, tp, kernels)
    return tuple(_gradients(layer, model.hidden_size, rows))


def _gradients(layer: TransformerLayer, h: int, rows: _Rows) -> Iterator[Operator]:
    yield Operator(
        operator=OperatorClass.GRADIENT_ADDITION,
        what="residual and branch gradients",
        count=2,
        m=rows.cut_tokens,
        n=h,
    )
    if rows.kernels.product_format:
        return
    for what, tokens, columns in (
        *_attention_biases(layer.attention, h, rows),
        *_mlp_biases(layer.mlp, h, rows),
    ):
        yield Operator(operator=OperatorClass.BIAS_GRADIENT, what=what, m=tokens, n=columns)


def _attention_biases(
    attention: Attention | LatentAttention, h: int, rows: _Rows
) -> Iterator[tuple[str, int, int]]:
    """Where a bias stands, tokens and columns; those of row-cut matrices meet a rank's tokens."""
    if isinstance(attention, LatentAttention):
        if attention.bias:
            latents = (attention.query_rank or 0) + attention.kv_rank + attention.rope_head_dim
            yield "latents' biases", rows.tokens, latents
            yield "attention output bias", rows.cut_tokens, h
        return
    if attention.qkv_bias:
        query, kv = attention.slice_sizes(rows.tp)
        yield "query-key-value bias", rows.tokens, query + 2 * kv
    if attention.output_bias:
        yield "attention output bias", rows.cut_tokens, h


def _mlp_biases(mlp: Mlp | Experts, h: int, rows: _Rows) -> Iterator[tuple[str, int, int]]:
    if isinstance(mlp, Mlp):
        parts = [("", mlp, rows.tokens, rows.cut_tokens)]
    else:
        copies = rows.tokens * mlp.experts_per_token
        parts = [("experts' ", mlp.expert, copies, copies)]
        if mlp.shared:
            parts.append(("shared experts' ", mlp.shared, rows.tokens, rows.cut_tokens))
    for of, part, tokens, after in parts:
        if part.bias:
            inner = part.ffn_hidden_size // rows.tp
            yield f"{of}up bias", tokens, 2 * inner if part.gated else inner
            yield f"{of}down bias", after, h


class _Rows:
    """Sizes that all operators of a layer share."""

    __slots__ = ("batch", "cut_tokens", "kernels", "length", "tokens", "tp")

    def __init__(self, batch: int, length: int, tp: int, kernels: Kernels) -> None:
        self.batch, self.length, self.tp, self.kernels = batch, length, tp, kernels
        self.tokens = batch * length
        # Tokens of norms and additions between the tensor-parallel regions.
        self.cut_tokens = -(-self.tokens // tp) if kernels.sequence_parallel else self.tokens


def _product(what: str, m: int, n: int, k: int) -> Operator:
    return Operator(operator=OperatorClass.MATRIX_PRODUCT, what=what, m=m, n=n, k=k)


def _transformer(layer: TransformerLayer, h: int, rows: _Rows) -> Iterator[Operator]:
    kernels = rows.kernels
    yield Operator(
        operator=OperatorClass.NORM, what="norm", count=layer.num_norms, m=rows.cut_tokens, n=h
    )
    if isinstance(layer.attention, LatentAttention):
        yield from _latent_attention(layer.attention, h, rows)
    else:
        yield from _attention(layer.attention, h, rows)
    if isinstance(layer.mlp, Experts):
        yield from _experts(layer.mlp, h, rows)
    else:
        yield from _mlp(layer.mlp, h, rows.tokens, rows.tp, "")
    yield Operator(
        operator=OperatorClass.ADDITION,
        what="residual addition",
        count=2,
        m=rows.cut_tokens,
        n=h,
        k=ADDITION_DROPOUT if kernels.hidden_dropout else ADDITION_FUSED,
    )


def _attention(attention: Attention, h: int, rows: _Rows) -> Iterator[Operator]:
    query, kv = attention.slice_sizes(rows.tp)
    width = attention.head_dim
    yield _product("query-key-value projection", rows.tokens, query + 2 * kv, h)
    if attention.qk_norm:
        # One row per head: queries' and keys' norms are a launch each, counted as one operator.
        yield Operator(
            operator=OperatorClass.NORM,
            what="query and key norm",
            m=rows.tokens * (query + kv) // width,
            n=width,
        )
    if attention.rotary:
        yield Operator(
            operator=OperatorClass.ROTATION, what="rotary positions", m=rows.tokens, n=query + kv
        )
    yield from _core(query // width, width, width, rows, attention.window)
    yield _product("attention output", rows.tokens, h, query)


def _latent_attention(attention: LatentAttention, h: int, rows: _Rows) -> Iterator[Operator]:
    """Arithmetic of arXiv 2405.04434, equations 9 to 19; latents' projections are whole."""
    tokens = rows.tokens
    query, value = attention.slice_sizes(rows.tp)
    heads = attention.num_heads // rows.tp
    rotated, latent = attention.rope_head_dim, attention.kv_rank
    if attention.query_rank is None:
        yield _product("query projection", tokens, query, h)
    else:
        yield _product("query latent", tokens, attention.query_rank, h)
        yield Operator(
            operator=OperatorClass.NORM, what="query latent norm", m=tokens, n=attention.query_rank
        )
        yield _product("queries from latent", tokens, query, attention.query_rank)
    yield _product("key-value latent", tokens, latent + rotated, h)
    yield Operator(operator=OperatorClass.NORM, what="key-value latent norm", m=tokens, n=latent)
    keys = heads * attention.nope_head_dim
    yield _product("keys and values from latent", tokens, keys + value, latent)
    # Rotation of each head's part, with the copy that puts a key's two parts side by side.
    yield Operator(
        operator=OperatorClass.ROTATION,
        what="rotary positions and keys put together",
        m=tokens,
        n=heads * rotated + query,
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
            operator=OperatorClass.FUSED_ATTENTION,
            what="attention",
            batch=batch,
            m=s,
            n=keys,
            k=(key_width + value_width) // 2,
        )
        return
    # Without a fused kernel the whole square is computed, whatever the window.
    yield Operator(
        operator=OperatorClass.ATTENTION_SCORE, what="scores", batch=batch, m=s, n=s, k=key_width
    )
    yield Operator(operator=OperatorClass.SOFTMAX, what="softmax", m=batch * s, n=s)
    if rows.kernels.attention_dropout:
        yield Operator(
            operator=OperatorClass.ATTENTION_DROPOUT, what="attention dropout", m=batch * s, n=s
        )
    yield Operator(
        operator=OperatorClass.ATTENTION_CONTEXT,
        what="context",
        batch=batch,
        m=s,
        n=value_width,
        k=s,
    )


def _mlp(mlp: Mlp, h: int, tokens: int, tp: int, of: str) -> Iterator[Operator]:
    inner = mlp.ffn_hidden_size // tp
    read = 2 * inner if mlp.gated else inner
    # Gate and up projection read the same input: one product, as trainers run it.
    yield _product(f"{of}up projection", tokens, read, h)
    yield Operator(
        operator=OperatorClass.ACTIVATION, what=f"{of}activation", m=tokens, n=inner, k=read
    )
    yield _product(f"{of}down projection", tokens, h, inner)


def _experts(experts: Experts, h: int, rows: _Rows) -> Iterator[Operator]:
    tokens, copies = rows.tokens, rows.tokens * experts.experts_per_token
    inner = experts.expert_ffn_hidden_size // rows.tp
    read = 2 * inner if experts.gated else inner
    # Balanced: as many copies come from the ranks that share the experts as go to them.
    held = max(1, experts.num_experts // rows.kernels.expert_parallel)
    met = min(held, copies)
    each = -(-copies // met)
    yield _product("router", tokens, experts.num_experts + experts.shared_gate, h)
    # Softmax and choice over the experts; the counts and indices are below one pass more.
    yield Operator(
        operator=OperatorClass.SOFTMAX, what="router softmax", m=tokens, n=experts.num_experts
    )
    yield Operator(operator=OperatorClass.ROUTING, what="routing", m=copies, n=h)
    grouped = OperatorClass.GROUPED_PRODUCT
    yield Operator(operator=grouped, what="experts' up projection", batch=met, m=each, n=read, k=h)
    yield Operator(
        operator=OperatorClass.ACTIVATION, what="experts' activation", m=copies, n=inner, k=read
    )
    yield Operator(
        operator=grouped, what="experts' down projection", batch=met, m=each, n=h, k=inner
    )
    if experts.shared:
        yield from _mlp(experts.shared, h, tokens, rows.tp, "shared experts' ")


def _embedding(model: ModelSpec, rows: _Rows) -> Iterator[Operator]:
    yield Operator(
        operator=OperatorClass.EMBEDDING,
        what="embedding",
        m=rows.tokens,
        n=model.embedding_width,
        k=model.vocabulary_slice(rows.tp),
    )
    if model.embedding_size is not None:
        yield _product("embedding projection", rows.tokens, model.hidden_size, model.embedding_size)


def _head(model: ModelSpec, rows: _Rows) -> Iterator[Operator]:
    h, vocabulary = model.hidden_size, model.vocabulary_slice(rows.tp)
    if model.final_norm is not None:
        yield Operator(operator=OperatorClass.NORM, what="final norm", m=rows.cut_tokens, n=h)
    if model.embedding_size is not None:
        yield _product("head projection", rows.tokens, model.embedding_size, h)
    yield _product("logits", rows.tokens, vocabulary, model.embedding_width)
    yield Operator(
        operator=OperatorClass.LOSS,
        what="loss",
        m=rows.tokens,
        n=vocabulary,
        float32_copy=not rows.kernels.fused_loss,
    )


def _multi_token_prediction(
    model: ModelSpec, inside: TransformerLayer, rows: _Rows
) -> Iterator[Operator]:
    """Two norms, the merge [2 h, h], a transformer layer, the shared head."""
    h = model.hidden_size
    yield Operator(
        operator=OperatorClass.NORM,
        what="norms of state and embedding",
        count=2,
        m=rows.cut_tokens,
        n=h,
    )
    yield _product("merge", rows.tokens, -(-h // rows.tp), 2 * h)
    yield from _transformer(inside, h, rows)
    yield from _head(model, rows)
