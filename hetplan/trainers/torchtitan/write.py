"""What of a plan do torchtitan's arguments say?

Release 0.3.0: torchtitan/config/configs.py has their meaning, torchtitan/trainer.py checks them.
Later code counts tokens in place of sequences (`training.num_tokens_per_microbatch_per_dp_rank`)
and microbatches in place of their size (`parallelism.num_pp_microbatches`): it takes other
arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from hetplan.cluster.links import Transport
from hetplan.cost.step_model.end_of_step import clips_gradients
from hetplan.errors import Fault
from hetplan.job.spec import Job, Optimizer, Precision, ProductFormat
from hetplan.job.trainer import TrainerSettings, trainer_settings
from hetplan.model.layers import Attention, Mlp
from hetplan.model.spec import ModelSpec
from hetplan.plans.pieces import stage_copies
from hetplan.plans.plan import Boundary, Plan, RecomputeGranularity, Sharding
from hetplan.schedulers.launch import EmissionOptions, EmittedFile, TrainerLaunch
from hetplan.schedulers.rank_layout import RankLayout, vendor_environment
from hetplan.schedulers.vendors import vendor_of
from hetplan.search.result import SearchResult
from hetplan.trainers import Trainer
from hetplan.trainers.megatron.write import added_seconds
from hetplan.trainers.torchtitan.model import (
    FUNCTION,
    MODULE,
    NORM_EPSILON,
    ROTARY_BASE,
    config_text,
    model_faults,
    module_names,
)

MOCK_VOCABULARY = 2048
"""Entries that the tokenizer of torchtitan's tests needs (llama3_debugmodel's vocab_size)."""
INIT_TIMEOUT_SECONDS, TRAIN_TIMEOUT_SECONDS = 300, 100
"""What torchtitan waits until the end of the first step and after it (CommConfig)."""
RECOMPUTE_PREFIX = "activation_checkpoint"
"""Of the word that chooses what is recomputed, which ends the arguments."""

_SCHEDULES = {
    "1f1b": "1F1B",
    "interleaved-1f1b": "Interleaved1F1B",
    "zb-h1": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Sizes of torchtitan's one mesh."""

    tp: int
    cp: int
    pp: int
    replicate: int
    """Data-parallel ranks that hold copies."""
    shard: int
    """Data-parallel ranks that share what is sharded, beside those of cp."""
    microbatch_size: int
    sequence_parallel: bool


def degrees_of(plan: Plan) -> Degrees:
    """The degrees of a plan that is legal for target torchtitan; shards rounded down."""
    stage = plan.pipelines[0].stages[0]
    first = stage.replicas[0]
    dp = stage_copies(stage) // first.cp
    shards = plan.optimizer_shards if plan.sharding is not Sharding.NONE else first.cp
    shard = max(1, shards // first.cp)
    return Degrees(
        tp=first.tp,
        cp=first.cp,
        pp=len(plan.pipelines[0].stages),
        replicate=max(1, dp // shard),
        shard=shard,
        microbatch_size=first.microbatch_size,
        sequence_parallel=first.sequence_parallel,
    )


def plan_arguments(result: SearchResult) -> Iterator[tuple[str, ...]]:
    """Everything that the plan and its job decide, but for recomputation."""
    plan, job = result.plan, result.inputs.job
    degrees = degrees_of(plan)
    yield "--module", MODULE
    yield "--config", FUNCTION
    yield from _parallelism(plan, degrees, result.inputs.model.num_layers)
    # Every rank of a pipeline step computes all of its microbatches; without stages a microbatch is
    # a step of gradient accumulation.
    count = plan.pipelines[0].num_microbatches if degrees.pp > 1 else 1
    yield "--training.local_batch_size", str(degrees.microbatch_size * count)
    yield "--training.global_batch_size", str(job.global_batch_size)
    yield "--training.seq_len", str(job.sequence_length)
    yield from _precision(job)
    yield "--training.max_norm", "1.0" if clips_gradients(job) else "inf"
    if trainer_settings(job).fused_elementwise:
        yield ("--compile.enable",)
    # Captured graphs do not go with stages (trainer.py, _validate_cuda_graphs).
    yield ("--training.disable_cuda_graphs",)


def _parallelism(plan: Plan, degrees: Degrees, num_layers: int) -> Iterator[tuple[str, ...]]:
    pipeline = plan.pipelines[0]
    yield "--parallelism.data_parallel_replicate_degree", str(degrees.replicate)
    yield "--parallelism.data_parallel_shard_degree", str(degrees.shard)
    yield "--parallelism.tensor_parallel_degree", str(degrees.tp)
    yield "--parallelism.context_parallel_degree", str(degrees.cp)
    yield "--parallelism.pipeline_parallel_degree", str(degrees.pp)
    if degrees.tp > 1 and not degrees.sequence_parallel:
        yield ("--parallelism.no-enable_sequence_parallel",)
    # Without stages "default" is "always": parameters are gathered anew in every pass.
    freed = plan.sharding is Sharding.PARAMETERS
    yield "--parallelism.fsdp_reshard_after_forward", "always" if freed else "never"
    if degrees.cp > 1:
        # The balancer for FlexAttention, which language models have (context_parallel/api.py).
        yield "--parallelism.context_parallel_load_balancer", "ptrr"
    if degrees.pp == 1:
        return
    yield "--parallelism.pipeline_parallel_schedule", _SCHEDULES[pipeline.schedule.name]
    yield "--parallelism.pipeline_parallel_microbatch_size", str(degrees.microbatch_size)
    names = module_names(pipeline, num_layers)
    # A comma between the names of one list (torchtitan/config/manager.py, list_str_rule).
    yield (
        "--parallelism.module_fqns_per_model_part",
        *(",".join(each) for each in names),
    )


def _precision(job: Job) -> Iterator[tuple[str, ...]]:
    """Weights, gradients and their reduction are float32 (hetplan.job.trainer)."""
    yield "--training.dtype", "float32"
    mixed = "bfloat16" if job.precision is Precision.BFLOAT16 else "float32"
    yield "--training.mixed_precision_param", mixed


def timeout_arguments(result: SearchResult, ranks: RankLayout) -> Iterator[tuple[str, ...]]:
    """Longer timeouts where long links or long steps need more than a tenth of torchtitan's own."""
    added = added_seconds(result, ranks)
    if added > TRAIN_TIMEOUT_SECONDS / 10:
        for name, own in (("init", INIT_TIMEOUT_SECONDS), ("train", TRAIN_TIMEOUT_SECONDS)):
            yield f"--comm.{name}_timeout_seconds", str(own + math.ceil(added))


def option_arguments(options: EmissionOptions) -> Iterator[tuple[str, ...]]:
    """What the user says beside the plan."""
    yield "--training.steps", str(options.steps)
    yield "--optimizer.param_groups.0.optimizer_kwargs.lr", f"{options.rate!r}"
    # The step time of every step is read from the log.
    yield "--metrics.log_freq", "1"
    if options.data:
        # c4_test's loader reads any local data set with a `text` column (text_datasets.py).
        yield "--dataloader.dataset", "c4_test"
        yield "--dataloader.dataset_path", options.data[0]
    if options.tokenizer:
        yield "--hf_assets_path", options.tokenizer
    if options.save:
        yield ("--checkpoint.enable",)
        yield "--checkpoint.folder", options.save
    if options.load:
        if not options.save:
            yield ("--checkpoint.enable",)
            yield ("--checkpoint.load_only",)
        yield "--checkpoint.initial_load_path", options.load


def recompute_word(plan: Plan) -> str:
    """The subcommand that chooses what is recomputed (distributed/activation_checkpoint.py)."""
    full = plan.pipelines[0].stages[0].recompute.granularity is RecomputeGranularity.FULL
    return f"{RECOMPUTE_PREFIX}:{'full' if full else 'none'}"


# ---- torchtitan/trainer

TITLE = "torchtitan 0.3.0"


def torchtitan_launch(
    result: SearchResult, ranks: RankLayout, options: EmissionOptions
) -> TrainerLaunch:
    """The launch of a result without faults."""
    inputs = result.inputs
    settings = trainer_settings(inputs.job)
    text = config_text(inputs.model, result.plan, inputs.job.sequence_length, settings)
    return TrainerLaunch(
        target="torchtitan",
        title=TITLE,
        program=("-m", "torchtitan.train"),
        arguments=(
            *plan_arguments(result),
            *timeout_arguments(result, ranks),
            *option_arguments(options),
            *((each,) for each in options.extra_arguments),
            # A subcommand: arguments of the whole stand before it.
            (recompute_word(result.plan),),
        ),
        environment=(
            # Where torchtitan finds the module with the model.
            ("PYTHONPATH", "{folder}"),
            # run_train.sh.
            ("PYTORCH_ALLOC_CONF", "expandable_segments:True"),
        ),
        agent_environment=tuple(
            vendor_environment(agent, settings.collective_algorithm) for agent in ranks.agents
        ),
        files=(EmittedFile(path=f"{MODULE}.py", text=text),),
        remarks=tuple(_remarks(result, options, settings)),
    )


def _remarks(
    result: SearchResult, options: EmissionOptions, settings: TrainerSettings
) -> Iterator[str]:
    product_format = settings.product_format
    plan, model, job = result.plan, result.inputs.model, result.inputs.job
    yield (
        "The arguments are those of release 0.3.0; code after it counts tokens instead of "
        "sequences (training.num_tokens_per_train_step) and takes others."
    )
    if model.rotary_base is None:
        yield (
            f"The model does not say rotary_base: that of torchtitan's Llama 3 models, "
            f"{ROTARY_BASE:,}, stands. Say it in the model file."
        )
    if model.norm_epsilon is None:
        yield (
            f"The model does not say norm_epsilon: torchtitan's own, {NORM_EPSILON:g}, stands. Say "
            "it in the model file."
        )
    if not options.data:
        yield (
            "Without --data torchtitan reads the texts of its tests (tests/assets), which its "
            "checkout has and its package has not: start in a checkout."
        )
    if plan.padded_vocab_size != model.vocab_size:
        yield (
            f"The vocabulary of {model.vocab_size:,} is padded to {plan.padded_vocab_size:,}, so "
            "that tp divides it."
        )
    if job.gradient_clipping is False:
        yield (
            "Gradients are not clipped (training.max_norm inf); torchtitan computes their norm all "
            "the same."
        )
    freed = plan.sharding is Sharding.PARAMETERS
    if degrees_of(plan).pp == 1 and plan.pipelines[0].num_microbatches > 1 and not freed:
        yield (
            "Without stages a microbatch is a step of gradient accumulation, each of which reduces "
            "its gradients; the plan is priced with one reduction per step."
        )
    yield from _boundary_remarks(plan.pipelines[0].boundaries)
    if product_format is ProductFormat.FLOAT8:
        yield "Products in float8 are scaled by rows (torchao), one scale per tensor was priced."
    if product_format is not None and not settings.fused_elementwise:
        yield (
            "Layers are compiled only with trainer.fused_elementwise; torchao's products in "
            f"{product_format} are slow without it."
        )


def _boundary_remarks(boundaries: tuple[Boundary, ...]) -> Iterator[str]:
    staged = [str(each.index) for each in boundaries if each.transport == Transport.HOST_STAGED]
    if staged:
        yield (
            f"Boundaries after stages {', '.join(staged)} are host-staged in the plan; torchtitan "
            "sends over them with the devices' own library."
        )


# ---- torchtitan/faults

_FLEX_BLOCK = 128
"""torch.nn.attention.flex_attention._DEFAULT_SPARSE_BLOCK_SIZE."""
_NVFP4_BLOCK = 128
"""torchtitan/components/quantization/nvfp4.py: every dimension of a product, on every rank."""


def torchtitan_faults(
    result: SearchResult, ranks: RankLayout, options: EmissionOptions
) -> tuple[Fault, ...]:
    """Everything that keeps the plan from torchtitan."""
    return (
        *question_faults(result.inputs.model, result.inputs.job),
        *_stages(result),
        *_degrees(result),
        *_devices(ranks),
        *_options(result, options),
    )


def question_faults(model: ModelSpec, job: Job) -> Iterator[Fault]:
    """What keeps every plan of this model and job from torchtitan."""
    for message in model_faults(model):
        yield Fault(
            field="inputs.model",
            message=f"{model.name} has {message}; what is emitted is torchtitan's Llama 3 model, "
            "which has not: use target megatron",
        )
    yield from _settings(job)


def _stages(result: SearchResult) -> Iterator[Fault]:
    model = result.inputs.model
    stages = len(result.plan.pipelines[0].stages)
    if model.tied_embeddings and stages > 1:
        # models/common/decoder.py, update_from_config.
        yield Fault(
            field="plan.pipelines[0].stages",
            message=f"{stages} stages and tied embeddings, which torchtitan refuses together (the "
            "two copies are one parameter): pin pp: 1, or use target megatron",
        )
    if trainer_settings(result.inputs.job).product_format is ProductFormat.NVFP4:
        yield from _nvfp4(result, degrees_of(result.plan).tp)


def _settings(job: Job) -> Iterator[Fault]:
    if job.precision is Precision.FLOAT16:
        yield Fault(
            field="inputs.job.precision",
            message="float16; torchtitan has no loss scaling (training.mixed_precision_param is "
            "bfloat16 or float32): use one of these",
        )
    if job.optimizer is not Optimizer.ADAMW:
        # components/optimizer/optimizer.py, _resolve_optimizer_factory.
        yield Fault(
            field="inputs.job.optimizer",
            message=f"{job.optimizer}; torchtitan has Adam, AdamW and DistMuon: use adamw",
        )
    if job.sequence_lengths and not job.packing:
        yield Fault(
            field="inputs.job.packing",
            message="false; torchtitan always packs short texts into whole sequences: set "
            "packing: true",
        )


def _nvfp4(result: SearchResult, tp: int) -> Iterator[Fault]:
    model = result.inputs.model
    layer = model.layer_runs[0].layer
    if not isinstance(layer.attention, Attention) or not isinstance(layer.mlp, Mlp):
        return
    query, kv = layer.attention.slice_sizes(tp)
    sizes = (
        ("hidden_size", model.hidden_size),
        ("queries of a rank", query),
        ("queries, keys and values of a rank", query + 2 * kv),
        ("ffn_hidden_size of a rank", layer.mlp.ffn_hidden_size // tp),
    )
    for name, size in sizes:
        if size % _NVFP4_BLOCK:
            yield Fault(
                field="inputs.job.trainer.product_format",
                message=f"nvfp4, and {name} is {size} at tp {tp}; torchtitan's products in it are "
                f"multiples of {_NVFP4_BLOCK}: leave product_format out, or pin a smaller tp",
            )


def _degrees(result: SearchResult) -> Iterator[Fault]:
    plan, job = result.plan, result.inputs.job
    degrees = degrees_of(plan)
    copies = stage_copies(plan.pipelines[0].stages[0])
    if degrees.shard * degrees.cp * degrees.replicate != copies or (
        plan.sharding is not Sharding.NONE and plan.optimizer_shards != degrees.shard * degrees.cp
    ):
        yield Fault(
            field="plan.optimizer_shards",
            message=f"{plan.optimizer_shards} of {copies} copies with cp {degrees.cp}; torchtitan "
            "shards over data_parallel_shard_degree times cp ranks, which divide the copies: shard "
            "over all of them",
        )
    block = _FLEX_BLOCK * degrees.cp
    if degrees.cp > 1 and job.sequence_length % block:
        # torch/distributed/tensor/experimental/_context_parallel: create_cp_block_mask.
        yield Fault(
            field="inputs.job.sequence_length",
            message=f"{job.sequence_length} is no multiple of {block}, {_FLEX_BLOCK} times cp "
            f"{degrees.cp}, in which FlexAttention is cut: use such a length, or pin cp: 1",
        )


def _devices(ranks: RankLayout) -> Iterator[Fault]:
    for host in ranks.hosts:
        if vendor_of(host.vendor, host.device_kind).backend == "gloo":
            yield Fault(
                field="plan.pipelines[0].stages",
                message=f"devices of kind {host.device_kind}, which is no accelerator; torchtitan "
                "trains on accelerators: use target native",
            )
            return


def _options(result: SearchResult, options: EmissionOptions) -> Iterator[Fault]:
    if len(options.data) > 1:
        yield Fault(
            field="--data",
            message=f"{len(options.data)} data sets; torchtitan's text loader reads one folder: "
            "give one, or change dataloader in hetplan_torchtitan.py",
        )
    size = result.plan.padded_vocab_size
    if not options.data and not options.tokenizer and size < MOCK_VOCABULARY:
        yield Fault(
            field="inputs.model.vocab_size",
            message=f"{size} with padding; torchtitan's test texts need {MOCK_VOCABULARY} entries: "
            "say --data and --tokenizer",
        )


TRAINER = Trainer(
    name="torchtitan",
    plan_target="torchtitan",
    faults=torchtitan_faults,
    question_faults=question_faults,
    launch=torchtitan_launch,
)
