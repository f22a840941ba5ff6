"""Laws of parameters, operations and activations that hold for every model."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.model.layers import (
    Attention,
    Experts,
    LatentAttention,
    LayerRun,
    Mlp,
    Norm,
    TransformerLayer,
)
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.model.work import (
    attended,
    largest_matrix,
    layer_work_at,
    transformer_work,
)

steady = settings(derandomize=True, deadline=None, max_examples=80)
size = st.integers(1, 40)
flag = st.booleans()


@st.composite
def attentions(draw):
    heads = draw(st.sampled_from([4, 8, 12]))
    if draw(flag):
        return LatentAttention(
            num_heads=heads,
            query_rank=draw(st.none() | size),
            kv_rank=draw(size),
            nope_head_dim=draw(size),
            rope_head_dim=draw(size),
            value_head_dim=draw(size),
            bias=draw(flag),
        )
    return Attention(
        num_heads=heads,
        num_kv_heads=draw(st.sampled_from([1, 2, 4])),
        head_dim=draw(size),
        qkv_bias=draw(flag),
        output_bias=draw(flag),
        qk_norm=draw(flag),
        rotary=draw(flag),
        window=draw(st.none() | size),
    )


@st.composite
def mlps(draw):
    width = 4 * draw(size)
    if draw(flag):
        return Mlp(ffn_hidden_size=width, gated=draw(flag), bias=draw(flag))
    shared = 4 * draw(st.integers(0, 9))
    number = draw(st.integers(1, 9))
    return Experts(
        num_experts=number,
        experts_per_token=draw(st.integers(1, number)),
        expert_ffn_hidden_size=width,
        shared_ffn_hidden_size=shared,
        shared_gate=bool(shared) and draw(flag),
        gated=draw(flag),
        bias=draw(flag),
    )


@st.composite
def layers(draw):
    parallel = draw(flag)
    return TransformerLayer(
        attention=draw(attentions()),
        mlp=draw(mlps()),
        norm=draw(st.sampled_from(Norm)),
        num_norms=draw(st.sampled_from([1, 2, 4] if parallel else [2, 4])),
        parallel_residual=parallel,
    )


@st.composite
def models(draw, most_runs=3):
    mtp = draw(st.integers(0, 2))
    return ModelSpec(
        name="drawn",
        hidden_size=draw(size),
        vocab_size=draw(st.integers(1, 300)),
        max_sequence_length=draw(st.integers(1, 300)),
        layer_runs=tuple(
            LayerRun(count=draw(st.integers(1, 3)), layer=draw(layers()))
            for _ in range(draw(st.integers(1, most_runs)))
        ),
        final_norm=draw(st.none() | st.sampled_from(Norm)),
        learned_positions=draw(st.integers(0, 300)),
        embedding_size=draw(st.none() | size),
        head_bias=draw(flag),
        tied_embeddings=draw(flag),
        num_mtp_layers=mtp,
        mtp_layer=draw(layers()) if mtp else None,
    )


@given(model=models(), tp=st.sampled_from([1, 2, 4]))
@steady
def test_slices_hold_at_least_the_whole_and_no_rank_more_than_it(model, tp):
    assert model.slicing_faults(tp) == ()
    for position in range(len(model.layers)):
        whole, part = model.parameters_at(position), model.parameters_at(position, tp)
        assert whole <= tp * part
        # A vocabulary or merge that tp does not divide is rounded up by less than a row a rank.
        assert part <= whole + 2 * model.hidden_size + model.embedding_width + 1


@given(model=models())
@steady
def test_the_count_is_the_sum_over_the_row(model):
    kinds = model.layers
    of_row = [model.parameters_at(position) for position in range(len(kinds))]
    mtp = [n for n, kind in zip(of_row, kinds, strict=True) if kind == "multi_token_prediction"]
    tied = model.vocabulary_matrix() if model.tied_embeddings else 0
    assert model.parameter_count == sum(of_row) - sum(mtp) - tied


@given(model=models(), b=st.integers(1, 3), s=st.integers(1, 60), tp=st.sampled_from([1, 2, 4]))
@steady
def test_work_is_whole_for_every_position(model, b, s, tp):
    for position, kind in enumerate(model.layers):
        one = layer_work_at(model, position, b, s)
        part = layer_work_at(model, position, b, s, tp)
        assert (
            one.matrix_flops
            <= tp * part.matrix_flops
            <= tp * layer_work_at(model, position, b, s).matrix_flops * (1 + tp)
        )
        assert one.weight_elements <= model.parameters_at(position) + (
            model.parameters(LayerKind.HEAD) if kind == "multi_token_prediction" else 0
        )
        double = layer_work_at(model, position, 2 * b, s)
        assert double.flops == 2 * one.flops


@given(layer=layers(), h=size, s=st.integers(1, 60), more=st.integers(0, 50))
@steady
def test_a_window_over_the_whole_sequence_is_none(layer, h, s, more):
    if isinstance(layer.attention, LatentAttention):
        return
    full = replace(layer, attention=replace(layer.attention, window=None))
    wide = replace(layer, attention=replace(layer.attention, window=s + more))
    assert transformer_work(wide, h, 1, s) == transformer_work(full, h, 1, s)
    assert wide.at(s) == full
    assert wide.parameters(h) == full.parameters(h)


@given(s=st.integers(1, 80), w=st.integers(1, 80))
@steady
def test_the_band_is_the_pairs_that_are_seen(s, w):
    seen = sum(min(i, w) for i in range(1, s + 1))  # token i sees itself and w - 1 before it
    # The diagonal's pairs count half: those of the first min(s, w) tokens, as in the whole square.
    assert attended(s, w) == seen - min(s, w) / 2
    assert attended(s, w) <= attended(s, w + 1) <= attended(s, None) == s * s / 2


@given(width=size, gated=flag, bias=flag, h=size, tokens=st.integers(1, 30))
@steady
def test_one_expert_for_all_is_a_dense_mlp_with_a_router(width, gated, bias, h, tokens):
    mlp = Mlp(ffn_hidden_size=width, gated=gated, bias=bias)
    one = Experts(
        num_experts=1,
        experts_per_token=1,
        expert_ffn_hidden_size=width,
        gated=gated,
        bias=bias,
    )
    shared = replace(one, shared_ffn_hidden_size=width)
    assert one.parameters(h) == mlp.parameters(h) + h
    assert shared.parameters(h) == 2 * mlp.parameters(h) + h
    attention = Attention(num_heads=1, num_kv_heads=1, head_dim=4)
    dense = TransformerLayer(attention=attention, mlp=mlp, norm=Norm.RMS_NORM)
    sparse = replace(dense, mlp=one)
    difference = (
        transformer_work(sparse, h, 1, tokens).flops - transformer_work(dense, h, 1, tokens).flops
    )
    assert difference == 2 * tokens * h  # the router's product
    assert largest_matrix(sparse, h, 1) == largest_matrix(dense, h, 1)
