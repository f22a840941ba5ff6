"""What a layer keeps for its backward pass, by hand and by laws."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from memory_cases import (
    DENSE,
    FULL,
    LLAMA,
    MEGATRON_JOB,
    MIXED,
    SPARSE,
    kept,
    layout,
    one_layer,
    use_of,
)

from hetplan.cost.memory.device import device_memory
from hetplan.cost.memory.values import MEGATRON, Loss
from hetplan.model.layers import (
    Attention,
    LatentAttention,
    LayerRun,
)
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import (
    Recompute,
    RecomputeGranularity,
    RecomputeModule,
)


def test_a_llama_layer_by_hand() -> None:
    # 16 bits: inputs and outputs of two norms 4 h; queries, keys, values, result 2 q + 2 k; gate,
    # up and product 3 f; float32 statistics: one per norm, one per head.
    per_token = 2 * (4 * 256 + 2 * 256 + 2 * 128 + 3 * 688) + 4 * (2 + 8)
    assert kept(one_layer()) == 2 * 512 * per_token
    # Sequence parallelism divides what tensor parallelism does not.
    cut = kept(one_layer(tp=4, sequence_parallel=True))
    assert cut == 2 * 512 * per_token / 4
    assert kept(one_layer(tp=4)) == cut + 2 * 512 * (2 * 4 * 256 + 4 * 2) * 3 / 4
    # Context parallelism divides tokens; by all-to-all it keeps the result once more.
    assert kept(one_layer(cp=2)) == 512 * per_token
    exchange = replace(MEGATRON, context_exchange=True)
    more = device_memory(LLAMA, MEGATRON_JOB, one_layer(cp=2), 1e9, habits=exchange)
    assert more.activation_bytes == 512 * (per_token + 2 * 256)


def test_ring_attention_has_all_blocks_at_once() -> None:
    # 16 blocks: keys, values and result of each, while no MLP of the layer is there yet.
    wide = use_of(one_layer(cp=16)).temporary_bytes
    assert wide == 512 / 8 * (16 * 2 * (2 * 128 + 256) - 2 * 3 * 688)
    few, more = (use_of(one_layer(cp=cp)).temporary_bytes * cp for cp in (1, 2))
    assert few == more


def test_selective_recompute_takes_its_module_away() -> None:
    tokens = 2 * 512

    def less(*modules: RecomputeModule, the_model: ModelSpec = LLAMA, at: int = 1) -> float:
        again = Recompute(granularity=RecomputeGranularity.SELECTIVE, modules=modules)
        plain = layout(at, at + 1, num_stages=1, stage=0)
        return (kept(plain, the_model) - kept(replace(plain, recompute=again), the_model)) / tokens

    assert less() == 0
    assert less(RecomputeModule.CORE_ATTENTION) == 4 * 8
    assert less(RecomputeModule.MLP) == 2 * 3 * 688
    assert less(RecomputeModule.ACTIVATION) == 2 * 688
    assert less(RecomputeModule.NORMS) == 2 * 2 * 256
    assert less(RecomputeModule.NORMS, RecomputeModule.MLP) == 2 * 2 * 256 + 2 * 3 * 688
    assert less(RecomputeModule.EXPERTS) == 0
    # Experts: the router's logits and probabilities, two copies of a token, the shared expert.
    copies = 2 * (2 * 256 + 2 * 3 * 96 + 4)
    moe = 2 * 4 * 8 + copies + 2 * 3 * 64
    assert less(RecomputeModule.EXPERTS, the_model=MIXED, at=5) == moe
    assert less(RecomputeModule.ACTIVATION, the_model=MIXED, at=5) == 2 * 2 * 96 + 2 * 64


def test_recomputing_the_first_layers_of_a_chunk() -> None:
    none, full = layout(0, 5), layout(0, 5, recompute=FULL)
    some = [kept(replace(full, recompute=replace(FULL, layers=n))) for n in range(6)]
    assert some[0] == kept(none)
    assert some[4] == some[5] == kept(full)
    steps = {round(left - right) for left, right in pairwise(some[:5])}
    assert len(steps) == 1
    assert steps.pop() > 0


def test_busy_experts_keep_more() -> None:
    shared = layout(4, 6, ep=4, dp=4)
    even, busy = (
        kept(shared, MIXED, replace(MEGATRON_JOB, expert_load_factor=factor))
        for factor in (1.0, 1.5)
    )
    copies = 2 * (2 * 256 + 2 * 3 * 96 + 4)
    assert busy - even == pytest.approx(0.5 * copies * 2 * 1024 * 3)  # 2 layers, 3 in flight
    # With every expert on every rank none is busier than another.
    alone = replace(shared, ep=1)
    assert kept(alone, MIXED, replace(MEGATRON_JOB, expert_load_factor=1.5)) == kept(alone, MIXED)


def test_latent_attention_keeps_its_latents() -> None:
    latent = LatentAttention(
        num_heads=4,
        query_rank=96,
        kv_rank=32,
        nope_head_dim=32,
        rope_head_dim=16,
        value_head_dim=32,
    )
    shape = replace(
        LLAMA,
        layer_runs=(LayerRun(count=8, layer=replace(DENSE, attention=latent)),),
    )
    query, value = 4 * 48, 4 * 32
    attention = 2 * query + 2 * value + 2 * (96 + 32)
    assert kept(one_layer(), shape) == 1024 * (2 * (4 * 256 + attention + 3 * 688) + 4 * (2 + 4))


@pytest.mark.parametrize("target", ["native", "megatron"])
@pytest.mark.parametrize("at", range(11))
def test_every_position_keeps_in_proportion_to_its_tokens(at: int, target: str) -> None:
    latent = LatentAttention(
        num_heads=4,
        query_rank=None,
        kv_rank=32,
        nope_head_dim=32,
        rope_head_dim=16,
        value_head_dim=32,
    )
    windowed = replace(DENSE, attention=Attention(num_heads=8, num_kv_heads=2, head_dim=32))
    shape = replace(
        MIXED,
        layer_runs=(
            LayerRun(count=4, layer=replace(SPARSE, attention=latent)),
            LayerRun(count=2, layer=windowed),
            LayerRun(count=2, layer=replace(windowed, num_norms=4)),
        ),
        num_mtp_layers=1,
        mtp_layer=SPARSE,
    )
    asked = replace(MEGATRON_JOB, target=target)
    here = layout(at, at + 1, num_stages=1, stage=0, num_microbatches=1, microbatch_size=1)
    # Without messages, which native keeps besides.
    message = 0 if target == "megatron" else 512 * 256 * 2
    beside = message * ((at > 0) + 2 * (at < 10))
    one = kept(here, shape, asked) - beside
    two = kept(replace(here, microbatch_size=2), shape, asked) - 2 * beside
    cut = kept(replace(here, tp=2), shape, asked) - beside
    again = kept(replace(here, recompute=FULL), shape, asked) - beside
    assert two == pytest.approx(2 * one)
    assert 0 < again <= one
    assert one / 2 <= cut <= one
    window = replace(windowed, attention=replace(windowed.attention, window=8))
    same = replace(
        shape,
        layer_runs=tuple(
            replace(run, layer=window) if run.layer == windowed else run for run in shape.layer_runs
        ),
    )
    assert kept(here, same, asked) - beside == one


def test_multi_token_prediction_brings_logits_of_its_own() -> None:
    shape = replace(LLAMA, num_mtp_layers=1, mtp_layer=DENSE)
    with_head = kept(layout(8, 11, num_stages=4, stage=3), shape)
    without = kept(layout(8, 10, num_stages=4, stage=3))
    layer = kept(layout(8, 9, num_stages=4, stage=3))
    head = without - layer
    assert with_head - without == pytest.approx(layer + head + 1024 * 2 * 4 * 256)
    assert head == 1024 * (2 * 2 * 256 + 4 * 2048)


@pytest.mark.parametrize(
    ("loss", "size", "expected"),
    [
        (Loss.TORCH, 4, (8, 4)),
        (Loss.FLOAT32_COPY, 4, (4, 4)),
        (Loss.FLOAT32_COPY, 2, (4, 6)),
        (Loss.VOCAB_PARALLEL, 4, (4, 0)),
        (Loss.VOCAB_PARALLEL, 2, (4, 2)),
        (Loss.IN_PLACE, 2, (2, 0)),
    ],
)
def test_logits(loss: Loss, size: int, expected: tuple[float, float]) -> None:
    assert loss.bytes_per_logit(size) == expected
