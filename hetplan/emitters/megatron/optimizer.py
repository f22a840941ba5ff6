"""How are number formats, optimizer, sharding and offloading told to Megatron-LM?

arguments.py, validate_args; megatron/core/optimizer/__init__.py and optimizer_config.py (what goes
with what); parallel_state.py (`num_distributed_optimizer_instances`).
"""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.cost.components.step import clips_gradients
from hetplan.emitters.megatron.parallel import Degrees, degrees_of
from hetplan.emitters.trainer_launch import EmitOptions
from hetplan.errors import Fault
from hetplan.job.spec import Job, Optimizer, Precision, ProductFormat
from hetplan.job.trainer import TrainerSettings
from hetplan.plans.plan import Plan, Sharding
from hetplan.search.result import SearchResult


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


def optimizer_arguments(result: SearchResult, options: EmitOptions) -> Iterator[tuple[str, ...]]:
    """Update rule, sharding, offloading, learning rate, clipping."""
    plan, job = result.plan, result.inputs.job
    degrees = degrees_of(plan)
    if job.optimizer is Optimizer.ADAMW:
        # Weight decay is decoupled unless told otherwise: AdamW.
        yield "--optimizer", "adam"
    else:
        yield "--optimizer", "sgd"
        # hetplan.cost.memory.state counts no momentum.
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
