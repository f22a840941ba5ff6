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

from hetplan.cost.components.step import clips_gradients
from hetplan.emitters.megatron.timeouts import added_seconds
from hetplan.emitters.sheet import LaunchSheet
from hetplan.emitters.torchtitan.config import FUNCTION, MODULE
from hetplan.emitters.torchtitan.modules import module_names
from hetplan.emitters.trainer_launch import EmitOptions
from hetplan.job.spec import Job, Precision
from hetplan.plans.pieces import stage_copies
from hetplan.plans.plan import Plan, RecomputeGranularity, Sharding
from hetplan.search.result import SearchResult

MOCK_VOCABULARY = 2048
"""Entries that the tokenizer of torchtitan's tests needs (llama3_debugmodel's vocab_size)."""
INIT_TIMEOUT_SECONDS, TRAIN_TIMEOUT_SECONDS = 300, 100
"""What torchtitan waits until the end of the first step and after it (CommConfig)."""
RECOMPUTE_PREFIX = "activation_checkpoint"
"""Of the word that chooses what is recomputed, which ends the arguments."""

_SCHEDULES = {"1f1b": "1F1B", "interleaved-1f1b": "Interleaved1F1B"}


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
    # "default" gathers the parameters anew in every pass where there are no stages.
    yield "--parallelism.fsdp_reshard_after_forward", "never"
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


def timeout_arguments(result: SearchResult, sheet: LaunchSheet) -> Iterator[tuple[str, ...]]:
    """Longer timeouts where long links or long steps need more than a tenth of torchtitan's own."""
    added = added_seconds(result, sheet)
    if added > TRAIN_TIMEOUT_SECONDS / 10:
        for name, own in (("init", INIT_TIMEOUT_SECONDS), ("train", TRAIN_TIMEOUT_SECONDS)):
            yield f"--comm.{name}_timeout_seconds", str(own + math.ceil(added))


def option_arguments(options: EmitOptions) -> Iterator[tuple[str, ...]]:
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
