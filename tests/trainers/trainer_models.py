"""Small models of every family that trainers can be told."""

from __future__ import annotations

import random
from dataclasses import replace

from hetplan.cluster.catalogue import load_catalogue
from hetplan.cluster.devices import DeviceKind
from hetplan.model.layers import (
    Attention,
    Experts,
    LatentAttention,
    LayerRun,
    Mlp,
    Norm,
    TransformerLayer,
)
from hetplan.model.numerics import (
    Activation,
    RotaryScaling,
    RotaryScalingKind,
    Router,
    ScoreFunction,
)
from hetplan.model.spec import Architecture, ModelSpec, plain_model

MODEL = plain_model(
    name="twelve layers",
    architecture=Architecture.LLAMA,
    num_layers=12,
    hidden_size=1024,
    ffn_hidden_size=2816,
    num_attention_heads=16,
    num_kv_heads=16,
    head_dim=64,
    vocab_size=32000,
    max_sequence_length=2048,
)
TIED = plain_model(
    name="twelve tied layers",
    architecture=Architecture.GPT,
    num_layers=12,
    hidden_size=1024,
    ffn_hidden_size=4096,
    num_attention_heads=16,
    num_kv_heads=16,
    head_dim=64,
    vocab_size=50257,
    max_sequence_length=2048,
    tied_embeddings=True,
)


def device(kind: str) -> DeviceKind:
    """A kind of the catalogue."""
    return next(each for each in load_catalogue() if each.kind == kind)


def llama(layers: int, **changes: object) -> ModelSpec:
    """32 heads of 16, 8 key-value heads, rotary positions, no biases."""
    layer = TransformerLayer(
        attention=Attention(num_heads=32, num_kv_heads=8, head_dim=16),
        mlp=Mlp(ffn_hidden_size=1536, gated=True),
        norm=Norm.RMS_NORM,
    )
    model = ModelSpec(
        name="llama",
        hidden_size=512,
        vocab_size=32001,
        max_sequence_length=4096,
        layer_runs=(LayerRun(count=layers, layer=layer),),
        final_norm=Norm.RMS_NORM,
    )
    return replace(model, **changes)  # type: ignore[arg-type]


def gpt(layers: int) -> ModelSpec:
    """32 heads of 16, biases, learned positions, a tied matrix."""
    layer = TransformerLayer(
        attention=Attention(
            num_heads=32,
            num_kv_heads=32,
            head_dim=16,
            qkv_bias=True,
            output_bias=True,
            rotary=False,
        ),
        mlp=Mlp(ffn_hidden_size=2048, gated=False, bias=True),
        norm=Norm.LAYER_NORM,
    )
    return ModelSpec(
        name="gpt",
        hidden_size=512,
        vocab_size=50257,
        max_sequence_length=1024,
        learned_positions=1024,
        layer_runs=(LayerRun(count=layers, layer=layer),),
        final_norm=Norm.LAYER_NORM,
        tied_embeddings=True,
    )


def with_experts(layers: int, *, latent: bool = False, dense_first: bool = False) -> ModelSpec:
    """16 experts, 4 per token; perhaps latent attention, perhaps a dense first layer."""
    model = llama(layers)
    layer = model.layer_runs[0].layer
    if latent:
        layer = replace(
            layer,
            attention=LatentAttention(
                num_heads=32,
                query_rank=96,
                kv_rank=64,
                nope_head_dim=16,
                rope_head_dim=8,
                value_head_dim=16,
            ),
        )
    expert = replace(
        layer,
        mlp=Experts(
            num_experts=16,
            experts_per_token=4,
            expert_ffn_hidden_size=256,
            shared_ffn_hidden_size=256,
        ),
    )
    runs: tuple[LayerRun, ...] = (LayerRun(count=layers, layer=expert),)
    if dense_first and layers > 1:
        runs = (LayerRun(count=1, layer=layer), LayerRun(count=layers - 1, layer=expert))
    return replace(model, name="experts", layer_runs=runs)


def random_model(rng: random.Random, layers: int) -> ModelSpec:
    """One of the families above; half of them say what they compute with their weights."""
    model = _random_shape(rng, layers)
    return with_numerics(model) if rng.random() < 0.5 else model


def with_numerics(model: ModelSpec) -> ModelSpec:
    """The model with values that are not Megatron-LM's own."""
    layer = model.layer_runs[-1].layer
    latent = isinstance(layer.attention, LatentAttention)
    rotary = isinstance(layer.attention, LatentAttention) or layer.attention.rotary
    gated = layer.mlp.gated
    scaling = None
    if latent:
        scaling = RotaryScaling(
            kind=RotaryScalingKind.YARN, factor=40.0, original_length=4096, mscale_all_dim=1.0
        )
    elif rotary:
        scaling = RotaryScaling(
            kind=RotaryScalingKind.LLAMA3,
            factor=8.0,
            original_length=8192,
            low_frequency_factor=1.0,
            high_frequency_factor=4.0,
        )
    return replace(
        model,
        norm_epsilon=1e-6,
        activation=Activation.SILU if gated else Activation.GELU,
        rotary_base=500000.0 if rotary else None,
        rotary_scaling=scaling,
        router=ROUTER if isinstance(layer.mlp, Experts) else None,
    )


ROUTER = Router(
    score_function=ScoreFunction.SIGMOID,
    normalized=True,
    scaling_factor=2.5,
    num_groups=4,
    groups_per_token=2,
    group_experts=2,
    correction_bias=True,
    loss_coefficient=0.001,
    loss_per_sequence=True,
)
"""As DeepSeek-V3's, of 16 experts."""


def _random_shape(rng: random.Random, layers: int) -> ModelSpec:
    kind = rng.randrange(6)
    if kind == 0:
        return gpt(layers)
    if kind == 1:
        return with_experts(layers, dense_first=rng.random() < 0.5)
    if kind == 2:
        return with_experts(layers, latent=True)
    if kind == 3:
        attention = Attention(num_heads=32, num_kv_heads=8, head_dim=16, qk_norm=True, window=128)
        layer = replace(llama(1).layer_runs[0].layer, attention=attention)
        return llama(layers, layer_runs=(LayerRun(count=layers, layer=layer),))
    return llama(layers, tied_embeddings=rng.random() < 0.3)
