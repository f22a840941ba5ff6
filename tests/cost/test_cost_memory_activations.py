"""What a layer keeps for its backward pass, by hand and by laws."""

from __future__ import annotations

from dataclasses import replace

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
)

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
    two = (
        kept(replace(here, shape=replace(here.shape, microbatch_size=2)), shape, asked) - 2 * beside
    )
    cut = kept(replace(here, shape=replace(here.shape, tp=2)), shape, asked) - beside
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
