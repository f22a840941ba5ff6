"""A rank's part of the model as megatron-core builds it: its settings, its chunks, their weights.

Settings are those of Megatron-LM's pre-training without Transformer Engine and without kernels of
its own: megatron-core's local layers. What differs from its defaults so that losses can be compared
with hetplan's own trainer: no dropout, no gradient clipping, weight decay of every parameter, and
padded entries of the vocabulary are left out of the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hetplan.errors import LaunchError
from hetplan.job.spec import Optimizer, Precision
from hetplan.launchers.megatron_core_plan import CorePlace
from hetplan.launchers.megatron_core_weights import stage_values
from hetplan.model.numerics import Activation, RotaryScalingKind
from hetplan.model.spec import Architecture, LayerKind, ModelSpec
from hetplan.plans.formats import one_format
from hetplan.plans.plan import Plan, RecomputeGranularity, Sharding
from hetplan.profiling.layers import NORM_EPSILON, ROTARY_BASE
from hetplan.profiling.updating import (
    ADAMW_BETAS,
    ADAMW_EPSILON,
    ADAMW_RATE,
    ADAMW_WEIGHT_DECAY,
    SGD_RATE,
)
from hetplan.runtime.trainer import DTYPES
from hetplan.runtime.training import Training
from hetplan.trainers.megatron.parallel import degrees_of, layout_text
from hetplan.trainers.megatron.write import optimizer_instances


def transformer_config(training: Training) -> Any:
    """The TransformerConfig of every rank of the plan."""
    from megatron.core.transformer import TransformerConfig

    model, job, plan = training.model, training.job, training.plan
    degrees = degrees_of(plan)
    llama = model.architecture is Architecture.LLAMA
    dtype = DTYPES[job.precision]
    interleaved = degrees.virtual_stages > 1
    layout = layout_text(plan.pipelines[0], model) if degrees.pp > 1 else None
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_kv_heads,
        kv_channels=model.head_dim,
        normalization="RMSNorm" if llama else "LayerNorm",
        layernorm_epsilon=NORM_EPSILON if model.norm_epsilon is None else model.norm_epsilon,
        add_bias_linear=not llama,
        gated_linear_unit=llama,
        activation_func=_activation(model),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=degrees.tp,
        pipeline_model_parallel_size=degrees.pp,
        virtual_pipeline_model_parallel_size=degrees.virtual_stages if interleaved else None,
        pipeline_model_parallel_layout=layout,
        sequence_parallel=degrees.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=job.precision is Precision.BFLOAT16,
        use_cpu_initialization=training.backend == "cpu",
        # The weights are set afterwards.
        perform_initialization=False,
        # Overlapped sends cannot be batched (training/arguments.py does the same).
        overlap_p2p_comm=plan.overlap.send and interleaved,
        batch_p2p_comm=not (plan.overlap.send and interleaved),
        # Kernels of Apex and Transformer Engine.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        **_recompute(plan),
    )


def _activation(model: ModelSpec) -> Callable[[Tensor], Tensor]:
    own = Activation.SILU if model.architecture is Architecture.LLAMA else Activation.GELU
    functions: dict[Activation, Callable[[Tensor], Tensor]] = {
        Activation.SILU: functional.silu,
        Activation.GELU: functional.gelu,
        Activation.GELU_TANH: partial(functional.gelu, approximate="tanh"),
        Activation.RELU: functional.relu,
    }
    return functions[model.activation or own]


def _rotary(model: ModelSpec) -> dict[str, Any]:
    """Rotary positions of a model without `core_faults`, as GPTModel takes them."""
    scaling = model.rotary_scaling
    stretched: dict[str, Any] = {}
    if scaling is not None and scaling.kind is RotaryScalingKind.LLAMA3:
        stretched = {"rope_scaling": True, "rope_scaling_factor": scaling.factor}
    elif scaling is not None:
        stretched = {"seq_len_interpolation_factor": scaling.factor}
    return {
        "rotary_base": ROTARY_BASE if model.rotary_base is None else model.rotary_base,
        "rotary_percent": 1.0 if model.rotary_fraction is None else model.rotary_fraction,
        **stretched,
    }


def _recompute(plan: Plan) -> dict[str, Any]:
    """Recomputation, which is the same on all stages; megatron-core's block method counts layers of
    each virtual stage, as plans do (transformer/transformer_block.py).
    """
    recompute = plan.pipelines[0].stages[0].recompute
    if recompute.granularity is RecomputeGranularity.NONE:
        return {}
    if recompute.granularity is RecomputeGranularity.SELECTIVE:
        modules = [module.value for module in recompute.modules]
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    counted = recompute.layers is not None
    return {
        "recompute_granularity": "full",
        "recompute_method": "block" if counted else "uniform",
        "recompute_num_layers": recompute.layers if counted else 1,
    }


def build_chunks(training: Training, place: CorePlace, config: Any) -> list[nn.Module]:
    """The rank's GPTModels, one per virtual stage, with their weights, on the rank's device.

    parallel_state must be initialised. A LaunchError where megatron-core built other layers than
    the plan says.
    """
    return [
        _built(training, place, config, chunk, layers_of)
        for chunk, layers_of in enumerate(
            range(layers.start, layers.stop) for layers in place.chunks
        )
    ]


def _built(
    training: Training, place: CorePlace, config: Any, chunk: int, layers: range
) -> nn.Module:
    from megatron.core.models.gpt.gpt_model import GPTModel

    model, plan = training.model, training.plan
    llama = model.architecture is Architecture.LLAMA
    virtual = chunk if len(place.chunks) > 1 else None
    kinds = [model.layers[position] for position in layers]
    built: nn.Module = GPTModel(
        config,
        _layer_spec(config, virtual),
        vocab_size=plan.padded_vocab_size,
        max_sequence_length=model.max_sequence_length,
        pre_process=LayerKind.EMBEDDING in kinds,
        post_process=LayerKind.HEAD in kinds,
        share_embeddings_and_output_weights=model.tied_embeddings,
        position_embedding_type="rope" if llama else "learned_absolute",
        **_rotary(model),
        vp_stage=virtual,
    )
    _check_layers(built, layers, kinds)
    tp = degrees_of(plan).tp
    values = stage_values(
        model,
        layers,
        padded_vocab_size=plan.padded_vocab_size,
        tp=tp,
        tp_rank=place.tp_index,
        seed=training.job.seed,
    )
    _set(built, dict(values))
    if LayerKind.HEAD in kinds:
        mask_padding(built, model, plan.padded_vocab_size // tp, place.tp_index)
    if training.backend == "cuda":
        built.cuda(torch.cuda.current_device())
    return built


def _layer_spec(config: Any, virtual: int | None) -> Any:
    """megatron-core's local layers."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )

    spec: Any = get_gpt_layer_local_spec(normalization=config.normalization)
    if not config.sequence_parallel:
        return spec
    # transformer/torch_norm.py refuses sequence parallelism, because nobody marks its weights.
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = _MarkedNorm
    count = get_num_layers_to_build(config, virtual)
    return TransformerBlockSubmodules(layer_specs=[spec] * count, layer_norm=_MarkedNorm)


class _MarkedNorm:
    """torch's norm with the mark that makes megatron-core sum its gradients over the
    tensor-parallel group (distributed/finalize_model_grads.py), as those of Apex have it
    (fusions/fused_layer_norm.py).
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        norm = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        made = norm(hidden_size, eps=eps)
        for parameter in made.parameters():
            parameter.sequence_parallel = True  # type: ignore[attr-defined]
        return made


def _check_layers(built: Any, layers: range, kinds: list[LayerKind]) -> None:
    """megatron-core counts transformer layers from 1, which is their position in the model."""
    wanted = [
        position
        for position, kind in zip(layers, kinds, strict=True)
        if kind is LayerKind.TRANSFORMER
    ]
    found = [layer.layer_number for layer in built.decoder.layers]
    if found != wanted:
        raise LaunchError(f"megatron-core built layers {found}, the plan has {wanted} here")


def _set(built: nn.Module, values: dict[str, Tensor]) -> None:
    """Give every parameter its value; a LaunchError where names or shapes are not the same."""
    parameters = dict(built.named_parameters())
    # One parameter for both ends of a tied model in one chunk: named after the embedding.
    spare = {"output_layer.weight"} if "embedding.word_embeddings.weight" in parameters else set()
    unlike = (set(values) - spare) ^ (set(parameters) - spare)
    if unlike:
        raise LaunchError(f"parameters of megatron-core that hetplan does not know: {unlike}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            value = values[name]
            if value.shape != parameter.shape:
                raise LaunchError(
                    f"{name} has shape {tuple(parameter.shape)}, expected {tuple(value.shape)}"
                )
            parameter.copy_(value)


def mask_padding(built: Any, model: ModelSpec, rows: int, tp_index: int) -> None:
    """Leave the vocabulary's padding out of the softmax, as hetplan's own head does; megatron-core
    counts it as entries that never occur.
    """
    real = model.vocab_size - tp_index * rows
    if real >= rows:
        return

    def masked(module: nn.Module, inputs: Any, output: Any) -> Any:
        logits, bias = output
        padding = torch.arange(rows, device=logits.device) >= real
        return logits.masked_fill(padding, torch.finfo(logits.dtype).min), bias

    built.output_layer.register_forward_hook(masked)


def distribute(training: Training, config: Any, chunks: list[nn.Module]) -> list[Any]:
    """The chunks inside megatron-core's DistributedDataParallel, as Megatron-LM's training wraps
    them (training/training.py, get_model).
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.transformer.module import Float16Module

    plan = training.plan
    degrees, sharded = degrees_of(plan), plan.sharding is not Sharding.NONE
    overlaps = plan.overlap.reduction and degrees.copies > 1
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=_sums_in_float32(training),
        overlap_grad_reduce=overlaps,
        overlap_param_gather=overlaps and sharded and plan.overlap.gathering,
        use_distributed_optimizer=sharded,
        num_distributed_optimizer_instances=optimizer_instances(plan, degrees),
    )
    if config.bf16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    wrapped: list[Any] = [
        # Only the first chunk's communication is split: the others' is not waited for.
        DistributedDataParallel(config, settings, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    config.finalize_model_grads_func = finalize_model_grads
    if overlaps:
        no_syncs = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_syncs if len(no_syncs) > 1 else no_syncs[0]
    return wrapped


def _sums_in_float32(training: Training) -> bool:
    return one_format(training.plan, training.job) is Precision.FLOAT32


def make_optimizer(training: Training, config: Any, wrapped: list[Any]) -> Any:
    """megatron-core's optimizer with the reference trainer's rule and constants."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    adam = training.job.optimizer is Optimizer.ADAMW
    settings = OptimizerConfig(
        optimizer="adam" if adam else "sgd",
        lr=ADAMW_RATE if adam else SGD_RATE,
        weight_decay=ADAMW_WEIGHT_DECAY if adam else 0.0,
        adam_beta1=ADAMW_BETAS[0],
        adam_beta2=ADAMW_BETAS[1],
        adam_eps=ADAMW_EPSILON,
        sgd_momentum=0.0,
        params_dtype=config.params_dtype,
        bf16=config.bf16,
        clip_grad=0.0,
        use_distributed_optimizer=training.plan.sharding is not Sharding.NONE,
        overlap_param_gather=wrapped[0].ddp_config.overlap_param_gather,
    )
    # No overrides: by default norms and biases do not decay.
    # Its gloo groups serve checkpoints only, which a run does not write.
    return get_megatron_optimizer(
        settings, wrapped, config_overrides={}, use_gloo_process_groups=False
    )
