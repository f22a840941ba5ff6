"""Layers under every kind of parallelism and recomputation, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cost_fakes import LinearPredictor, job, model
from estimate_plans import (
    CLUSTER,
    FREE,
    SHAPE,
    expert_model,
    hidden_of,
    plan_of,
    seconds_of,
    wide_cluster,
)

from hetplan.cluster.spec import Cluster
from hetplan.cost.estimate import estimate
from hetplan.cost.estimate_values import Component, Estimate
from hetplan.job.spec import Job, LengthShare
from hetplan.model.layers import Experts, LayerRun
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.model.work import layer_work
from hetplan.plans.plan import (
    OverlapSettings,
    Recompute,
    RecomputeGranularity,
    RecomputeModule,
)
from hetplan.predict.fit import FittedPredictor
from hetplan.predict.predictor import Predictor

HIDDEN = 128 * 256 * 4  # one sequence of 128 tokens, float32
FAST = 100e9  # inside a node


def priced(
    shape: ModelSpec = SHAPE,
    *,
    size: int = 4,
    asked: Job = FREE,
    cluster: Cluster = CLUSTER,
    predictor: Predictor = LinearPredictor(),  # noqa: B008
    **changes: object,
) -> Estimate:
    """One stage that holds everything."""
    plan = plan_of([size], microbatches=8, shape=shape, asked=asked, cluster=cluster, **changes)  # type: ignore[arg-type]
    return estimate(plan, shape, cluster, asked, predictor)


COMPUTE = 3 * (8 * 0.010 + 0.001 + 0.004)  # forward and twice that backward, one sequence


def test_sequence_parallelism_splits_every_sum_in_two_halves_and_gathers_inputs_again() -> None:
    plain, split = priced(tp=4), priced(tp=4, sequence_parallel=True)
    one = 1.5 * HIDDEN / FAST  # all_reduce among four
    softmax = 3 * 1.5 * 128 * 4 / FAST
    layers = 8 * 4 + 1 + 1  # the embedding's forward one, the head's backward one
    assert seconds_of(plain, Component.TENSOR_PARALLEL) == pytest.approx(
        8 * (layers * one + softmax)
    )
    # A sum is a scatter and a gather of 3/4 each: the embedding's output is scattered and its
    # gradient gathered, the head's input gathered and its gradient scattered.
    # Backward, the inputs of attention, MLP and head are gathered once more.
    halves = 8 * 4 * 2 + 2 + 2 + 8 * 2 + 1
    assert seconds_of(split, Component.TENSOR_PARALLEL) == pytest.approx(
        8 * (halves * 0.75 * HIDDEN / FAST + softmax)
    )
    assert seconds_of(plain, Component.COMPUTE) == pytest.approx(8 * COMPUTE / 4)
    assert split.stages[0].memory.activation_bytes < plain.stages[0].memory.activation_bytes


def test_context_parallelism_divides_compute_and_sends_keys_and_values_around() -> None:
    alone = OverlapSettings(context_parallel=False)
    found = priced(cp=4, overlap=alone)
    assert seconds_of(found, Component.COMPUTE) == pytest.approx(8 * COMPUTE / 4)
    # 4 key-value heads of 32, keys and values, a quarter of the tokens: three sends forward, three
    # of twice the bytes backward, in each of eight layers.
    block = 2 * 4 * 32 * 128 / 4 * 4
    assert seconds_of(found, Component.CONTEXT_PARALLEL) == pytest.approx(8 * 8 * 9 * block / FAST)
    # All four ranks hold the same weights: their gradients are summed.
    parameters = model().parameter_count
    assert seconds_of(found, Component.DATA_PARALLEL) == pytest.approx(1.5 * parameters * 4 / FAST)
    assert found.stages[0].memory.parameter_bytes == parameters * 4


def test_context_parallel_sends_hide_behind_attention() -> None:
    slow = LinearPredictor(collective_fixed_seconds=1e-4)
    open_, beside = (
        priced(cp=4, overlap=OverlapSettings(context_parallel=on), predictor=slow)
        for on in (False, True)
    )
    whole = seconds_of(open_, Component.CONTEXT_PARALLEL)
    assert hidden_of(open_, Component.CONTEXT_PARALLEL) == 0
    assert hidden_of(beside, Component.CONTEXT_PARALLEL) > 0
    assert seconds_of(beside, Component.CONTEXT_PARALLEL) + hidden_of(
        beside, Component.CONTEXT_PARALLEL
    ) == pytest.approx(whole)
    # Three quarters of the attention core can hide some, slowed down by both sides' slow-downs.
    work = layer_work(model(), LayerKind.TRANSFORMER, 1, 128)
    core = 8 * 8 * 0.030 / 4 * work.attention_flops / work.flops * 3 / 4
    assert hidden_of(beside, Component.CONTEXT_PARALLEL) <= core * 1.2
    assert seconds_of(beside, Component.SLOWED) > 0


def test_tensor_parallel_overlap_keeps_the_sum_of_exposed_and_hidden() -> None:
    plain = priced(tp=4, sequence_parallel=True)
    both = OverlapSettings(tensor_parallel=True)
    beside = priced(tp=4, sequence_parallel=True, overlap=both)
    assert hidden_of(beside, Component.TENSOR_PARALLEL) > 0
    assert seconds_of(beside, Component.TENSOR_PARALLEL) + hidden_of(
        beside, Component.TENSOR_PARALLEL
    ) == pytest.approx(seconds_of(plain, Component.TENSOR_PARALLEL))
    assert any("assumed that compute beside" in line for line in beside.warnings)


def test_expert_parallelism_sends_tokens_to_their_experts_and_back() -> None:
    shape = expert_model()
    asked = replace(FREE, target="any")
    one, four = priced(shape, asked=asked), priced(shape, ep=4, asked=asked)
    assert seconds_of(one, Component.EXPERT_PARALLEL) == 0
    # 2 experts per token; there and back, forward and backward, in 8 layers of 8 microbatches.
    message = 2 * HIDDEN * 0.75 / FAST
    assert seconds_of(four, Component.EXPERT_PARALLEL) == pytest.approx(8 * 8 * 4 * message)
    assert seconds_of(four, Component.COMPUTE) == pytest.approx(seconds_of(one, Component.COMPUTE))
    # A quarter of the experts on each rank, which nobody else holds: only the rest is reduced.
    held = one.stages[0].memory.parameter_bytes - four.stages[0].memory.parameter_bytes
    routed = 8 * 8 * 3 * 256 * 256 * 4
    assert held == pytest.approx(0.75 * routed)
    rest = shape.parameter_count * 4 - routed
    assert seconds_of(four, Component.DATA_PARALLEL) == pytest.approx(1.5 * rest / FAST)


def test_uneven_experts_cost_compute_and_transfers() -> None:
    shape = expert_model()
    uneven = replace(FREE, expert_load_factor=1.5)
    even, found = priced(shape, ep=4), priced(shape, ep=4, asked=uneven)
    work = layer_work(shape, LayerKind.TRANSFORMER, 1, 128)
    routed = 2 * 128 * 2 * 3 * 256 * 256 / work.flops
    expected = 0.5 * (8 * 8 * 0.030 * routed + seconds_of(even, Component.EXPERT_PARALLEL))
    assert seconds_of(found, Component.IMBALANCE) == pytest.approx(expected)
    assert found.step_seconds - even.step_seconds == pytest.approx(expected)


@pytest.mark.parametrize("layers", [None, 3])
def test_full_recomputation_of_all_or_the_first_layers(layers: int | None) -> None:
    again = Recompute(granularity=RecomputeGranularity.FULL, layers=layers)
    plain, found = priced(tp=2, size=2), priced(tp=2, size=2, recompute=again)
    count = 8 if layers is None else layers
    assert seconds_of(found, Component.RECOMPUTE) == pytest.approx(8 * count * 0.010 / 2)
    # Its two sums per layer are made again too.
    assert seconds_of(found, Component.TENSOR_PARALLEL) - seconds_of(
        plain, Component.TENSOR_PARALLEL
    ) == pytest.approx(8 * count * 2 * HIDDEN / FAST)


def test_selective_recomputation_is_the_modules_part_of_the_operations() -> None:
    work = layer_work(model(), LayerKind.TRANSFORMER, 1, 128)
    shares = {
        RecomputeModule.CORE_ATTENTION: work.attention_flops / work.flops,
        RecomputeModule.MLP: 2 * 128 * 3 * 256 * 512 / work.flops,
        # Two norms, read and written at the device's 1 TB/s.
        RecomputeModule.NORMS: 2 * 2 * 128 * 256 * 4 / 1e12 / 0.010,
    }
    for module, share in shares.items():
        selective = Recompute(granularity=RecomputeGranularity.SELECTIVE, modules=(module,))
        found = priced(size=1, recompute=selective)
        assert seconds_of(found, Component.RECOMPUTE) == pytest.approx(8 * 8 * 0.010 * share), (
            module
        )
    both = Recompute(
        granularity=RecomputeGranularity.SELECTIVE,
        modules=(RecomputeModule.CORE_ATTENTION, RecomputeModule.MLP),
    )
    assert seconds_of(priced(size=1, recompute=both), Component.RECOMPUTE) == pytest.approx(
        8 * 8 * 0.010 * (shares[RecomputeModule.CORE_ATTENTION] + shares[RecomputeModule.MLP])
    )


def test_unlike_layers_cost_what_models_of_each_alone_do() -> None:
    dense = model()
    plain = dense.layer_runs[0].layer
    experts = replace(
        plain, mlp=Experts(num_experts=4, experts_per_token=2, expert_ffn_hidden_size=512)
    )
    window = replace(plain, attention=replace(plain.attention, window=32))  # type: ignore[type-var]
    runs = (LayerRun(count=3, layer=plain), LayerRun(count=2, layer=experts),
            LayerRun(count=3, layer=window))  # fmt: skip
    mixed = replace(dense, layer_runs=runs)
    predictor = FittedPredictor.datasheet_only()

    def forward(shape: ModelSpec) -> float:
        return priced(shape, size=1, predictor=predictor).stages[0].forward_seconds

    alone = [
        forward(replace(dense, layer_runs=(LayerRun(count=8, layer=each),)))
        for each in (plain, experts, window)
    ]
    ends = forward(replace(dense, layer_runs=(LayerRun(count=1, layer=plain),)))
    layer = (alone[0] - ends) / 7
    ends -= layer
    parts = [(each - ends) / 8 for each in alone]
    assert parts[0] != parts[1] != parts[2]
    assert forward(mixed) == pytest.approx(ends + 3 * parts[0] + 2 * parts[1] + 3 * parts[2])


def test_multi_token_prediction_is_a_layer_a_merge_and_a_head() -> None:
    dense = model()
    layer = dense.layer_runs[0].layer
    shape = replace(dense, num_mtp_layers=1, mtp_layer=layer)
    found, plain = priced(shape, size=1), priced(size=1)
    work = layer_work(dense, LayerKind.TRANSFORMER, 1, 128)
    merge = 2 * 128 * 2 * 256 * 256 / work.flops
    assert found.step_seconds - plain.step_seconds == pytest.approx(
        8 * 3 * (0.010 * (1 + merge) + 0.004) + (shape.mtp_parameter_count) * 1e-9
    )
    assert found.stages[0].transformer_layers == 9


def test_padding_of_the_vocabulary_is_a_part_of_the_head() -> None:
    asked = job(target="megatron", gradient_clipping=False)
    found = priced(asked=asked, size=1)
    assert seconds_of(found, Component.PADDING) == pytest.approx(8 * 3 * 0.004 * 24 / 1024)
    assert seconds_of(found, Component.COMPUTE) + seconds_of(
        found, Component.PADDING
    ) == pytest.approx(8 * COMPUTE)


def test_copies_of_key_value_heads_are_a_part_of_the_compute_and_sums() -> None:
    shared = model(num_kv_heads=1)
    asked = job(gradient_clipping=False)
    found = priced(shared, tp=2, size=2, asked=asked)
    work = layer_work(shared, LayerKind.TRANSFORMER, 1, 128, 2)
    # Each of two ranks has the whole head where an even share were half of one.
    copied = 2 * 128 * 256 * 2 * 32 / 2 / work.flops
    sums = 2 * 32 * 256 * 4 / FAST
    assert seconds_of(found, Component.COPIED_HEADS) == pytest.approx(
        8 * 8 * (0.030 / 2 * copied + sums)
    )
    whole = seconds_of(found, Component.COMPUTE) + 8 * 8 * 0.030 / 2 * copied
    assert whole == pytest.approx(8 * COMPUTE / 2)


def test_packed_sequences_save_attention_and_hold_fewer_tokens() -> None:
    shares = (LengthShare(length=64, share=1.0),)
    packed = replace(FREE, sequence_lengths=shares, packing=True)
    padded = replace(FREE, sequence_lengths=shares)
    plain, dense, wasted = (priced(size=1, asked=each) for each in (FREE, packed, padded))
    work = layer_work(model(), LayerKind.TRANSFORMER, 1, 128)
    # Two sequences of half the length have half the pairs of a full one.
    saved = 8 * 8 * 0.030 * 0.5 * work.attention_flops / work.flops
    assert plain.step_seconds - dense.step_seconds == pytest.approx(saved)
    assert wasted.step_seconds == plain.step_seconds
    assert wasted.tokens_per_second == pytest.approx(plain.tokens_per_second / 2)
    assert any("tokens are of sequences" in line for line in dense.warnings)


def test_clocks_and_stragglers_are_components_of_their_own() -> None:
    found = priced(cluster=wide_cluster(clock_ratio=0.8, speed_spread=0.05))
    assert seconds_of(found, Component.CLOCKS) == pytest.approx(8 * COMPUTE * 0.25)
    assert seconds_of(found, Component.STRAGGLERS) / (8 * COMPUTE * 1.25) == pytest.approx(
        0.0528, abs=1e-3
    )  # mean of the largest of four normal variables is 1.029 standard deviations
    assert found.interval.p10_seconds < found.step_seconds < found.interval.p90_seconds
    assert found.interval.mean_seconds == pytest.approx(found.step_seconds, rel=1e-3)
