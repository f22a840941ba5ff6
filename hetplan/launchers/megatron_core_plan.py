"""Which plans does `hetplan launch --target megatron-core` run, and where does each rank stand?

A plan of any target that is legal for stock Megatron-LM (`hetplan.plans.targets`), of a model made
of hetplan's own layers, whose losses can then be compared. What megatron-core has only together
with Transformer Engine is refused (files of megatron-core 0.16.1, under megatron/core): context
parallelism (transformer/dot_product_attention.py asserts 1), overlapped tensor-parallel
communication and products in 8 bits (model_parallel_config.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hetplan.errors import Fault
from hetplan.job.spec import Job
from hetplan.model.layer_units import own_layer_fault
from hetplan.model.numerics import Activation, RotaryScalingKind
from hetplan.model.spec import ModelSpec
from hetplan.plans.check import check_plan
from hetplan.plans.formats import job_summing_as
from hetplan.plans.plan import LayerRange, Plan, RecomputeModule, expand
from hetplan.plans.targets import target
from hetplan.search.result import Inputs, SearchResult

# The others are of experts, or need another kernel (transformer/transformer_config.py).
_MODULES = (RecomputeModule.CORE_ATTENTION, RecomputeModule.MLP)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorePlace:
    """What one rank holds: ranks count in Megatron's order tp, dp, pp, tp fastest
    (`hetplan.plans.ranks`).
    """

    rank: int
    device: int
    """Device number of the cluster."""
    stage: int
    dp_index: int
    tp_index: int
    chunks: tuple[LayerRange, ...]
    """Positions in `ModelSpec.layers`, one range per virtual stage."""


def core_places(plan: Plan) -> tuple[CorePlace, ...]:
    """The place of every rank of a plan without `core_faults`."""
    places: list[CorePlace] = []
    for number, stage in enumerate(plan.pipelines[0].stages):
        devices = [device for replica in stage.replicas for device in expand(replica.devices)]
        for position, device in enumerate(devices):
            dp_index, tp_index = divmod(position, stage.replicas[0].tp)
            places.append(
                CorePlace(
                    rank=len(places),
                    device=device,
                    stage=number,
                    dp_index=dp_index,
                    tp_index=tp_index,
                    chunks=stage.chunks,
                )
            )
    return tuple(places)


def core_faults(result: SearchResult) -> Iterator[Fault]:
    """Everything in a result that this launcher does not run."""
    inputs, plan = result.inputs, result.plan
    unlike = own_layer_fault(inputs.model)
    if unlike:
        yield Fault(
            field="model",
            message=f"{unlike}; losses can be compared for hetplan's own layers only: emit the "
            "plan for Megatron-LM with hetplan emit --target megatron",
        )
        return
    yield from _model_faults(inputs.model)
    illegal = tuple(_megatron_faults(inputs, plan))
    yield from illegal
    if not illegal:
        yield from _plan_faults(plan)
        yield from _job_faults(inputs.job)


def _megatron_faults(inputs: Inputs, plan: Plan) -> Iterator[Fault]:
    """Rules that the plan breaks, those of its own target and those of Megatron-LM.

    megatron-core takes any padded vocabulary that tp divides, so each plan keeps its own.
    """
    yield from check_plan(plan, inputs.model, inputs.cluster, inputs.job)
    if plan.target == "megatron" or not plan.pipelines or not plan.replicas:
        return
    padded = target("megatron").padded_vocab_size(inputs.model.vocab_size, plan.replicas[0].tp)
    same = replace(plan, target="megatron", padded_vocab_size=padded)
    job = job_summing_as(plan, replace(inputs.job, target="megatron"))
    for fault in check_plan(same, inputs.model, inputs.cluster, job):
        yield replace(fault, message=f"{fault.message} (plan again with --target megatron)")


_LLAMA3 = (8192, 1.0, 4.0)
"""Original length and factors, which models/common/embeddings/rotary_pos_embedding.py has fixed."""


def _model_faults(model: ModelSpec) -> Iterator[Fault]:
    """What megatron-core's GPTModel computes otherwise."""
    if model.activation is Activation.OTHER:
        message = "other; hetplan launch has silu, gelu, gelu_tanh and relu"
        yield Fault(field="model.activation", message=message)
    scaling = model.rotary_scaling
    if scaling is None:
        return
    if scaling.kind is RotaryScalingKind.LLAMA3:
        asked = (scaling.original_length, scaling.low_frequency_factor)
        told = (*asked, scaling.high_frequency_factor)
        unlike = any(each not in (None, own) for each, own in zip(told, _LLAMA3, strict=True))
    else:
        unlike = scaling.kind is not RotaryScalingKind.LINEAR
    if unlike or scaling.factor is None:
        yield Fault(
            field="model.rotary_scaling",
            message=f"{scaling.kind}; megatron-core's GPT has linear, and llama3 from 8192 tokens "
            "with frequency factors 1 and 4, both with a factor",
        )


def _plan_faults(plan: Plan) -> Iterator[Fault]:
    for s, stage in enumerate(plan.pipelines[0].stages):
        where = f"plan.pipelines[0].stages[{s}]"
        for replica in stage.replicas[:1]:
            if replica.cp > 1:
                message = f"{replica.cp}; megatron-core has it with Transformer Engine only"
                yield Fault(field=f"{where}.replicas[0].cp", message=f"{message}: pin cp: 1")
        other = [each for each in stage.recompute.modules if each not in _MODULES]
        if other:
            yield Fault(
                field=f"{where}.recompute.modules",
                message=f"{', '.join(other)}; hetplan launch has {' and '.join(_MODULES)} here",
            )
    if plan.optimizer_offload:
        yield Fault(
            field="plan.optimizer_offload",
            message=f"{plan.optimizer_offload:g}; hetplan launch keeps all of it on the device",
        )
    if plan.overlap.tensor_parallel:
        yield Fault(
            field="plan.overlap.tensor_parallel",
            message="megatron-core has it with Transformer Engine only",
        )


def _job_faults(job: Job) -> Iterator[Fault]:
    asked = job.trainer
    for name in ("attention_dropout", "hidden_dropout"):
        if getattr(asked, name):
            message = "on; the losses of two runs differ with it: leave it out"
            yield Fault(field=f"job.trainer.{name}", message=message)
    if asked.product_format is not None:
        yield Fault(
            field="job.trainer.product_format",
            message=f"{asked.product_format}; megatron-core has it with Transformer Engine only",
        )
    if job.gradient_clipping:
        yield Fault(
            field="job.gradient_clipping",
            message="true; megatron-core clips gradients of accelerators only, and this command "
            "clips none: leave it out",
        )
    if job.sequence_lengths:
        yield Fault(
            field="job.sequence_lengths",
            message="hetplan launch makes sequences of one length; leave it out",
        )
