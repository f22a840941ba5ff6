"""The Python module that torchtitan imports for the model: its shape, which no argument can say.

`--module hetplan_torchtitan --config planned` makes torchtitan call the function `planned` of this
module (torchtitan/config/manager.py, release 0.3.0: a module outside of torchtitan is imported by
its name). Everything else that the plan decides is in the arguments, which are applied after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hetplan.job.spec import ProductFormat
from hetplan.job.trainer import TrainerSettings
from hetplan.model.layers import Attention, Mlp, Norm
from hetplan.model.numerics import Activation, RotaryScaling, RotaryScalingKind
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import LayerRange, Pipeline, Plan
from hetplan.plans.v_schedules import places

MODULE, FUNCTION = "hetplan_torchtitan", "planned"
ROTARY_BASE = 500_000
"""Of torchtitan's Llama 3 models (models/llama3/__init__.py), where a model says none."""
NORM_EPSILON = 1e-5
"""RMSNorm.Config's own (torchtitan/models/common/nn_modules.py)."""

_CONVERTERS = {
    # lm_head keeps the plan's precision (hetplan.job.trainer); torchao's recipes.
    ProductFormat.FLOAT8: ("Float8LinearConverter", 'filter_fqns=["lm_head"]'),
    ProductFormat.MXFP8: ("MXFP8LinearConverter", 'fqns=["layers"]'),
    ProductFormat.NVFP4: ("NVFP4LinearConverter", 'fqns=["layers"]'),
}


def config_text(
    model: ModelSpec, plan: Plan, sequence_length: int, settings: TrainerSettings
) -> str:
    """Text of the module, of a model without faults (`modules.model_faults`)."""
    layer = model.layer_runs[0].layer
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(attention, Attention) or not isinstance(mlp, Mlp):
        raise ValueError(f"{model.name} is no Llama")  # of a caller that asked for no faults
    added = plan.padded_vocab_size - model.vocab_size
    imported, call = "", "model()"
    if settings.product_format is not None:
        name, arguments = _CONVERTERS[settings.product_format]
        imported = f"from torchtitan.components.quantization import {name}\n"
        compiled = f"model_compile_enabled={settings.fused_elementwise}"
        call = f"{name}.Config({arguments}, {compiled}).build().convert(model())"
    template = Path(__file__).with_name("planned.py.txt").read_text(encoding="utf-8")
    return template.format(
        converter_import=imported,
        layers=model.num_layers,
        hidden=model.hidden_size,
        ffn=mlp.ffn_hidden_size,
        heads=attention.num_heads,
        kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        vocabulary=plan.padded_vocab_size,
        vocabulary_note=f"{model.vocab_size} and {added} that pad it" if added else "not padded",
        longest=max(model.max_sequence_length, sequence_length),
        tied=model.tied_embeddings,
        norm_epsilon=NORM_EPSILON if model.norm_epsilon is None else model.norm_epsilon,
        rotary_base=ROTARY_BASE if model.rotary_base is None else f"{model.rotary_base:.17g}",
        rotary_scaling=_scaling_text(model.rotary_scaling),
        function=FUNCTION,
        name=model.name,
        model_call=call,
    )


def _scaling_text(scaling: RotaryScaling | None) -> str:
    """Arguments of RoPE.Config (torchtitan/models/common/rope.py), whose defaults are Llama 3's."""
    if scaling is None:
        return '{"scaling": "none"}'
    given = (
        ("scaling_factor", scaling.factor),
        ("low_freq_factor", scaling.low_frequency_factor),
        ("high_freq_factor", scaling.high_frequency_factor),
        ("original_max_position_embeddings", scaling.original_length),
    )
    words = "".join(f'    "{name}": {value!r},\n' for name, value in given if value is not None)
    return f'{{\n    "scaling": "llama",\n{words}}}'


# ---- which modules are in which stage

EMBEDDING, NORM, HEAD = "tok_embeddings", "norm", "lm_head"


def module_names(pipeline: Pipeline, num_layers: int) -> tuple[tuple[str, ...], ...]:
    """Names of every virtual stage, in the order of the model."""
    schedule, stages = pipeline.schedule, pipeline.stages
    return tuple(
        tuple(_names(stages[s].chunks[chunk], num_layers))
        for s, chunk in places(schedule.name, len(stages), schedule.virtual_stages)
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
