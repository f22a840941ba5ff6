"""Which modules of torchtitan's model are in which stage, and what does a plan's model need?

torchtitan cuts a model by names (parallelism.module_fqns_per_model_part, read in
torchtitan/distributed/pipeline_parallel.py, release 0.3.0): a list per virtual stage in the order
of the model. With a looped schedule, rank s of P has the lists s, s + P, s + 2 P.

A name is a whole block (`layers.7`) or one of `tok_embeddings`, `norm`, `lm_head`; norm and lm_head
are both what a plan calls the head. Layers count from 0 here and from 1 in a plan, where 0 is the
embedding.
"""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.model.layers import Attention, Mlp, Norm
from hetplan.model.numerics import Activation, RotaryScalingKind
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import LayerRange, Pipeline

EMBEDDING, NORM, HEAD = "tok_embeddings", "norm", "lm_head"


def module_names(pipeline: Pipeline, num_layers: int) -> tuple[tuple[str, ...], ...]:
    """Names of every virtual stage, in the order of the model."""
    rounds = range(pipeline.schedule.virtual_stages)
    return tuple(
        tuple(_names(stage.chunks[chunk], num_layers))
        for chunk in rounds
        for stage in pipeline.stages
    )


def _names(layers: LayerRange, num_layers: int) -> Iterator[str]:
    for position in range(layers.start, layers.stop):
        if position == 0:
            yield EMBEDDING
        elif position <= num_layers:
            yield f"layers.{position - 1}"
        else:
            yield from (NORM, HEAD)


def model_faults(model: ModelSpec) -> Iterator[str]:
    """What the model has that torchtitan's Llama 3 model has not.

    Its other models (Qwen 3, DeepSeek V3, GPT-OSS) have parts of this, each in one way of its own;
    no configuration is emitted for them.
    """
    if len(model.layer_runs) > 1:
        yield "transformer layers that are not all equal"
    layer = model.layer_runs[0].layer
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(attention, Attention):
        yield "latent attention"
    else:
        if attention.qkv_bias or attention.output_bias:
            yield "biases in the attention"
        if attention.qk_norm:
            yield "query and key norms"
        if attention.window is not None:
            yield f"an attention window of {attention.window}"
        if not attention.rotary:
            yield "no rotary positions"
    if not isinstance(mlp, Mlp):
        yield "experts"
    elif not mlp.gated:
        yield "an MLP without gate"
    elif mlp.bias:
        yield "biases in the MLP"
    if layer.norm is not Norm.RMS_NORM or layer.num_norms != 2 or layer.parallel_residual:
        yield "other norms than an RMSNorm before attention and one before the MLP"
    if model.final_norm is not Norm.RMS_NORM:
        yield "a head without RMSNorm"
    if model.head_bias:
        yield "a bias in the head"
    if model.embedding_size is not None:
        yield "a projection beside the embedding"
    if model.learned_positions:
        yield "learned positions"
    if model.num_mtp_layers:
        yield "multi-token prediction"
    if model.activation not in (None, Activation.SILU):
        yield f"a gate with {model.activation}"
    if model.rotary_fraction not in (None, 1):
        yield f"{model.rotary_fraction:g} of each head rotated"
    scaling = model.rotary_scaling
    if scaling is not None and scaling.kind is not RotaryScalingKind.LLAMA3:
        yield f"{scaling.kind} stretching of rotary positions"
