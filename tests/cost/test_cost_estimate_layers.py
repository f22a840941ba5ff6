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


def test_padding_of_the_vocabulary_is_a_part_of_the_head() -> None:
    asked = job(target="megatron", gradient_clipping=False)
    found = priced(asked=asked, size=1)
    assert seconds_of(found, Component.PADDING) == pytest.approx(8 * 3 * 0.004 * 24 / 1024)
    assert seconds_of(found, Component.COMPUTE) + seconds_of(
        found, Component.PADDING
    ) == pytest.approx(8 * COMPUTE)


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
