"""Rows of operators against the work that a layer does, counted apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.errors import InputError
from hetplan.model.layers import (
    Attention,
    Experts,
    LatentAttention,
    LayerRun,
    Mlp,
    Norm,
    TransformerLayer,
)
from hetplan.model.operators import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    PRODUCTS,
    WEIGHT_GRADIENT,
    WITH_WEIGHTS,
    Kernels,
    Operator,
    OperatorClass,
    gradient_operators,
    layer_operators,
    operator_bytes,
    operator_flops,
)
from hetplan.model.spec import Architecture, LayerKind, ModelSpec, plain_model
from hetplan.model.work import layer_work

UNFUSED = Kernels(
    fused_attention=False, attention_dropout=True, hidden_dropout=True, fused_loss=False
)


def model_of(layer: TransformerLayer, hidden: int, **more: object) -> ModelSpec:
    return ModelSpec(
        name="test",
        hidden_size=hidden,
        vocab_size=1000,
        max_sequence_length=4096,
        layer_runs=(LayerRun(count=2, layer=layer),),
        final_norm=Norm.RMS_NORM,
        **more,  # type: ignore[arg-type]
    )


ATTENTIONS = (
    Attention(num_heads=8, num_kv_heads=8, head_dim=16, rotary=False),
    Attention(num_heads=8, num_kv_heads=4, head_dim=16, qk_norm=True),
    Attention(num_heads=8, num_kv_heads=4, head_dim=16, window=64),
    LatentAttention(
        num_heads=8, query_rank=24, kv_rank=32, nope_head_dim=16, rope_head_dim=8, value_head_dim=16
    ),
    LatentAttention(
        num_heads=8,
        query_rank=None,
        kv_rank=32,
        nope_head_dim=16,
        rope_head_dim=8,
        value_head_dim=16,
    ),
)
MLPS = (
    Mlp(ffn_hidden_size=512, gated=False),
    Mlp(ffn_hidden_size=512, gated=True),
    Experts(num_experts=8, experts_per_token=2, expert_ffn_hidden_size=64),
    Experts(
        num_experts=16,
        experts_per_token=4,
        expert_ffn_hidden_size=32,
        shared_ffn_hidden_size=64,
        shared_gate=True,
        gated=False,
    ),
)
layers = st.builds(
    TransformerLayer,
    attention=st.sampled_from(ATTENTIONS),
    mlp=st.sampled_from(MLPS),
    norm=st.sampled_from(Norm),
    num_norms=st.sampled_from((2, 4)),
)


def flops(ops: tuple[Operator, ...], *, attention: bool) -> float:
    cores = PRODUCTS - WITH_WEIGHTS
    return sum(
        op.count * operator_flops(op, FORWARD) for op in ops if (op.operator in cores) == attention
    )


@settings(max_examples=60, deadline=None)
@given(
    layer=layers,
    batch=st.integers(1, 4),
    length=st.sampled_from((32, 64, 128, 256)),
    tp=st.sampled_from((1, 2, 4)),
)
def test_products_are_the_work_that_a_layer_does(
    layer: TransformerLayer, batch: int, length: int, tp: int
) -> None:
    model = model_of(layer, 128)
    ops = layer_operators(
        model,
        LayerKind.TRANSFORMER,
        layer,
        microbatch_size=batch,
        sequence_length=length,
        tp=tp,
    )
    work = layer_work(model, LayerKind.TRANSFORMER, batch, length, tp)
    assert flops(ops, attention=False) == pytest.approx(work.matrix_flops, rel=1e-9)
    # The causal kernel's half; a window's band is rounded to whole tokens.
    assert flops(ops, attention=True) / 2 == pytest.approx(work.attention_flops, rel=0.01)


def test_a_multi_token_prediction_layer_is_merge_layer_and_head() -> None:
    layer = TransformerLayer(attention=ATTENTIONS[0], mlp=MLPS[1], norm=Norm.RMS_NORM)
    model = model_of(layer, 128, num_mtp_layers=1, mtp_layer=layer)
    kind = LayerKind.MULTI_TOKEN_PREDICTION
    ops = layer_operators(model, kind, microbatch_size=2, sequence_length=64, tp=2)
    work = layer_work(model, kind, 2, 64, 2)
    assert flops(ops, attention=False) == pytest.approx(work.matrix_flops)
    with pytest.raises(InputError, match="no multi-token prediction"):
        layer_operators(model_of(layer, 128), kind, microbatch_size=1, sequence_length=8)


@settings(max_examples=40, deadline=None)
@given(
    layer=layers,
    tp=st.sampled_from((2, 4)),
    kernels=st.sampled_from((Kernels(), UNFUSED)),
)
def test_slices_sum_to_the_whole(layer: TransformerLayer, tp: int, kernels: Kernels) -> None:
    """All that is cut adds up; what every rank repeats is named here."""
    model = model_of(layer, 128)

    def row(degree: int) -> dict[str, Operator]:
        ops = layer_operators(
            model,
            LayerKind.TRANSFORMER,
            layer,
            microbatch_size=2,
            sequence_length=64,
            tp=degree,
            kernels=replace(kernels, sequence_parallel=True),
        )
        return {op.what: op for op in ops}

    whole, slices = row(1), row(tp)
    assert whole.keys() == slices.keys()
    repeated = {"sorting by expert"}  # of copies that ranks which cut the experts gathered
    for what, op in whole.items():
        of_one = slices[what]
        if op.operator in PRODUCTS:
            one, all_ = operator_flops(of_one, FORWARD), operator_flops(op, FORWARD)
        else:
            one, all_ = operator_bytes(of_one, FORWARD, 2), operator_bytes(op, FORWARD, 2)
        assert one * (1 if what in repeated else tp) == pytest.approx(all_), what


def test_ranks_that_share_experts_have_fewer_with_more_tokens_each() -> None:
    layer = TransformerLayer(attention=ATTENTIONS[0], mlp=MLPS[2], norm=Norm.RMS_NORM)

    def grouped(ranks: int) -> list[Operator]:
        ops = layer_operators(
            model_of(layer, 128),
            LayerKind.TRANSFORMER,
            layer,
            microbatch_size=2,
            sequence_length=64,
            kernels=Kernels(expert_parallel=ranks),
        )
        return [op for op in ops if op.operator is OperatorClass.GROUPED_PRODUCT]

    for alone, shared in zip(grouped(1), grouped(4), strict=True):
        assert (shared.batch, shared.m) == (alone.batch // 4, alone.m * 4)
        assert operator_flops(shared, FORWARD) == operator_flops(alone, FORWARD)


def rows_of(layer: TransformerLayer, kernels: Kernels, tp: int = 1) -> dict[str, Operator]:
    ops = layer_operators(
        model_of(layer, 128),
        LayerKind.TRANSFORMER,
        layer,
        microbatch_size=2,
        sequence_length=64,
        tp=tp,
        kernels=kernels,
    )
    return {op.what: op for op in ops}


def test_a_layer_with_experts_by_hand() -> None:
    # 8 experts of 64, 2 per token, on 4 ranks; 128 tokens, of which a rank has 64 by itself.
    layer = TransformerLayer(attention=ATTENTIONS[0], mlp=MLPS[2], norm=Norm.RMS_NORM)
    kernels = Kernels(
        sequence_parallel=True,
        expert_parallel=4,
        expert_tensor_parallel=1,
        product_format="mxfp8",
    )
    ops = rows_of(layer, kernels, tp=2)
    sizes = {what: (op.m, op.n, op.k, op.count, op.batch) for what, op in ops.items()}
    assert sizes["router"] == (64, 8, 128, 1, 1)
    # 40 kernels, and messages of counts and of probabilities, each as long as five.
    assert sizes["router passes"] == (64, 8, 0, 50, 1)
    for what in ("routing", "sorting by expert", "padding of experts' tokens"):
        assert sizes[what] == (128, 128, 0, 1, 1)
    # 128 copies come to two experts of the rank; nobody cuts them.
    assert sizes["experts' up projection"] == (64, 128, 128, 1, 2)
    assert sizes["experts' activation"] == (128, 64, 128, 1, 1)
    assert sizes["experts' down projection"] == (64, 128, 64, 1, 2)
    after = {what for what, op in ops.items() if op.dispatched}
    assert after == {
        "sorting by expert",
        "padding of experts' tokens",
        "experts' up projection",
        "experts' activation",
        "experts' down projection",
    }
    (backward,) = (
        op
        for op in gradient_operators(
            model_of(layer, 128),
            LayerKind.TRANSFORMER,
            layer,
            microbatch_size=2,
            sequence_length=64,
            tp=2,
            kernels=kernels,
        )
        if op.operator is OperatorClass.ROUTER
    )
    assert (backward.m, backward.n, backward.count) == (64, 8, 12 + 5)


def test_dispatchers_differ_in_what_they_move() -> None:
    layer = TransformerLayer(attention=ATTENTIONS[0], mlp=MLPS[2], norm=Norm.RMS_NORM)

    def moved(**changes: object) -> set[str]:
        ops = rows_of(layer, replace(Kernels(expert_parallel=2), **changes))  # type: ignore[arg-type]
        return {what for what, op in ops.items() if op.operator is OperatorClass.ROUTING}

    assert moved() == {"routing", "sorting by expert"}
    assert moved(product_format="float8") == moved() | {"padding of experts' tokens"}
    assert moved(sorts_copies=False, product_format="float8") == {"routing"}
    # One expert a rank: nothing to sort. All on one rank: Megatron-core sorts all the same.
    assert moved(expert_parallel=8) == {"routing"}
    assert moved(expert_parallel=1) == moved()


def test_ranks_that_cut_experts_gather_each_others_copies() -> None:
    layer = TransformerLayer(attention=ATTENTIONS[0], mlp=MLPS[2], norm=Norm.RMS_NORM)
    cut = rows_of(layer, Kernels(sequence_parallel=True), tp=2)
    assert (cut["routing"].m, cut["sorting by expert"].m) == (128, 256)
    up, down = cut["experts' up projection"], cut["experts' down projection"]
    assert (up.batch, up.m, up.n) == (8, 32, 64)
    assert (down.batch, down.m, down.k) == (8, 32, 32)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(sorted(WITH_WEIGHTS)),
    batch=st.integers(1, 8),
    m=st.integers(1, 500),
    n=st.integers(1, 500),
    k=st.integers(1, 500),
)
def test_both_gradients_are_the_backward_pass(
    kind: OperatorClass, batch: int, m: int, n: int, k: int
) -> None:
    op = Operator(operator=kind, what="", batch=batch, m=m, n=n, k=k)
    of_input = Operator(operator=kind, what="", batch=batch, m=m, n=k, k=n)
    of_weight = Operator(operator=kind, what="", batch=batch, m=n, n=k, k=m)
    for count, more in ((operator_flops, ()), (operator_bytes, (2.0,))):
        both = count(of_input, INPUT_GRADIENT, *more) + count(of_weight, WEIGHT_GRADIENT, *more)
        assert both == pytest.approx(count(op, BACKWARD, *more))


def test_bytes_by_hand() -> None:
    """Passes over 3 tokens of width 10 in 2 bytes per element."""

    def of(kind: OperatorClass, phase: str, k: int = 0, **more: bool) -> float:
        return operator_bytes(Operator(operator=kind, what="", m=3, n=10, k=k, **more), phase, 2)

    assert of(OperatorClass.NORM, FORWARD) == 30 * 4
    assert of(OperatorClass.ACTIVATION, FORWARD) == of(OperatorClass.ACTIVATION, FORWARD, 10)
    assert of(OperatorClass.ACTIVATION, FORWARD, 20) == 30 * 6
    assert of(OperatorClass.ADDITION, FORWARD) == 30 * 6
    assert of(OperatorClass.ADDITION, FORWARD, 1) == 30 * 7
    assert of(OperatorClass.ADDITION, FORWARD, 3) == 30 * 15
    assert of(OperatorClass.ADDITION, BACKWARD, 1) == 30 * 5
    assert of(OperatorClass.GRADIENT_ADDITION, BACKWARD) == 30 * 6
    assert of(OperatorClass.BIAS_GRADIENT, BACKWARD) == 30 * 2
    assert of(OperatorClass.ATTENTION_DROPOUT, BACKWARD) == 30 * 5
    assert of(OperatorClass.LOSS, FORWARD) == 30 * 4
    assert of(OperatorClass.LOSS, FORWARD, float32_copy=True) == 30 * 38
    assert of(OperatorClass.LOSS, BACKWARD, float32_copy=True) == 30 * 14
    # The table's gradient is written whole.
    assert of(OperatorClass.EMBEDDING, BACKWARD, 500) - of(
        OperatorClass.EMBEDDING, FORWARD, 500
    ) == (500 * 10 * 2)
    fused = Operator(operator=OperatorClass.FUSED_ATTENTION, what="", batch=4, m=8, n=8, k=16)
    assert operator_flops(fused, FORWARD) == 2 * 2 * 4 * 8 * 8 * 16
    assert operator_flops(fused, BACKWARD) == 2.5 * operator_flops(fused, FORWARD)
    assert operator_bytes(fused, FORWARD, 2) == 4 * 4 * 8 * 16 * 2


def plain(architecture: Architecture) -> ModelSpec:
    return plain_model(
        name="plain",
        architecture=architecture,
        num_layers=1,
        hidden_size=128,
        ffn_hidden_size=512,
        num_attention_heads=8,
        num_kv_heads=8,
        head_dim=16,
        vocab_size=1000,
        max_sequence_length=64,
    )


def gradient_bytes(model: ModelSpec, tp: int = 1, **more: bool | str) -> dict[OperatorClass, float]:
    found: dict[OperatorClass, float] = {}
    for op in gradient_operators(
        model,
        LayerKind.TRANSFORMER,
        microbatch_size=2,
        sequence_length=64,
        tp=tp,
        kernels=Kernels(**more),
    ):
        moved = op.count * operator_bytes(op, BACKWARD, 2)
        found[op.operator] = found.get(op.operator, 0.0) + moved
    return found


def test_autograd_adds_gradients_at_two_forks_and_sums_those_of_biases() -> None:
    """6 bytes per element at each fork; 2 per column of qkv, dense, fc1, fc2 of a GPT layer."""
    sums, biases = OperatorClass.GRADIENT_ADDITION, OperatorClass.BIAS_GRADIENT
    model, tokens = plain(Architecture.GPT), 2 * 64
    h = model.hidden_size
    assert gradient_bytes(model) == {sums: 12 * tokens * h, biases: 2 * tokens * 9 * h}
    cut = gradient_bytes(model, 2)
    assert cut == {sums: 12 * tokens * h, biases: 2 * tokens * (7 / 2 + 2) * h}
    split = gradient_bytes(model, 2, sequence_parallel=True)
    assert split == {sums: 6 * tokens * h, biases: 2 * tokens * (7 / 2 + 1) * h}
    # In 8 bit the biases are summed where the gradients are narrowed.
    assert gradient_bytes(model, product_format="float8") == {sums: 12 * tokens * h}
    assert set(gradient_bytes(plain(Architecture.LLAMA))) == {sums}


def test_operators_apart_move_what_pytorch_moves() -> None:
    """RMSNorm 36 bytes per element forward, rotation 20, a gated activation 10 (SwiGLU)."""
    layer = TransformerLayer(
        attention=Attention(num_heads=8, num_kv_heads=4, head_dim=16),
        mlp=Mlp(ffn_hidden_size=256, gated=True),
        norm=Norm.RMS_NORM,
    )
    model, moved = model_of(layer, 128), {}
    for fused in (True, False):
        ops = layer_operators(
            model,
            LayerKind.TRANSFORMER,
            microbatch_size=1,
            sequence_length=64,
            kernels=Kernels(fused_elementwise=fused),
        )
        passes = [op for op in ops if op.operator not in PRODUCTS]
        moved[fused] = sum(op.count * operator_bytes(op, FORWARD, 2) for op in passes)
    apart = 2 * 128 * (32 - 4) + (128 + 2 * 64 - 64) * (20 - 4) + 256 * (10 - 6)
    assert moved[False] - moved[True] == 64 * apart
