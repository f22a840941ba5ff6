"""What a model computes with its weights, as Megatron-LM is told it."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
from trainer_models import ROUTER, llama, with_experts, with_numerics

from hetplan.model.numerics import (
    Activation,
    RotaryScaling,
    RotaryScalingKind,
    Router,
    ScoreFunction,
)
from hetplan.model.spec import ModelSpec
from hetplan.trainers.megatron.model import (
    numerics_arguments,
    numerics_faults,
)

LLAMA3 = RotaryScaling(
    kind=RotaryScalingKind.LLAMA3,
    factor=8.0,
    original_length=8192,
    low_frequency_factor=1.0,
    high_frequency_factor=4.0,
)


def flags(model: ModelSpec) -> dict[str, tuple[str, ...]]:
    assert [*numerics_faults(model)] == []
    return {entry[0]: entry[1:] for entry in numerics_arguments(model)}


SCALED = {
    "factor": replace(LLAMA3, factor=32.0),
    "original": replace(LLAMA3, original_length=4096),
    "yarn": RotaryScaling(kind=RotaryScalingKind.YARN, factor=4.0),
    "linear": RotaryScaling(kind=RotaryScalingKind.LINEAR, factor=2.5),
    "dynamic": RotaryScaling(kind=RotaryScalingKind.DYNAMIC, factor=2.0),
    "other": RotaryScaling(kind=RotaryScalingKind.OTHER),
}
SOFTMAX = Router(score_function=ScoreFunction.SOFTMAX, normalized=False)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        *((llama(1, rotary_scaling=each), "leave rotary_scaling out") for each in SCALED.values()),
        (llama(1, rotary_base=1234.5), "whole number"),
        (llama(1, activation=Activation.GELU_TANH), "--swiglu"),
        (replace(with_experts(1), router=replace(ROUTER, normalized=False)), "not normalized"),
        (replace(with_experts(1), router=replace(SOFTMAX, correction_bias=True)), "softmax router"),
    ],
)  # fmt: skip
def test_what_no_argument_says_is_refused(model: ModelSpec, says: str) -> None:
    (fault,) = numerics_faults(model)
    assert says in fault


def _core() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.transformer.moe import moe_utils

        return moe_utils


@pytest.mark.parametrize("normalized", [True, False])
def test_megatrons_softmax_routers_are_those_of_the_models(normalized: bool) -> None:
    """Weights as transformers' Mixtral and Qwen2-MoE routers have them."""
    import torch

    model = replace(with_experts(1), router=replace(SOFTMAX, normalized=normalized))
    found = flags(model)
    logits = torch.randn(7, 16, generator=torch.Generator().manual_seed(1))
    probabilities, _ = _core().topk_routing_with_score_function(
        logits, 4, use_pre_softmax="--moe-router-pre-softmax" in found
    )
    whole = torch.softmax(logits, dim=-1)
    best, places = torch.topk(whole, 4, dim=-1)
    weights = best / best.sum(dim=-1, keepdim=True) if normalized else best
    expected = torch.zeros_like(whole).scatter(1, places, weights)
    assert torch.allclose(probabilities, expected, atol=1e-6)


def test_megatrons_groups_are_deepseeks() -> None:
    """The choice of transformers' DeepseekV3TopkRouter."""
    import torch

    found = flags(replace(with_experts(1), router=ROUTER))
    groups, chosen = (
        int(found[name][0]) for name in ("--moe-router-num-groups", "--moe-router-group-topk")
    )
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(9, 16, generator=generator)
    bias = torch.randn(16, generator=generator) / 10
    weights, taken = _core().topk_routing_with_score_function(
        logits,
        4,
        num_groups=groups,
        group_topk=chosen,
        scaling_factor=float(found["--moe-router-topk-scaling-factor"][0]),
        score_function=found["--moe-router-score-function"][0],
        expert_bias=bias,
    )
    scores = torch.sigmoid(logits)
    for token in range(len(logits)):
        ranked = (scores[token] + bias).view(groups, -1)
        best = torch.topk(ranked, 2, dim=-1)[0].sum(dim=-1)
        kept = torch.topk(best, chosen)[1].tolist()
        masked = [float(ranked.view(-1)[e]) if e // 4 in kept else -math.inf for e in range(16)]
        experts = sorted(range(16), key=lambda e: -masked[e])[:4]
        assert sorted(torch.nonzero(taken[token]).view(-1).tolist()) == sorted(experts)
        total = sum(float(scores[token][e]) for e in experts)
        for e in experts:
            assert math.isclose(
                float(weights[token][e]), 2.5 * float(scores[token][e]) / total, rel_tol=1e-5
            )


def test_megatrons_stretching_is_llama_3s() -> None:
    """Frequencies as transformers computes them (modeling_rope_utils.py)."""
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    found = flags(with_numerics(llama(1)))
    rotation = RotaryEmbedding(
        128,
        1.0,
        rotary_base=int(found["--rotary-base"][0]),
        rope_scaling="--use-rope-scaling" in found,
        rope_scaling_factor=float(found["--rope-scaling-factor"][0]),
        use_cpu_initialization=True,
    )
    config = LlamaConfig(
        head_dim=128,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    assert torch.allclose(rotation.inv_freq, theirs, rtol=1e-5)
