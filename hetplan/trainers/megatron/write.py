"""A plan as a launch of Megatron-LM's pretrain_gpt.py: arguments, environment, files, refusals.

Flags that are left out have Megatron-LM's defaults, which the plan was priced with. Every flag was
taken by the parser and validators of Megatron-LM d98e8a64: megatron/training/arguments.py
(validate_args), megatron/core/optimizer/__init__.py and optimizer_config.py, parallel_state.py
(`num_distributed_optimizer_instances`).

A rank waits --distributed-timeout-minutes for another, 10 unless given
(megatron/training/config/common_config.py). Those minutes are for what every run has: loading,
compiling, slow disks. Long links add

    bootstrap   before its first collective a communicator gathers addresses, devices and rings from
                all of its ranks, each time around a ring of all W of them (NCCL, bootstrap.cc and
                init.cc): BOOTSTRAP_RINGS * (W - 1) * latency of the longest link, for the
                default group, which has all ranks
    steps       a rank waits up to a step for its partner, a transfer may take what is left of
                another, and the first step builds communicators group by group: three of them
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations

from hetplan.cost.step_model.end_of_step import clips_gradients
from hetplan.errors import Fault
from hetplan.job.spec import Job, Optimizer, Precision, ProductFormat
from hetplan.job.trainer import TrainerSettings, trainer_settings_of
from hetplan.plans.plan import Plan, Sharding
from hetplan.schedulers.launch import EmissionOptions, EmittedFile, TrainerLaunch
from hetplan.schedulers.rank_layout import (
    Agent,
    RankLayout,
    vendor_environment,
)
from hetplan.schedulers.vendors import vendor_of
from hetplan.search.result import SearchResult
from hetplan.trainers import Trainer
from hetplan.trainers.megatron.model import (
    VOCAB_MULTIPLE,
    model_arguments,
    model_faults,
    numerics_remarks,
)
from hetplan.trainers.megatron.parallel import (
    TRANSPORT_FILE,
    Degrees,
    batch_arguments,
    degrees_of,
    layout_faults,
    overlap_arguments,
    parallel_arguments,
    parallel_faults,
    recompute_arguments,
    transport_remarks,
    transport_text,
)

DROPOUT = "0.1"
"""Megatron-LM's own, where the job asks for dropout."""


def megatron_settings(result: SearchResult) -> TrainerSettings:
    """The trainer's settings under the job's options."""
    job = result.inputs.job
    return trainer_settings_of("megatron", job.precision, job.trainer)


def plan_arguments(result: SearchResult, ranks: RankLayout) -> Iterator[tuple[str, ...]]:
    """What the plan and its model say: shape, degrees, recomputation, formats, overlap."""
    job = result.inputs.job
    settings = megatron_settings(result)
    yield from model_arguments(result.inputs.model, job)
    yield from parallel_arguments(result, ranks, context_exchange=settings.context_exchange)
    yield from batch_arguments(result)
    yield from recompute_arguments(result.plan)
    yield from overlap_arguments(result.plan)
    yield from precision_arguments(job, settings)
    yield from kernel_arguments(settings)


def kernel_arguments(settings: TrainerSettings) -> Iterator[tuple[str, ...]]:
    """Dropout and the kernels of attention, loss and weights' gradients."""
    yield "--attention-dropout", DROPOUT if settings.attention_dropout else "0.0"
    yield "--hidden-dropout", DROPOUT if settings.hidden_dropout else "0.0"
    yield "--transformer-impl", "transformer_engine"
    if not settings.fused_attention:
        yield "--attention-backend", "unfused"
    if settings.fused_loss:
        yield ("--cross-entropy-loss-fusion",)
        # Transformer Engine's is refused (arguments.py: "disabled due to stability issues").
        yield "--cross-entropy-fusion-impl", "native"
    if not settings.fused_accumulation:
        yield ("--no-gradient-accumulation-fusion",)


def transport_arguments(result: SearchResult, ranks: RankLayout) -> Iterator[tuple[str, ...]]:
    """Timeouts of long links and the file of the groups' networks."""
    yield from timeout_arguments(result, ranks)
    if transport_text(result.plan, result.inputs.cluster, ranks):
        yield "--nccl-communicator-config-path", f"{{folder}}/{TRANSPORT_FILE}"


def data_arguments(result: SearchResult, options: EmissionOptions) -> Iterator[tuple[str, ...]]:
    """Vocabulary and data, padded as the plan has it."""
    yield "--vocab-size", str(result.inputs.model.vocab_size)
    yield "--make-vocab-size-divisible-by", str(VOCAB_MULTIPLE)
    if not options.data:
        # Its vocabulary is --vocab-size (core/tokenizers/text/libraries/null_tokenizer.py).
        yield "--tokenizer-type", "NullTokenizer"
        yield ("--mock-data",)
        return
    # Otherwise the tokenizer's own vocabulary is padded (core/tokenizers/utils/build_tokenizer.py).
    yield "--padded-vocab-size", str(result.plan.padded_vocab_size)
    sentencepiece = options.tokenizer.endswith(".model")
    yield "--tokenizer-type", "SentencePieceTokenizer" if sentencepiece else "HuggingFaceTokenizer"
    yield "--tokenizer-model", options.tokenizer
    yield "--data-path", *options.data
    # Nothing is evaluated.
    yield "--split", "100,0,0"


def run_arguments(result: SearchResult, options: EmissionOptions) -> Iterator[tuple[str, ...]]:
    """Length of the run, checkpoints and log."""
    job = result.inputs.job
    yield "--train-iters", str(options.steps)
    yield "--eval-iters", "0"
    yield "--eval-interval", str(options.steps)
    # Every step, so that `hetplan compare` sees how they differ; level 1 are the parts of a step.
    yield "--log-interval", "1"
    yield ("--log-throughput",)
    yield "--timing-log-level", "1"
    yield ("--no-barrier-with-level-1-timing",)
    if job.seed > 0:
        # initialize.py takes positive ones; its own is 1234.
        yield "--seed", str(job.seed)
    if options.save:
        yield "--save", options.save
        yield "--save-interval", str(job.checkpoint_interval_steps or options.steps)
    if options.load:
        yield "--load", options.load
    if options.save or options.load:
        # Can be read again under other degrees and layouts.
        yield "--ckpt-format", "torch_dist"


def extra_arguments(options: EmissionOptions) -> tuple[tuple[str, ...], ...]:
    """The user's own words, one entry per flag."""
    entries: list[list[str]] = []
    for word in options.extra_arguments:
        if word.startswith("--") or not entries:
            entries.append([])
        entries[-1].append(word)
    return tuple(tuple(entry) for entry in entries)


def megatron_arguments(
    result: SearchResult, ranks: RankLayout, options: EmissionOptions
) -> tuple[tuple[str, ...], ...]:
    """Every argument of pretrain_gpt.py."""
    return (
        *plan_arguments(result, ranks),
        *optimizer_arguments(result, options),
        *transport_arguments(result, ranks),
        *data_arguments(result, options),
        *run_arguments(result, options),
        *extra_arguments(options),
    )


# ---- number formats, optimizer, sharding, offloading


def precision_arguments(job: Job, settings: TrainerSettings) -> Iterator[tuple[str, ...]]:
    """Formats of parameters, gradients and products."""
    if job.precision is Precision.BFLOAT16:
        yield ("--bf16",)
    elif job.precision is Precision.FLOAT16:
        yield ("--fp16",)
    if job.precision is not Precision.FLOAT32:
        if settings.gradient_precision is Precision.FLOAT32:
            yield ("--accumulate-allreduce-grads-in-fp32",)
        elif job.precision is Precision.BFLOAT16:
            # Otherwise bfloat16 training turns float32 gradients on.
            yield ("--grad-reduce-in-bf16",)
    if settings.product_format is ProductFormat.FLOAT8:
        # One current scale per tensor; delayed ones cannot go with every recomputed module.
        yield "--fp8-format", "hybrid"
        yield "--fp8-recipe", "tensorwise"
    elif settings.product_format is ProductFormat.MXFP8:
        yield "--fp8-format", "e4m3"
        yield "--fp8-recipe", "mxfp8"
    elif settings.product_format is ProductFormat.NVFP4:
        yield "--fp4-format", "e2m1"


def optimizer_arguments(
    result: SearchResult, options: EmissionOptions
) -> Iterator[tuple[str, ...]]:
    """Update rule, sharding, offloading, learning rate, clipping."""
    plan, job = result.plan, result.inputs.job
    degrees = degrees_of(plan)
    if job.optimizer is Optimizer.ADAMW:
        # Weight decay is decoupled unless told otherwise: AdamW.
        yield "--optimizer", "adam"
    else:
        yield "--optimizer", "sgd"
        # hetplan.cost.memory.device counts no momentum.
        yield "--sgd-momentum", "0.0"
    if distributed_optimizer(plan, degrees):
        yield ("--use-distributed-optimizer",)
    instances = optimizer_instances(plan, degrees)
    if instances > 1:
        yield "--num-distributed-optimizer-instances", str(instances)
    if plan.optimizer_offload > 0:
        yield ("--optimizer-cpu-offload",)
        yield "--optimizer-offload-fraction", f"{plan.optimizer_offload!r}"
        # arguments.py: offloading reuses the code path of this flag.
        yield ("--use-precision-aware-optimizer",)
    yield "--lr", f"{options.rate!r}"
    yield "--lr-decay-style", "constant"
    yield "--clip-grad", "1.0" if clips_gradients(job) else "0.0"


def distributed_optimizer(plan: Plan, degrees: Degrees) -> bool:
    """Whether the distributed optimizer runs; with one copy it changes nothing but the class."""
    return plan.sharding is Sharding.OPTIMIZER or (
        plan.optimizer_offload > 0 and degrees.copies == 1
    )


def optimizer_instances(plan: Plan, degrees: Degrees) -> int:
    """Groups of copies, each of which shards the optimizer state inside."""
    if plan.sharding is not Sharding.OPTIMIZER:
        return 1
    return degrees.copies // plan.optimizer_shards


def optimizer_faults(result: SearchResult) -> Iterator[Fault]:
    """Combinations that Megatron-LM refuses."""
    plan, job = result.plan, result.inputs.job
    degrees = degrees_of(plan)
    if job.optimizer is Optimizer.SGD and plan.sharding is Sharding.OPTIMIZER:
        yield Fault(
            field="plan.sharding",
            message="optimizer, with sgd; Megatron-LM's distributed optimizer was made for Adam: "
            "pin sharded_optimizer: false, or use adamw",
        )
    if plan.optimizer_offload > 0:
        if job.optimizer is not Optimizer.ADAMW:
            yield Fault(
                field="plan.optimizer_offload",
                message=f"{plan.optimizer_offload} with {job.optimizer}; "
                "--use-precision-aware-optimizer, which offloading needs, takes adam alone",
            )
        elif not distributed_optimizer(plan, degrees):
            yield Fault(
                field="plan.optimizer_offload",
                message=f"{plan.optimizer_offload} without sharding; Megatron-LM offloads with its "
                "distributed optimizer alone: pin sharded_optimizer: true",
            )
    instances = optimizer_instances(plan, degrees)
    if instances > 1 and degrees.expert_copies % instances:
        yield Fault(
            field="plan.optimizer_shards",
            message=f"{plan.optimizer_shards} of {degrees.copies} copies are {instances} groups, "
            f"into which the {degrees.expert_copies} copies of an expert cannot be dealt "
            "(parallel_state.py): shard over all copies",
        )


# ---- timeouts of long links

OWN_MINUTES = 10
"""What Megatron-LM waits unless told otherwise."""
BOOTSTRAP_RINGS = 3
"""Addresses, devices, rings: the gathers of a communicator's start."""
STEPS = 3
"""Derived above."""
HCCL_CONNECT_SECONDS = (120, 7200)
"""Range of HCCL_CONNECT_TIMEOUT; the least is its default (hiascend.com, CANN 8.2)."""
HCCL_EXEC_SECONDS = (1836, 17340)
"""Default of HCCL_EXEC_TIMEOUT, and the most that every Ascend training product takes."""


def longest_latency_seconds(result: SearchResult, ranks: RankLayout) -> float:
    """One way, of the longest link between two of the launch's hosts."""
    cluster = result.inputs.cluster
    names = dict.fromkeys(agent.host.island for agent in ranks.agents)
    inside = [cluster.island(name).inter_node.latency_seconds for name in names]
    between = [
        cluster.link_between(left, right).latency_seconds for left, right in combinations(names, 2)
    ]
    return max(*inside, *between, 0.0)


def bootstrap_seconds(result: SearchResult, ranks: RankLayout) -> float:
    """What the default group's start takes over the longest link."""
    rings = BOOTSTRAP_RINGS * (ranks.world_size - 1)
    return rings * longest_latency_seconds(result, ranks)


def added_seconds(result: SearchResult, ranks: RankLayout) -> float:
    """What this plan's longest wait adds to that of any run."""
    estimate = result.estimate
    slow = estimate.step_seconds if estimate.p95_seconds is None else estimate.p95_seconds
    return bootstrap_seconds(result, ranks) + STEPS * max(slow, estimate.step_seconds)


def timeout_minutes(result: SearchResult, ranks: RankLayout) -> int | None:
    """Minutes to give; None where Megatron-LM's own have room for them (a tenth)."""
    added = added_seconds(result, ranks) / 60
    return None if added <= OWN_MINUTES / 10 else OWN_MINUTES + math.ceil(added)


def timeout_arguments(result: SearchResult, ranks: RankLayout) -> Iterator[tuple[str, str]]:
    """The flag of Megatron-LM and of trainers made from it; nothing where its own minutes do."""
    minutes = timeout_minutes(result, ranks)
    if minutes is not None:
        yield "--distributed-timeout-minutes", str(minutes)


def hccl_timeouts(result: SearchResult, ranks: RankLayout) -> tuple[tuple[str, str], ...]:
    """HCCL's own two timeouts, in seconds, where their defaults are too short."""
    minutes = timeout_minutes(result, ranks)
    if minutes is None:
        return ()
    wanted = 60 * minutes
    ranges = (
        ("HCCL_CONNECT_TIMEOUT", HCCL_CONNECT_SECONDS),
        ("HCCL_EXEC_TIMEOUT", HCCL_EXEC_SECONDS),
    )
    return tuple((name, str(min(wanted, most))) for name, (own, most) in ranges if wanted > own)


# ---- environment

_BLACKWELL = ("nvidia-b200", "nvidia-b300", "nvidia-gb200", "nvidia-gb300")
"""Beginnings of the kinds from which on the rule below is none (arguments.py: device architecture
10 and above)."""


def agent_environment(
    agent: Agent, degrees: Degrees, job: Job, *, experts_beside: bool = False
) -> tuple[tuple[str, str], ...]:
    """Variables of one agent.

    With tp or cp above 1 validate_args refuses any other CUDA_DEVICE_MAX_CONNECTIONS than 1 before
    Blackwell: kernels that wait for a transfer must not be queued before it. Experts' exchanges
    beside compute need several, and validate_args then lets them.
    """
    found = vendor_environment(agent, job.trainer.collective_algorithm)
    ordered = (degrees.tp > 1 or degrees.cp > 1) and not experts_beside
    if ordered and not agent.host.device_kind.startswith(_BLACKWELL):
        return (("CUDA_DEVICE_MAX_CONNECTIONS", "1"), *found)
    return found


# ---- the launch

TITLE = "Megatron-LM (pretrain_gpt.py, made for commit d98e8a64 of 22 Aug 2026)"


def megatron_launch(
    result: SearchResult, ranks: RankLayout, options: EmissionOptions
) -> TrainerLaunch:
    """Program, arguments, environment and files of a plan without `megatron_faults`."""
    degrees = degrees_of(result.plan)
    return TrainerLaunch(
        target="megatron",
        title=TITLE,
        program=("pretrain_gpt.py",),
        arguments=megatron_arguments(result, ranks, options),
        environment=(),
        agent_environment=tuple(
            agent_environment(
                agent,
                degrees,
                result.inputs.job,
                experts_beside=result.plan.overlap.expert_parallel,
            )
            for agent in ranks.agents
        ),
        files=transport_files(result, ranks),
        remarks=launch_remarks(result, ranks, options),
    )


def transport_files(result: SearchResult, ranks: RankLayout) -> tuple[EmittedFile, ...]:
    """The file of the groups' networks, where they need one."""
    text = transport_text(result.plan, result.inputs.cluster, ranks)
    return (EmittedFile(path=TRANSPORT_FILE, text=text),) if text else ()


def launch_remarks(
    result: SearchResult, ranks: RankLayout, options: EmissionOptions, *, transport: bool = True
) -> tuple[str, ...]:
    """What a reader should know of this launch; `transport`: it has a file of groups' networks."""
    plan, inputs = result.plan, result.inputs
    remarks = list(numerics_remarks(inputs.model))
    minutes = timeout_minutes(result, ranks)
    if minutes is not None:
        remarks.append(
            f"--distributed-timeout-minutes {minutes}: Megatron-LM's own 10, the start of the "
            "largest communicator over the longest link, and three steps."
        )
    if transport:
        remarks += transport_remarks(plan, inputs.cluster)
    if options.data:
        remarks.append(
            f"The plan was priced with {inputs.model.vocab_size} entries of the vocabulary, padded "
            f"to {plan.padded_vocab_size}; the tokenizer must not have more."
        )
    if not options.save:
        remarks.append("no checkpoint is saved without --save FOLDER")
    return tuple(remarks)


# ---- what cannot be told


def megatron_faults(
    result: SearchResult, ranks: RankLayout, options: EmissionOptions
) -> tuple[Fault, ...]:
    """Everything that stock Megatron-LM cannot be told."""
    return (*device_faults(ranks), *common_faults(result))


def common_faults(result: SearchResult) -> tuple[Fault, ...]:
    """The same but for devices: what holds for every trainer that takes Megatron's arguments."""
    exchange = bool(result.inputs.job.trainer.context_exchange)
    models = tuple(model_faults(result.inputs.model, result.inputs.job))
    if models:
        # What follows asks the model's parts.
        return (*models, *_job_faults(result))
    return (
        *layout_faults(result.plan.pipelines[0], result.inputs.model),
        *parallel_faults(result, context_exchange=exchange),
        *optimizer_faults(result),
        *_job_faults(result),
    )


def device_faults(ranks: RankLayout) -> Iterator[Fault]:
    """Devices whose collectives torch does not know as nccl."""
    vendors = {vendor_of(host.vendor, host.device_kind): host.device_kind for host in ranks.hosts}
    for vendor, kind in vendors.items():
        if vendor.backend == "nccl":
            continue
        instead = "forbid these islands, or use the vendor's own Megatron with other launch files"
        if vendor.vendor == "huawei":
            instead = "emit for target mindspeed"
        elif vendor.backend == "gloo":
            instead = "plan for target native, which `hetplan launch` trains on such devices"
        yield Fault(
            field="plan.pipelines[0].stages",
            message=f"devices of kind {kind}; stock Megatron-LM wants devices that torch calls "
            f"cuda, with its nccl backend: {instead}",
        )


def _job_faults(result: SearchResult) -> Iterator[Fault]:
    """Settings of the job; the plan's target can run them all, today's Megatron-LM cannot."""
    job = result.inputs.job
    settings = trainer_settings_of("megatron", job.precision, job.trainer)
    if settings.scattered_sends:
        yield Fault(
            field="inputs.job.trainer.scattered_sends",
            message="on; Megatron-core sends whole activations (versions of 2021 scattered them): "
            "leave it out and plan again",
        )
    if settings.blocking_sends:
        yield Fault(
            field="inputs.job.trainer.blocking_sends",
            message="on; only DeepSpeed's pipeline engine sends so: leave it out and plan again",
        )
    if job.sequence_lengths:
        yield Fault(
            field="inputs.job.sequence_lengths",
            message="given; pretrain_gpt.py fills every sequence to sequence_length with the next "
            "document: leave sequence_lengths and packing out and plan again",
        )


TRAINER = Trainer(
    name="megatron",
    plan_target="megatron",
    faults=megatron_faults,
    question_faults=model_faults,
    launch=megatron_launch,
    data_outermost=True,
)
