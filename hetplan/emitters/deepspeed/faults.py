"""What in a legal plan for target megatron can Megatron-DeepSpeed not be told?

Above all a cut of its own: DeepSpeed's pipeline takes no list of layers per stage, and what it cuts
by itself (`hetplan.emitters.deepspeed.partition`) is even. Plans for unlike devices are mostly
uneven, and then refused.
"""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.emitters.deepspeed.partition import transformer_layers
from hetplan.emitters.megatron.model import model_faults as megatron_model_faults
from hetplan.emitters.megatron.model import model_parts
from hetplan.emitters.megatron.parallel import degrees_of
from hetplan.emitters.sheet import LaunchSheet
from hetplan.emitters.trainer_launch import EmitOptions
from hetplan.emitters.vendors import mixed_library_faults, vendor_of
from hetplan.errors import Fault
from hetplan.job.spec import Job, Precision
from hetplan.job.trainer import trainer_settings
from hetplan.model.layers import Attention, Norm
from hetplan.model.spec import ModelSpec
from hetplan.plans.pieces import stage_copies, transformer_layers_of
from hetplan.plans.plan import Plan, RecomputeGranularity, Sharding
from hetplan.search.result import SearchResult

_STAGES = "plan.pipelines[0].stages"


def deepspeed_faults(
    result: SearchResult, sheet: LaunchSheet, options: EmitOptions
) -> tuple[Fault, ...]:
    """Everything that keeps the plan from Megatron-DeepSpeed."""
    plan, inputs = result.plan, result.inputs
    return (
        *_cut(plan, inputs.model, inputs.job),
        *_model(inputs.model, inputs.job),
        *_degrees(plan),
        *_sharding(plan, inputs.job),
        *_settings(plan, inputs.job),
        *_devices(sheet),
        *_options(options),
    )


def _cut(plan: Plan, model: ModelSpec, job: Job) -> Iterator[Fault]:
    pipeline = plan.pipelines[0]
    if pipeline.schedule.virtual_stages > 1:
        yield Fault(
            field="plan.pipelines[0].schedule.virtual_stages",
            message=f"{pipeline.schedule.virtual_stages}; DeepSpeed's pipeline has one part of the "
            "model per stage: pin virtual_stages: 1",
        )
        return
    held = tuple(transformer_layers_of(stage, model.num_layers) for stage in pipeline.stages)
    mixed = job.precision is not Precision.FLOAT32
    own = transformer_layers(model.num_layers, len(held), mixed=mixed)
    if held != own:
        yield Fault(
            field=_STAGES,
            message=f"hold {_listed(held)} transformer layers; DeepSpeed takes no such list "
            f"(deepspeedai/DeepSpeed#2974) and cuts {model.num_layers} into {_listed(own)}: pin a "
            "pp whose best cut is that one, or use target megatron",
        )


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def _model(model: ModelSpec, job: Job) -> Iterator[Fault]:
    faults = tuple(megatron_model_faults(model, job))
    yield from faults
    if faults:
        return
    for message in _model_messages(model, job):
        yield Fault(
            field="inputs.model",
            message=f"{model.name} has {message}, for which Megatron-DeepSpeed has no argument: "
            "use target megatron",
        )


def _model_messages(model: ModelSpec, job: Job) -> Iterator[str]:
    parts = model_parts(model, job.sequence_length)
    attention = parts.attention
    if not isinstance(attention, Attention):
        yield "latent attention"
        return
    if attention.qk_norm:
        yield "query and key norms"
    if attention.head_dim * attention.num_heads != model.hidden_size:
        yield (
            f"{attention.num_heads} heads of {attention.head_dim}, which do not make up its hidden "
            f"size of {model.hidden_size}"
        )
    if any(window is not None for window in parts.windows):
        yield "attention windows"
    if parts.experts is not None:
        yield "experts as Megatron-core's"
    elif parts.dense is not None:
        biases = {attention.qkv_bias, attention.output_bias, parts.dense.bias}
        if len(biases) > 1:
            yield "biases on some matrices alone"
    if not attention.rotary and not model.learned_positions:
        yield "no positions"
    if model.num_mtp_layers:
        yield "multi-token prediction"
    if parts.norm is Norm.UNSCALED:
        yield "norms without weights"
    if model.rotary_scaling is not None and attention.rotary:
        yield "stretched rotary positions"


def _degrees(plan: Plan) -> Iterator[Fault]:
    degrees = degrees_of(plan)
    if degrees.cp > 1:
        yield Fault(
            field="plan.pipelines[0]",
            message=f"cp {degrees.cp}; Megatron-DeepSpeed cuts sequences by an exchange of heads "
            "(Ulysses), which was not priced: pin cp: 1",
        )
    if degrees.sequence_parallel:
        # pretrain_gpt.py: get_batch cuts the tokens, get_batch_pipe does not, and both lead to an
        # embedding that cuts again (language_model.py).
        yield Fault(
            field=f"{_STAGES}[0].replicas[0].sequence_parallel",
            message="on; Megatron-DeepSpeed's pipeline was not made for it: pin "
            "sequence_parallel: false",
        )


def _sharding(plan: Plan, job: Job) -> Iterator[Fault]:
    copies = stage_copies(plan.pipelines[0].stages[0])
    if plan.sharding is Sharding.OPTIMIZER and plan.optimizer_shards != copies:
        yield Fault(
            field="plan.optimizer_shards",
            message=f"{plan.optimizer_shards} of {copies} copies; ZeRO stage 1 shards over all of "
            "them: plan again with sharded_optimizer: true",
        )
    elif plan.sharding is Sharding.NONE and copies > 1 and job.precision is Precision.BFLOAT16:
        # engine.py: unsupported mix of model_dtype and grad_accum_dtype.
        yield Fault(
            field="plan.sharding",
            message="none; DeepSpeed sums bfloat16's gradients in float32 with ZeRO stage 1 only: "
            "pin sharded_optimizer: true",
        )
    if plan.optimizer_offload > 0:
        yield Fault(
            field="plan.optimizer_offload",
            message=f"{plan.optimizer_offload}; what DeepSpeed offloads was not priced: use 0",
        )


def _settings(plan: Plan, job: Job) -> Iterator[Fault]:
    if job.precision is Precision.FLOAT16:
        yield Fault(
            field="inputs.job.precision",
            message="float16; emitted for DeepSpeed are bfloat16 and float32: use bfloat16",
        )
    settings = trainer_settings(job)
    if job.precision is Precision.BFLOAT16 and settings.gradient_precision is not Precision.FLOAT32:
        yield Fault(
            field="inputs.job.trainer.gradient_precision",
            message=f"{settings.gradient_precision}; Megatron-DeepSpeed sums bfloat16's gradients "
            "in float32: leave it out",
        )
    for name, on in (
        ("fused_loss", settings.fused_loss),
        ("product_format", settings.product_format is not None),
        ("context_exchange", settings.context_exchange),
    ):
        if on:
            yield Fault(
                field=f"inputs.job.trainer.{name}",
                message="given; Megatron-DeepSpeed has nothing like it: leave it out",
            )
    if job.sequence_lengths:
        yield Fault(
            field="inputs.job.sequence_lengths",
            message="given; pretrain_gpt.py fills every sequence to sequence_length: leave "
            "sequence_lengths and packing out",
        )
    recompute = plan.pipelines[0].stages[0].recompute
    if recompute.granularity is RecomputeGranularity.SELECTIVE or recompute.layers is not None:
        yield Fault(
            field=f"{_STAGES}[0].recompute",
            message="of parts of layers, or of some layers; DeepSpeed's pipeline recomputes every "
            "layer of a stage or none (gpt_model.py): pin recompute: true or false",
        )
    for name in ("reduction", "gathering", "tensor_parallel", "send"):
        if getattr(plan.overlap, name):
            yield Fault(
                field=f"plan.overlap.{name}",
                message="on; DeepSpeed's pipeline communicates between its passes "
                "(pipe/engine.py): set it to false in the plan and price it again",
            )


def _devices(sheet: LaunchSheet) -> Iterator[Fault]:
    yield from mixed_library_faults(sheet, "DeepSpeed")
    for host in sheet.hosts:
        if vendor_of(host.vendor, host.device_kind).backend != "nccl":
            yield Fault(
                field=_STAGES,
                message=f"devices of kind {host.device_kind}; what is emitted for DeepSpeed wants "
                "devices that torch calls cuda: forbid these islands",
            )
            return


def _options(options: EmitOptions) -> Iterator[Fault]:
    if not options.data:
        yield Fault(
            field="--data",
            message="is missing; Megatron-DeepSpeed has no mock data: say the prefix of a data set "
            "made by its tools/preprocess_data.py",
        )
    if not options.tokenizer:
        yield Fault(
            field="--tokenizer",
            message="is missing; say which tokenizer made the data",
        )
    if options.learning_rate is None:
        yield Fault(
            field="--learning-rate",
            message="is missing; the run learns, and no plan says how fast",
        )
