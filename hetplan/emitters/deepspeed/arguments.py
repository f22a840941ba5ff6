"""What of a plan do Megatron-DeepSpeed's arguments and DeepSpeed's configuration say?

Megatron-DeepSpeed f4157bea (megatron/arguments.py, pretrain_gpt.py; its Megatron-LM is of 2023) and
DeepSpeed 0.19.6 (deepspeed/runtime/engine.py, pipe/engine.py, pipe/topology.py: ranks count pipe,
data, model, the last fastest).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hetplan.cost.components.step import clips_gradients
from hetplan.emitters.megatron.arguments import DROPOUT
from hetplan.emitters.megatron.model import VOCAB_MULTIPLE, model_parts
from hetplan.emitters.megatron.parallel import Degrees, degrees_of
from hetplan.emitters.megatron.timeouts import timeout_arguments
from hetplan.emitters.sheet import LaunchSheet
from hetplan.emitters.trainer_launch import EmitOptions
from hetplan.job.spec import Job, Optimizer, Precision
from hetplan.job.trainer import TrainerSettings
from hetplan.model.layers import Attention, Norm
from hetplan.model.numerics import Activation
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import Plan, RecomputeGranularity, Sharding
from hetplan.search.result import SearchResult

Argument = tuple[str, ...]
CONFIG_FILE = "ds_config.json"


def zero_stage(plan: Plan, job: Job) -> int:
    """The stage of ZeRO.

    bfloat16 with float32 gradients wants stage 1 (engine.py, _do_optimizer_sanity_check), which
    with one copy changes nothing.
    """
    return int(plan.sharding is Sharding.OPTIMIZER or job.precision is Precision.BFLOAT16)


def deepspeed_config(result: SearchResult, settings: TrainerSettings) -> dict[str, Any]:
    """DeepSpeed's own file."""
    plan, job = result.plan, result.inputs.job
    degrees = degrees_of(plan)
    config: dict[str, Any] = {
        "train_batch_size": job.global_batch_size,
        "train_micro_batch_size_per_gpu": degrees.microbatch_size,
        "gradient_accumulation_steps": plan.pipelines[0].num_microbatches,
        "gradient_clipping": 1.0 if clips_gradients(job) else 0.0,
        "zero_optimization": {"stage": zero_stage(plan, job)},
        # With tp every rank sends its part of the activations unless told otherwise
        # (pipe/engine.py, is_pipe_partitioned).
        "pipeline": {
            "pipe_partitioned": settings.scattered_sends,
            "grad_partitioned": settings.scattered_sends,
        },
        "steps_per_print": 1,
        "wall_clock_breakdown": False,
    }
    if job.precision is Precision.BFLOAT16:
        config["bf16"] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def deepspeed_arguments(
    result: SearchResult, sheet: LaunchSheet, settings: TrainerSettings, options: EmitOptions
) -> Iterator[Argument]:
    """Every argument of pretrain_gpt.py, but for the user's own."""
    plan, job = result.plan, result.inputs.job
    degrees = degrees_of(plan)
    yield from model_arguments(result.inputs.model, job, settings)
    yield "--tensor-model-parallel-size", str(degrees.tp)
    yield "--pipeline-model-parallel-size", str(degrees.pp)
    if degrees.pp == 1:
        yield ("--no-pipeline-parallel",)
    yield "--micro-batch-size", str(degrees.microbatch_size)
    yield "--global-batch-size", str(job.global_batch_size)
    yield "--seq-length", str(job.sequence_length)
    yield from _recompute(plan)
    if job.precision is Precision.BFLOAT16:
        yield ("--bf16",)
    yield from timeout_arguments(result, sheet)
    yield from _run(result, degrees, options)
    yield ("--deepspeed",)
    yield "--deepspeed_config", f"{{folder}}/{CONFIG_FILE}"
    # Read by Megatron-DeepSpeed's own code beside the file.
    yield "--zero-stage", str(zero_stage(plan, job))


def model_arguments(model: ModelSpec, job: Job, settings: TrainerSettings) -> Iterator[Argument]:
    """The model, of those that `faults.model_faults` lets through."""
    parts = model_parts(model, job.sequence_length)
    attention, mlp = parts.attention, parts.dense
    if not isinstance(attention, Attention) or mlp is None:
        raise ValueError(f"{model.name} has faults")  # of a caller that did not ask for them
    yield "--num-layers", str(model.num_layers)
    yield "--hidden-size", str(model.hidden_size)
    yield "--ffn-hidden-size", str(mlp.ffn_hidden_size)
    yield "--num-attention-heads", str(attention.num_heads)
    yield "--num-key-value-heads", str(attention.num_kv_heads)
    longest = model.learned_positions or max(model.max_sequence_length, job.sequence_length)
    yield "--max-position-embeddings", str(longest)
    if attention.rotary:
        yield ("--use-rotary-position-embeddings",)
        if model.rotary_base is not None:
            yield "--rotary-position-embeddings-theta", str(int(model.rotary_base))
        if model.rotary_fraction not in (None, 1):
            yield "--rotary-percent", repr(model.rotary_fraction)
    if model.norm_epsilon is not None:
        yield "--layernorm-epsilon", repr(model.norm_epsilon)
    if model.activation is Activation.GELU and mlp.bias:
        # Megatron's fusion, on by default, is the tanh form (megatron/model/fused_bias_gelu.py).
        yield ("--no-bias-gelu-fusion",)
    yield "--normalization", "rmsnorm" if parts.norm is Norm.RMS_NORM else "layernorm"
    if mlp.gated:
        yield ("--swiglu",)
    if not mlp.bias:
        yield ("--disable-bias-linear",)
    if not model.tied_embeddings:
        yield ("--untie-embeddings-and-output-weights",)
    yield "--attention-dropout", DROPOUT if settings.attention_dropout else "0.0"
    yield "--hidden-dropout", DROPOUT if settings.hidden_dropout else "0.0"
    # Scores are scaled by layer otherwise, as in models of 2019.
    yield ("--no-query-key-layer-scaling",)
    if settings.fused_attention:
        yield ("--use-flash-attn-v2",)
    if not settings.fused_accumulation:
        yield ("--no-gradient-accumulation-fusion",)
    yield "--make-vocab-size-divisible-by", str(VOCAB_MULTIPLE)


def _recompute(plan: Plan) -> Iterator[Argument]:
    """GPTModelPipe hands the number of layers to DeepSpeed; without stages Megatron reads it."""
    if plan.pipelines[0].stages[0].recompute.granularity is RecomputeGranularity.FULL:
        yield "--recompute-granularity", "full"
        yield "--recompute-method", "uniform"
        yield "--recompute-num-layers", "1"


def _run(result: SearchResult, degrees: Degrees, options: EmitOptions) -> Iterator[Argument]:
    job = result.inputs.job
    if job.optimizer is Optimizer.ADAMW:
        yield "--optimizer", "adam"
    else:
        yield "--optimizer", "sgd"
        yield "--sgd-momentum", "0.0"
    yield "--lr", f"{options.learning_rate!r}"
    yield "--lr-decay-style", "constant"
    yield "--clip-grad", "1.0" if clips_gradients(job) else "0.0"
    sentencepiece = options.tokenizer.endswith(".model")
    yield "--tokenizer-type", "GPTSentencePieceTokenizer" if sentencepiece else "HFTokenizer"
    yield "--tokenizer-model", options.tokenizer
    yield "--data-path", *options.data
    yield "--split", "100,0,0"
    yield "--train-iters", str(options.steps)
    yield "--eval-iters", "0"
    yield "--eval-interval", str(options.steps)
    yield "--log-interval", "1"
    if job.seed > 0:
        yield "--seed", str(job.seed)
    if options.save:
        yield "--save", options.save
        yield "--save-interval", str(job.checkpoint_interval_steps or options.steps)
    if options.load:
        yield "--load", options.load
