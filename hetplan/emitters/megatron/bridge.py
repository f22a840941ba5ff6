"""Megatron-Bridge: a plan as a Python configuration with the values of Megatron-LM's arguments.

Megatron-Bridge is configured in Python (docs.nvidia.com/nemo/megatron-bridge, "Megatron-LM to
Megatron Bridge Guide"). The emitted program holds the settings as literals and hands them to
`ConfigContainer` and `pretrain`. Names of fields were checked against the wheel of megatron-bridge
0.3.1 (models/gpt_provider.py, training/config.py, training/mixed_precision.py); nothing was run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

from hetplan.emitters.megatron.arguments import megatron_arguments
from hetplan.emitters.megatron.bridge_program import program_text
from hetplan.emitters.megatron.environment import agent_environment
from hetplan.emitters.megatron.faults import megatron_faults
from hetplan.emitters.megatron.optimizer import optimizer_instances
from hetplan.emitters.megatron.parallel import degrees_of
from hetplan.emitters.megatron.trainer import launch_remarks, transport_files
from hetplan.emitters.sheet import LaunchSheet
from hetplan.emitters.trainer_launch import EmitOptions, EmittedFile, Trainer, TrainerLaunch
from hetplan.errors import Fault, InputError
from hetplan.job.spec import Precision
from hetplan.search.result import SearchResult

TITLE = "Megatron-Bridge (field names checked against 0.3.1, not run)"
PROGRAM = "pretrain_bridge.py"

Value: TypeAlias = "bool | int | float | str | tuple[int, ...] | list[int] | list[str]"
_Kind: TypeAlias = Literal[
    "int", "float", "str", "true", "false", "pattern", "pair", "list", "none"
]

_MODEL_INTS = (
    *("num-layers", "hidden-size", "num-attention-heads", "kv-channels", "num-query-groups"),
    *("ffn-hidden-size", "moe-router-topk", "moe-ffn-hidden-size"),
    *("moe-shared-expert-intermediate-size", "q-lora-rank", "kv-lora-rank", "qk-head-dim"),
    *("qk-pos-emb-head-dim", "v-head-dim", "mtp-num-layers", "tensor-model-parallel-size"),
    *("pipeline-model-parallel-size", "context-parallel-size", "expert-model-parallel-size"),
    *("expert-tensor-parallel-size", "recompute-num-layers", "rotary-base"),
    *("moe-router-num-groups", "moe-router-group-topk"),
)
_MODEL_FRACTIONS = (
    *("rotary-percent", "rotary-scaling-factor", "mscale", "mscale-all-dim"),
    *("rope-scaling-factor", "moe-router-topk-scaling-factor", "moe-aux-loss-coeff"),
)
_MODEL_TEXTS = (
    *("normalization", "position-embedding-type", "rope-type", "moe-token-dispatcher-type"),
    *("pipeline-model-parallel-layout", "cp-comm-type", "recompute-granularity"),
    *("recompute-method", "transformer-impl", "cross-entropy-fusion-impl"),
    *("moe-router-score-function", "moe-router-load-balancing-type"),
)
_MODEL_SWITCHES = (
    *("qk-layernorm", "multi-latent-attention", "add-qkv-bias", "moe-grouped-gemm"),
    *("moe-shared-expert-gate", "sequence-parallel", "cross-entropy-loss-fusion"),
    *("moe-router-pre-softmax", "moe-router-enable-expert-bias"),
)
_OTHERS: tuple[tuple[str, str, str, _Kind], ...] = (
    ("num-experts", "model", "num_moe_experts", "int"),
    ("swiglu", "model", "gated_linear_unit", "true"),
    ("no-rope-fusion", "model", "apply_rope_fusion", "false"),
    ("norm-epsilon", "model", "layernorm_epsilon", "float"),
    ("use-rope-scaling", "model", "rope_scaling", "true"),
    ("rotary-seq-len-interpolation-factor", "model", "seq_len_interpolation_factor", "float"),
    ("no-bias-gelu-fusion", "model", "bias_activation_fusion", "false"),
    ("disable-bias-linear", "model", "add_bias_linear", "false"),
    (
        "untie-embeddings-and-output-weights",
        "model",
        "share_embeddings_and_output_weights",
        "false",
    ),
    ("moe-layer-freq", "model", "moe_layer_freq", "pattern"),
    ("window-size", "model", "window_size", "pair"),
    ("window-attn-skip-freq", "model", "window_attn_skip_freq", "pattern"),
    ("recompute-modules", "model", "recompute_modules", "list"),
    ("attention-dropout", "model", "attention_dropout", "float"),
    ("hidden-dropout", "model", "hidden_dropout", "float"),
    ("seq-length", "model", "seq_length", "int"),
    ("no-gradient-accumulation-fusion", "model", "gradient_accumulation_fusion", "false"),
    ("attention-backend", "model", "attention_backend", "str"),
    ("fp8-format", "precision", "fp8", "str"),
    ("fp8-recipe", "precision", "fp8_recipe", "str"),
    ("fp4-format", "precision", "fp4", "str"),
    ("bf16", "precision", "bf16", "true"),
    ("fp16", "precision", "fp16", "true"),
    ("accumulate-allreduce-grads-in-fp32", "precision", "grad_reduce_in_fp32", "true"),
    ("grad-reduce-in-bf16", "precision", "grad_reduce_in_fp32", "false"),
    ("use-tp-pp-dp-mapping", "dist", "use_tp_pp_dp_mapping", "true"),
    ("distributed-timeout-minutes", "dist", "distributed_timeout_minutes", "int"),
    ("overlap-grad-reduce", "ddp", "overlap_grad_reduce", "true"),
    ("overlap-param-gather", "ddp", "overlap_param_gather", "true"),
    ("use-distributed-optimizer", "ddp", "use_distributed_optimizer", "true"),
    ("optimizer", "optimizer", "optimizer", "str"),
    ("sgd-momentum", "optimizer", "sgd_momentum", "float"),
    ("lr", "optimizer", "lr", "float"),
    ("clip-grad", "optimizer", "clip_grad", "float"),
    ("optimizer-cpu-offload", "optimizer", "optimizer_cpu_offload", "true"),
    ("optimizer-offload-fraction", "optimizer", "optimizer_offload_fraction", "float"),
    ("use-precision-aware-optimizer", "optimizer", "use_precision_aware_optimizer", "true"),
    ("lr-decay-style", "scheduler", "lr_decay_style", "str"),
    ("micro-batch-size", "train", "micro_batch_size", "int"),
    ("global-batch-size", "train", "global_batch_size", "int"),
    ("train-iters", "train", "train_iters", "int"),
    ("eval-iters", "train", "eval_iters", "int"),
    ("eval-interval", "train", "eval_interval", "int"),
    ("log-interval", "logger", "log_interval", "int"),
    ("timing-log-level", "logger", "timing_log_level", "int"),
    ("seed", "rng", "seed", "int"),
    ("save", "checkpoint", "save", "str"),
    ("save-interval", "checkpoint", "save_interval", "int"),
    ("load", "checkpoint", "load", "str"),
    ("ckpt-format", "checkpoint", "ckpt_format", "str"),
    ("tokenizer-type", "tokenizer", "tokenizer_type", "str"),
    ("tokenizer-model", "tokenizer", "tokenizer_model", "str"),
    ("data-path", "dataset", "blend", "list"),
    ("split", "dataset", "split", "str"),
    # Said otherwise: by num_query_groups, by the folder of the program, by settings below.
    ("group-query-attention", "", "", "none"),
    ("nccl-communicator-config-path", "", "", "none"),
    ("max-position-embeddings", "", "", "none"),
    ("vocab-size", "", "", "none"),
    ("padded-vocab-size", "", "", "none"),
    ("make-vocab-size-divisible-by", "", "", "none"),
    ("mock-data", "", "", "none"),
    ("no-overlap-p2p-communication", "", "", "none"),
    # LoggerConfig has none: timers of level 1 come with barriers.
    ("no-barrier-with-level-1-timing", "", "", "none"),
)
SECTIONS = (
    *("model", "precision", "train", "optimizer", "scheduler", "ddp", "dist", "dataset"),
    *("tokenizer", "logger", "checkpoint", "rng"),
)
"""Parts of the configuration, in the order of the program."""


def _fields() -> dict[str, tuple[str, str, _Kind]]:
    def own(names: tuple[str, ...], kind: _Kind) -> Iterator[tuple[str, tuple[str, str, _Kind]]]:
        for name in names:
            yield name, ("model", name.replace("-", "_"), kind)

    return dict(
        (
            *own(_MODEL_INTS, "int"),
            *own(_MODEL_FRACTIONS, "float"),
            *own(_MODEL_TEXTS, "str"),
            *own(_MODEL_SWITCHES, "true"),
            *((name, (section, field, kind)) for name, section, field, kind in _OTHERS),
        )
    )


def _value(kind: _Kind, words: tuple[str, ...]) -> Value:
    match kind:
        case "int":
            return int(words[0])
        case "float":
            return float(words[0])
        case "true":
            return True
        case "false":
            return False
        case "pattern":
            return _pattern(words[0])
        case "pair":
            return tuple(int(part) for part in words[0].split(","))
        case "list":
            return list(words)
        case _:
            return words[0]


def _pattern(text: str) -> list[int]:
    """`([0]*3+[1]*58)` element by element."""
    runs = (part.split("*") for part in text.strip("()").split("+"))
    return [int(value.strip("[]")) for value, count in runs for _ in range(int(count))]


def bridge_settings(
    result: SearchResult, sheet: LaunchSheet, options: EmitOptions
) -> tuple[tuple[str, tuple[tuple[str, Value], ...]], ...]:
    """(part of the configuration, its fields with their values)."""
    plan, job, model = result.plan, result.inputs.job, result.inputs.model
    fields = _fields()
    found: dict[str, dict[str, Value]] = {name: {} for name in SECTIONS}
    # Defaults of Megatron-Bridge that differ from Megatron-LM's.
    found["model"] |= {
        "cross_entropy_loss_fusion": False,
        "persist_layer_norm": True,
        "bias_dropout_fusion": True,
        "vocab_size": plan.padded_vocab_size,
        "should_pad_vocab": False,
    }
    found["precision"]["grad_reduce_in_fp32"] = job.precision is not Precision.FLOAT16
    for flag, *words in megatron_arguments(result, sheet, options):
        name = flag.removeprefix("--")
        if name not in fields:
            raise InputError(f"{flag} has no field in Megatron-Bridge's configuration")
        section, field, kind = fields[name]
        if kind != "none":
            found[section][field] = _value(kind, tuple(words))
    # What argument_utils.py makes of Megatron-LM's fusions, which are on by default.
    shape = found["model"]
    biases = shape.get("add_bias_linear", True)
    fused = bool(shape.get("gated_linear_unit", False) or biases)
    shape.setdefault("bias_activation_fusion", fused)
    shape.setdefault("apply_rope_fusion", shape["position_embedding_type"] == "rope")
    degrees = degrees_of(plan)
    if degrees.virtual_stages > 1:
        shape["virtual_pipeline_model_parallel_size"] = degrees.virtual_stages
        # argument_utils.py sets the two of them together.
        shape["overlap_p2p_comm"] = plan.overlap.send
        shape["batch_p2p_comm"] = not plan.overlap.send
    found["optimizer"] |= {
        # Two parts of the configuration say it.
        "use_distributed_optimizer": found["ddp"].get("use_distributed_optimizer", False),
        "bf16": job.precision is Precision.BFLOAT16,
        "fp16": job.precision is Precision.FLOAT16,
    }
    found["dataset"]["sequence_length"] = job.sequence_length
    if not options.data:
        # With or without an end-of-document token it is no larger than the model's.
        found["tokenizer"]["vocab_size"] = model.vocab_size - 1
    return tuple((name, tuple(values.items())) for name, values in found.items())


def bridge_faults(
    result: SearchResult, sheet: LaunchSheet, options: EmitOptions
) -> tuple[Fault, ...]:
    """Everything that Megatron-Bridge cannot be told, or that was not verified with it."""
    return (*megatron_faults(result, sheet, options), *_own_faults(result, options))


def _own_faults(result: SearchResult, options: EmitOptions) -> Iterator[Fault]:
    plan, model, job = result.plan, result.inputs.model, result.inputs.job
    degrees = degrees_of(plan)
    if model.learned_positions not in (0, job.sequence_length):
        yield Fault(
            field="inputs.model.learned_positions",
            message=f"{model.learned_positions}; GPTModelProvider has as many as the sequence is "
            f"long, {job.sequence_length}: emit for target megatron",
        )
    if model.num_mtp_layers:
        message = "multi-token prediction was not verified with Megatron-Bridge: emit for megatron"
        yield Fault(field="inputs.model.num_mtp_layers", message=message)
    if plan.overlap.tensor_parallel:
        yield Fault(
            field="plan.overlap.tensor_parallel",
            message="on; Megatron-Bridge wants buffers described for it (CommOverlapConfig): set "
            "it to false and price the plan again, or emit for target megatron",
        )
    if optimizer_instances(plan, degrees) > 1:
        yield Fault(
            field="plan.optimizer_shards",
            message=f"{plan.optimizer_shards} of {degrees.copies} copies, which was not verified "
            "with Megatron-Bridge: shard over all copies",
        )
    if options.extra_arguments:
        yield Fault(
            field="--extra",
            message=f"{PROGRAM} takes no arguments; change it instead",
        )


def bridge_launch(result: SearchResult, sheet: LaunchSheet, options: EmitOptions) -> TrainerLaunch:
    """Program, environment and files of a plan without `bridge_faults`."""
    degrees = degrees_of(result.plan)
    networks = transport_files(result, sheet)
    settings = bridge_settings(result, sheet, options)
    text = program_text(
        settings,
        precision=result.inputs.job.precision,
        transport=networks[0].path if networks else "",
    )
    return TrainerLaunch(
        target="megatron-bridge",
        title=TITLE,
        program=(f"{{folder}}/{PROGRAM}",),
        arguments=(),
        environment=(),
        agent_environment=tuple(agent_environment(agent, degrees) for agent in sheet.agents),
        files=(*networks, EmittedFile(path=PROGRAM, text=text)),
        remarks=launch_remarks(result, sheet, options),
    )


TRAINER = Trainer(
    name="megatron-bridge",
    plan_target="megatron",
    faults=bridge_faults,
    launch=bridge_launch,
    data_outermost=True,
)
